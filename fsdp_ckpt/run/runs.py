"""Find the unbroken runs of source files that make up a box, where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_ckpt.catalog import Chunk
from fsdp_ckpt.plan.boxes import Box, intersect, is_contiguous_in, linear_offset
from fsdp_ckpt.run.sources import Located
from fsdp_ckpt.run.tasks import CopyTask
from fsdp_ckpt.store.local import LocalStore

__all__ = ["Run", "find_runs", "is_read_in_order"]


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a source file that go to the result in one piece.

    Attributes:
        store: Where the file is.
        chunk: The RAW chunk that they are of.
        start: First byte in the file.
        num_bytes: Their number.
        is_record: Whether they are exactly what the chunk's checksum covers.
    """

    store: LocalStore
    chunk: Chunk
    start: int
    num_bytes: int
    is_record: bool


def find_runs(task: CopyTask, located: Sequence[Located]) -> list[Run] | None:
    """Return the runs of a task's box in the order of the result; None where elements have to be gathered.

    Args:
        task: The task.
        located: RAW chunks of its chunks, in any order; each shares elements with the box.
    """
    box, shape, itemsize = task.box, task.tensor.shape, task.tensor.dtype.itemsize
    if any(chunk.strides is not None or chunk.conj or chunk.neg for _, chunk in located):
        return None
    if len(located) == 1 and (located[0][1].offsets, located[0][1].lengths) == box:
        return [_run(*located[0], 0, located[0][1].numel * itemsize)]
    boxes = [(chunk.offsets, chunk.lengths) for _, chunk in located]
    if not all(is_contiguous_in(one, shape) for one in (box, *boxes)):
        return None
    placed = sorted(zip(boxes, located, strict=True), key=lambda pair: pair[0][0])
    runs = []
    for one, (store, chunk) in placed:
        shared = intersect(one, box)
        if shared is None:
            continue
        skipped = linear_offset(shared[0], shape) - linear_offset(one[0], shape)
        elements = 1
        for length in shared[1]:
            elements *= length
        runs.append(_run(store, chunk, skipped * itemsize, elements * itemsize))
    return runs


def _run(store: LocalStore, chunk: Chunk, skipped_bytes: int, num_bytes: int) -> Run:
    start = chunk.start + skipped_bytes
    covered = chunk.crc_range or (chunk.start, chunk.stop)
    return Run(store, chunk, start, num_bytes, (start, start + num_bytes) == covered)


def is_read_in_order(chunk: Chunk, box: Box) -> bool:
    """Tell whether gathering a box reads a chunk's record from its beginning to its end, which shows its checksum."""
    if chunk.strides is not None or chunk.crc_range not in (None, (chunk.start, chunk.stop)):
        return False
    return intersect((chunk.offsets, chunk.lengths), box) == (chunk.offsets, chunk.lengths)
