"""Which bytes of a flat parameter's shards are which boxes of one of the parameters in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fsdp_ckpt.catalog import Chunk, Shape, contiguous_strides
from fsdp_ckpt.plan.boxes import flat_boxes

__all__ = ["cut_parameter"]


def cut_parameter(
    shards: Sequence[Chunk], shape: Shape, order: tuple[int, ...] | None, start: int, itemsize: int
) -> Iterator[Chunk]:
    """Yield the boxes of one parameter, with their bytes, in the order of the shards.

    Args:
        shards: RAW chunks of the flat parameter, in one dimension.
        shape: The parameter's shape.
        order: Its dimensions as they lie in memory, the slowest first; None for row-major.
        start: Its first element in the flat parameter.
        itemsize: Bytes of an element.
    """
    dims = order or tuple(range(len(shape)))
    lying = tuple(shape[dim] for dim in dims)
    stop = start + math.prod(shape)
    for shard in shards:
        begin, end = max(shard.offsets[0], start), min(shard.offsets[0] + shard.numel, stop)
        first = shard.start + (begin - shard.offsets[0]) * itemsize
        covered = shard.crc_range or (shard.start, shard.stop)
        for offsets, lengths in flat_boxes(lying, begin - start, end - start):
            size = math.prod(lengths) * itemsize
            strides = _back(contiguous_strides(lengths), dims)
            yield shard._replace(
                offsets=_back(offsets, dims),
                lengths=_back(lengths, dims),
                start=first,
                stop=first + size,
                strides=None if order is None else strides,
                crc_range=None if covered == (first, first + size) else covered,
            )
            first += size


def _back(values: Shape, dims: tuple[int, ...]) -> Shape:
    """Return values of dimensions as they lie in the order of the tensor's own ones."""
    return tuple(value for _, value in sorted(zip(dims, values, strict=True)))
