"""Conversions are transactions: whole or not at all, taken up again, shared by processes, never over the source."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt import convert, latest_complete, reshard, validate
from fsdp_ckpt.errors import (
    ChecksumMismatch,
    CorruptCheckpoint,
    DestinationExists,
    IncompleteCheckpoint,
    NotEnoughSpace,
    UsageError,
)
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.ops.share import Share
from fsdp_ckpt.run.progress import Progress
from tests.build import Sharded, assert_same, full_bits, grid, rows, save_dcp
from tests.property.conversions import read_dcp
from tests.unit.ops.saved_by_us import save_small

MODEL = {
    "rows": torch.arange(5000, dtype=torch.int32).reshape(100, 50),
    "columns": torch.arange(600.0).reshape(20, 30),
    "turned": torch.arange(77, dtype=torch.int16).reshape(7, 11),
    "tiny": torch.tensor(3.0),
}


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    state = {
        "rows": rows(MODEL["rows"], 2),
        "columns": grid(MODEL["columns"], [[], [11]], ranks=2),
        "turned": Sharded(MODEL["turned"], [((0, 0), (7, 11))], [1], by_columns=True),
        "tiny": MODEL["tiny"],
    }
    return save_dcp(tmp_path / "src", {"model": state, "lr": 0.1})


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("ours") / "step-7")


Way = Callable[..., Any]
WAYS: dict[str, Way] = {
    "reshard to more": lambda src, dst, **more: reshard(src, dst, 3, **more),
    "reshard to one": lambda src, dst, **more: reshard(src, dst, 1, **more),
    "reshard by columns": lambda src, dst, **more: reshard(src, dst, 2, placements=["[!t]*=1"], **more),
    "dcp": lambda src, dst, **more: convert(src, dst, to="dcp", world_size=4, **more),
    "safetensors": convert,
    "torch": lambda src, dst, **more: convert(src, dst, to="torch", **more),
    "full": lambda src, dst, **more: convert(src, dst, to="accelerate", full=True, **more),
}


def damage(folder: Path, needle: bytes) -> None:
    """Change a bit within bytes that stand in exactly one file, once."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes().count(needle) == 1]
    assert len(files) == 1
    data = bytearray(files[0].read_bytes())
    data[data.index(needle) + len(needle) // 2] ^= 0x10
    files[0].write_bytes(data)


NEEDLES = {
    "rows": full_bits(MODEL["rows"][50:]),
    "columns": full_bits(MODEL["columns"][:, :11]),
    "turned": full_bits(MODEL["turned"].t()),
}


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NEEDLES)
def test_a_flipped_bit_is_found_and_nothing_is_left(name: str, way: str, jobs: int, src: Path, tmp_path: Path) -> None:
    damage(src, NEEDLES[name])
    with pytest.raises(ChecksumMismatch, match=f"`model.{name}` is damaged"):
        WAYS[way](src, tmp_path / "a" / "out", jobs=jobs)
    assert os.listdir(tmp_path) == ["src"]
    report = WAYS[way](src, tmp_path / "out", verify=False, fsync=False)
    assert report.verified_bytes == 0


@pytest.mark.parametrize("way", WAYS)
def test_every_byte_is_compared_once(way: str, src: Path, tmp_path: Path) -> None:
    report = WAYS[way](src, tmp_path / "out", fsync=False)
    assert report.verified_bytes == sum(tensor.nbytes for tensor in MODEL.values())
    assert report.unverified == 0


def test_a_storage_of_several_tensors_is_compared_as_a_whole(tmp_path: Path) -> None:
    whole = torch.arange(4000, dtype=torch.int32)
    views = {
        "a": whole[:1500].reshape(30, 50),
        "b": whole[1000:3000].reshape(40, 50),
        "c": whole[::2],
        "d": whole[10:20],
    }
    torch.save(views, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "out", to="dcp", world_size=3, fsync=False)
    assert_same(read_dcp(tmp_path / "out")[0], views)
    damage(tmp_path, full_bits(whole))
    for needed in (["a"], ["b"], ["c"], ["d"], ["*"]):  # also where the damaged byte is not asked for
        with pytest.raises(ChecksumMismatch):
            convert(tmp_path / "m.pt", tmp_path / "wrong", to="dcp", world_size=3, include=needed)
    assert not (tmp_path / "wrong").exists()


def test_a_replica_takes_the_place_of_a_damaged_record_everywhere(tmp_path: Path) -> None:
    """Each of four ranks gets a piece of it; the second one to look must not take it for sound."""
    tensor = torch.arange(4000, dtype=torch.int32).reshape(400, 10)
    src = tmp_path / "src"
    src.mkdir()
    for rank in range(2):
        torch.save({"w": tensor}, src / f"model_world_size_2_rank_{rank}.pt")
    sound = tree(src)
    (src / "model_world_size_2_rank_0.pt").write_bytes(
        sound["model_world_size_2_rank_0.pt"].replace(full_bits(tensor[200:300]), full_bits(tensor[200:300] + 1))
    )
    for jobs in (1, 4):
        for columns in ([], ["w=1"]):
            out = tmp_path / "out"
            report = convert(src, out, to="dcp", world_size=4, placements=columns, jobs=jobs, overwrite=True)
            assert_same(read_dcp(out)[0], {"w": tensor})
            assert report.recovered


@pytest.mark.parametrize("way", WAYS)
def test_a_missing_shard_is_refused(way: str, src: Path, tmp_path: Path) -> None:
    (src / "__1_0.distcp").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"__1_0\.distcp") as caught:
        WAYS[way](src, tmp_path / "out")
    assert caught.value.exit_code == 4
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.parametrize("way", WAYS)
def test_a_dry_run_writes_nothing_and_says_what_would_be(way: str, src: Path, tmp_path: Path) -> None:
    planned = WAYS[way](src, tmp_path / "a" / "b", dry_run=True)
    assert os.listdir(tmp_path) == ["src"]
    done = WAYS[way](src, tmp_path / "a" / "b")
    assert (planned.files, planned.parts, planned.dtypes) == (done.files, done.parts, done.dtypes)
    found = tree(tmp_path / "a" / "b")
    assert {name: len(data) for name, data in found.items() if name in done.files} == dict(done.files)
    assert found.keys() == {*done.files, *done.small_files}


def test_overwriting_is_one_step(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard(src, out, 2)
    before = tree(out)
    with pytest.raises(DestinationExists):
        reshard(src, out, 3)
    sound = (src / "__0_0.distcp").read_bytes()
    damage(src, full_bits(MODEL["rows"][:50]))
    with pytest.raises(CorruptCheckpoint):
        reshard(src, out, 3, overwrite=True)
    assert tree(out) == before
    (src / "__0_0.distcp").write_bytes(sound)
    reshard(src, out, 3, overwrite=True)
    assert len(list(out.glob("*.distcp"))) == 3
    convert(src, out, to="torch", overwrite=True)
    assert sorted(os.listdir(out)) == ["pytorch_model.bin"]
    assert sorted(os.listdir(tmp_path)) == ["out", "src"]


def test_what_no_conversion_made_is_never_replaced(src: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(DestinationExists, match="thesis"):
        reshard(src, tmp_path / "out", 3, overwrite=True)


def test_the_source_is_never_the_destination(src: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    for wrong in (src, tmp_path, src / ".", src.parent / "src" / ".." / "src"):
        with pytest.raises(UsageError, match="holds the checkpoint itself"):
            reshard(src, wrong, 3, overwrite=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("way", WAYS)
def test_a_result_is_never_within_the_source(way: str, src: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    for wrong in (src / "out", src / "a" / "b", tmp_path / "src" / "." / "out"):
        with pytest.raises(UsageError, match="lies within the checkpoint itself") as caught:
            WAYS[way](src, wrong)
        assert f"{src} {src}-" in str(caught.value.hint)
    assert tree(tmp_path) == before


def test_a_result_may_be_beside_a_file_that_is_the_source(tmp_path: Path) -> None:
    torch.save(MODEL, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "out", to="dcp", fsync=False)
    assert_same(read_dcp(tmp_path / "out")[0], MODEL)


def test_a_full_disk_is_said_before_anything_is_written(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    fields = [*real][:10]
    fields[4] = 0
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*fields, *[*real][10:]]))
    with pytest.raises(NotEnoughSpace):
        reshard(src, tmp_path / "out", 3)
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.parametrize("own", [False, True])
def test_shares_make_what_one_process_makes(own: bool, src: Path, ours: Path, tmp_path: Path) -> None:
    source = ours if own else src
    reshard(source, tmp_path / "one", 5)
    pending = [
        reshard(source, tmp_path / "shared", 5, share=Share(index=index, count=3)).pending for index in (2, 3, 1)
    ]
    assert pending == [[1, 3], [1], []]
    assert tree(tmp_path / "shared") == tree(tmp_path / "one")
    assert validate(tmp_path / "shared", level="deep").ok


@pytest.mark.parametrize("way", ["exit", "interrupt"])
@pytest.mark.parametrize("own", [False, True])
def test_resuming_makes_what_one_run_makes(own: bool, way: str, src: Path, ours: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ours if own else src, source)
    reshard(source, tmp_path / "one", 5)
    out = tmp_path / "there" / "out"
    out.parent.mkdir()
    command = [sys.executable, "-m", "tests.unit.ops.killed_writer", str(source), str(out), way]
    died = subprocess.run(command, check=False, timeout=60, capture_output=True)
    assert died.returncode in (9, 1, 130, -2), died.stderr
    assert not out.exists()
    finished = sorted(path.relative_to(out.parent) for path in out.parent.glob(".*/**/*.distcp"))
    assert len(finished) >= 3
    stamps = {path: (out.parent / path).stat().st_mtime_ns for path in finished}
    seen: list[Progress] = []
    reshard(source, out, 5, resume=True, listener=seen.append)
    assert tree(out) == tree(tmp_path / "one")
    kept = {path: (out / Path(*path.parts[1:])).stat().st_mtime_ns for path in finished}
    assert kept == stamps, "what was finished was not written again"
    assert sorted(os.listdir(out.parent)) == ["out"]
    assert validate(out, level="deep").ok


def test_what_a_run_left_is_not_taken_up_when_the_source_changed(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "there" / "out"
    out.parent.mkdir()
    command = [sys.executable, "-m", "tests.unit.ops.killed_writer", str(src), str(out), "exit"]
    subprocess.run(command, check=False, timeout=60, capture_output=True)
    other = {key: tensor + 1 for key, tensor in MODEL.items()}
    shutil.rmtree(src)
    save_dcp(src, {"model": {key: rows(tensor, 2) if tensor.dim() else tensor for key, tensor in other.items()}})
    reshard(src, out, 5, resume=True)
    assert_same(read_dcp(out)[0], other)
    assert sorted(os.listdir(out.parent)) == ["out"]


@pytest.mark.parametrize("where", [slice(0, 1), slice(60, 61)])
def test_damage_in_what_an_earlier_run_copied_is_found_by_the_one_that_resumes(where: slice, tmp_path: Path) -> None:
    """A tensor is part of a larger storage: that is compared at the end, which the run that died did not see."""
    whole = torch.arange(4000, dtype=torch.int32).reshape(100, 40)
    (tmp_path / "src").mkdir()
    torch.save({"first row": whole[:1], "other": torch.arange(500.0).reshape(100, 5)}, tmp_path / "src" / "m.pt")
    damage(tmp_path / "src", full_bits(whole[where]))
    out = tmp_path / "there" / "out"
    out.parent.mkdir()
    command = [sys.executable, "-m", "tests.unit.ops.killed_writer", str(tmp_path / "src"), str(out), "exit"]
    died = subprocess.run(command, check=False, timeout=60, capture_output=True)
    assert died.returncode == 9, died.stderr
    finished = sorted(path.name for path in out.parent.glob(".*/**/*.distcp"))
    assert finished == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"], "the first of them holds the row"
    with pytest.raises(ChecksumMismatch, match=r"`first row` is damaged"):
        reshard(tmp_path / "src", out, 5, resume=True)
    assert not out.exists()


def test_a_checkpoint_of_ours_gets_a_manifest_that_fits(ours: Path, tmp_path: Path) -> None:
    reshard(ours, tmp_path / "run" / "step-7", 3)
    report = validate(tmp_path / "run" / "step-7", level="deep")
    assert [finding for finding in report.findings if finding.severity != "note"] == []
    assert latest_complete(tmp_path / "run") == tmp_path / "run" / "step-7"
    assert (tmp_path / "run" / "step-7" / MANIFEST).exists()
    reshard(tmp_path / "run" / "step-7", tmp_path / "back", 1)
    back, first = (json.loads((folder / MANIFEST).read_text()) for folder in (tmp_path / "back", ours))
    assert back["save_id"] != first["save_id"]
    for key in first.keys() - {"save_id", "files", "crc32"}:
        assert back[key] == first[key], "what it says about the training job stays"
    for name in first["files"].keys() | back["files"].keys():
        data = (tmp_path / "back" / name).read_bytes()
        assert back["files"][name] == {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    assert tree(tmp_path / "back").keys() == tree(ours).keys()


def test_no_manifest_where_parts_are_left_out(ours: Path, tmp_path: Path) -> None:
    reshard(ours, tmp_path / "out", 3, part="model")
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert {path.parts[0] for path in map(Path, tree(tmp_path / "out"))} == {"pytorch_model_fsdp_0"}


@pytest.fixture
def shares_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand in for a file system on which files can share blocks; return what was shared."""
    shared: list[int] = []

    def clone(source: int, start: int, num_bytes: int, fd: int, position: int) -> bool:
        assert os.pwrite(fd, os.pread(source, num_bytes, start), position) == num_bytes
        shared.append(num_bytes)
        return True

    monkeypatch.setattr("fsdp_ckpt.run.copy.clone_range", clone)
    return shared


def test_sharing_blocks_hides_no_damage(shares_blocks: list[int], tmp_path: Path) -> None:
    """A new checksum over a piece of a damaged record would make the damage the truth."""
    tensor = torch.arange(64 * 1024, dtype=torch.int32).reshape(64, 1024)  # a row is a page
    save_dcp(tmp_path / "first", {"model": {"w": tensor}})
    reshard(tmp_path / "first", tmp_path / "src", 2)
    shares_blocks.clear()
    report = reshard(tmp_path / "src", tmp_path / "out", 4)
    assert sum(shares_blocks) == report.shared_bytes == tensor.nbytes
    assert report.verified_bytes == tensor.nbytes
    assert_same(read_dcp(tmp_path / "out")[0], {"w": tensor})
    damage(tmp_path / "src", full_bits(tensor[40]))
    with pytest.raises(ChecksumMismatch, match=r"`model\.w` is damaged"):
        reshard(tmp_path / "src", tmp_path / "wrong", 4)
    assert not (tmp_path / "wrong").exists()
    reshard(tmp_path / "src", tmp_path / "same", 2)  # whole records are not read: what is recorded of them stays
    assert not validate(tmp_path / "same", level="deep").ok


def test_where_no_library_combines_checksums(ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reshard(ours, tmp_path / "with", 3)
    monkeypatch.setattr("fsdp_ckpt.run.checksum._combine", None)
    reshard(ours, tmp_path / "without", 3)
    assert tree(tmp_path / "without") == tree(tmp_path / "with")
    assert validate(tmp_path / "without", level="deep").ok
