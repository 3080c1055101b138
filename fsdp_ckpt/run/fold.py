"""Write weights with an adapter folded in: ``W + scale * B @ A``, block by block."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.catalog import DTYPES, Chunk, TensorEntry
from fsdp_ckpt.errors import ChecksumMismatch, MalformedFile, NotEnoughSpace
from fsdp_ckpt.plan.boxes import Box, bands
from fsdp_ckpt.plan.output import LowRank, OutputTensor
from fsdp_ckpt.run.checksum import crc32, verify_record
from fsdp_ckpt.run.copy import CancelledError, Copier, TaskResult
from fsdp_ckpt.run.runs import is_read_in_order
from fsdp_ckpt.run.sources import Located
from fsdp_ckpt.run.tasks import CopyTask, cut_tasks
from fsdp_ckpt.store.syscalls import write_all
from fsdp_ckpt.units import format_size

if TYPE_CHECKING:
    import numpy as np

    _Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["FACTORS_LIMIT_BYTES", "FoldTask", "factors_bytes", "fold_tasks"]

FACTORS_LIMIT_BYTES = 1 << 30
"""Memory that the two matrices of one adapter may take."""

_BAND_BYTES = 1 << 20


def factors_bytes(addition: LowRank) -> int:
    """Return the memory that folding an adapter takes for its two matrices."""
    return (addition.up.numel + addition.down.numel) * (8 if _is_double(addition.up, addition.down) else 4)


def fold_tasks(tensor: OutputTensor, box: Box | None, *, position: int) -> Iterator[FoldTask]:
    """Yield the tasks that write a tensor with an adapter folded in.

    Args:
        tensor: A matrix with ``addition``.
        box: The part to write, in the coordinates of ``tensor.source``; None for what the tensor is: its window, or
            all of the source.
        position: Byte in the output file at which it begins.

    Raises:
        NotEnoughSpace: The adapter's two matrices do not fit into the memory meant for them.
    """
    assert tensor.addition is not None
    needed = factors_bytes(tensor.addition)
    if needed > FACTORS_LIMIT_BYTES:
        raise NotEnoughSpace(
            f"folding the adapter of `{tensor.name}` takes {format_size(needed)} of memory for its two matrices, more "
            f"than the {format_size(FACTORS_LIMIT_BYTES)} that are meant for them",
            hint="fold it with peft: merge_and_unload()",
        )
    if box is None and tensor.window is not None:
        box = tensor.window.offsets, tensor.window.lengths
    factors = _Factors(tensor.addition, is_double=_is_double(tensor.source, tensor.addition.up, tensor.addition.down))
    for copy in cut_tasks(tensor.source, tensor.dtype, position=position, box=box):
        yield FoldTask(copy=copy, factors=factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldTask:
    """Writes a box of a weight with its adapter folded in.

    The sum is formed in float32, or float64 where a matrix is of that type, and rounded once.

    Attributes:
        copy: The same without the adapter.
        factors: The adapter, shared by the tasks of a tensor.
    """

    copy: CopyTask
    factors: _Factors

    @property
    def position(self) -> int:
        """Byte in the output file at which the box begins."""
        return self.copy.position

    @property
    def num_bytes(self) -> int:
        """Bytes written."""
        return self.copy.num_bytes

    def carry_out(self, copier: Copier, fd: int) -> TaskResult:
        """Write it, with replicas in place of damaged chunks where there are any.

        Raises:
            ChecksumMismatch: Bytes are not those that were written, and no replica is sound.
            MalformedFile: A record is broken, or is not what the metadata say.
            CancelledError: ``copier.stop`` was set.
        """
        recovered: list[str] = []
        task = self.copy
        seen = TaskResult(recovered=recovered)
        factors = self.factors.load(copier, seen)
        while True:
            result = replace(seen)
            try:
                self._write(task, copier, fd, factors, result)
            except (ChecksumMismatch, MalformedFile) as error:
                chunks = _mend(copier, task.tensor, task.chunks, error, recovered)
                task = replace(task, chunks=chunks)
                continue
            return result

    def _write(
        self, task: CopyTask, copier: Copier, fd: int, factors: tuple[_Array, _Array], result: TaskResult
    ) -> None:
        import numpy as np

        from fsdp_ckpt.run.cast import cast_bits
        from fsdp_ckpt.run.gather import numpy_dtype, storage_dtype

        reader = _open(copier, task.tensor, task.chunks, task.box, result)
        left, right = factors
        wide = DTYPES["float64" if left.dtype == np.float64 else "float32"]
        position, crc = task.position, 0
        first_row, first_column = task.box[0]
        for offsets, lengths in bands(task.box[1], wide.itemsize, _BAND_BYTES):
            if copier.stop.is_set():
                raise CancelledError
            row, column = offsets[0] + first_row, offsets[1] + first_column
            bits = np.empty(lengths, dtype=reader.bits)
            reader.read(((row, column), lengths), bits)
            with np.errstate(all="ignore"):  # infinities and NaN of the weights go their way
                total = left[row : row + lengths[0]] @ right[:, column : column + lengths[1]]
                total *= self.factors.scale
                total += bits.view(numpy_dtype(task.tensor.dtype))
            flat = total.reshape(-1).view(storage_dtype(wide))
            values: Any = flat if task.dtype == wide else cast_bits(flat, wide, task.dtype)
            data = memoryview(values.view(np.uint8))
            crc = crc32(data, crc)
            write_all(fd, data, position)
            position += len(data)
            copier.meter.add(len(data))
        reader.finish()
        result.verified_bytes += reader.verified_bytes
        result.crc32 = crc


class _Factors:
    """The two matrices of an adapter, in the order in which they are multiplied; read once, by whoever comes first."""

    def __init__(self, addition: LowRank, *, is_double: bool) -> None:
        self.scale = addition.scale
        self._addition = addition
        self._is_double = is_double
        self._lock = threading.Lock()
        self._loaded: tuple[_Array, _Array] | None = None

    def load(self, copier: Copier, result: TaskResult) -> tuple[_Array, _Array]:
        """Return matrices of shapes (rows, rank) and (rank, columns) of the weight."""
        with self._lock:
            if self._loaded is None:
                up = self._read(copier, self._addition.up, result)
                down = self._read(copier, self._addition.down, result)
                self._loaded = (down.T, up.T) if self._addition.transposed else (up, down)
            return self._loaded

    def _read(self, copier: Copier, tensor: TensorEntry, result: TaskResult) -> _Array:
        import numpy as np

        from fsdp_ckpt.run.gather import numpy_dtype

        whole = (0,) * len(tensor.shape), tensor.shape
        chunks: Sequence[Chunk] = [chunk for chunk in tensor.chunks if chunk.numel]
        while True:
            seen = TaskResult()
            try:
                reader = _open(copier, tensor, chunks, whole, seen)
                bits = np.empty(tensor.shape, dtype=reader.bits)
                reader.read(whole, bits)
                reader.finish()
            except (ChecksumMismatch, MalformedFile) as error:
                chunks = _mend(copier, tensor, chunks, error, result.recovered)
                continue
            result.verified_bytes += seen.verified_bytes + reader.verified_bytes
            result.unverified += seen.unverified
            with np.errstate(invalid="ignore"):
                return bits.view(numpy_dtype(tensor.dtype)).astype(np.float64 if self._is_double else np.float32)


def _is_double(*tensors: TensorEntry) -> bool:
    return any(tensor.dtype.name == "float64" for tensor in tensors)


def _open(copier: Copier, tensor: TensorEntry, chunks: Sequence[Chunk], box: Box, result: TaskResult) -> Any:
    """Return a reader of a box; records that it will not read in order are compared now, each once."""
    from fsdp_ckpt.run.gather import Gatherer

    located: list[Located] = []
    for wanted in chunks:
        store, chunk = copier.sources.resolve(tensor, wanted)
        if copier.verify:
            result.unverified += chunk.crc32 is None
            if not is_read_in_order(chunk, box):
                result.verified_bytes += copier.compare_once(store, chunk, key=tensor.key)
                chunk = chunk._replace(crc32=None)
        located.append((store, chunk))
    return Gatherer(tensor.key, tensor.dtype, tensor.shape, located, verify="passing" if copier.verify else "off")


def _mend(
    copier: Copier,
    tensor: TensorEntry,
    chunks: Sequence[Chunk],
    error: ChecksumMismatch | MalformedFile,
    recovered: list[str],
) -> list[Chunk]:
    """Put a replica in the place of the first damaged chunk; raise the error again where none will do."""
    for index, chunk in enumerate(chunks):
        damaged = _facts(copier, tensor, chunk)
        if damaged is not None and damaged[1]:
            continue
        for replica in tensor.replicas:
            if (replica.offsets, replica.lengths) != (chunk.offsets, chunk.lengths):
                continue
            found = _facts(copier, tensor, replica)
            if damaged is not None and found is not None and found[1] and found[0] == damaged[0]:
                recovered.append(f"{error.message}; the copy in {replica.file} was used")
                return [*chunks[:index], replica, *chunks[index + 1 :]]
    raise error


def _facts(copier: Copier, tensor: TensorEntry, chunk: Chunk) -> tuple[Any, bool] | None:
    """Return what tells a copy of the same bytes, and whether the bytes are sound; None for a broken record."""
    try:
        store, raw = copier.sources.resolve(tensor, chunk)
    except (ChecksumMismatch, MalformedFile):
        return None
    what = raw.crc32, raw.strides, raw.conj, raw.neg, raw.stop - raw.start
    if raw.crc32 is None:
        return what, False
    try:
        verify_record(store, raw, key=tensor.key)
    except (ChecksumMismatch, MalformedFile):
        return what, False
    return what, True
