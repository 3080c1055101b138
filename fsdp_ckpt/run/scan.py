"""Look at every value of a checkpoint once, in blocks of 1 MiB, whatever its size; and at checksums on the way.

Counting does not need the order of the elements, so that records are read as they lie: a transposed matrix is read
through from its beginning to its end like any other. Only where elements have gaps between them, or share bytes, they
are gathered.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdp_ckpt.catalog import Chunk, TensorEntry, contiguous_strides
from fsdp_ckpt.errors import CorruptCheckpoint, MalformedFile
from fsdp_ckpt.plan.boxes import bands
from fsdp_ckpt.run.checksum import BLOCK_BYTES, check_crc, checksum_range, crc32
from fsdp_ckpt.run.gather import Gatherer
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.run.sources import Located, Sources
from fsdp_ckpt.run.tally import Statistics, Tally
from fsdp_ckpt.store.local import LocalStore

__all__ = ["TensorScan", "scan_tensors"]

_Array = np.ndarray[Any, np.dtype[Any]]

_TASK_BYTES = 8 << 20
"""Small chunks of a tensor are one task together, as a task costs as much as reading some 100 KB."""
_WAITING = 64
"""Tasks that may wait for a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorScan:
    """What was found in a tensor.

    Attributes:
        tensor: The tensor.
        statistics: About the values that could be read; replicas are not looked at.
        faults: Why some could not be read, or are not those that were written.
        verified_bytes: Bytes whose recorded checksum was compared; a storage that several chunks share counts once.
        unverified_bytes: Bytes of chunks without a recorded checksum; 0 when none was to be compared.
    """

    tensor: TensorEntry
    statistics: Statistics
    faults: Sequence[CorruptCheckpoint] = ()
    verified_bytes: int = 0
    unverified_bytes: int = 0


def scan_tensors(
    tensors: Iterable[TensorEntry], sources: Sources, *, jobs: int, meter: Meter | None = None, verify: bool = False
) -> Iterator[TensorScan]:
    """Yield what is found in each tensor, in the order of the tensors.

    Args:
        tensors: The tensors; taken one by one, as threads become free.
        sources: Finds raw bytes.
        jobs: Threads.
        meter: Told about bytes that were looked at: of all elements of all chunks, also of those that have a fault.
        verify: Compare recorded checksums. Records that are read through are compared on the way, others are read once
            more for it.

    Raises:
        Incompatible: A record needs a package that is not installed.
        OSError: The disk or the network fails.
    """
    scanner = _Scanner(sources, meter, verify=verify)
    waiting: deque[tuple[TensorEntry, list[Future[_Findings]]]] = deque()
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="fsdp-ckpt-scan")
    try:
        num_waiting = 0
        for tensor in tensors:
            tasks = [pool.submit(scanner.run, tensor, chunks) for chunks in _cut_tasks(tensor)]
            waiting.append((tensor, tasks))
            num_waiting += max(1, len(tasks))
            while num_waiting > _WAITING:
                num_waiting -= max(1, len(waiting[0][1]))
                yield _finish(*waiting.popleft())
        while waiting:
            yield _finish(*waiting.popleft())
    finally:
        scanner.stop.set()
        pool.shutdown(cancel_futures=True)


@dataclass(slots=True)
class _Findings:
    tally: Tally
    faults: list[CorruptCheckpoint] = field(default_factory=list)
    verified_bytes: int = 0
    unverified_bytes: int = 0


def _cut_tasks(tensor: TensorEntry) -> Iterator[list[Chunk]]:
    task: list[Chunk] = []
    num_bytes = 0
    for chunk in tensor.chunks:
        if not chunk.numel:
            continue
        task.append(chunk)
        num_bytes += chunk.numel * tensor.dtype.itemsize
        if num_bytes >= _TASK_BYTES:
            yield task
            task, num_bytes = [], 0
    if task:
        yield task


def _finish(tensor: TensorEntry, tasks: Sequence[Future[_Findings]]) -> TensorScan:
    found = _Findings(Tally(tensor.dtype))
    for task in tasks:
        part = task.result()
        found.tally.merge(part.tally)
        found.faults += part.faults
        found.verified_bytes += part.verified_bytes
        found.unverified_bytes += part.unverified_bytes
    return TensorScan(
        tensor=tensor,
        statistics=found.tally.result(),
        faults=tuple(found.faults),
        verified_bytes=found.verified_bytes,
        unverified_bytes=found.unverified_bytes,
    )


class _Scanner:
    """Looks at chunks; called from several threads."""

    def __init__(self, sources: Sources, meter: Meter | None, *, verify: bool) -> None:
        self.stop = threading.Event()
        self._sources = sources
        self._meter = meter
        self._verify = verify
        self._local = threading.local()
        self._lock = threading.Lock()
        self._storages: dict[tuple[LocalStore, str, int, int], int] = {}

    def run(self, tensor: TensorEntry, chunks: Sequence[Chunk]) -> _Findings:
        """Look at some chunks of a tensor."""
        found = _Findings(Tally(tensor.dtype))
        for chunk in chunks:
            if self.stop.is_set():
                break
            try:
                self._scan(tensor, self._sources.resolve(tensor, chunk), found)
            except CorruptCheckpoint as error:
                found.faults.append(error)
            if self._meter is not None:
                self._meter.add(chunk.numel * tensor.dtype.itemsize)
        return found

    def _scan(self, tensor: TensorEntry, located: Located, found: _Findings) -> None:
        store, chunk = located
        pairs = zip(chunk.lengths, chunk.strides or contiguous_strides(chunk.lengths), strict=True)
        # As the elements lie in the file. What is there once and stands for many is looked at once.
        dims = sorted((pair for pair in pairs if pair[0] > 1), key=lambda pair: -pair[1])
        times = math.prod(length for length, stride in dims if not stride)
        lengths = tuple(length for length, stride in dims if stride)
        strides = tuple(stride for _, stride in dims if stride)
        plain = chunk._replace(offsets=(0,) * len(lengths), lengths=lengths, strides=strides, conj=False, neg=False)
        own = Tally(tensor.dtype)
        is_dense = strides == contiguous_strides(lengths)
        inline = is_dense and chunk.crc_range in (None, (chunk.start, chunk.stop))
        crc = None
        if is_dense:
            crc = self._read(tensor, store, plain, own, hash_it=self._verify and inline and chunk.crc32 is not None)
        else:
            self._gather(tensor, store, plain, own)
        found.tally.merge(own, times=times, neg=chunk.neg, conj=chunk.conj)
        if self._verify:
            self._compare(tensor, store, chunk, crc, found)

    def _read(self, tensor: TensorEntry, store: LocalStore, chunk: Chunk, tally: Tally, *, hash_it: bool) -> int | None:
        """Look at elements that lie in a row; return the CRC-32 of the whole record where asked."""
        num_bytes = chunk.numel * tensor.dtype.itemsize
        if chunk.start + num_bytes > chunk.stop:
            span = f"bytes {chunk.start}-{chunk.stop}"
            raise MalformedFile(f"{chunk.file}: {span} are too few for the shape of `{tensor.key}`")
        buffer, crc = self._buffer(), 0
        total = chunk.stop - chunk.start if hash_it else num_bytes
        with store.opened(chunk.file) as source:
            for done in range(0, total, BLOCK_BYTES):
                if self.stop.is_set():
                    break
                block = buffer[: min(BLOCK_BYTES, total - done)]
                if source.read_into(block.data, chunk.start + done) < len(block):
                    raise MalformedFile(f"{chunk.file} ends within `{tensor.key}`")
                if hash_it:
                    crc = crc32(block.data, crc)
                tally.add(block[: max(num_bytes - done, 0)])
        return crc if hash_it else None

    def _gather(self, tensor: TensorEntry, store: LocalStore, chunk: Chunk, tally: Tally) -> None:
        """Look at elements that do not lie in a row."""
        buffer = self._buffer()
        gatherer = Gatherer(tensor.key, tensor.dtype, chunk.lengths, [(store, chunk)], verify="off")
        for box in bands(chunk.lengths, tensor.dtype.itemsize, BLOCK_BYTES):
            if self.stop.is_set():
                break
            block = buffer[: math.prod(box[1]) * tensor.dtype.itemsize]
            gatherer.read(box, block.view(gatherer.bits).reshape(box[1]))
            tally.add(block)

    def _compare(self, tensor: TensorEntry, store: LocalStore, chunk: Chunk, crc: int | None, found: _Findings) -> None:
        """Compare a checksum, after working it out where the record was not read through."""
        start, stop = chunk.crc_range or (chunk.start, chunk.stop)
        if chunk.crc32 is None:
            found.unverified_bytes += chunk.stop - chunk.start
            return
        is_new = True
        if crc is None:
            place = store, chunk.file, start, stop
            with self._lock:
                crc = self._storages.get(place)
            if crc is None:
                with store.opened(chunk.file) as source:
                    crc = checksum_range(source, start, stop)
            with self._lock:
                is_new = place not in self._storages
                self._storages[place] = crc
        if not self.stop.is_set():
            check_crc(chunk, crc, key=tensor.key)
            found.verified_bytes += stop - start if is_new else 0

    def _buffer(self) -> _Array:
        buffer: _Array | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
        return buffer
