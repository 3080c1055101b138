"""DCP folders whose ``.metadata`` and files do not go together; sound ones are read in tests/contract."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fsdp_ckpt.catalog import Encoding, Part, Problem, Role, Severity
from fsdp_ckpt.errors import CorruptCheckpoint, FsdpCkptError, Incompatible, MalformedFile
from fsdp_ckpt.layouts.dcp import looks_like_dcp, read_dcp
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.store.local import Folder, LocalStore
from tests.build import rows, save_dcp
from tests.unit.child import outcome
from tests.unit.codec.raw_pickle import Raw, dump
from tests.unit.codec.test_dcp_metadata import make
from tests.unit.codec.test_dcp_metadata import rows as boxes

DEEP = Raw(b")" + b"\x85" * 200_000)


def folder(path: Path) -> Folder:
    return Folder(LocalStore(path))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"model": {"w": rows(torch.arange(30.0).reshape(10, 3), 2), "b": torch.ones(4)}, "step": 7}
    return save_dcp(tmp_path / "ckpt", state)


def read(path: Path) -> list[Part]:
    return read_dcp(folder(path))


def problems(path: Path) -> dict[str, Problem]:
    return {problem.code: problem for part in read(path) for problem in part.problems}


def test_a_sound_folder(saved: Path) -> None:
    assert looks_like_dcp(folder(saved))
    model, other = read(saved)
    assert (model.name, model.role, model.world_size, model.is_complete) == ("model", Role.MODEL, 2, True)
    assert {key: entry.shape for key, entry in model.tensors.items()} == {"model.w": (10, 3), "model.b": (4,)}
    assert {entry.name for entry in model.tensors.values()} == {"w", "b"}
    assert all(c.encoding is Encoding.TORCH_ZIP for entry in model.tensors.values() for c in entry.chunks)
    assert list(other.objects) == ["step"]
    assert dict(model.files) == {path.name: path.stat().st_size for path in saved.iterdir()}
    assert not problems(saved)


def test_a_missing_data_file(saved: Path) -> None:
    (saved / "__1_0.distcp").unlink()
    problem = problems(saved)["missing-file"]
    assert (problem.severity, problem.where) == (Severity.ERROR, "__1_0.distcp")


def test_a_data_file_that_is_too_short(saved: Path) -> None:
    size = (saved / "__1_0.distcp").stat().st_size
    with open(saved / "__1_0.distcp", "r+b") as file:
        file.truncate(size - 1)
    problem = problems(saved)["short-file"]
    assert problem.severity is Severity.ERROR
    assert f"{size - 1} bytes" in problem.message
    assert f"up to byte {size}" in problem.message


def test_no_metadata(saved: Path) -> None:
    (saved / ".metadata").unlink()
    assert looks_like_dcp(folder(saved))
    (part,) = read(saved)
    assert not part.tensors
    assert not part.is_complete
    assert problems(saved)["missing-metadata"].severity is Severity.ERROR


def test_metadata_that_were_not_finished(saved: Path) -> None:
    (saved / ".metadata").rename(saved / ".metadata.tmp")
    found = problems(saved)
    assert found["missing-metadata"].severity is Severity.ERROR
    assert found["unfinished-metadata"].severity is Severity.WARNING


def test_files_of_an_earlier_save(saved: Path) -> None:
    shutil.copy(saved / "__1_0.distcp", saved / "__7_0.distcp")
    (saved / "__8_0.distcp").touch()
    problem = problems(saved)["stale-file"]
    assert (problem.severity, problem.where) == (Severity.WARNING, "__7_0.distcp")
    assert read(saved)[0].is_complete


def write(path: Path, metadata: Metadata) -> Path:
    path.mkdir()
    (path / ".metadata").write_bytes(dump(metadata))
    for name in ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp"):
        with open(path / name, "wb") as file:
            file.truncate(1 << 42)
    return path


def metadata(places: tuple[int, int] = (0, 1000)) -> Metadata:
    made = make({"w": boxes(3, 2, 5)}, random.Random(0))
    for info in made.storage_data.values():
        info.offset, info.length = places
    return made


@pytest.mark.parametrize("places", [(-1, 100), (5, -7), (-(2**40), 2**41), (2**62, 2**62), (0, 2**63), (2**70, 5)])
def test_impossible_places(places: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="impossible"):
        read(write(tmp_path / "x", metadata(places)))


@pytest.mark.parametrize("places", [(2**61, 2**60), (0, 2**60), (2**42 - 1, 5)])
def test_places_behind_the_end(places: tuple[int, int], tmp_path: Path) -> None:
    assert problems(write(tmp_path / "x", metadata(places)))["short-file"].severity is Severity.ERROR


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/../../b", "..", "", "x\0y"])
def test_names_that_lead_out(name: str, tmp_path: Path) -> None:
    made = metadata()
    next(iter(made.storage_data.values())).relative_path = name
    with pytest.raises(MalformedFile, match="leads out"):
        read(write(tmp_path / "x", made))


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["y" * 200] * 30), "w\ud800", "."])
def test_names_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    made = metadata()
    next(iter(made.storage_data.values())).relative_path = name
    path = write(tmp_path / "x", made)
    try:
        found = problems(path)
    except FsdpCkptError:
        return
    assert found["missing-file"].severity is Severity.ERROR


def test_a_chunk_that_is_listed_nowhere(tmp_path: Path) -> None:
    made = metadata()
    made.storage_data.pop(next(iter(made.storage_data)))
    found = problems(write(tmp_path / "x", made))
    assert found["unlisted-item"].severity is Severity.ERROR
    assert found["missing-shard"].severity is Severity.ERROR


@pytest.mark.parametrize(
    ("offsets", "lengths", "code"),
    [((0, 0), (5, 2), "missing-shard"), ((0, 0), (6, 3), "shard-overlap"), ((0, 0), (99, 3), "shard-outside"),
     ((0, 0), (5,), "shard-outside"), ((0, 0), (5, 3, 1), "shard-outside"), ((0, 0), (), "shard-outside")],
)  # fmt: skip
def test_chunks_that_do_not_tile(offsets: Any, lengths: Any, code: str, tmp_path: Path) -> None:
    made: Any = metadata()
    chunk = made.state_dict_metadata["w"].chunks[0]
    chunk.offsets, chunk.sizes = torch.Size(offsets), torch.Size(lengths)
    assert problems(write(tmp_path / "x", made))[code].severity is Severity.ERROR


@pytest.mark.parametrize(("shape", "offsets", "lengths"), [((5,), (0,), ()), ((5,), (), (5,)), ((), (0,), (1,))])
def test_chunks_of_another_rank(shape: Any, offsets: Any, lengths: Any, tmp_path: Path) -> None:
    made = make({"w": (shape, [(offsets, lengths)])}, random.Random(0))
    for info in made.storage_data.values():
        info.offset, info.length = 0, 1000
    assert problems(write(tmp_path / "x", made))["shard-outside"].severity is Severity.ERROR


def test_transforms_that_nobody_knows(tmp_path: Path) -> None:
    made = metadata()
    next(iter(made.storage_data.values())).transform_descriptors = ["stream.lz4/9"]
    with pytest.raises(Incompatible, match=r"stream\.lz4/9"):
        read(write(tmp_path / "x", made))


PATHS: dict[str, Any] = {
    "deep head": (DEEP, "w"),
    "deep tail": ("model", DEEP),
    "deep only": (DEEP,),
    "list": (["a"], "w"),
    "dict": ({}, "w"),
    "none": (None, "w"),
    "number too long to show": (10**5000, "w"),
    "float": (1.5,),
    "bytes": (b"x", "w"),
    "tuple": (("a",), "w"),
    "nothing": (),
}


@pytest.mark.parametrize("name", PATHS)
def test_paths_that_torch_would_not_write(name: str, tmp_path: Path) -> None:
    made = metadata()
    made.planner_data["w"] = PATHS[name]
    where = write(tmp_path / "x", made)
    assert outcome(lambda: read_checkpoint(where)) in ("ok", "MalformedFile")


@pytest.mark.parametrize("offset", ["00", 7, 1.5])
def test_places_of_nothing_that_is_a_chunk(offset: Any, tmp_path: Path) -> None:
    made = metadata()
    next(iter(made.storage_data)).__dict__["offset"] = offset
    where = write(tmp_path / "x", made)
    assert outcome(lambda: read_checkpoint(where)) in ("ok", "MalformedFile")


def test_an_object_whose_place_is_missing(tmp_path: Path) -> None:
    made = make({"w": boxes(3, 2, 5)}, random.Random(0), objects=1)
    made.storage_data = {index: _StorageInfo("__0_0.distcp", 0, 1000) for index in made.storage_data}
    made.storage_data.pop(MetadataIndex("object 0"))
    assert problems(write(tmp_path / "x", made))["unlisted-item"].where == "object 0"


def test_per_rank_metadata_that_contradict_each_other(tmp_path: Path) -> None:
    path = write(tmp_path / "x", metadata())
    (path / ".metadata").rename(path / "__0.metadata")
    other = make({"w": boxes(4, 2, 5)}, random.Random(0))
    for info in other.storage_data.values():
        info.offset, info.length = 0, 1000
    (path / "__1.metadata").write_bytes(dump(other))
    with pytest.raises(CorruptCheckpoint, match="another rank"):
        read(path)
