"""Tensors in the pickles that torch.save writes, and the sharded tensors of per-rank files."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_ckpt.catalog import DTYPES
from fsdp_ckpt.codec.pickles import Machine
from fsdp_ckpt.codec.tensors import (
    TORCH,
    DTensorRef,
    ShardedTensorRef,
    StorageRef,
    TensorRef,
    storage_from_pid,
)
from fsdp_ckpt.errors import MalformedFile, UnsafePickle
from tests.build import save_rank_files
from tests.unit.codec.raw_pickle import Raw, call, dump, dump_storage, global_

FIXTURES = Path(__file__).parents[3] / "fixtures"


def load_pickle(data: bytes) -> Any:
    return Machine(data, TORCH, where="f", persistent=storage_from_pid).run()


def load(file: Path | io.BytesIO) -> Any:
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return load_pickle(archive.read(name))


def saved(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return load(file)


def views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = torch.zeros(60, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype).reshape(3, 4, 5)
    return {
        "whole": base,
        "0-d": base[1, 2, 3],
        "empty": base[:0],
        "rows": base[1:],
        "column": base[:, 1],
        "transposed": base.transpose(0, 2),
        "steps": base[::2, 1::2, 1:4],
        "expanded": base[:1].expand(7, 4, 5),
        "flat": base.view(-1)[7:20],
    }


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_views_of_every_dtype(name: str, protocol: int) -> None:
    tensors = views(getattr(torch, name))
    for key, ref in saved(tensors, pickle_protocol=protocol).items():
        tensor = tensors[key]
        assert isinstance(ref, TensorRef)
        assert ref.dtype is DTYPES[name]
        assert (ref.shape, ref.strides, ref.offset) == (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        stored = ref.storage.size * (ref.storage.dtype.itemsize if ref.storage.dtype else 1)
        assert stored == tensor.untyped_storage().nbytes()


def test_tensors_that_share_a_storage_say_so() -> None:
    base = torch.zeros(10)
    found = saved({"a": base, "b": base[3:], "c": torch.zeros(10)})
    assert found["a"].storage == found["b"].storage
    assert found["a"].storage != found["c"].storage


def test_conj_and_neg_bits() -> None:
    def value() -> torch.Tensor:
        return torch.tensor([1 + 2j, 3 - 4j])

    both = torch._neg_view(value().conj())
    found = saved({"plain": value(), "conj": value().conj(), "neg": value().conj().imag, "both": both})
    assert {key: (ref.conj, ref.neg) for key, ref in found.items()} == {
        "plain": (False, False), "conj": (True, False), "neg": (False, True), "both": (True, True),
    }  # fmt: skip


def test_parameters_and_buffers_are_their_tensors() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    tagged = torch.nn.Parameter(torch.zeros(4))
    tagged.tag = "x"  # type: ignore[attr-defined]
    found = saved(
        {
            "p": parameter,
            "tagged": tagged,
            "b": torch.nn.Buffer(torch.zeros(5)),
            "t": torch.zeros(6, requires_grad=True),
        }
    )
    assert {key: ref.shape for key, ref in found.items()} == {"p": (2, 3), "tagged": (4,), "b": (5,), "t": (6,)}


def test_state_dicts_keep_order_and_lose_metadata() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    found = saved(state)
    assert list(found) == ["weight", "bias"]
    assert type(found) is dict


CASES: dict[str, tuple[tuple[int, ...], list[Any], tuple[Any, ...]]] = {
    "rows": ((4,), [Shard(0)], (("shard", 0),)),
    "columns": ((2,), [Shard(1)], (("shard", 1),)),
    "hsdp": ((2, 2), [Replicate(), Shard(0)], (("replicate",), ("shard", 0))),
    "tensor parallel": ((2, 3), [Shard(0), Shard(1)], (("shard", 0), ("shard", 1))),
    "strided": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (("strided", 0, 2), ("shard", 0))),
    "three dimensions": ((2, 1, 2), [Shard(0), Replicate(), Shard(1)], (("shard", 0), ("replicate",), ("shard", 1))),
}


@pytest.mark.parametrize("name", CASES)
def test_dtensors_of_every_rank(name: str, tmp_path: Path) -> None:
    mesh, placements, expected = CASES[name]
    whole = torch.arange(42.0).reshape(7, 6)
    save_rank_files(tmp_path, {"w": whole}, mesh=mesh, placements={"w": placements})
    ranks = torch.arange(len(list(tmp_path.iterdir()))).reshape(mesh)
    for file in tmp_path.iterdir():
        rank = int(file.stem.rpartition("_")[2])
        ref = load(file)["w"]
        assert isinstance(ref, DTensorRef)
        assert (ref.shape, ref.mesh_shape, ref.placements) == ((7, 6), mesh, expected)
        assert ref.coordinate == tuple((ranks == rank).nonzero()[0].tolist())
        assert ref.local.dtype is DTYPES["float32"]


def test_dtensors_keep_the_shape_of_their_local_tensor(tmp_path: Path) -> None:
    save_rank_files(tmp_path, {"w": torch.zeros(7, 6)}, mesh=(3,), placements={"w": [Shard(0)]})
    shapes = [load(tmp_path / f"model_world_size_3_rank_{rank}.pt")["w"].local.shape for rank in range(3)]
    assert shapes == [(3, 6), (3, 6), (1, 6)]


def test_sharded_tensors_of_every_rank(tmp_path: Path) -> None:
    save_rank_files(tmp_path, {"w": torch.zeros(5, 3, dtype=torch.bfloat16)}, mesh=(2,), placements={"w": []},
                    kind="ShardedTensor")  # fmt: skip
    boxes = (((0, 0), (3, 3)), ((3, 0), (2, 3)))
    for rank in range(2):
        ref = load(tmp_path / f"model_world_size_2_rank_{rank}.pt")["w"]
        assert isinstance(ref, ShardedTensorRef)
        assert (ref.shape, ref.dtype, ref.boxes) == ((5, 3), DTYPES["bfloat16"], boxes)
        (shard,) = ref.shards
        assert (shard.offsets, shard.lengths) == boxes[rank]
        assert shard.tensor.shape == boxes[rank][1]


@pytest.mark.parametrize(
    "path", sorted(FIXTURES.glob("*/*/*rank*.*")), ids=lambda path: f"{path.parts[-3]}-{path.name}"
)
def test_files_of_every_torch_version_can_be_read(path: Path) -> None:
    assert load(path)


def rebuild(*args: Any, function: str = "_rebuild_tensor_v2") -> Raw:
    return call("torch._utils", function, *args)


FLOAT = global_("torch", "FloatStorage")
ORDERED = Raw(dump(OrderedDict(), 2)[2:-1])


def storage(elements: Any = 6, kind: Any = FLOAT, key: Any = "0") -> Any:
    return dump_storage(key, kind, elements)


def test_the_crafted_tensor_below_is_sound() -> None:
    data = dump(call_tensor(storage(), 1, (2, 2), (2, 1)), 2)
    ref = load_pickle(data)
    assert ref == TensorRef(StorageRef("0", DTYPES["float32"], 6), DTYPES["float32"], 1, (2, 2), (2, 1))


def call_tensor(*args: Any) -> Raw:
    pickled = dump((*args, False, ORDERED), 2)[2:-1]
    return Raw(global_("torch._utils", "_rebuild_tensor_v2").program + pickled + b"R")


IMPOSSIBLE = {
    "negative size": (storage(), 0, (-1,), (1,)),
    "negative stride": (storage(), 0, (2,), (-1,)),
    "negative offset": (storage(), -1, (2,), (1,)),
    "size beyond 63 bits": (storage(), 0, (2**63,), (1,)),
    "more sizes than strides": (storage(), 0, (2, 2), (1,)),
    "shape is a list": (storage(), 0, [2], (1,)),
    "shape is a number": (storage(), 0, 2, (1,)),
    "size is a float": (storage(), 0, (2.0,), (1,)),
    "size is a bool": (storage(), 0, (True,), (1,)),
    "offset is a float": (storage(), 0.0, (2,), (1,)),
    "no storage": (None, 0, (2,), (1,)),
    "a huge number": (storage(), 0, 10**5000, (1,)),
    "negative storage": (storage(-1), 0, (2,), (1,)),
    "storage of a float": (storage(6.0), 0, (2,), (1,)),
    "storage without name": (storage(key=5), 0, (2,), (1,)),
    "storage of no type": (storage(kind="float"), 0, (2,), (1,)),
    "storage of a dtype": (storage(kind=global_("torch", "float32")), 0, (2,), (1,)),
    "an untyped storage": (storage(kind=global_("torch", "UntypedStorage")), 0, (2,), (1,)),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_tensors_are_malformed(name: str) -> None:
    with pytest.raises(MalformedFile):
        load_pickle(dump(call_tensor(*IMPOSSIBLE[name]), 2))


@pytest.mark.parametrize("pid", [None, (), ("storage",), ("module", FLOAT, "0", "cpu", 6), "0"])
def test_other_persistent_ids_are_malformed(pid: Any) -> None:
    with pytest.raises(MalformedFile):
        load_pickle(b"\x80\x02" + dump(pid, 2)[2:-1] + b"Q.")


def test_views_of_torch_0_3_are_malformed() -> None:
    pid = ("storage", FLOAT, "0", "cpu", 6, ("1", 0, 3))
    with pytest.raises(MalformedFile):
        load_pickle(b"\x80\x02" + dump(pid, 2)[2:-1] + b"Q.")


SHARDED = global_("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
DTENSOR = global_("torch.distributed.tensor", "DTensor")


def from_type(kind: Raw, state: Any) -> bytes:
    wrapper = global_("torch._utils", "_rebuild_wrapper_subclass")
    return dump(call("torch._tensor", "_rebuild_from_type_v2", wrapper, kind, (kind,), state), 2)


STATES: dict[str, Any] = {
    "nothing": None,
    "empty": (),
    "a number": 5,
    "a dict": {},
    "metadata missing": ([], None),
    "metadata is a number": ([5], 5),
    "metadata is a dict": ([[]], {}),
    "parts are numbers": (None, {"_local_tensor": 1, "_spec": 2}),
    "a shard is a number": ([5], call("torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata")),
    "a shard is a list": ([[]], call("torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata")),
}


@pytest.mark.parametrize("kind", [SHARDED, DTENSOR], ids=["ShardedTensor", "DTensor"])
@pytest.mark.parametrize("name", STATES)
def test_sharded_tensors_without_their_parts_are_malformed(kind: Raw, name: str) -> None:
    with pytest.raises(MalformedFile):
        load_pickle(from_type(kind, STATES[name]))


@pytest.mark.parametrize("kind", ["DTensor", "ShardedTensor"])
def test_every_changed_byte_of_a_rank_file_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    save_rank_files(tmp_path, {"w": torch.zeros(5, 3)}, mesh=(2,), placements={"w": [Shard(0)]}, kind=kind)
    with zipfile.ZipFile(tmp_path / "model_world_size_2_rank_0.pt") as archive:
        data = archive.read("model_world_size_2_rank_0/data.pkl")
    refused = 0
    for position in range(len(data)):
        for value in (0x29 + position % 2, 0x4E, data[position] ^ 1):
            try:
                load_pickle(data[:position] + bytes([value]) + data[position + 1 :])
            except (MalformedFile, UnsafePickle):
                refused += 1
    assert refused > len(data)
