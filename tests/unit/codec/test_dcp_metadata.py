"""``.metadata`` as torch's own classes see it, read at once and record by record."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
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

from fsdp_ckpt.codec import dcp_metadata
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, read_metadata
from fsdp_ckpt.codec.pickles import Machine
from fsdp_ckpt.errors import MalformedFile

FIXTURES = Path(__file__).parents[3] / "fixtures"
FILES = sorted([*FIXTURES.glob("**/.metadata"), *FIXTURES.glob("**/__*.metadata")])
# torch 2.15 writes six fields, Python 3.13 another module of paths: older ones cannot unpickle these.
NEWER = ("torch215_hand2", "torch215_hand4", "py313_style")
# Their writers put classes of their own into them.
FOREIGN = ("bytecheckpoint", "olmo_core")


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine take every record the ordinary way."""
    known = dcp_metadata._known
    monkeypatch.setattr(dcp_metadata, "_known", lambda *, bulk: known(bulk=False))  # noqa: ARG005


def as_plain(found: DcpMetadata) -> dict[str, Any]:
    return {
        "tensors": {key: (t.dtype.name, t.shape, list(t.chunks)) for key, t in found.tensors.items()},
        "objects": list(found.objects),
        "paths": dict(found.paths),
        "storage": {(place[0], place[1]): (info[0], info[1], info[2]) for place, info in found.storage.items()},
    }


def by_torch(metadata: Metadata) -> dict[str, Any]:
    tensors, objects = {}, []
    for key, item in metadata.state_dict_metadata.items():
        if isinstance(item, BytesStorageMetadata):
            objects.append(key)
            continue
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in item.chunks]
        tensors[key] = (str(item.properties.dtype).removeprefix("torch."), tuple(item.size), chunks)
    storage = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): (
            info.relative_path,
            info.offset,
            info.length,
        )
        for index, info in (metadata.storage_data or {}).items()
    }
    return {
        "tensors": tensors,
        "objects": objects,
        "paths": dict(metadata.planner_data or {}),
        "storage": storage,
    }


def read_both(data: bytes) -> DcpMetadata:
    """Read both ways and compare; ``plainly`` is too slow to choose for a whole test."""
    found = read_metadata(data, where="f")
    with pytest.MonkeyPatch.context() as patch:
        known = dcp_metadata._known
        patch.setattr(dcp_metadata, "_known", lambda *, bulk: known(bulk=False))  # noqa: ARG005
        again = read_metadata(data, where="f")
    assert as_plain(again) == as_plain(found)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_real_files(path: Path) -> None:
    data = path.read_bytes()
    found = as_plain(read_both(data))
    assert found["storage"]
    if not {*NEWER, *FOREIGN} & set(path.parts):
        assert found == by_torch(pickle.loads(data))


WRITERS = {
    "torch-2.1.2": "torch 2.1-2.2",
    "torch-2.3.1": "torch 2.3",
    "torch-2.5.1": "torch 2.4-2.6",
    "torch-2.9.1": "torch 2.9-2.14",
    "torch-2.13.0": "torch 2.9-2.14",
    "edge/torch215_hand4": "torch >= 2.15",
}


@pytest.mark.parametrize("folder", WRITERS)
def test_the_writer_shows(folder: str) -> None:
    files = [path for path in FILES if str(path.relative_to(FIXTURES)).startswith(folder)]
    assert files
    assert {read_metadata(path.read_bytes(), where="f").writer for path in files} == {WRITERS[folder]}


def test_the_writer_of_torch_2_7() -> None:
    metadata = make({"w": ((4,), [((0,), (4,))])}, random.Random(0))
    del metadata.__dict__["version"]
    assert read_metadata(pickle.dumps(metadata, 4), where="f").writer == "torch 2.7-2.8"


Tensors = dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]]


def make(tensors: Tensors, rng: random.Random, *, objects: int = 0, files: int = 3) -> Metadata:
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for key, (shape, boxes) in tensors.items():
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64])
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)) for offsets, lengths in boxes]
        state[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
        for number, chunk in enumerate(chunks):
            # torch's planner hands on the Size object of the chunk, its reader makes new ones: both occur.
            offset = chunk.offsets if rng.random() < 0.5 else torch.Size(tuple(chunk.offsets))
            place = rng.choice([0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**40, 2**61]), rng.randrange(2**33)
            storage[MetadataIndex(key, offset, number)] = _StorageInfo(f"__{rng.randrange(files)}_0.distcp", *place)
    for number in range(objects):
        key = f"object {number}"
        state[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", number, 7)
    paths: Any = {key: ("model", key) for key in state}
    return Metadata(state, paths, storage, StorageMeta("/some/where", save_id="0-1-2", modules=[]))


def rows(count: int, dims: int, step: int) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    rest = (3,) * (dims - 1)
    boxes = [((i * step, *[0] * (dims - 1)), (step, *rest)) for i in range(count)]
    return (count * step, *rest), boxes


CASES: dict[str, Tensors] = {
    "one": {"w": rows(1, 2, 4)},
    "many chunks": {f"layers.{i}.weight": rows(300, 2, 5) for i in range(5)},
    "many tensors": {f"layers.{i}.weight": rows(2, 1 + i % 4, 5) for i in range(300)},
    "0-d": {f"step.{i}": ((), [((), ())]) for i in range(20)},
    "0-d between others": {f"w.{i}": ((), [((), ())]) if i % 3 else rows(4, 2, 5) for i in range(30)},
    "4-D": {f"conv.{i}": rows(5, 4, 7) for i in range(20)},
    "5-D between others": {f"w.{i}": rows(5, 2 + 3 * (i % 2), 7) for i in range(20)},
    "no chunks": {"w": ((0,), []), "v": rows(3, 1, 2)},
    "empty chunks": {"w": ((1,), [((0,), (1,)), ((1,), (0,))])},
    "beyond 2^31": {f"w.{i}": rows(40, 1 + i % 3, 2**31 - 7) for i in range(6)},
    "beyond 2^40": {f"w.{i}": rows(40, 1 + i % 3, 2**40 + i) for i in range(6)},
    "around one byte": {f"w.{i}": rows(40, 2, i) for i in (254, 255, 256, 257, 65535, 65536)},
    # 0x94 is the opcode MEMOIZE, 0x85 to 0x87 are tuples, 0x8c begins a text.
    "0x94 in names": {f"{name}.{i}": rows(7, 2, 5) for name in ("Ŕ", "\x94", "x\x94\x94", "葔") for i in range(4)},
    "names of other alphabets": {f"größe.権重.{i}": rows(7, 2, 5) for i in range(20)},
    "names that look like opcodes": {f"{n}{i}": rows(7, 2, 5) for n in ("h", "\x94h", "ub", ")\x81") for i in range(9)},
    "long names": {"x" * n: rows(3, 2, 5) for n in (1, 127, 128, 133, 140, 148, 254, 255, 256, 300, 66_000)},
    "sizes that look like opcodes": {f"w.{n}": rows(9, 3, n) for n in (0x28, 0x4B, 0x85, 0x86, 0x94, 0x8A, 0x8C75)},
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", CASES)
def test_made_by_torch(name: str, protocol: int) -> None:
    for seed, files in ((0, 1), (1, 3), (2, 400))[: 3 if protocol == 4 else 1]:
        metadata = make(CASES[name], random.Random(seed), objects=seed * 3, files=files)
        data = pickle.dumps(metadata, protocol)
        assert as_plain(read_both(data)) == by_torch(metadata)


def test_any_order_of_tensors_and_storage() -> None:
    rng = random.Random(7)
    for _ in range(10):
        names = [
            f"layers.{i}.{'ü' * rng.randrange(3)}{rng.choice(['weight', 'Ŕ', 'b'])}"
            for i in range(rng.randrange(1, 60))
        ]
        tensors: Tensors = {name: ((), [((), ())]) for name in names if rng.random() < 0.1}
        for name in names[::2]:
            tensors[name] = rows(rng.randrange(1, 40), rng.randrange(1, 6), rng.randrange(1, 2**34))
        metadata = make(tensors, rng, objects=rng.randrange(4), files=rng.choice([1, 2, 300]))
        items = list(metadata.storage_data.items())
        rng.shuffle(items)
        metadata.storage_data = dict(items)
        assert as_plain(read_both(pickle.dumps(metadata, 4))) == by_torch(metadata)


def test_long_runs_are_not_taken_record_by_record(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = make({f"w.{i}": rows(500, 2, 5) for i in range(4)}, random.Random(0))
    calls = 0
    reduce = Machine.reduce

    def counted(self: Machine, function: Any, args: Any) -> Any:
        nonlocal calls
        calls += 1
        return reduce(self, function, args)

    monkeypatch.setattr(Machine, "reduce", counted)
    read_metadata(pickle.dumps(metadata, 4), where="f")
    assert calls < 1000, "2,000 chunks and 2,000 places would need 10,000"


def test_later_references_to_records_that_were_passed_over() -> None:
    # torch writes no such thing, but Python's pickle may: one object in two places is written once.
    metadata = make({f"w.{i}": rows(60, 2, 5) for i in range(3)}, random.Random(0))
    storage = metadata.storage_data
    indices = list(storage)
    storage[indices[-1]] = storage[indices[40]]
    assert as_plain(read_both(pickle.dumps(metadata, 4))) == by_torch(metadata)

    tensors: Any = metadata.state_dict_metadata
    tensors["w.2"].chunks[50] = tensors["w.0"].chunks[50]
    assert as_plain(read_both(pickle.dumps(metadata, 4))) == by_torch(metadata)


@pytest.mark.parametrize("what", ["offsets", "sizes"])
def test_sizes_that_are_one_object_in_many_chunks(what: str) -> None:
    metadata = make({f"w.{i}": rows(60, 2, 5) for i in range(3)}, random.Random(0))
    shared = torch.Size([5, 3])
    for tensor in metadata.state_dict_metadata.values():
        assert isinstance(tensor, TensorStorageMetadata)
        for chunk in tensor.chunks[::2]:
            setattr(chunk, what, shared)
    assert as_plain(read_both(pickle.dumps(metadata, 4))) == by_torch(metadata)


def test_transforms_are_kept() -> None:
    metadata = make({"w": rows(5, 2, 5)}, random.Random(0))
    for number, info in enumerate(metadata.storage_data.values()):
        info.transform_descriptors = ["stream.zstd/1"] if number % 2 else None
    found = read_both(pickle.dumps(metadata, 4))
    assert sorted(info[3] for info in found.storage.values()) == [(), (), (), ("stream.zstd/1",), ("stream.zstd/1",)]


def test_items_of_the_ordinary_way_are_refused_alike(plainly: None) -> None:
    with pytest.raises(MalformedFile):
        read_metadata(pickle.dumps({"state_dict_metadata": {}}), where="f")
