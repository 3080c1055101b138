"""Damaged bytes, mended from another rank's copy of the box, or from another copy of the checkpoint."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from fsdp_ckpt import load_state, save_state
from fsdp_ckpt.ops.repair import repair
from tests.build import assert_same, rows, save_dcp, save_rank_files
from tests.cli.tool import flip, tensor_ranges
from tests.compat.judges import read_with_torch
from tests.compat.samples import FIXTURES
from tests.unit.ops.mended import copy, is_read, kinds, mend, tree, unchanged

MESH = FIXTURES / "torch-2.13.0/fsdp2_sharded_w2"


def flip_zip(path: Path, name: str) -> None:
    """Flip a bit of a record of a torch.save file, found with Python's zipfile."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith(name))
        content = archive.read(info)
    data[data.index(content) + len(content) // 2] ^= 0x08
    path.write_bytes(data)


# --------------------------------------------------------------------------------------------- copies of other ranks


def hybrid(folder: Path) -> dict[str, Tensor]:
    """Two replicas of two shards, in a file per rank; numbers that nothing else in the files has."""
    state = {"w": torch.arange(1000.0, 1064.0).reshape(16, 4), "b": torch.full((6,), 7.5)}
    save_rank_files(folder, state, mesh=[2, 2], placements={"w": [Replicate(), Shard(0)]})
    return state


def reads_ranks(state: dict[str, Tensor]) -> Callable[[Path], None]:
    """Return a judge: torch.load gives every rank's file its values back."""

    def judge(folder: Path) -> None:
        for rank in range(4):
            path = folder / f"model_world_size_4_rank_{rank}.pt"
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None
                contents = [archive.read(n) for n in archive.namelist() if "/data/" in n and not n.endswith("_id")]
            want = {state["w"][8 * (rank % 2) :][:8].contiguous().numpy().tobytes(), state["b"].numpy().tobytes()}
            assert want <= set(contents)

    return judge


@pytest.mark.parametrize("rank", [0, 3])
def test_a_shard_that_another_replica_has(rank: int, tmp_path: Path) -> None:
    state = hybrid(tmp_path / "c")
    path = tmp_path / f"c/model_world_size_4_rank_{rank}.pt"
    good = path.read_bytes()
    bad = bytearray(good)
    bad[good.index(state["w"][8 * (rank % 2) :][:8].contiguous().numpy().tobytes()) + 9] ^= 0x40
    path.write_bytes(bad)
    said = mend(tmp_path / "c", reads_ranks(state))
    assert kinds(said) == [("restore-box", "write", path.name)]
    assert f"rank_{(rank + 2) % 4}.pt" in str(said.actions[0].source)
    assert path.read_bytes() == good


def test_several_boxes_of_several_files(tmp_path: Path) -> None:
    state = hybrid(tmp_path / "c")
    good = tree(tmp_path / "c")
    for rank, content in ((0, state["w"][:8]), (1, state["w"][8:]), (1, state["b"]), (2, state["b"])):
        path = tmp_path / f"c/model_world_size_4_rank_{rank}.pt"
        data = bytearray(path.read_bytes())
        data[data.index(content.contiguous().numpy().tobytes()) + 3] ^= 1
        path.write_bytes(data)
    said = mend(tmp_path / "c", reads_ranks(state))
    assert [file for _, _, file in kinds(said)] == [f"model_world_size_4_rank_{rank}.pt" for rank in (0, 1, 2)]
    assert {name: item for name, item in tree(tmp_path / "c").items() if not name.startswith(".before")} == good


def test_both_replicas_are_damaged(tmp_path: Path) -> None:
    state = hybrid(tmp_path / "c")
    for rank in (0, 2):
        path = tmp_path / f"c/model_world_size_4_rank_{rank}.pt"
        data = bytearray(path.read_bytes())
        data[data.index(state["w"][:8].contiguous().numpy().tobytes()) + rank] ^= 1
        path.write_bytes(data)
    said = unchanged(tmp_path / "c")
    assert {fault.where for fault in said.faults} == {f"model_world_size_4_rank_{rank}.pt" for rank in (0, 2)}
    assert "--replica" in str(said.faults[0].hint)


def test_a_copy_that_was_written_with_other_numbers_is_not_taken(tmp_path: Path) -> None:
    """Buffers may differ between ranks: the recorded checksums tell that they did."""
    for rank in (0, 1):
        (tmp_path / "c").mkdir(exist_ok=True)
        state = {"seen": torch.full((64,), 100.0 + rank), "same": torch.full((64,), 5.0)}
        torch.save(state, tmp_path / f"c/model_world_size_2_rank_{rank}.pt")
    path = tmp_path / "c/model_world_size_2_rank_0.pt"
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((64,), 100.0).numpy().tobytes()) + 1] ^= 1
    path.write_bytes(data)
    (fault,) = unchanged(tmp_path / "c").faults
    assert "nothing tells any more whether with the same numbers" in fault.why


REPLICATED = FIXTURES / "torch-2.13.0/dcp_nocollectives_w2/dcp"


def _shared_item(folder: Path) -> tuple[str, int, int]:
    """Return file and extent of an item of rank 1 that rank 0 has as well, by torch's own classes."""
    import pickle

    found = []
    for rank in (0, 1):
        with (folder / f"__{rank}.metadata").open("rb") as file:
            storage = pickle.load(file).storage_data
        found.append({(index.fqn, index.offset): info for index, info in storage.items()})
    shared = sorted(found[0].keys() & found[1].keys(), key=str)
    info = found[1][shared[0]]
    return info.relative_path, info.offset, info.length


@pytest.mark.parametrize("where", ["numbers", "data.pkl"])
def test_items_that_every_rank_has_stored(where: str, tmp_path: Path) -> None:
    """Metadata per rank: what is not sharded stands in the files of all ranks."""
    folder = copy(REPLICATED, tmp_path / "c")
    file, start, length = _shared_item(folder)
    path = folder / file
    good = path.read_bytes()
    (tensor,) = list(tensor_ranges(good[start : start + length]))
    place = start + tensor[0] if where == "numbers" else start + good[start:].index(b"torch._utils")
    bad = bytearray(good)
    bad[place] ^= 0x04
    path.write_bytes(bad)
    said = mend(folder, lambda _: None)
    assert kinds(said) == [("restore-box", "write", file)]
    assert path.read_bytes() == good


def test_a_damaged_directory_leaves_nothing_to_compare(tmp_path: Path) -> None:
    folder = copy(REPLICATED, tmp_path / "c")
    file, start, length = _shared_item(folder)
    data = bytearray((folder / file).read_bytes())
    place = data.index(b"PK\1\2", start)
    assert place < start + length
    data[place] ^= 1
    (folder / file).write_bytes(data)
    assert any("nothing tells any more" in fault.why for fault in unchanged(folder).faults)


def test_damage_without_a_copy(tmp_path: Path) -> None:
    checkpoint = copy(MESH, tmp_path / "run/checkpoint-7")
    flip(checkpoint / "pytorch_model_fsdp_0/__0_0.distcp")
    (fault,) = unchanged(checkpoint).faults
    assert fault.where == "pytorch_model_fsdp_0/__0_0.distcp"
    assert "is damaged" in fault.why
    assert f"fsdp-ckpt list {tmp_path}/run" in str(fault.hint)
    assert repair(checkpoint, verify=False).whole, "nobody looked"


# ------------------------------------------------------------------------------------- another copy of the checkpoint


def save_own(folder: Path, step: int = 3) -> tuple[nn.Module, Any]:
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    save_state(folder, model, optimizer, step=step, durable=False)
    return model, optimizer


def loads_as(model: nn.Module) -> Callable[[Path], None]:
    """Return a judge: ``load_state`` and torch itself give the parameters of this model back."""
    expected = {key: value.detach().clone() for key, value in model.state_dict().items()}

    def judge(folder: Path) -> None:
        fresh = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 4))
        load_state(folder, fresh)
        assert_same(dict(fresh.state_dict()), expected)
        found = read_with_torch(folder / "pytorch_model_fsdp_0")
        assert_same({key.removeprefix("model."): value for key, value in found.items()}, expected)

    return judge


OWN_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a flipped bit": lambda folder: flip(folder / "pytorch_model_fsdp_0/__0_0.distcp"),
    "a missing file": lambda folder: (folder / "optimizer_0/__0_0.distcp").unlink(),
    "a short file": lambda folder: _cut(folder / "pytorch_model_fsdp_0/__0_0.distcp"),
    "metadata": lambda folder: (folder / "pytorch_model_fsdp_0/.metadata").write_bytes(b"\x80\x04N."),
    "lost metadata": lambda folder: (folder / "optimizer_0/.metadata").unlink(),
    "random states": lambda folder: _cut(next(folder.glob("random_states_0.pkl"))),
}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("name", OWN_DAMAGE)
def test_our_manifest_says_which_copy_is_right(name: str, tmp_path: Path) -> None:
    model, _ = save_own(tmp_path / "run/step-3")
    backup = copy(tmp_path / "run/step-3", tmp_path / "backup")
    OWN_DAMAGE[name](tmp_path / "run/step-3")
    if name != "lost metadata":  # which may be found at a neighbour, too
        assert repair(tmp_path / "run/step-3").faults
    mend(tmp_path / "run/step-3", loads_as(model), replica=backup)
    good = {name: item for name, item in tree(tmp_path / "run/step-3").items() if not name.startswith(".before")}
    assert good == tree(backup)


def test_all_damage_at_once(tmp_path: Path) -> None:
    model, _ = save_own(tmp_path / "run/step-3")
    backup = copy(tmp_path / "run/step-3", tmp_path / "backup")
    for path in (tmp_path / "run/step-3").rglob("*"):
        if path.is_file() and path.name != "fsdp_ckpt.json":
            _cut(path)
    mend(tmp_path / "run/step-3", loads_as(model), replica=backup)


def test_a_backup_of_another_step_is_not_taken(tmp_path: Path) -> None:
    save_own(tmp_path / "run/step-3")
    save_own(tmp_path / "run/step-4", step=4)
    flip(tmp_path / "run/step-3/pytorch_model_fsdp_0/__0_0.distcp")
    (fault,) = unchanged(tmp_path / "run/step-3", replica=tmp_path / "run/step-4").faults
    assert "not what the manifest lists" in fault.why


def test_a_backup_that_is_damaged_as_well(tmp_path: Path) -> None:
    save_own(tmp_path / "run/step-3")
    backup = copy(tmp_path / "run/step-3", tmp_path / "backup")
    flip(tmp_path / "run/step-3/pytorch_model_fsdp_0/__0_0.distcp")
    flip(backup / "pytorch_model_fsdp_0/__0_0.distcp", 1)
    assert "either" in unchanged(tmp_path / "run/step-3", replica=backup).faults[0].why


def test_the_metadata_of_a_neighbour_have_the_checksum_of_the_manifest(tmp_path: Path) -> None:
    """Our metadata only say where things are: those of another step are the same, byte by byte."""
    save_own(tmp_path / "run/step-3")
    model, _ = save_own(tmp_path / "run/step-4", step=4)
    (tmp_path / "run/step-4/pytorch_model_fsdp_0/.metadata").unlink()
    said = mend(tmp_path / "run/step-4", loads_as(model))
    assert kinds(said) == [("rebuild-metadata", "write", "pytorch_model_fsdp_0/.metadata")]
    assert "CRC-32 that the manifest says" in str(said.actions[0].source)


def test_a_part_of_a_checkpoint_of_ours_means_the_whole(tmp_path: Path) -> None:
    """Its manifest stands above, and lists the files of the part."""
    save_own(tmp_path / "run/step-3")
    model, _ = save_own(tmp_path / "run/step-4", step=4)
    (tmp_path / "run/step-4/pytorch_model_fsdp_0/.metadata").unlink()
    report = repair(tmp_path / "run/step-4/pytorch_model_fsdp_0", apply=True)
    assert (report.path, report.whole) == (str(tmp_path / "run/step-4"), True)
    loads_as(model)(tmp_path / "run/step-4")


def _each(folder: Path, damage: Callable[[Path], None]) -> None:
    for path in (folder / "pytorch_model_fsdp_0").glob("*.distcp"):
        damage(path)


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "a flipped bit": lambda folder: flip(folder / "pytorch_model_fsdp_0/__1_0.distcp"),
    "a missing file": lambda folder: (folder / "pytorch_model_fsdp_0/__1_0.distcp").unlink(),
    "a short file": lambda folder: _cut(folder / "pytorch_model_fsdp_0/__1_0.distcp"),
    "all data": lambda folder: _each(folder, _cut),
    "both ranks": lambda folder: _each(folder, Path.unlink),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_checkpoints_of_others_tell_by_what_they_record(name: str, tmp_path: Path) -> None:
    checkpoint, backup = copy(MESH, tmp_path / "checkpoint-7"), copy(MESH, tmp_path / "backup")
    FOREIGN[name](checkpoint)
    expected = read_with_torch(MESH / "pytorch_model_fsdp_0")
    mend(checkpoint, lambda folder: is_read(expected)(folder / "pytorch_model_fsdp_0"), replica=backup)


def test_metadata_without_an_id_are_no_evidence(tmp_path: Path) -> None:
    """Those of torch before 2.4 are the same for every step."""
    source = FIXTURES / "torch-2.3.1/fsdp2_sharded_w2/pytorch_model_fsdp_0"
    folder, backup = copy(source, tmp_path / "c"), copy(source, tmp_path / "backup")
    for path in folder.glob("*.distcp"):
        path.unlink()
    faults = unchanged(folder, replica=backup).faults
    assert all("nothing here tells whether" in fault.why for fault in faults)
    assert f"cp -a {backup}/" in str(faults[0].hint)


def test_a_backup_of_another_step_of_somebody_else(tmp_path: Path) -> None:
    """Same names, shapes and sizes, other numbers; metadata differ in the id of the save."""
    for step in (1, 2):
        state = {"w": rows(torch.arange(48.0).reshape(12, 4) + step, 2), "b": torch.ones(5) * step}
        save_dcp(tmp_path / f"step-{step}", state)
    (tmp_path / "step-1/__1_0.distcp").unlink()
    assert "not of the same save" in unchanged(tmp_path / "step-1", replica=tmp_path / "step-2").faults[0].why
    # Also where the metadata are the same, as those of torch before 2.4 are: by the files that are still there.
    shutil.copy(tmp_path / "step-1/.metadata", tmp_path / "step-2")
    assert "not of the same save" in unchanged(tmp_path / "step-1", replica=tmp_path / "step-2").faults[0].why


def test_a_rank_file_that_cannot_be_opened(tmp_path: Path) -> None:
    state = hybrid(tmp_path / "c")
    backup = copy(tmp_path / "c", tmp_path / "backup")
    _cut(tmp_path / "c/model_world_size_4_rank_2.pt")
    mend(tmp_path / "c", reads_ranks(state), replica=backup)


def test_a_full_file(tmp_path: Path) -> None:
    full = FIXTURES / "torch-2.13.0/full_w2"
    checkpoint, backup = copy(full, tmp_path / "c"), copy(full, tmp_path / "backup")
    name = max(full.glob("*.bin"), key=lambda path: "model" in path.name).name
    flip_zip(checkpoint / name, "/data/3")
    expected = torch.load(full / name, weights_only=True)

    def judge(folder: Path) -> None:
        assert_same(torch.load(folder / name, weights_only=True), expected)

    assert "is damaged" in repair(checkpoint).faults[0].why
    mend(checkpoint, judge, replica=backup)
