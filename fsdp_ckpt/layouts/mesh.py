"""Where one rank's local tensor of a DTensor lies in the whole, without torch.

Follows ``torch/distributed/tensor/placement_types.py``: ``Shard`` chunks as ``torch.chunk`` does, ``_StridedShard``
(FSDP2 over tensor parallelism) splits into ``split_factor`` pieces first and takes its share of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.codec.tensors import DTensorRef
from fsdp_ckpt.errors import Incompatible, MalformedFile

__all__ = ["local_boxes"]

_Range = tuple[int, int]
_MAX_PIECES = 1 << 16


def local_boxes(value: DTensorRef) -> Iterator[tuple[Shape, Shape, int]]:
    """Yield the boxes of the whole tensor that a local tensor holds.

    Args:
        value: The DTensor.

    Yields:
        Offsets and lengths in the whole tensor, and the element of the local storage at which the box begins
        (counted from the local tensor's first element, along its strides).

    Raises:
        Incompatible: A pending reduction (``Partial``), or a rank without coordinate.
        MalformedFile: The local tensor does not have the shape that its placements say.
    """
    if value.coordinate is None or len(value.coordinate) != len(value.mesh_shape):
        raise Incompatible("a DTensor of a rank outside of its mesh")
    if len(value.placements) != len(value.mesh_shape):
        raise MalformedFile("a DTensor with more placements than mesh dimensions, or fewer")
    ranges: list[list[_Range]] = [[(0, size)] for size in value.shape]
    for (kind, *rest), ranks, rank in zip(value.placements, value.mesh_shape, value.coordinate, strict=True):
        if kind == "replicate":
            continue
        if kind == "partial":
            raise Incompatible("a DTensor with a pending reduction (Partial placement)")
        dim = int(rest[0])
        if not -len(ranges) <= dim < len(ranges) or not 0 <= rank < ranks:
            raise MalformedFile(
                "a DTensor sharded over a dimension that it does not have, or a rank outside of its mesh"
            )
        pieces = [ranges[dim]]
        if kind == "strided":
            factor = int(rest[1])
            if not 1 <= factor <= _MAX_PIECES:
                raise MalformedFile(f"a DTensor split into {factor} pieces")
            pieces = [_piece(ranges[dim], factor, number) for number in range(factor)]
        ranges[dim] = [item for piece in pieces for item in _piece(piece, ranks, rank)]
    local_shape = tuple(sum(stop - start for start, stop in dim) for dim in ranges)
    if local_shape != value.local.shape:
        raise MalformedFile(f"a DTensor whose local shape is {value.local.shape}, where placements say {local_shape}")
    yield from _boxes([_merge(dim) for dim in ranges], value.local.strides)


def _boxes(ranges: list[list[_Range]], strides: Shape) -> Iterator[tuple[Shape, Shape, int]]:
    placed: list[list[tuple[_Range, int]]] = []
    for dim in ranges:
        position, row = 0, []
        for start, stop in dim:
            row.append(((start, stop), position))
            position += stop - start
        placed.append(row or [((0, 0), 0)])
    if math.prod(map(len, placed)) > _MAX_PIECES:
        raise MalformedFile("a DTensor in more pieces than any mesh has")
    for combination in itertools.product(*placed):
        offsets = tuple(start for (start, _), _ in combination)
        lengths = tuple(stop - start for (start, stop), _ in combination)
        element = sum(position * stride for (_, position), stride in zip(combination, strides, strict=True))
        yield offsets, lengths, element


def _piece(ranges: list[_Range], count: int, number: int) -> list[_Range]:
    """Return one piece of what torch.chunk makes: equal pieces of ceil(n / count), the last ones smaller or empty."""
    total = sum(stop - start for start, stop in ranges)
    size = -(-total // count)
    return _slice(ranges, min(number * size, total), min((number + 1) * size, total))


def _slice(ranges: list[_Range], begin: int, end: int) -> list[_Range]:
    found, position = [], 0
    for start, stop in ranges:
        low, high = max(begin, position), min(end, position + stop - start)
        if low < high:
            found.append((start + low - position, start + high - position))
        position += stop - start
    return found


def _merge(ranges: list[_Range]) -> list[_Range]:
    merged: list[_Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
