"""``.metadata`` that is damaged, or made to do harm."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fsdp_ckpt.codec import dcp_metadata
from fsdp_ckpt.codec.dcp_metadata import read_metadata
from fsdp_ckpt.errors import MalformedFile, UnsafePickle
from tests.unit.child import outcome
from tests.unit.codec.raw_pickle import Raw, call, dump
from tests.unit.codec.test_dcp_metadata import as_plain, make, rows

DEEP = Raw(b")" + b"\x85" * 200_000)
EMPTY_LIST = Raw(b"]")


def metadata() -> Metadata:
    return make({"w": rows(3, 2, 5), "v": ((), [((), ())])}, random.Random(0), objects=1)


def tensor(meta: Metadata) -> Any:
    return meta.state_dict_metadata["w"]


def index(meta: Metadata, number: int = 0) -> dict[str, Any]:
    return list(meta.storage_data)[number].__dict__  # type: ignore[no-any-return]


def info(meta: Metadata) -> Any:
    return next(iter(meta.storage_data.values()))


Change = Callable[[Metadata], object]
CHANGES: dict[str, Change] = {
    "no tensors": lambda m: setattr(m, "state_dict_metadata", None),
    "tensors are a list": lambda m: setattr(m, "state_dict_metadata", [1]),
    "no storage": lambda m: setattr(m, "storage_data", None),
    "storage is a list": lambda m: setattr(m, "storage_data", [1]),
    "a key that is no text": lambda m: m.state_dict_metadata.update({5: tensor(m)}),  # type: ignore[dict-item]
    "an item that is a number": lambda m: m.state_dict_metadata.update(w=5),  # type: ignore[call-overload]
    "an item that is nothing": lambda m: m.state_dict_metadata.update(w=None),  # type: ignore[call-overload]
    "no chunks": lambda m: setattr(tensor(m), "chunks", None),
    "chunks are a number": lambda m: setattr(tensor(m), "chunks", 5),
    "a chunk that is a text": lambda m: setattr(tensor(m), "chunks", ["x"]),
    "a chunk without sizes": lambda m: tensor(m).chunks[0].__dict__.pop("sizes"),
    "negative sizes": lambda m: setattr(tensor(m).chunks[0], "sizes", (-1, 3)),
    "offsets are a list": lambda m: setattr(tensor(m).chunks[0], "offsets", [0, 0]),
    "offsets are floats": lambda m: setattr(tensor(m).chunks[0], "offsets", (0.0, 0.0)),
    "no size": lambda m: tensor(m).__dict__.pop("size"),
    "size is a list": lambda m: setattr(tensor(m), "size", [15, 3]),
    "size is a number": lambda m: setattr(tensor(m), "size", 45),
    "size beyond 63 bits": lambda m: setattr(tensor(m), "size", (2**63, 3)),
    "a huge size": lambda m: setattr(tensor(m), "size", (10**5000,)),
    "no properties": lambda m: setattr(tensor(m), "properties", None),
    "properties of nothing": lambda m: setattr(tensor(m), "properties", {}),
    "dtype is a text": lambda m: setattr(tensor(m).properties, "dtype", "float32"),
    "a fqn that is a number": lambda m: index(m).update(fqn=5),
    "a fqn that is missing": lambda m: index(m).pop("fqn"),
    "an offset that is a list": lambda m: index(m).update(offset=EMPTY_LIST),
    "a path that is a number": lambda m: setattr(info(m), "relative_path", 5),
    "a path that is missing": lambda m: info(m).__dict__.pop("relative_path"),
    "a start that is a text": lambda m: setattr(info(m), "offset", "0"),
    "a length that is a float": lambda m: setattr(info(m), "length", 7.5),
    "transforms that are a number": lambda m: setattr(info(m), "transform_descriptors", 5),
    # Deep values: hashing, comparing or showing them ends the process or Python's patience.
    "a deep size": lambda m: setattr(tensor(m), "size", DEEP),
    "deep offsets": lambda m: setattr(tensor(m).chunks[0], "offsets", DEEP),
    "deep sizes": lambda m: setattr(tensor(m).chunks[0], "sizes", DEEP),
    "a deep offset in an index": lambda m: index(m).update(offset=DEEP),
    "a deep fqn in an index": lambda m: index(m).update(fqn=DEEP),
    "a deep path": lambda m: setattr(info(m), "relative_path", DEEP),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_torch_would_not_write_is_malformed(name: str) -> None:
    meta = metadata()
    # The index is hashed by torch on unpickling only; here its fields change after it became a key.
    CHANGES[name](meta)
    data = dump(meta)
    assert outcome(lambda: read_metadata(data, where="f")) == "MalformedFile"


def test_negative_numbers_in_long_runs() -> None:
    data = pickle.dumps(make({"w": rows(50, 2, 70_000)}, random.Random(0)), 4)
    size = (70_000 * 30).to_bytes(4, "little")
    assert data.count(b"J" + size) >= 1
    broken = data.replace(b"J" + size, b"J\xff\xff\xff\xff")
    with pytest.raises(MalformedFile):
        read_metadata(broken, where="f")


def test_a_value_of_another_class_is_no_metadata() -> None:
    values: list[Any] = [{}, [], 5, torch.Size([2]), TensorStorageMetadata]
    for value in values:
        with pytest.raises((MalformedFile, UnsafePickle)):
            read_metadata(pickle.dumps(value), where="f")


@pytest.mark.parametrize("where", ["planner_data", "storage_meta", "state_dict_metadata", "storage_data"])
def test_code_is_refused_wherever_it_stands(where: str) -> None:
    meta = metadata()
    meta.__dict__[where] = call("posix", "system", "true")
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        read_metadata(dump(meta), where="f")


def test_code_in_the_middle_of_a_long_run() -> None:
    meta = make({"w": rows(60, 2, 5)}, random.Random(0))
    info_40 = list(meta.storage_data.values())[40]
    info_40.relative_path = call("posix", "system", "true")
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        read_metadata(dump(meta), where="f")


def test_every_truncation_is_noticed() -> None:
    data = pickle.dumps(make({"w": rows(20, 2, 5)}, random.Random(0)), 4)
    for stop in range(0, len(data), 3):
        with pytest.raises(MalformedFile):
            read_metadata(data[:stop], where="f")


def try_read(data: bytes) -> str | None:
    try:
        return repr(as_plain(read_metadata(data, where="f")))
    except (MalformedFile, UnsafePickle):
        return None


def test_every_changed_byte_is_refused_or_read_alike_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(make({"w": rows(5, 2, 300), "v": rows(2, 1, 2)}, random.Random(0)), 4)
    changed = [
        data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]
        for position in range(len(data))
        for mask in (0x01, 0x80)
    ]
    at_once = [try_read(broken) for broken in changed]
    known = dcp_metadata._known
    monkeypatch.setattr(dcp_metadata, "_known", lambda *, bulk: known(bulk=False))  # noqa: ARG005
    one_by_one = [try_read(broken) for broken in changed]
    differing = [number for number, pair in enumerate(zip(at_once, one_by_one, strict=True)) if pair[0] != pair[1]]
    assert not differing, f"byte {differing[0] // 2} of {len(data)}"
    assert any(at_once)
    assert None in at_once


def test_an_index_may_be_a_key_only_once() -> None:
    # The later of two equal places wins, as in torch, where MetadataIndex hashes by name and offset.
    meta = make({"w": rows(2, 2, 5)}, random.Random(0))
    twin = MetadataIndex("w", torch.Size([0, 0]), 9)
    twin.__dict__["offset"] = torch.Size([1, 1])
    meta.storage_data[twin] = _StorageInfo("__9_0.distcp", 1, 2)
    twin.__dict__["offset"] = torch.Size([0, 0])
    data = pickle.dumps(meta, 4)
    judge = pickle.loads(data)
    found = read_metadata(data, where="f").storage["w", (0, 0)]
    assert found[0] == judge.storage_data[MetadataIndex("w", torch.Size([0, 0]))].relative_path == "__9_0.distcp"
