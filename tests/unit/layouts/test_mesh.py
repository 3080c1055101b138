"""Where local tensors lie, against the local tensors that torch's own DTensor makes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_ckpt.catalog import DTYPES, Shape, contiguous_strides
from fsdp_ckpt.codec.tensors import DTensorRef, StorageRef, TensorRef
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.mesh import local_boxes
from tests.build import as_rank
from tests.unit.child import outcome

F32 = DTYPES["float32"]


def words(placement: Any) -> tuple[str | int, ...]:
    if isinstance(placement, _StridedShard):
        return ("strided", placement.dim, int(placement.split_factor))
    return ("shard", placement.dim) if isinstance(placement, Shard) else ("replicate",)


def ref(local: torch.Tensor, shape: Shape, mesh: Shape, coordinate: Shape, placements: Any) -> DTensorRef:
    tensor = TensorRef(StorageRef("0", F32, local.numel()), F32, 0, tuple(local.shape), local.stride())
    return DTensorRef(tensor, shape, mesh, coordinate, tuple(map(words, placements)))


MESHES: dict[str, tuple[Shape, list[Any]]] = {
    "rows over 3": ((3,), [Shard(0)]),
    "rows over 4": ((4,), [Shard(0)]),
    "columns": ((3,), [Shard(1)]),
    "last dimension": ((2,), [Shard(-1)]),
    "replicated": ((3,), [Replicate()]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "hsdp, the other way": ((2, 2), [Shard(0), Replicate()]),
    "rows and columns": ((2, 3), [Shard(0), Shard(1)]),
    "columns and rows": ((3, 2), [Shard(1), Shard(0)]),
    "rows twice": ((2, 3), [Shard(0), Shard(0)]),
    "fsdp over tp": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "fsdp over more tp": ((2, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
    "fsdp over tp, more ranks": ((3, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "fsdp over tp by columns": ((2, 2), [Shard(0), Shard(1)]),
    "strided columns": ((2, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
    "hsdp over tp": ((2, 2, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]),
    "strided alone": ((2,), [_StridedShard(0, split_factor=2)]),
}
SHAPES: list[Shape] = [(12, 6), (7, 5), (1, 4), (2, 2), (5, 1), (3, 4, 2), (0, 4), (4, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MESHES)
def test_local_tensors_are_put_where_torch_took_them_from(name: str, shape: Shape) -> None:
    mesh, placements = MESHES[name]
    whole = torch.arange(float(math.prod(shape))).reshape(shape)
    seen = torch.zeros(shape)
    for rank in range(math.prod(mesh)):
        with as_rank(rank, math.prod(mesh)):
            device_mesh = init_device_mesh("cpu", mesh)
            coordinate = tuple(device_mesh.get_coordinate() or ())
            local = distribute_tensor(whole, device_mesh, placements, src_data_rank=None).to_local()
        local = local.contiguous()
        covered = 0
        for offsets, lengths, element in local_boxes(ref(local, shape, mesh, coordinate, placements)):
            box = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            if 0 in lengths:
                continue
            piece = local.reshape(-1).as_strided(lengths, local.stride(), element)
            assert torch.equal(piece, whole[box])
            seen[box] += 1
            covered += math.prod(lengths)
        assert covered == local.numel(), "every element has a place"
    if math.prod(shape):
        copies = math.prod(n for n, placement in zip(mesh, placements, strict=True) if isinstance(placement, Replicate))
        assert torch.equal(seen, torch.full(shape, float(copies)))


def test_strides_of_the_local_tensor_are_followed() -> None:
    local = torch.arange(12.0).reshape(3, 4).t()  # 4 x 3, stored by columns
    value = ref(local, (8, 3), (2, 1), (1, 0), [_StridedShard(0, split_factor=2), Replicate()])
    boxes = list(local_boxes(value))
    # Two pieces of four rows; this rank has the second half of each.
    assert [(offsets, lengths) for offsets, lengths, _ in boxes] == [((2, 0), (2, 3)), ((6, 0), (2, 3))]
    assert [element for *_, element in boxes] == [0, 2 * local.stride(0)]


def sound() -> DTensorRef:
    return ref(torch.zeros(3, 4), (6, 4), (2,), (1,), [Shard(0)])


def test_the_value_below_is_sound() -> None:
    assert list(local_boxes(sound())) == [((3, 0), (3, 4), 0)]


BROKEN: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "no coordinate": ({"coordinate": None}, Incompatible),
    "coordinate of another mesh": ({"coordinate": (0, 1)}, Incompatible),
    "pending reduction": ({"placements": (("partial",),)}, Incompatible),
    "too few placements": ({"placements": ()}, MalformedFile),
    "too many placements": ({"placements": (("shard", 0), ("shard", 1))}, MalformedFile),
    "a dimension too many": ({"placements": (("shard", 2),)}, MalformedFile),
    "a negative dimension too many": ({"placements": (("shard", -3),)}, MalformedFile),
    "rank behind the mesh": ({"coordinate": (2,)}, MalformedFile),
    "an empty mesh": ({"mesh_shape": (0,), "coordinate": (0,)}, MalformedFile),
    "another local shape": ({"shape": (9, 4)}, MalformedFile),
    "another number of dimensions": ({"shape": (6,)}, MalformedFile),
    "no pieces": ({"placements": (("strided", 0, 0),)}, MalformedFile),
    "negative pieces": ({"placements": (("strided", 0, -2),)}, MalformedFile),
}


@pytest.mark.parametrize("name", BROKEN)
def test_values_that_contradict_themselves(name: str) -> None:
    fields, error = BROKEN[name]
    with pytest.raises(error):
        list(local_boxes(dataclasses.replace(sound(), **fields)))


HUGE: dict[str, dict[str, Any]] = {
    "ranks": {"mesh_shape": (1 << 62,)},
    "pieces": {"placements": (("strided", 0, 1 << 40),)},
    "pieces and ranks": {"placements": (("strided", 0, 1 << 24),), "mesh_shape": (1 << 24,)},
    "rows": {"shape": (1 << 62, 4), "placements": (("strided", 0, 1 << 30),)},
}


@pytest.mark.parametrize("name", HUGE)
def test_absurd_numbers_cost_nothing(name: str) -> None:
    value = dataclasses.replace(sound(), **HUGE[name])
    assert outcome(lambda: list(local_boxes(value)), memory_bytes=1 << 28, cpu_s=5) == "MalformedFile"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 100])
def test_rows_are_those_of_torch_chunk(size: int, ranks: int) -> None:
    whole = torch.arange(float(size * 2)).reshape(size, 2)
    pieces = list(whole.chunk(ranks)) if size else []
    pieces += [whole[size:]] * (ranks - len(pieces))
    start = 0
    for rank, piece in enumerate(pieces):
        value = ref(piece.contiguous(), (size, 2), (ranks,), (rank,), [Shard(0)])
        ((offsets, lengths, element),) = local_boxes(value)
        assert (lengths, element) == (tuple(piece.shape), 0)
        if piece.numel():
            assert offsets == (start, 0)
        start += piece.shape[0]
    assert contiguous_strides((2, 2)) == (2, 1)
