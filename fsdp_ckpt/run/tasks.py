"""Cut tensors into the tasks that write them: whole ones for a merge, boxes of them for another sharding."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_ckpt.catalog import Chunk, DType, TensorEntry
from fsdp_ckpt.errors import IncompleteCheckpoint
from fsdp_ckpt.plan.boxes import Box, intersect, is_contiguous_in, linear_offset

if TYPE_CHECKING:
    from fsdp_ckpt.run.copy import Copier, TaskResult

__all__ = ["ChunkIndex", "CopyTask", "cut_tasks"]

_SPLIT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTask:
    """One unbroken run of an output file that holds a box of a tensor, row-major.

    Attributes:
        tensor: The tensor that it belongs to.
        dtype: Element type of the result.
        box: The part of the tensor.
        chunks: Chunks that hold the box (and perhaps more).
        position: Byte in the output file at which the run begins.
        num_bytes: Its length.
    """

    tensor: TensorEntry
    dtype: DType
    box: Box
    chunks: Sequence[Chunk]
    position: int
    num_bytes: int

    def carry_out(self, copier: Copier, fd: int) -> TaskResult:
        """Write it, see ``Copier.run``."""
        return copier.run(self, fd)


class ChunkIndex:
    """The chunks of a tensor that are not empty, found by box.

    Chunks that follow one another along dimension 0, as FSDP's do, are found by bisection; a sharding of thousands of
    ranks into thousands of others would take forever otherwise.

    Attributes:
        chunks: All of them.
    """

    __slots__ = ("_rows", "chunks")

    def __init__(self, tensor: TensorEntry) -> None:
        self.chunks = [chunk for chunk in tensor.chunks if chunk.numel]
        self._rows: list[int] | None = None
        if tensor.shape and len(self.chunks) > 1:
            rows = sorted(self.chunks, key=lambda chunk: chunk.offsets)
            if all(a.offsets[0] + a.lengths[0] <= b.offsets[0] for a, b in itertools.pairwise(rows)):
                self.chunks, self._rows = rows, [chunk.offsets[0] for chunk in rows]

    def within(self, box: Box) -> Sequence[Chunk]:
        """Return the chunks that share elements with a box."""
        near: Sequence[Chunk] = self.chunks
        if self._rows is not None:
            first = max(bisect.bisect_right(self._rows, box[0][0]) - 1, 0)
            near = near[first : bisect.bisect_left(self._rows, box[0][0] + box[1][0])]
        return [chunk for chunk in near if intersect((chunk.offsets, chunk.lengths), box) is not None]


def cut_tasks(
    tensor: TensorEntry, dtype: DType, *, position: int, box: Box | None = None, index: ChunkIndex | None = None
) -> Iterator[CopyTask]:
    """Yield the tasks that write a tensor, or a box of it, at byte ``position`` of a file.

    Large tensors of row-block shards become a task per shard, so that several workers share them.

    Args:
        tensor: The tensor.
        dtype: Element type of the result.
        position: Where it goes.
        box: The part to write; None for all of it.
        index: The tensor's chunks, where many boxes of it are written.
    """
    shape, itemsize = tensor.shape, dtype.itemsize
    box = box or ((0,) * len(shape), shape)
    num_bytes = math.prod(box[1]) * itemsize
    if not num_bytes:
        return
    chunks = (index or ChunkIndex(tensor)).within(box)
    boxes = [(chunk.offsets, chunk.lengths) for chunk in chunks]
    shared = [intersect(one, box) for one in boxes]
    if sum(math.prod(one[1]) for one in shared if one is not None) * itemsize != num_bytes:
        # Whoever chose the tensor has looked at its coverage; a hole would become zeros without a word.
        raise IncompleteCheckpoint(f"`{tensor.key}`: its shards do not make up the box at {box[0]} of shape {box[1]}")
    is_small = num_bytes <= _SPLIT_BYTES and len(chunks) > 1
    if len(chunks) == 1 or is_small or not all(is_contiguous_in(one, shape) for one in (box, *boxes)):
        yield CopyTask(tensor=tensor, dtype=dtype, box=box, chunks=chunks, position=position, num_bytes=num_bytes)
        return
    first = linear_offset(box[0], shape)
    pieces = [(one, chunk) for one, chunk in zip(shared, chunks, strict=True) if one is not None]
    for one, chunk in sorted(pieces, key=lambda pair: pair[0]):
        start = position + (linear_offset(one[0], shape) - first) * itemsize
        size = math.prod(one[1]) * itemsize
        yield CopyTask(tensor=tensor, dtype=dtype, box=one, chunks=(chunk,), position=start, num_bytes=size)
