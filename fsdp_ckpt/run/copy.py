"""Move the bytes of tensors into files of the result: the one place where checkpoint data flows.

A tensor becomes one or several tasks. Each writes one unbroken run of the result, in blocks of 1 MiB through a
buffer that is reused, and checks the recorded CRC-32 in the same pass. Where the file system can share blocks and
source and target are aligned, the run is shared instead and no byte is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fsdp_ckpt.catalog import Chunk, DType, TensorEntry
from fsdp_ckpt.errors import ChecksumMismatch, MalformedFile
from fsdp_ckpt.plan.boxes import bands
from fsdp_ckpt.run.checksum import BLOCK_BYTES, check_crc, checksum_range, combine_crc, crc32, verify_record
from fsdp_ckpt.run.ledger import Ledger
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.run.runs import Run, find_runs, is_read_in_order
from fsdp_ckpt.run.sources import Located, Sources
from fsdp_ckpt.run.tasks import CopyTask
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.store.syscalls import SHARE_ALIGNMENT, clone_range, start_writeback, write_all

__all__ = ["CancelledError", "Copier", "TaskResult"]

_WRITEBACK_BYTES = 8 << 20
_BAND_BYTES = 1 << 20


@dataclass(slots=True)
class TaskResult:
    """What a task did.

    Attributes:
        crc32: CRC-32 of the bytes written; None when they were not looked at (blocks shared).
        shared_bytes: Bytes of the result that share blocks with the source.
        verified_bytes: Source bytes whose recorded checksum was compared.
        unverified: Chunks that had no recorded checksum.
        recovered: Sentences about damaged chunks that were read from a replica instead.
    """

    crc32: int | None = None
    shared_bytes: int = 0
    verified_bytes: int = 0
    unverified: int = 0
    recovered: list[str] = field(default_factory=list)


class Copier:
    """Carries out copy tasks; may be called from several threads.

    Args:
        sources: Finds raw bytes.
        meter: Told about bytes that are in place.
        verify: Compare recorded checksums.
        share: Try to share blocks.
        writeback: Ask for blocks to be written to disk as they come, which makes the final fsync short.
        hash_output: Work out the CRC-32 of what is written, where the check of the source does not yield it anyway.

    Attributes:
        sources: As given.
        meter: As given.
        verify: As given.
        stop: Set to make all tasks end with ``CancelledError``.
    """

    def __init__(
        self,
        sources: Sources,
        meter: Meter,
        *,
        verify: bool = True,
        share: bool = True,
        writeback: bool = True,
        hash_output: bool = False,
    ) -> None:
        self.sources = sources
        self.meter = meter
        self.verify = verify
        self._share = share
        self._writeback = writeback
        self._hash_output = hash_output
        self._ledger = Ledger()
        self._local = threading.local()
        self.stop = threading.Event()

    def run(self, task: CopyTask, fd: int) -> TaskResult:
        """Carry out a task, with replicas in place of damaged chunks where there are any.

        Args:
            task: The task.
            fd: Descriptor of its output file.

        Raises:
            ChecksumMismatch: Bytes are not those that were written, and no replica is sound.
            MalformedFile: A record is broken, or is not what the metadata say.
            CancelledError: ``stop`` was set.
        """
        recovered: list[str] = []
        while True:
            result = TaskResult(recovered=recovered)
            try:
                self._run(task, fd, result)
            except (ChecksumMismatch, MalformedFile) as error:
                task = self._next_best(task, error, recovered)
                continue
            return result

    def expect(self, task: CopyTask) -> None:
        """Take into account that an earlier run has carried out a task: what it read in part is still to be compared.

        Raises:
            MalformedFile: A record is broken.
        """
        if not self.verify or task.tensor.replicas:  # where there are copies, each record was compared at once
            return
        located = [self.sources.resolve(task.tensor, chunk) for chunk in task.chunks]
        for run in find_runs(task, located) or ():
            if run.chunk.crc32 is not None and not run.is_record:
                self._ledger.expect(run.store, run.chunk, key=task.tensor.key)

    def compare_once(self, store: LocalStore, chunk: Chunk, *, key: str) -> int:
        """Compare a record that its reader does not see in order, unless that was done before.

        Returns:
            Bytes that were compared.

        Raises:
            ChecksumMismatch: It is not what was written.
        """
        return self._ledger.verify_once(store, chunk, key=key)

    def finish(self) -> int:
        """Compare the records that were read in part only; to be called when all tasks are done.

        Returns:
            Bytes that were compared.

        Raises:
            ChecksumMismatch: One is not what was written.
        """
        return self._ledger.finish()

    def _next_best(self, task: CopyTask, error: ChecksumMismatch | MalformedFile, recovered: list[str]) -> CopyTask:
        for index, chunk in enumerate(task.chunks):
            if self._is_sound(task.tensor, chunk):
                continue
            for replica in task.tensor.replicas:
                same_box = (replica.offsets, replica.lengths) == (chunk.offsets, chunk.lengths)
                if same_box and self._is_copy(task.tensor, chunk, replica) and self._is_sound(task.tensor, replica):
                    recovered.append(f"{error.message}; the copy in {replica.file} was used")
                    return replace(task, chunks=[*task.chunks[:index], replica, *task.chunks[index + 1 :]])
        raise error

    def _is_copy(self, tensor: TensorEntry, chunk: Chunk, replica: Chunk) -> bool:
        """Whether a replica was written with the same bytes, as far as the recorded checksums tell."""
        try:
            _, first = self.sources.resolve(tensor, chunk)
            _, second = self.sources.resolve(tensor, replica)
        except (ChecksumMismatch, MalformedFile):
            return False
        facts = [(raw.crc32, raw.strides, raw.conj, raw.neg, raw.stop - raw.start) for raw in (first, second)]
        return first.crc32 is not None and facts[0] == facts[1]

    def _is_sound(self, tensor: TensorEntry, chunk: Chunk) -> bool:
        try:
            store, raw = self.sources.resolve(tensor, chunk)
            verify_record(store, raw, key=tensor.key)
        except (ChecksumMismatch, MalformedFile):
            return False
        return True

    def _run(self, task: CopyTask, fd: int, result: TaskResult) -> None:
        located = [self.sources.resolve(task.tensor, chunk) for chunk in task.chunks]
        result.unverified = sum(chunk.crc32 is None for _, chunk in located) if self.verify else 0
        cast = task.dtype != task.tensor.dtype
        runs = find_runs(task, located)
        if runs is None:
            self._gather(task, fd, located, result, cast=cast)
            return
        position = task.position
        crc: int | None = 0
        for number, run in enumerate(runs):
            num_bytes = run.num_bytes // task.tensor.dtype.itemsize * task.dtype.itemsize
            if not cast and self._share and self._try_share(fd, run, position):
                result.shared_bytes += num_bytes
                self.meter.add(num_bytes)
                own = self._shared_crc(task, run, result)
            else:
                own = self._stream(task, fd, run, position, result, cast=cast)
            if crc is not None:
                crc = own if number == 0 or own is None else combine_crc(crc, own, num_bytes)
            position += num_bytes
        result.crc32 = crc

    def _shared_crc(self, task: CopyTask, run: Run, result: TaskResult) -> int | None:
        """Return the CRC-32 of a run that shares blocks, where it has to be known or is recorded.

        Of a whole record it is the recorded one: nothing is read, and damage stays visible. A new checksum over a piece
        would hide the damage of its record, so that pieces are read and the record is compared.
        """
        chunk, key = run.chunk, task.tensor.key
        if run.is_record or chunk.crc32 is None or not (self.verify and self._hash_output):
            return chunk.crc32 if run.is_record else None
        stop = run.start + run.num_bytes
        with run.store.opened(chunk.file) as source:
            crc = checksum_range(source, run.start, stop)
        if task.tensor.replicas:
            result.verified_bytes += self._ledger.verify_once(run.store, chunk, key=key)
        else:
            result.verified_bytes += self._ledger.note(run.store, chunk, run.start, crc, stop=stop, key=key)
        return crc

    def _buffer(self) -> memoryview:
        view: memoryview | None = getattr(self._local, "view", None)
        if view is None:
            view = self._local.view = memoryview(bytearray(BLOCK_BYTES))
        return view

    def _stream(
        self, task: CopyTask, fd: int, run: Run, position: int, result: TaskResult, *, cast: bool
    ) -> int | None:
        """Copy or convert one unbroken run; return the CRC-32 of what was written, where that is known."""
        store, chunk, key = run.store, run.chunk, task.tensor.key
        convert = _converter(task.tensor.dtype, task.dtype) if cast else None
        hash_input = self.verify and chunk.crc32 is not None
        if hash_input and not run.is_record and task.tensor.replicas:
            # At once rather than when all pieces were seen: now a replica can still take its place.
            result.verified_bytes += self._ledger.verify_once(store, chunk, key=key)
            hash_input = False
        hash_output = self._hash_output or (hash_input and convert is None)
        buffer, read_crc, written_crc, written = self._buffer(), 0, 0, 0
        with store.opened(chunk.file) as source:
            for done in range(0, run.num_bytes, BLOCK_BYTES):
                if self.stop.is_set():
                    raise CancelledError
                block = buffer[: min(BLOCK_BYTES, run.num_bytes - done)]
                if source.read_into(block, run.start + done) < len(block):
                    raise MalformedFile(f"{chunk.file} ends within `{key}`")
                if convert is not None and hash_input:
                    read_crc = crc32(block, read_crc)
                data = block if convert is None else convert(block)
                if hash_output:
                    written_crc = crc32(data, written_crc)
                write_all(fd, data, position + written)
                written += len(data)
                self._note(fd, position, written)
                self.meter.add(len(data))
        if hash_input:
            crc = written_crc if convert is None else read_crc
            if run.is_record:
                check_crc(chunk, crc, key=key)
                result.verified_bytes += run.num_bytes
            else:
                stop = run.start + run.num_bytes
                result.verified_bytes += self._ledger.note(store, chunk, run.start, crc, stop=stop, key=key)
        return written_crc if hash_output else None

    def _gather(self, task: CopyTask, fd: int, located: Sequence[Located], result: TaskResult, *, cast: bool) -> None:
        import numpy as np

        from fsdp_ckpt.run.cast import cast_bits
        from fsdp_ckpt.run.gather import Gatherer

        tensor = task.tensor
        verify: Literal["passing", "off"] = "passing" if self.verify else "off"
        if self.verify:
            located = [self._compared(task, store, chunk, result) for store, chunk in located]
        gatherer = Gatherer(tensor.key, tensor.dtype, tensor.shape, located, verify=verify)
        buffer: Any = np.empty(_BAND_BYTES, dtype=np.uint8)
        position, crc = task.position, 0
        for offsets, lengths in bands(task.box[1], tensor.dtype.itemsize, _BAND_BYTES):
            if self.stop.is_set():
                raise CancelledError
            elements = int(np.prod(lengths, dtype=np.int64))
            values = buffer[: elements * tensor.dtype.itemsize].view(gatherer.bits).reshape(lengths)
            shifted = tuple(a + b for a, b in zip(offsets, task.box[0], strict=True))
            gatherer.read((shifted, lengths), values)
            flat = values.reshape(-1)
            data = _bytes_of(cast_bits(flat, tensor.dtype, task.dtype) if cast else flat)
            if self._hash_output:
                crc = crc32(data, crc)
            write_all(fd, data, position)
            position += len(data)
            self._note(fd, task.position, position - task.position)
            self.meter.add(len(data))
        gatherer.finish()
        result.verified_bytes += gatherer.verified_bytes
        result.crc32 = crc if self._hash_output else None

    def _compared(self, task: CopyTask, store: LocalStore, chunk: Chunk, result: TaskResult) -> Located:
        """Compare a record that gathering would not read in order; it has no checksum left to look at afterwards."""
        if is_read_in_order(chunk, task.box):
            return store, chunk
        result.verified_bytes += self.compare_once(store, chunk, key=task.tensor.key)
        return store, chunk._replace(crc32=None)

    def _try_share(self, fd: int, run: Run, position: int) -> bool:
        if run.start % SHARE_ALIGNMENT or position % SHARE_ALIGNMENT or run.num_bytes % SHARE_ALIGNMENT:
            return False
        with run.store.opened(run.chunk.file) as source:
            self._share = source.fd is not None and clone_range(source.fd, run.start, run.num_bytes, fd, position)
        return self._share

    def _note(self, fd: int, position: int, written: int) -> None:
        """Start write-back of every full window of a run, once it is written."""
        if self._writeback and written % _WRITEBACK_BYTES == 0:
            start_writeback(fd, position + written - _WRITEBACK_BYTES, _WRITEBACK_BYTES)


class CancelledError(Exception):
    """Another task failed, or the user asked to stop."""


def _converter(src: DType, dst: DType) -> Callable[[memoryview], memoryview]:
    import numpy as np

    from fsdp_ckpt.run.cast import cast_bits
    from fsdp_ckpt.run.gather import numpy_dtype, storage_dtype

    bits = storage_dtype(src)
    out = np.empty(BLOCK_BYTES // src.itemsize, dtype=numpy_dtype(dst))

    def convert(block: memoryview) -> memoryview:
        values = np.frombuffer(block, dtype=bits)
        return _bytes_of(cast_bits(values, src, dst, out[: len(values)]))

    return convert


def _bytes_of(values: Any) -> memoryview:
    return memoryview(values.view("u1"))
