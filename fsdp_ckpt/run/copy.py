"""Move the bytes of tensors into files of the result: the one place where checkpoint data flows.

A tensor becomes one or several tasks. Each writes one unbroken run of the result, in blocks of 1 MiB through a
buffer that is reused, and checks the recorded CRC-32 in the same pass. Where the file system can share blocks and
source and target are aligned, the run is shared instead and no byte is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fsdp_ckpt.catalog import Chunk, DType, TensorEntry
from fsdp_ckpt.errors import ChecksumMismatch, MalformedFile
from fsdp_ckpt.plan.boxes import Box, bands, is_contiguous_in, linear_offset
from fsdp_ckpt.run.checksum import BLOCK_BYTES, check_crc, combine_crc, crc32, verify_record
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.run.sources import Located, Sources
from fsdp_ckpt.store.syscalls import SHARE_ALIGNMENT, clone_range, read_into, start_writeback, write_all

__all__ = ["CancelledError", "Copier", "CopyTask", "TaskResult", "cut_tasks"]

_SPLIT_BYTES = 32 << 20
_WRITEBACK_BYTES = 8 << 20
_BAND_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTask:
    """One unbroken run of the result.

    Attributes:
        tensor: The tensor that it belongs to.
        dtype: Element type of the result.
        box: The part of the tensor, a run of its row-major order.
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


def cut_tasks(tensor: TensorEntry, dtype: DType, *, position: int) -> Iterator[CopyTask]:
    """Yield the tasks that write a tensor at byte ``position`` of a file.

    Large tensors of row-block shards become a task per shard, so that several workers share them.
    """
    shape, itemsize = tensor.shape, dtype.itemsize
    chunks = [chunk for chunk in tensor.chunks if chunk.numel]
    whole = (0,) * len(shape), shape
    num_bytes = tensor.numel * itemsize
    if not num_bytes:
        return
    boxes = [(chunk.offsets, chunk.lengths) for chunk in chunks]
    if (num_bytes <= _SPLIT_BYTES and len(chunks) > 1) or not all(is_contiguous_in(box, shape) for box in boxes):
        yield CopyTask(tensor=tensor, dtype=dtype, box=whole, chunks=chunks, position=position, num_bytes=num_bytes)
        return
    for box, chunk in sorted(zip(boxes, chunks, strict=True), key=lambda pair: pair[0]):
        yield CopyTask(
            tensor=tensor,
            dtype=dtype,
            box=box,
            chunks=(chunk,),
            position=position + linear_offset(box[0], shape) * itemsize,
            num_bytes=chunk.numel * itemsize,
        )


class Copier:
    """Carries out copy tasks; may be called from several threads.

    Args:
        sources: Finds raw bytes.
        meter: Told about bytes that are in place.
        verify: Compare recorded checksums.
        share: Try to share blocks.
        writeback: Ask for blocks to be written to disk as they come, which makes the final fsync short.
        hash_output: Work out the CRC-32 of what is written, where the check of the source does not yield it anyway.
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
        self._sources = sources
        self._meter = meter
        self._verify = verify
        self._share = share
        self._writeback = writeback
        self._hash_output = hash_output
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
            _, first = self._sources.resolve(tensor, chunk)
            _, second = self._sources.resolve(tensor, replica)
        except (ChecksumMismatch, MalformedFile):
            return False
        facts = [(raw.crc32, raw.strides, raw.conj, raw.neg, raw.stop - raw.start) for raw in (first, second)]
        return first.crc32 is not None and facts[0] == facts[1]

    def _is_sound(self, tensor: TensorEntry, chunk: Chunk) -> bool:
        try:
            store, raw = self._sources.resolve(tensor, chunk)
            verify_record(store, raw, key=tensor.key)
        except (ChecksumMismatch, MalformedFile):
            return False
        return True

    def _run(self, task: CopyTask, fd: int, result: TaskResult) -> None:
        located = [self._sources.resolve(task.tensor, chunk) for chunk in task.chunks]
        result.unverified = sum(chunk.crc32 is None for _, chunk in located) if self._verify else 0
        cast = task.dtype != task.tensor.dtype
        # Row blocks, one after the other, as FSDP writes them.
        in_rows = all(chunk.strides is None and not chunk.conj and not chunk.neg for _, chunk in located) and all(
            is_contiguous_in((chunk.offsets, chunk.lengths), task.tensor.shape) for chunk in task.chunks
        )
        if not in_rows:
            self._gather(task, fd, located, result, cast=cast)
            return
        located.sort(key=lambda item: item[1].offsets)
        position = task.position
        crc: int | None = 0
        for number, store_chunk in enumerate(located):
            num_bytes = store_chunk[1].numel * task.dtype.itemsize
            if not cast and self._share and self._try_share(fd, store_chunk, position):
                result.shared_bytes += num_bytes
                self._meter.add(num_bytes)
                crc = None
            else:
                own = self._stream(task, fd, store_chunk, position, result, cast=cast)
                if crc is not None:
                    crc = own if number == 0 or own is None else combine_crc(crc, own, num_bytes)
            position += num_bytes
        result.crc32 = crc

    def _buffer(self) -> memoryview:
        view: memoryview | None = getattr(self._local, "view", None)
        if view is None:
            view = self._local.view = memoryview(bytearray(BLOCK_BYTES))
        return view

    def _stream(
        self, task: CopyTask, fd: int, located: Located, position: int, result: TaskResult, *, cast: bool
    ) -> int | None:
        """Copy or convert one whole row-major chunk; return the CRC-32 of what was written, where that is known."""
        store, chunk = located
        convert = _converter(task.tensor.dtype, task.dtype) if cast else None
        inline = self._verify and chunk.crc32 is not None and chunk.crc_range is None
        if self._verify and not inline:
            result.verified_bytes += verify_record(store, chunk, key=task.tensor.key)
        hash_output = self._hash_output or (inline and convert is None)
        buffer, read_crc, written_crc, written = self._buffer(), 0, 0, 0
        start, total = chunk.start, chunk.stop - chunk.start
        with store.descriptor(chunk.file) as source:
            for done in range(0, total, BLOCK_BYTES):
                if self.stop.is_set():
                    raise CancelledError
                block = buffer[: min(BLOCK_BYTES, total - done)]
                if read_into(source, block, start + done) < len(block):
                    raise MalformedFile(f"{chunk.file} ends within `{task.tensor.key}`")
                if convert is not None and inline:
                    read_crc = crc32(block, read_crc)
                data = block if convert is None else convert(block)
                if hash_output:
                    written_crc = crc32(data, written_crc)
                write_all(fd, data, position + written)
                written += len(data)
                self._note(fd, position, written)
                self._meter.add(len(data))
        if inline:
            check_crc(chunk, written_crc if convert is None else read_crc, key=task.tensor.key)
            result.verified_bytes += total
        return written_crc if hash_output else None

    def _gather(self, task: CopyTask, fd: int, located: Sequence[Located], result: TaskResult, *, cast: bool) -> None:
        import numpy as np

        from fsdp_ckpt.run.cast import cast_bits
        from fsdp_ckpt.run.gather import Gatherer

        tensor = task.tensor
        verify: Literal["full", "off"] = "full" if self._verify else "off"
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
            self._meter.add(len(data))
        gatherer.finish()
        result.verified_bytes += gatherer.verified_bytes
        result.crc32 = crc if self._hash_output else None

    def _try_share(self, fd: int, located: Located, position: int) -> bool:
        store, chunk = located
        num_bytes = chunk.stop - chunk.start
        if chunk.start % SHARE_ALIGNMENT or position % SHARE_ALIGNMENT or num_bytes % SHARE_ALIGNMENT:
            return False
        with store.descriptor(chunk.file) as source:
            self._share = clone_range(source, chunk.start, num_bytes, fd, position)
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
