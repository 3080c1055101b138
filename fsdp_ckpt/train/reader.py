"""Move bytes from a checkpoint's files into live tensors, and read its objects."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from fsdp_ckpt.catalog import Checkpoint, Encoding, ObjectEntry, TensorEntry
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.plan.boxes import Box, bands, intersect, slices
from fsdp_ckpt.run.gather import Gatherer, storage_dtype, verify_boxes
from fsdp_ckpt.run.sources import Located, Sources
from fsdp_ckpt.store.syscalls import is_cached
from fsdp_ckpt.train.live import Piece, dtype_of
from fsdp_ckpt.train.memory import STAGE_BYTES, bits_of, is_plain_memory, tensor_of_bits
from fsdp_ckpt.train.objects import decode, plain_value

__all__ = ["Reader", "threads_per_rank"]

T = TypeVar("T")
R = TypeVar("R")

_MIN_THREADS, _MAX_THREADS = 2, 4
"""One reader alone gets a third of what a cold disk gives; for files in memory it is as good as two on one core."""
_SAMPLES = 8


def threads_per_rank(num_ranks: int) -> int:
    """Return how many threads a rank should read with: its share of the machine's cores, 1 to 4.

    Args:
        num_ranks: All of them, where the launcher does not say how many are on this machine (LOCAL_WORLD_SIZE).
    """
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharing = int(here) if here.isdecimal() and int(here) else num_ranks
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // sharing))


class Reader:
    """Reads one checkpoint; use as a context manager.

    Args:
        checkpoint: Its catalog.
        num_threads: Threads that read tensors.

    Attributes:
        read_bytes: Bytes brought into live tensors so far.
        verified_bytes: Bytes whose recorded checksum was compared.
        unverified_bytes: Bytes of records that have none.
    """

    def __init__(self, checkpoint: Checkpoint, *, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._sources = Sources(checkpoint.roots)
        self._located: dict[int, list[Located]] = {}
        self.read_bytes = 0
        self.verified_bytes = 0
        self.unverified_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sources.__exit__(kind, error, traceback)

    def check(self, wanted: Iterable[tuple[TensorEntry, Sequence[Box]]], *, verify: bool) -> None:
        """Find all records that boxes of tensors need, and compare their checksums.

        Raises:
            MalformedFile: A record is broken, or not what the metadata say.
            ChecksumMismatch: Its bytes are not those that were written.
        """

        def one(task: tuple[TensorEntry, Sequence[Box]]) -> tuple[int, int]:
            entry, boxes = task
            located = self._locate(entry, boxes)
            return verify_boxes(entry.key, entry.dtype, located, boxes) if verify else (0, 0)

        for verified, unverified in self._in_order(one, list(wanted)):
            self.verified_bytes += verified
            self.unverified_bytes += unverified

    def fill(self, wanted: Iterable[tuple[TensorEntry, Iterable[Piece]]]) -> None:
        """Read boxes of tensors into memory, converting to the memory's dtype.

        What lies beyond a saved tensor (a piece of one that has grown) is left as it is.

        Raises:
            MalformedFile: A file or record is too short.
        """

        def one(task: tuple[TensorEntry, Iterable[Piece]]) -> int:
            entry, pieces = task
            inner = [(piece, intersect(piece.box, _whole(entry))) for piece in pieces if math.prod(piece.lengths)]
            boxes = [(piece, box) for piece, box in inner if box is not None]
            gatherer = Gatherer(
                entry.key, entry.dtype, entry.shape, self._locate(entry, [box for _, box in boxes]), verify="off"
            )
            for piece, box in boxes:
                _fill_box(entry, gatherer, _part(piece, box), box)
            return sum(math.prod(box[1]) for _, box in boxes) * entry.dtype.itemsize

        self.read_bytes += sum(self._in_order(one, list(wanted)))

    def read(self, entry: TensorEntry) -> Tensor:
        """Return a whole small tensor, checked, in its own dtype."""
        box = _whole(entry)
        located = self._locate(entry, [box])
        bits = np.empty(entry.shape, dtype=storage_dtype(entry.dtype))
        gatherer = Gatherer(entry.key, entry.dtype, entry.shape, located, verify="full")
        gatherer.read(box, bits)
        gatherer.finish()
        return tensor_of_bits(bits, entry.dtype)

    def differ(self, first: TensorEntry, second: TensorEntry) -> bool:
        """Tell by recorded checksums whether two tensors have different values; False where they do not tell."""
        if first.shape != second.shape:
            return True
        known = self._checksums(first)
        other = self._checksums(second) if first.dtype == second.dtype else None
        return known is not None and other is not None and known.keys() == other.keys() and known != other

    def _checksums(self, entry: TensorEntry) -> dict[Box, int] | None:
        """Return the CRC-32 of each box of a tensor; None where some have none, or none of their own."""
        found: dict[Box, int] = {}
        for chunk in entry.chunks:
            try:
                located = self._sources.resolve(entry, chunk)[1]
            except MalformedFile:  # damaged, which is found where it is read; or on another node
                return None
            whole = (located.start, located.stop)
            plain = located.strides is None and not located.conj and not located.neg
            if located.crc32 is None or located.crc_range not in (None, whole) or not plain:
                return None
            found[chunk.offsets, chunk.lengths] = located.crc32
        return found

    def value(self, entry: ObjectEntry) -> Any:
        """Return the value of an object, by the allow-list of ``objects.decode``.

        Raises:
            UnsafePickle: It asks for something else.
        """
        where = f"{entry.file} (`{entry.key}`)"
        if entry.decoded:
            return plain_value(entry.value, where)
        if entry.encoding is Encoding.ZSTD_TORCH_ZIP:
            raise Incompatible(f"{where}: a compressed object", hint="save the checkpoint without compression")
        return decode(self._sources.store.reader(entry.file)(entry.start, entry.stop - entry.start), where)

    def _in_order(self, work: Callable[[tuple[TensorEntry, T]], R], tasks: list[tuple[TensorEntry, T]]) -> list[R]:
        """Do work for each tensor in the order in which they lie on disk, with several threads; return the results.

        Each thread takes the next one; the first error is raised when all have stopped.
        """
        tasks.sort(key=lambda task: min(((chunk.file, chunk.start) for chunk in task[0].chunks), default=("", 0)))
        num_threads = self._num_threads
        if num_threads < _MIN_THREADS and not self._are_cached([entry for entry, _ in tasks]):
            num_threads = _MIN_THREADS
        if num_threads == 1 or len(tasks) == 1:
            return [work(task) for task in tasks]
        with (
            torch.no_grad(),
            ThreadPoolExecutor(num_threads, "fsdp-ckpt-read", torch.set_grad_enabled, (False,)) as pool,
        ):
            running = [pool.submit(work, task) for task in tasks]
            try:
                return [one.result() for one in running]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _are_cached(self, entries: Sequence[TensorEntry]) -> bool:
        """Tell by a few samples whether tensors lie in memory, so that no thread will wait for the disk."""
        chunks = [entry.chunks[0] for entry in entries if entry.chunks]
        for chunk in chunks[:: max(1, len(chunks) // _SAMPLES)]:
            with self._sources.store.opened(chunk.file) as source:
                if source.fd is None or not is_cached(source.fd, chunk.start):
                    return False
        return True

    def _locate(self, entry: TensorEntry, boxes: Sequence[Box]) -> list[Located]:
        """Return the records that boxes need; a second call for the same entry is answered from memory."""
        known = self._located.get(id(entry))
        if known is None:
            needed = [
                chunk
                for chunk in entry.chunks
                if any(intersect((chunk.offsets, chunk.lengths), box) is not None for box in boxes)
            ]
            known = self._located[id(entry)] = [self._sources.resolve(entry, chunk) for chunk in needed]
        return known


def _whole(entry: TensorEntry) -> Box:
    return (0,) * len(entry.shape), entry.shape


def _part(piece: Piece, inner: Box) -> Tensor:
    """Return the view of a piece that holds a box within it."""
    return piece.tensor[slices(inner, piece.offsets)]


def _fill_box(entry: TensorEntry, gatherer: Gatherer, target: Tensor, box: Box) -> None:
    if is_plain_memory(target) and dtype_of(target.dtype, entry.key) == entry.dtype:
        gatherer.read(box, bits_of(target, entry.dtype))
        return
    stage = np.empty(min(STAGE_BYTES, math.prod(box[1]) * entry.dtype.itemsize), dtype=np.uint8)
    bits = storage_dtype(entry.dtype)
    for offsets, lengths in bands(box[1], entry.dtype.itemsize, STAGE_BYTES):
        part = stage[: math.prod(lengths) * entry.dtype.itemsize].view(bits).reshape(lengths)
        gatherer.read((tuple(a + b for a, b in zip(offsets, box[0], strict=True)), lengths), part)
        target[slices((offsets, lengths))].copy_(tensor_of_bits(part, entry.dtype))
