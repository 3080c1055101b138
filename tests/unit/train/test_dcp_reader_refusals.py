"""What FastFileSystemReader refuses, before a tensor is touched or code is run; and that torch does not."""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import re
import shutil
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_ckpt import FastFileSystemReader
from fsdp_ckpt.errors import (
    CheckpointNotFound,
    ChecksumMismatch,
    Incompatible,
    IncompleteCheckpoint,
    MalformedFile,
    UnsafePickle,
    UsageError,
)
from tests.build import as_rank
from tests.hostile.forge_dcp import Forged, index, place, tensor_metadata
from tests.hostile.forge_pickle import Call, Glob, dump
from tests.unit.train.dcp_loads import flip, load_error, save_pieces


@pytest.fixture(autouse=True)
def _no_tracebacks_from_torch() -> Iterator[None]:
    """torch logs a traceback before it falls back to a rank's own metadata."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
def test_a_flipped_bit(tmp_path: Path, whole: bool) -> None:
    """Also in the part of a record that this rank does not want. torch: 292 of 300 loads silently wrong (limits.md)."""
    value = torch.arange(4096.0).reshape(64, 64)
    dcp.save({"w": value}, checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / "__0_0.distcp"
    flip(file, file.read_bytes().index(struct.pack("<f", 4000.0)))
    with as_rank(0, 1 if whole else 2):
        mesh = init_device_mesh("cpu", (1 if whole else 2,))
        state = {"w": distribute_tensor(torch.zeros(64, 64), mesh, [Shard(0)], src_data_rank=None)}
        assert isinstance(load_error(FastFileSystemReader(tmp_path), dict(state), no_dist=True), ChecksumMismatch)
        dcp.load(dict(state), storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
        dcp.load(dict(state), storage_reader=FastFileSystemReader(tmp_path, verify=False), no_dist=True)


def test_without_recorded_checksums(tmp_path: Path) -> None:
    """`compute_crc32=False`: loads."""
    with torch.utils.serialization.config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        dcp.save({"w": torch.arange(100.0)}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": torch.zeros(100)}
    dcp.load(state, storage_reader=FastFileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(state["w"], torch.arange(100.0))


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1])
def test_a_file_that_was_cut(tmp_path: Path, keep: float) -> None:
    """Before any tensor is touched."""
    dcp.save({"a": torch.ones(3), "b": torch.arange(4096.0)}, checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
    state = {"a": torch.zeros(3), "b": torch.zeros(4096)}
    assert isinstance(load_error(FastFileSystemReader(tmp_path), dict(state), no_dist=True), MalformedFile)
    assert not any(value.any() for value in state.values())


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save_pieces(folder)
    (folder / "__1_0.distcp").unlink()
    state = {"rows": torch.zeros(29, 7)}
    error = load_error(FastFileSystemReader(folder), dict(state), no_dist=True)
    assert isinstance(error, IncompleteCheckpoint)
    assert "__1_0.distcp is missing" in error.message
    assert not state["rows"].any()


def test_two_records_that_were_swapped(tmp_path: Path) -> None:
    """Of different shapes, that is; those of one shape are beyond what the format records."""
    forged = Forged()
    forged.tensor("a", (4, 2))
    forged.tensor("b", (2, 4))
    (first, one), (second, other) = forged.storage
    forged.storage = [(first, other), (second, one)]
    forged.write(tmp_path)
    state = {"a": torch.zeros(4, 2), "b": torch.zeros(2, 4)}
    error = load_error(FastFileSystemReader(tmp_path), state, no_dist=True)
    assert "the stored tensor has shape (2, 4), not (4, 2)" in error.message


def forged_with(chunks: Any, shape: tuple[int, ...] = (8, 2), *, stored: int | None = None) -> Forged:
    """A tensor of 8 rows, of which the metadata list other pieces."""
    forged = Forged()
    forged.tensor("w", (8, 2), rows=(4, 4))
    forged.items["w"] = tensor_metadata(shape, chunks)
    forged.storage = forged.storage[:stored]
    return forged


def forged_overlap() -> Forged:
    """Two records of 5 and 4 rows, which the metadata put into 8 rows."""
    forged = Forged()
    forged.tensor("w", (9, 2), rows=(5, 4))
    forged.items["w"] = tensor_metadata((8, 2), [((0, 0), (5, 2)), ((4, 0), (4, 2))])
    forged.storage[1] = (index("w", (4, 0)), forged.storage[1][1])
    return forged


def forged_outside() -> Forged:
    """13 rows, of which the metadata say that they are 8."""
    forged = Forged()
    forged.tensor("w", (13, 2), rows=(4, 9))
    forged.items["w"] = tensor_metadata((8, 2), [((0, 0), (4, 2)), ((4, 0), (9, 2))])
    return forged


@pytest.mark.parametrize(
    ("forged", "kind", "message"),
    [
        (lambda: forged_with([((0, 0), (4, 2))]), IncompleteCheckpoint, "8 of 16 elements that are to be loaded"),
        (lambda: forged_with([]), IncompleteCheckpoint, "16 of 16 elements"),
        (lambda: forged_with([((0, 0), (4, 2)), ((4, 0), (4, 2))], (16, 2)), IncompleteCheckpoint, "16 of 32 elements"),
        (
            lambda: forged_with([((0, 0), (4, 2)), ((4, 0), (4, 2))], stored=1),
            IncompleteCheckpoint,
            "8 of 16|do not say",
        ),
        (forged_overlap, MalformedFile, "overlap"),
        (forged_outside, MalformedFile, "outside of the shape"),
    ],
    ids=["hole", "no chunks", "larger", "no place", "overlap", "outside"],
)
def test_metadata_that_do_not_cover_a_tensor(
    forged: Callable[[], Forged], kind: type, message: str, tmp_path: Path
) -> None:
    """torch leaves holes as they are, which is whatever was in memory."""
    made = forged()
    folder = made.write(tmp_path / "run")
    rows_here = 16 if message.startswith("16 of 32") else 8
    state = {"w": torch.full((rows_here, 2), 7.0)}
    error = load_error(FastFileSystemReader(folder), dict(state), no_dist=True)
    assert isinstance(error, kind)
    assert re.search(message, error.message), error.message
    assert bool((state["w"] == 7).all())


class Blind(DefaultLoadPlanner):
    """Does not show what it loads into."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.hidden, self.state_dict = self.state_dict, None  # type: ignore[assignment]
        return new_plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = find_state_dict_object(self.hidden, index)
        return found


def test_a_hole_that_only_the_plan_can_tell_of(tmp_path: Path) -> None:
    whole = forged_with([((0, 0), (4, 2)), ((4, 0), (4, 2))]).write(tmp_path / "whole")
    dcp.load({"w": torch.zeros(8, 2)}, storage_reader=FastFileSystemReader(whole), planner=Blind(), no_dist=True)
    torn = forged_with([((0, 0), (4, 2))]).write(tmp_path / "torn")
    error = load_error(FastFileSystemReader(torn), {"w": torch.zeros(8, 2)}, planner=Blind(), no_dist=True)
    assert isinstance(error, IncompleteCheckpoint)


def test_torch_is_silent_about_a_hole(tmp_path: Path) -> None:
    state = {"w": torch.full((8, 2), 7.0)}
    dcp.load(state, checkpoint_id=forged_with([((0, 0), (4, 2))]).write(tmp_path / "run"), no_dist=True)
    assert bool((state["w"][4:] == 7).all())
    assert not bool((state["w"][:4] == 7).any())


@pytest.mark.parametrize(
    "path", ["../secret/__0_0.distcp", "/etc/hostname", "link.distcp", "a/../../secret/__0_0.distcp"]
)
def test_a_file_outside_of_the_folder(tmp_path: Path, path: str) -> None:
    """torch reads it."""
    forged = Forged()
    forged.tensor("w", (4,))
    folder = forged.write(tmp_path / "run")
    shutil.copytree(folder, tmp_path / "secret")
    (folder / "a").mkdir()
    (folder / "link.distcp").symlink_to(tmp_path / "secret" / "__0_0.distcp")
    ((key, old),) = forged.storage
    forged.storage = [(key, place(path, old.state["offset"], old.state["length"]))]
    (folder / ".metadata").write_bytes(forged.metadata())
    if "hostname" not in path:
        dcp.load({"w": torch.zeros(4)}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    error = load_error(FastFileSystemReader(folder), {"w": torch.zeros(4)}, no_dist=True)
    assert isinstance(error, MalformedFile)
    assert "out of the checkpoint" in error.message


def touch(canary: Path) -> Call:
    """What makes the file when it is unpickled."""
    return Call(Glob("pathlib", "Path.touch"), (Call(Glob("pathlib", "PosixPath"), (str(canary),)),))


class Touch:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def archived(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("reader", [FastFileSystemReader, dcp.FileSystemReader], ids=["ours", "torch"])
def test_hostile_metadata(tmp_path: Path, reader: Any) -> None:
    """The attack works against torch, and names what it wanted when ours reads it."""
    canary, folder = tmp_path / "canary", tmp_path / "run"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").write_bytes(pickle.dumps({"x": Touch(canary)}))
    if reader is dcp.FileSystemReader:
        with pytest.raises(CheckpointException):
            dcp.load({"w": torch.zeros(3)}, storage_reader=reader(folder), no_dist=True)
        assert canary.exists()
        return
    error = load_error(reader(folder), {"w": torch.zeros(3)}, no_dist=True)
    assert isinstance(error, UnsafePickle)
    with pytest.raises(UnsafePickle):
        reader(folder).read_metadata()
    assert not canary.exists()


def _double(canary: Path) -> bytes:
    """A pickle that torch would run, if it took the file for one of before 1.6, and a sound archive after it."""
    return pickle.dumps(Touch(canary), protocol=0) + archived([1])


def _tar(canary: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("storages", "tensors", "pickle"):
            data = pickle.dumps(Touch(canary), protocol=2)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "object": lambda canary: archived({"x": Touch(canary)}),
    "in a buffer": lambda canary: archived({"x": io.BytesIO(archived(Touch(canary)))}),
    "pickle in a buffer": lambda canary: archived({"x": io.BytesIO(dump(touch(canary)))}),
    "beside a buffer": lambda canary: archived([io.BytesIO(archived(1)), Touch(canary)]),
    "before an archive": _double,
    "bare pickle": lambda canary: dump(touch(canary)),
    "tar": _tar,
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_objects(tmp_path: Path, attack: str) -> None:
    """Nothing runs, and no tensor is touched."""
    canary = tmp_path / "canary"
    forged = Forged()
    forged.tensor("w", (4,))
    forged.item("o", HOSTILE[attack](canary))
    folder = forged.write(tmp_path / "run")
    state: dict[str, Any] = {"w": torch.full((4,), 7.0), "o": None}
    error = load_error(FastFileSystemReader(folder), state, no_dist=True)
    assert isinstance(error, UnsafePickle | MalformedFile)
    assert isinstance(error, UnsafePickle) or attack in ("before an archive", "bare pickle", "tar")
    assert not canary.exists()
    assert state["w"].tolist() == [7.0] * 4


@pytest.mark.parametrize("attack", ["object", "before an archive", "beside a buffer"])
def test_these_attacks_work_against_torch(tmp_path: Path, attack: str) -> None:
    canary = tmp_path / "canary"
    forged = Forged()
    forged.item("o", HOSTILE[attack](canary))
    folder = forged.write(tmp_path / "run")
    with contextlib.suppress(CheckpointException):
        dcp.load({"o": None}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert canary.exists()


def test_objects_that_nobody_asks_for_are_not_looked_at(tmp_path: Path) -> None:
    forged = Forged()
    forged.tensor("w", (4,))
    forged.item("o", HOSTILE["object"](tmp_path / "canary"))
    state = {"w": torch.full((4,), 7.0)}
    dcp.load(state, storage_reader=FastFileSystemReader(forged.write(tmp_path / "run")), no_dist=True)
    assert state["w"].view(torch.int32).tolist() == [0, 1, 2, 3]


def test_other_buffers_are_refused(tmp_path: Path) -> None:
    dcp.save({"o": io.BytesIO(b"anything")}, checkpoint_id=tmp_path, no_dist=True)
    error = load_error(FastFileSystemReader(tmp_path), {"o": None}, no_dist=True)
    assert isinstance(error, UnsafePickle)
    assert error.name == "_io.BytesIO"


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda _: None, "there is no folder", None),
        (lambda folder: folder.mkdir(), "has no .metadata: no checkpoint, or a save was cut off", None),
        (
            lambda folder: dcp.save({"w": torch.ones(2)}, checkpoint_id=folder / "step-1", no_dist=True),
            "has no",
            "step-1",
        ),
    ],
)
def test_no_checkpoint(tmp_path: Path, make: Callable[[Path], None], message: str, hint: str | None) -> None:
    make(tmp_path / "run")
    error = load_error(FastFileSystemReader(tmp_path / "run"), {"w": torch.zeros(2)}, no_dist=True)
    assert isinstance(error, CheckpointNotFound)
    assert message in error.message
    assert error.hint is None or (hint is not None and hint in error.hint)


def test_broken_metadata(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(data[: len(data) // 2])
    error = load_error(FastFileSystemReader(tmp_path), {"w": torch.zeros(3)}, no_dist=True)
    assert isinstance(error, MalformedFile)
    found: dict[str, Any] = {}  # a planner that looks at the metadata first
    with pytest.raises(CheckpointException) as caught:
        _load_state_dict(
            found, storage_reader=FastFileSystemReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    assert isinstance(caught.value.failures[0][0], MalformedFile)


def test_transforms_that_are_not_known(tmp_path: Path) -> None:
    forged = Forged()
    forged.tensor("w", (4,))
    ((key, old),) = forged.storage
    forged.storage = [(key, place("__0_0.distcp", 0, old.state["length"], transform_descriptors=["stream.secret/1"]))]
    error = load_error(FastFileSystemReader(forged.write(tmp_path)), {"w": torch.zeros(4)}, no_dist=True)
    assert isinstance(error, Incompatible)
    assert "stream.secret/1" in error.message


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no local path"):
        FastFileSystemReader("s3://bucket/run")
    with pytest.raises(UsageError, match="num_threads"):
        FastFileSystemReader(tmp_path, num_threads=0)
    with pytest.raises(UsageError, match="read_metadata"):
        FastFileSystemReader(tmp_path).prepare_local_plan(LoadPlan([]))


def test_a_meta_tensor_has_no_memory(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)

    class Meta(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> Tensor:
            return torch.empty(read_item.lengths, device="meta")

    error = load_error(FastFileSystemReader(tmp_path), {"w": torch.zeros(3)}, planner=Meta(), no_dist=True)
    assert "meta device" in error.message
