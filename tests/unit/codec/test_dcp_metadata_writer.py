"""``.metadata`` files that we write, as torch's own reader and classes see them."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_ckpt.catalog import DTYPES, Shape
from fsdp_ckpt.codec import dcp_metadata
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo, read_metadata
from fsdp_ckpt.codec.dcp_metadata_writer import write_metadata
from fsdp_ckpt.codec.pickles import Machine
from tests.unit.codec.test_dcp_metadata import FILES, FIXTURES, FOREIGN, NEWER, read_both, rows

WRITER = "torch 2.9-2.14"
Chunks = list[tuple[Shape, Shape]]


@pytest.fixture(autouse=True)
def in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``read_both`` read small files both ways."""
    monkeypatch.setattr(dcp_metadata, "_BULK_BYTES", 0)


def make(
    tensors: dict[str, tuple[str, Shape, Chunks]],
    objects: tuple[str, ...] = (),
    *,
    files: tuple[str, ...] = ("__0_0.distcp",),
    first: int = 0,
    paths: dict[str, tuple[str | int, ...]] | None = None,
    transforms: tuple[str, ...] = (),
) -> DcpMetadata:
    """Place one item after the other, in the files by turns."""
    storage: dict[tuple[str, Shape | None], StorageInfo] = {}
    keys: list[tuple[str, Shape | None]] = [(key, None) for key in objects]
    keys += [(key, offsets) for key, (_, _, chunks) in tensors.items() for offsets, _ in chunks]
    for number, key in enumerate(keys):
        storage[key] = (files[number % len(files)], first + 1000 * number, 1000 - number % 7, transforms)
    return DcpMetadata(
        tensors={
            key: DcpTensor(dtype=DTYPES[dtype], shape=shape, chunks=chunks)
            for key, (dtype, shape, chunks) in tensors.items()
        },
        objects=list(objects),
        paths={key: tuple(key.split(".")) for key in (*tensors, *objects)} if paths is None else paths,
        storage=storage,
        writer=WRITER,
    )


def as_torch(metadata: DcpMetadata, save_id: str) -> Metadata:
    """Build the same from torch's classes."""
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, tensor in metadata.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in tensor.chunks]
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype.name))
        state[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    for key in metadata.objects:
        state[key] = BytesStorageMetadata()
    for (key, place), (path, start, length, transforms) in metadata.storage.items():
        index = MetadataIndex(key)
        if place is not None:
            numbers = [offsets for offsets, _ in metadata.tensors[key].chunks]
            index = MetadataIndex(key, place, numbers.index(place))
        storage[index] = _StorageInfo(path, start, length, list(transforms) or None)
    return Metadata(state, dict(metadata.paths), storage, StorageMeta(None, save_id, None, []), "1.0.0")


def everything(metadata: Metadata) -> Any:
    """Return what torch's ``==`` compares, and what it does not: order, types, and the numbers of chunks."""
    assert isinstance(metadata, Metadata)
    return (
        metadata,
        [(type(item), list(vars(item))) for item in metadata.state_dict_metadata.values()],
        [
            (index.fqn, index.offset, type(index.offset), index.index, sorted(vars(index)))
            for index in metadata.storage_data
        ],
        [(type(offset), type(path)) for path in metadata.planner_data.values() for offset in path],
    )


def check(metadata: DcpMetadata, folder: Path) -> bytes:
    data = write_metadata(metadata, save_id="an id")
    (folder / ".metadata").write_bytes(data)
    found = FileSystemReader(folder).read_metadata()
    assert found.storage_meta is not None
    assert found.storage_meta.load_id, "torch's reader sets it"
    found.storage_meta.load_id = None
    assert everything(found) == everything(as_torch(metadata, "an id"))
    assert read_both(data) == metadata
    return data


CASES: dict[str, DcpMetadata] = {
    "nothing": make({}),
    "one": make({"w": ("float32", (4, 3), [((0, 0), (4, 3))])}),
    "objects": make({}, ("lr_scheduler.last_epoch", "é")),
    "both": make({"w": ("bfloat16", *rows(5, 2, 3))}, ("a", "b"), files=("__0_0.distcp", "__1_0.distcp")),
    "0-d": make({f"step.{i}": ("float32", (), [((), ())]) for i in range(3)}),
    "0-d between others": make(
        {f"w.{i}": ("int64", *(((), [((), ())]) if i % 2 else rows(4, i, 5))) for i in range(1, 7)}
    ),
    "empty": make({"w": ("float32", (0, 3), [((0, 0), (0, 3))]), "v": ("float32", (0,), [])}),
    "an empty chunk": make({"w": ("float32", (4,), [((0,), (4,)), ((4,), (0,))])}),
    "grid": make(
        {"w": ("float16", (4, 6), [((i, j), (2, 3)) for i in (0, 2) for j in (0, 3)])}, files=("a/b.distcp", "c")
    ),
    "8-D": make({"w": ("float32", *rows(3, 8, 2))}),
    "64-D": make({"w": ("float32", (1,) * 64, [((0,) * 64, (1,) * 64)])}),
    "around widths": make(
        {
            f"w.{n}": ("float32", *rows(3, dims, n))
            for dims, n in enumerate((254, 255, 256, 257, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**55 - 1, 2**55), 1)
        }
    ),
    "beyond 2^31": make({"w": ("float32", *rows(4, 2, 5))}, first=2**31 - 2000),
    "beyond 2^60": make({"w": ("float32", *rows(4, 2, 2**58))}, ("o",), first=2**60),
    "long names": make(
        {"x" * n: ("float32", *rows(2, 1, 5)) for n in (1, 254, 255, 256, 300, 66_000)}, files=("f" * 255, "g" * 256)
    ),
    "names of other alphabets": make(
        {f"größe.権重 {i}\n": ("float32", *rows(2, 2, 5)) for i in range(3)} | {"": ("int8", *rows(1, 1, 1))},
        files=("Ŕ/ü .distcp", "\x94"),
    ),
    "more than 256 names": make({f"w.{i}": ("float32", *rows(2, 2, 5)) for i in range(300)}),
    "paths": make(
        {f"a.{i}": ("float32", *rows(1, 1, 5)) for i in range(7)},
        paths={
            "a.0": ("a", 0),
            "a.1": ("a", "x.y", "1", 70_000),
            "a.2": (),
            "a.3": ("a.3",),
            "a.4": (-1, -(2**40), 2**40),
            "not among the items": ("a", "0"),
        },
    ),
    "no paths": make({"w": ("float32", *rows(3, 1, 5))}, paths={}),
    "transforms": make({"w": ("float32", *rows(3, 1, 5))}, ("o",), transforms=("stream.zstd/1", "other")),
    "every dtype": make({name: (name, *rows(2, 2, 5)) for name in DTYPES}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_torch_reads_what_was_written(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_files_of_torch_are_written_again(path: Path) -> None:
    found = read_metadata(path.read_bytes(), where="f")
    data = write_metadata(found, save_id="x")
    assert read_metadata(data, where="f") == dataclasses.replace(found, writer=WRITER)
    if {*NEWER, *FOREIGN} & set(path.parts):
        return
    original, again = pickle.loads(path.read_bytes()), pickle.loads(data)
    assert again.storage_data == original.storage_data
    # A hint, which Megatron leaves out.
    numbers = {index: index.index for index in original.storage_data if index.index is not None}
    assert {index: index.index for index in again.storage_data if index in numbers} == numbers
    assert again.planner_data == (original.planner_data or {})
    for key, item in original.state_dict_metadata.items():
        have = again.state_dict_metadata[key]
        if isinstance(item, TensorStorageMetadata):
            assert isinstance(have, TensorStorageMetadata)
            assert (have.size, have.chunks) == (item.size, item.chunks)
            # torch 2.1 and 2.2 had the class elsewhere. What DcpTensor does not know is False.
            assert vars(have.properties) == vars(item.properties) | {"requires_grad": False}
        else:
            assert isinstance(have, BytesStorageMetadata)


def globals_of(data: bytes) -> set[tuple[str, str]]:
    seen = set()

    class Watched(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            seen.add((module, name))
            return super().find_class(module, name)

    Watched(io.BytesIO(data)).load()
    return seen


@pytest.mark.parametrize("version", ["2.5.1", "2.9.1", "2.13.0"])
def test_nothing_that_older_versions_lack(version: str) -> None:
    path = next(path for path in FILES if path.is_relative_to(FIXTURES / f"torch-{version}"))
    data = write_metadata(read_metadata(path.read_bytes(), where="f"), save_id="x")
    theirs = {name for name in globals_of(path.read_bytes()) if name[0] != "pathlib"}
    assert globals_of(data) - {("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")} <= theirs


def test_tied_weights_are_two_keys_at_one_place(tmp_path: Path) -> None:
    tensor = DcpTensor(dtype=DTYPES["float32"], shape=(4, 3), chunks=[((0, 0), (2, 3)), ((2, 0), (2, 3))])
    places = {(0, 0): ("__0_0.distcp", 0, 1200, ()), (2, 0): ("__1_0.distcp", 64, 1200, ())}
    keys = ("embed.weight", "lm_head.weight")
    metadata = DcpMetadata(
        tensors=dict.fromkeys(keys, tensor),
        objects=[],
        paths={key: (key,) for key in keys},
        storage={(key, offsets): info for key in keys for offsets, info in places.items()},
        writer=WRITER,
    )
    check(metadata, tmp_path)
    found = FileSystemReader(tmp_path).read_metadata()
    first, second = (found.state_dict_metadata[key] for key in keys)
    assert isinstance(first, TensorStorageMetadata)
    assert isinstance(second, TensorStorageMetadata)
    assert first.properties is not second.properties, "changing one leaves the other alone"


def many(count: int = 20_000) -> DcpMetadata:
    tensors = {
        f"layers.{i}.{name}.weight": ("bfloat16", *rows(100, dims, 300))
        for i in range(count // 400)
        for name, dims in (("q", 2), ("k", 2), ("mlp", 3), ("norm", 1))
    }
    return make(tensors, ("step",), files=tuple(f"__{i}_0.distcp" for i in range(300)))


def test_long_runs_are_read_in_bulk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    metadata = many()
    data = check(metadata, tmp_path)
    assert len(data) > 1 << 18
    calls = 0
    reduce = Machine.reduce

    def counted(self: Machine, function: Any, args: Any) -> Any:
        nonlocal calls
        calls += 1
        return reduce(self, function, args)

    monkeypatch.setattr(Machine, "reduce", counted)
    assert read_metadata(data, where="f") == metadata
    assert calls < 1500, "200 tensors need five each; 20,000 chunks and their places would need 100,000"


def test_places_in_any_order_are_read_in_bulk() -> None:
    metadata = many(8000)
    items = list(metadata.storage.items())
    random.Random(3).shuffle(items)
    metadata = dataclasses.replace(metadata, storage=dict(items))
    assert read_both(write_metadata(metadata, save_id="x")) == metadata


def test_no_larger_than_what_torch_writes() -> None:
    metadata = many()
    assert len(write_metadata(metadata, save_id="x")) <= len(pickle.dumps(as_torch(metadata, "x"), 4))


def test_every_python_and_any_file_object_reads_it() -> None:
    metadata = CASES["both"]
    data = write_metadata(metadata, save_id="x")
    # The unpickler in Python differs from the one in C in how it reads frames and marks.
    assert pickle._Unpickler(io.BytesIO(data)).load() == as_torch(metadata, "x")

    class Remote:
        """Offers no peek(), as files of fsspec do not."""

        def __init__(self) -> None:
            self.file = io.BytesIO(data)
            self.num_reads = 0

        def read(self, size: int = -1) -> bytes:
            self.num_reads += 1
            return self.file.read(size)

        def readline(self) -> bytes:
            self.num_reads += 1
            return self.file.readline()

    remote = Remote()
    assert pickle.load(remote) == as_torch(metadata, "x")
    assert remote.num_reads < 10


@pytest.mark.parametrize("cut", [1, 50, 500])
def test_a_truncated_file_is_noticed(cut: int) -> None:
    data = write_metadata(CASES["both"], save_id="x")[:-cut]
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        pickle.loads(data)


@pytest.mark.parametrize("key", [("w", (1, 0)), ("w", None), ("v", (0, 0)), ("o", (0,))])
def test_places_of_unknown_items_are_refused(key: tuple[str, Shape | None]) -> None:
    metadata = make({"w": ("float32", (4, 3), [((0, 0), (4, 3))])}, ("o",))
    metadata.storage[key] = ("__0_0.distcp", 0, 1, ())
    with pytest.raises(ValueError, match=key[0]):
        write_metadata(metadata, save_id="x")


SIZES = st.one_of(st.integers(0, 3), st.sampled_from([255, 256, 65535, 65536, 2**31 - 1, 2**31]), st.integers(0, 2**60))
NAMES = st.one_of(
    st.text(max_size=12), st.sampled_from(["layers.0.weight", "a b", "größe.権重", "\x94", ")\x81", "x" * 300, "."])
)


@st.composite
def tensors(draw: st.DrawFn) -> DcpTensor:
    sides = st.lists(SIZES, min_size=(dims := draw(st.integers(0, 5))), max_size=dims).map(tuple)
    chunks = draw(st.lists(st.tuples(sides, sides), max_size=6, unique_by=lambda chunk: chunk[0]))
    return DcpTensor(dtype=DTYPES[draw(st.sampled_from(list(DTYPES)))], shape=draw(sides), chunks=chunks)


@st.composite
def metadatas(draw: st.DrawFn) -> DcpMetadata:
    found = draw(st.dictionaries(NAMES, tensors(), max_size=5))
    objects = [key for key in draw(st.lists(NAMES, max_size=3, unique=True)) if key not in found]
    infos = st.tuples(NAMES, SIZES, SIZES, st.sampled_from([(), (), ("stream.zstd/1",)]))
    places: list[tuple[str, Shape | None]] = [(key, None) for key in objects]
    places += [(key, offsets) for key, tensor in found.items() for offsets, _ in tensor.chunks]
    steps = st.one_of(NAMES, st.integers(-(2**62), 2**62))
    return DcpMetadata(
        tensors=found,
        objects=objects,
        paths=draw(st.dictionaries(NAMES, st.lists(steps, max_size=5).map(tuple), max_size=4)),
        storage={place: draw(infos) for place in draw(st.permutations(places))},
        writer=WRITER,
    )


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(metadatas(), st.text())
def test_anything(metadata: DcpMetadata, save_id: str) -> None:
    data = write_metadata(metadata, save_id=save_id)
    assert read_both(data) == metadata
    assert everything(pickle.loads(data)) == everything(as_torch(metadata, save_id))


def test_the_same_as_torch_itself_saves(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(4, 3), "s": torch.tensor(1.0)}, "lr": 0.1, "list": [torch.ones(2), "x"]}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    original = (tmp_path / "theirs" / ".metadata").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pickle.loads(write_metadata(read_metadata(original, where="f"), save_id="x"))
    wanted = pickle.loads(original)
    for field in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(again, field) == getattr(wanted, field)
    assert math.prod(again.state_dict_metadata["model.w"].size) == 12
    assert sorted(vars(again)) == sorted(vars(wanted))
    assert vars(wanted.storage_meta) | vars(again.storage_meta) == vars(again.storage_meta)


def test_without_a_save_id_there_is_no_class_that_torch_2_3_lacks(tmp_path: Path) -> None:
    data = write_metadata(CASES["both"])
    assert "StorageMeta" not in {name for _, name in globals_of(data)}
    assert "StorageMeta" in {name for _, name in globals_of(write_metadata(CASES["both"], save_id="x"))}
    (tmp_path / ".metadata").write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = FileSystemReader(tmp_path).read_metadata()
    assert found.state_dict_metadata == as_torch(CASES["both"], "x").state_dict_metadata
    assert found.storage_meta is not None
