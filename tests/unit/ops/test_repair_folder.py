"""The rules of every repair: backups, links, locks, names, manifests."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from fsdp_ckpt import inspect, latest_complete
from fsdp_ckpt.catalog import DTYPES, Shape
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo
from fsdp_ckpt.errors import CheckpointNotFound, NotEnoughSpace, UnknownLayout, UsageError
from fsdp_ckpt.layouts.manifest import read_manifest
from fsdp_ckpt.ops.list_run import list_run
from fsdp_ckpt.ops.prune_run import prune_run
from fsdp_ckpt.ops.repair import repair
from fsdp_ckpt.ops.repairs import survey
from fsdp_ckpt.ops.repairs.actions import Findings
from fsdp_ckpt.ops.repairs.look import Look
from fsdp_ckpt.ops.repairs.union import unite
from fsdp_ckpt.store.local import Folder, LocalStore
from tests.build import rows, save_dcp
from tests.compat.judges import read_with_torch
from tests.compat.samples import EDGE
from tests.unit.ops.mended import copy, is_read, kinds, mend, moved_away, relist, tree, unchanged
from tests.unit.ops.test_repair_boxes import loads_as, save_own


def test_a_second_repair_has_a_backup_of_its_own(tmp_path: Path) -> None:
    folder = copy(EDGE / "stale", tmp_path / "c")
    assert repair(folder, apply=True).backup == str(folder / ".before-repair-1")
    (folder / ".metadata.tmp").write_bytes(b"x")
    assert repair(folder, apply=True).backup == str(folder / ".before-repair-2")


def test_many_files_are_brought_back_by_one_command(tmp_path: Path) -> None:
    folder = copy(EDGE / "stale", tmp_path / "c")
    for number in range(3, 12):
        shutil.copy(folder / "__0_1.distcp", folder / f"__0_{number}.distcp")
    assert len(kinds(mend(folder, is_read(read_with_torch(EDGE / "stale"))))) == 11


def test_a_backup_that_holds_nothing_but_second_names_is_forgotten(tmp_path: Path) -> None:
    """A repair that was killed before it replaced anything leaves one."""
    folder = copy(EDGE / "stale", tmp_path / "c")
    (folder / ".before-repair-1").mkdir()
    os.link(folder / ".metadata", folder / ".before-repair-1/.metadata")
    (folder / ".before-repair-2").mkdir()
    (folder / ".before-repair-2/.metadata").write_bytes(b"another one")
    assert repair(folder, apply=True).backup == str(folder / ".before-repair-3")
    assert not (folder / ".before-repair-1").exists()
    assert (folder / ".before-repair-2/.metadata").read_bytes() == b"another one"


def test_names_that_lead_out_of_the_checkpoint(tmp_path: Path) -> None:
    """Nothing outside is read, written or moved, whatever the metadata say."""
    folder = save_dcp(tmp_path / "run/c", {"w": rows(torch.ones(6, 2), 2)})
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    (tmp_path / "run/secret.distcp").write_bytes((folder / "__1_0.distcp").read_bytes())
    for info in metadata.storage_data.values():
        if info.relative_path == "__1_0.distcp":
            info.relative_path = "../secret.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    said = unchanged(folder, for_torch="2.13")
    assert any("leads out" in fault.why for fault in said.faults)
    (folder / ".metadata").rename(tmp_path / "run/evil")
    (tmp_path / "run/evil").rename(folder / ".metadata.tmp")
    assert any("leads out" in fault.why for fault in unchanged(folder).faults)


def test_metadata_that_ask_for_code_are_never_run(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "c", {"w": rows(torch.ones(6, 2), 2)})
    good = (folder / ".metadata").read_bytes()
    canary = tmp_path / "canary"
    attack = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    (folder / ".metadata").write_bytes(attack)
    assert any("os.system" in fault.why for fault in unchanged(folder, for_torch="2.9").faults)
    (folder / ".metadata.tmp").write_bytes(good)
    mend(folder, is_read({"w": torch.ones(6, 2)}))
    assert not canary.exists()


def test_backups_are_no_part_of_anything(tmp_path: Path) -> None:
    """Not for inspect, list and prune, nor for a run that resumes; whatever lies in them."""
    for step in (1, 2, 3):
        save_own(tmp_path / f"run/step-{step}", step=step)
    path = tmp_path / "run/step-3"
    backup = copy(path, tmp_path / "copy").rename(path / ".before-repair-1")
    copy(path / "pytorch_model_fsdp_0", backup / "pytorch_model_fsdp_7")
    assert [part.name for part in inspect(path).parts] == [part.name for part in inspect(tmp_path / "run/step-2").parts]
    assert inspect(path).complete
    assert inspect(tmp_path / "run").step == 3
    assert latest_complete(tmp_path / "run") == path
    assert [item.state for item in list_run(tmp_path / "run", deep=True).checkpoints] == ["complete"] * 3
    assert repair(path).whole
    assert [item.step for item in prune_run(tmp_path / "run", keep=1).removed] == [1, 2]
    assert path.is_dir()


def test_only_some_kinds(tmp_path: Path) -> None:
    folder = copy(EDGE / "torch215_hand2", tmp_path / "c")
    shutil.copy(folder / "__0_0.distcp", folder / "__0_1.distcp")
    assert [kind for kind, _, _ in kinds(repair(folder, for_torch="2.9"))] == ["metadata-for-torch", "drop-stale"]
    assert [kind for kind, _, _ in kinds(repair(folder, for_torch="2.9", only=["drop-stale"]))] == ["drop-stale"]
    repair(folder, for_torch="2.9", only=["metadata-for-torch"], apply=True)
    assert (folder / "__0_1.distcp").exists()
    assert [kind for kind, _, _ in kinds(repair(folder, for_torch="2.9"))] == ["drop-stale"]
    with pytest.raises(UsageError, match="drop-everything"):
        repair(folder, only=["drop-everything"])


def test_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    folder = copy(EDGE / "py3112", tmp_path / "c")
    mend(folder, is_read(read_with_torch(EDGE / "py3112")), for_torch="2.9")


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy(EDGE / "py3112", tmp_path / "c")
    before, full = tree(tmp_path), os.statvfs_result((512, 512, 9, 1, 1, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(NotEnoughSpace, match="512 B are free"):
        repair(folder, apply=True, for_torch="2.9")
    assert tree(tmp_path) == before


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part, say: found before anything is written."""
    path = tmp_path / "run/step-3"
    save_own(path)
    with_path_of_python_313(path)
    before, real = tree(path), os.access
    monkeypatch.setattr(
        os, "access", lambda name, mode: real(name, mode) and not str(name).endswith("pytorch_model_fsdp_0")
    )
    with pytest.raises(UsageError, match="cannot be written to") as error:
        repair(path, apply=True, for_torch="2.9")
    assert error.value.hint == f"ls -ld {path}/pytorch_model_fsdp_0"
    assert tree(path) == before
    assert os.listdir(tmp_path / "run") == ["step-3"]


@pytest.mark.parametrize("allowed", [True, False])
def test_the_owner_stays(allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy(EDGE / "py3112", tmp_path / "c")
    given: list[tuple[int, int]] = []

    def fchown(_: int, user: int, group: int) -> None:
        given.append((user, group))
        if not allowed:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    status = list((folder / ".metadata").stat())
    status[4:6] = [4711, 4712]
    monkeypatch.setattr(os, "fchown", fchown)
    real = Path.lstat
    monkeypatch.setattr(
        Path, "lstat", lambda path: os.stat_result(status) if path == folder / ".metadata" else real(path)
    )
    report = repair(folder, apply=True, for_torch="2.9")
    assert given == [(4711, 4712)]
    assert report.whole
    assert any("4711:4712" in note for note in report.notes) is not allowed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_gives_files_to_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "run/step-3"
    save_own(path)
    backup = copy(path, tmp_path / "backup")
    for file in (path, *path.rglob("*")):
        os.chown(file, 4711, 4712)
    shutil.rmtree(path / "optimizer_0")
    (path / "pytorch_model_fsdp_0/__0_0.distcp").write_bytes(b"x")
    assert repair(path, apply=True, replica=backup).whole
    assert (path / ".before-repair-1/pytorch_model_fsdp_0/__0_0.distcp").exists()
    for file in path.rglob("*"):
        assert (file.stat().st_uid, file.stat().st_gid) == (4711, 4712), file


def test_files_are_closed_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a killed repair comes first, and nothing else is looked at."""
    folder = copy(EDGE / "stale", tmp_path / "c")
    kept: list[LocalStore] = []

    def unfinished(look: Look) -> bool:
        kept.append(look.root.store)
        with look.root.store.opened("__0_0.distcp") as source:
            assert os.readlink(f"/proc/self/fd/{source.fd}") == str(folder / "__0_0.distcp")
        return True

    monkeypatch.setattr(survey, "finish_interrupted", unfinished)
    repair(folder)
    assert kept
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert str(folder / "__0_0.distcp") not in [os.readlink(link) for link in links if os.path.lexists(link)]


def test_many_faults_are_not_compared_with_each_other() -> None:
    findings, start = Findings(), time.perf_counter()
    for number in range(30_000):
        findings.fault(f"file-{number}", "damaged")
        findings.note(f"note {number}")
    findings.fault("file-0", "damaged")
    assert len(findings.faults) == len(findings.notes) == 30_000
    assert time.perf_counter() - start < 5


def test_metadata_of_many_ranks_are_not_compared_with_each_other() -> None:
    number, ranks = 20_000, dict[str, DcpMetadata | None]()
    for rank in range(number):
        tensor = DcpTensor(dtype=DTYPES["float32"], shape=(number,), chunks=[((rank,), (1,))])
        storage: dict[tuple[str, Shape | None], StorageInfo] = {("w", (rank,)): (f"__{rank}_0.distcp", 0, 4, ())}
        ranks[f"__{rank}.metadata"] = DcpMetadata(
            tensors={"w": tensor}, objects=[f"o{rank}"], paths={}, storage=storage, writer="torch"
        )
    start = time.perf_counter()
    metadata, _ = unite(ranks)
    assert time.perf_counter() - start < 4
    assert len(metadata.tensors["w"].chunks) == len(metadata.objects) == number


def test_links_that_are_called_like_our_unfinished_files(tmp_path: Path) -> None:
    folder = copy(EDGE / "py3112", tmp_path / "c")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / ".00ff.fsdp-ckpt-repair").symlink_to(victim)
    (folder / ".11ff.fsdp-ckpt-repair").write_text("half")
    said = mend(folder, is_read(read_with_torch(EDGE / "py3112")), for_torch="2.9")
    assert victim.read_text() == "precious"
    assert [kind for kind, _, _ in kinds(said)] == ["metadata-for-torch", "drop-stale", "drop-stale"]


def test_a_link_to_a_checkpoint(tmp_path: Path) -> None:
    folder = copy(EDGE / "stale", tmp_path / "step-5")
    (tmp_path / "latest").symlink_to("step-5")
    report = repair(tmp_path / "latest", apply=True)
    assert report.path == str(folder)
    assert (tmp_path / "latest").is_symlink()
    assert not (folder / "__0_1.distcp").exists()


def test_a_part_that_is_a_link_is_looked_at_but_not_written_through(tmp_path: Path) -> None:
    precious = copy(EDGE / "stale", tmp_path / "elsewhere")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/trainer_state.json").write_text("{}")
    (tmp_path / "c/pytorch_model_fsdp_0").symlink_to(precious)
    before = tree(tmp_path)
    repair(tmp_path / "c", apply=True, for_torch="2.3")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_file_is_no_checkpoint(file: str, tmp_path: Path) -> None:
    folder = copy(EDGE / "tied", tmp_path / "c")
    with pytest.raises(UsageError, match="is a file") as error:
        repair(folder / file)
    assert error.value.hint == f"fsdp-ckpt repair {folder}    (the folder)"


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    save_dcp(tmp_path / "run/step-1", {"w": torch.ones(2)}, ranks=1)
    save_dcp(tmp_path / "run/step-2", {"w": torch.ones(2)}, ranks=1)
    with pytest.raises(UsageError, match="folder of a run") as error:
        repair(tmp_path / "run")
    assert str(error.value.hint).endswith(f"fsdp-ckpt repair {tmp_path}/run/step-2")
    moved_away(tmp_path / "run/step-2")
    with pytest.raises(UsageError) as error:
        repair(tmp_path / "run")
    assert str(error.value.hint).endswith(f"fsdp-ckpt repair {tmp_path}/run/step-2"), "the lost one"


def test_what_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no run has left a copy"):
        repair(tmp_path / "step-1")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/todo.txt").write_text("x")
    with pytest.raises(UnknownLayout, match=r"todo\.txt"):
        repair(tmp_path / "notes")
    with pytest.raises(UsageError):
        repair("s3://bucket/step-1")


def test_one_folder_below(tmp_path: Path) -> None:
    copy(EDGE / "stale", tmp_path / "out/sharded")
    report = repair(tmp_path / "out")
    assert (report.path, report.chosen) == (str(tmp_path / "out/sharded"), str(tmp_path / "out"))


def test_a_broken_manifest_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run/step-3"
    save_own(path)
    (path / "fsdp_ckpt.json").write_text("{")
    said = unchanged(path)
    assert said.faults[0].where == "fsdp_ckpt.json"


def test_a_repair_that_died_without_a_manifest(tmp_path: Path) -> None:
    """A manifest in a backup is taken if all is as it lists, and no file is believed that is not."""
    path = tmp_path / "run/step-3"
    model, _ = save_own(path)
    metadata = path / "pytorch_model_fsdp_0/.metadata"
    (path / ".before-repair-1/pytorch_model_fsdp_0").mkdir(parents=True)
    shutil.copy(metadata, path / ".before-repair-1/pytorch_model_fsdp_0")
    (path / "fsdp_ckpt.json").rename(path / ".before-repair-1/fsdp_ckpt.json")
    good = metadata.read_bytes()
    metadata.write_bytes(good + b"x")  # content that readers take, and that nobody has written down
    assert "does not list what is here" in unchanged(path).faults[0].why
    metadata.write_bytes(good)
    said = mend(path, loads_as(model))
    assert kinds(said) == [("finish-swap", "write", "fsdp_ckpt.json")]
    assert latest_complete(tmp_path / "run") == path


def test_the_manifest_follows_what_was_written(tmp_path: Path) -> None:
    """A checkpoint of ours whose metadata torch 2.15 has written over: rewritten for 2.9, it has to be whole for us."""
    path = tmp_path / "run/step-3"
    model, _ = save_own(path)
    with_path_of_python_313(path)
    before = list_run(tmp_path / "run", deep=True)
    assert before.num_complete == 1
    said = mend(path, loads_as(model), for_torch="2.9")
    assert kinds(said) == [("metadata-for-torch", "write", "pytorch_model_fsdp_0/.metadata")]
    assert list_run(tmp_path / "run", deep=True).num_complete == 1


def with_path_of_python_313(path: Path) -> None:
    """Let the metadata need a class that not every Python has, and the manifest list them so."""
    file = path / "pytorch_model_fsdp_0/.metadata"
    with file.open("rb") as stream:
        metadata = pickle.load(stream)
    metadata.storage_meta = StorageMeta(checkpoint_id="place", save_id="7")
    data = pickle.dumps(metadata, protocol=4)
    path_of_313 = b"\x8c\x0epathlib._local\x8c\tPosixPath\x93\x8c\x02/x\x85R"
    assert data.startswith(b"\x80\x04\x95")
    file.write_bytes(
        data[:2] + data[11:].replace(b"\x8c\x05place", path_of_313)
    )  # without the frame, which is longer now
    content = file.read_bytes()
    manifest = read_manifest(Folder(LocalStore(path)))
    assert manifest is not None
    listed = {"pytorch_model_fsdp_0/.metadata": (len(content), f"{zlib.crc32(content):08x}")}
    relist(path, files={**manifest.files, **listed})
