"""Put boxes together with NumPy: pieces of several shards, strided storages, lazily conjugated or negated values.

Whole shards that are unbroken runs of the result take the straight way in ``run.copy`` and never come here.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from fsdp_ckpt.catalog import Chunk, DType, Shape, contiguous_strides
from fsdp_ckpt.errors import MalformedFile
from fsdp_ckpt.plan.boxes import Box, intersect, is_contiguous_in, linear_offset
from fsdp_ckpt.run.checksum import check_crc, crc32, verify_record
from fsdp_ckpt.run.sources import Located
from fsdp_ckpt.store.syscalls import read_into

__all__ = ["Gatherer", "numpy_dtype", "storage_dtype"]

_BITS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
_COMPLEX_PARTS = {"complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}


def storage_dtype(dtype: DType) -> np.dtype[Any]:
    """Return a NumPy type of the same width, for moving elements without looking at them."""
    return np.dtype(_BITS[dtype.itemsize])


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy type of the same meaning; bfloat16 and float8 come from ml_dtypes.

    Raises:
        TypeError: NumPy has none (complex32, float4 pairs).
    """
    if dtype.name in ("complex32", "float4_e2m1fn_x2"):
        raise TypeError(f"NumPy has no {dtype}")
    if dtype.name.startswith(("bfloat", "float8")):
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
        return found
    return np.dtype(dtype.name)


class Gatherer:
    """Reads boxes of one tensor in the order of their elements, and checks checksums on the way.

    Args:
        key: The tensor's key, for messages.
        dtype: Its element type.
        shape: Its shape.
        located: Its RAW chunks.
        verify: Check checksums. Strided records are read once more for that, first.
    """

    def __init__(self, key: str, dtype: DType, shape: Shape, located: Sequence[Located], *, verify: bool) -> None:
        self.key = key
        self.dtype = dtype
        self.shape = shape
        self.bits = storage_dtype(dtype)
        self.verified_bytes = 0
        self._located = [(store, chunk) for store, chunk in located if chunk.numel]
        self._crc: dict[int, int] = {}
        for number, (store, chunk) in enumerate(self._located):
            if not verify or chunk.crc32 is None:
                continue
            if chunk.strides is None and chunk.crc_range is None:
                self._crc[number] = 0  # checked while it is read
            else:
                self.verified_bytes += verify_record(store, chunk, key=key)
        self._buffer = bytearray()

    def read(self, box: Box, out: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Fill an array of the box's shape with the stored bits.

        Args:
            box: A box of the tensor. Checksums are only meaningful when boxes come in row-major order and cover all.
            out: C-contiguous, of ``storage_dtype``.
        """
        for number, (store, chunk) in enumerate(self._located):
            shared = intersect((chunk.offsets, chunk.lengths), box)
            if shared is None:
                continue
            inner = tuple(a - b for a, b in zip(shared[0], chunk.offsets, strict=True))
            target = tuple(slice(a - b, a - b + n) for a, b, n in zip(shared[0], box[0], shared[1], strict=True))
            with store.descriptor(chunk.file) as fd:
                if chunk.strides is None and is_contiguous_in((inner, shared[1]), chunk.lengths):
                    block = self._read_run(number, fd, chunk, inner, shared[1])
                    values = np.frombuffer(block, dtype=self.bits).reshape(shared[1])
                    out[target] = self._restore(chunk, values)
                else:
                    with self._strided(fd, chunk) as view:
                        part = view[tuple(slice(a, a + n) for a, n in zip(inner, shared[1], strict=True))]
                        out[target] = self._restore(chunk, part)
                        del part

    def finish(self) -> None:
        """Compare the checksums of all records that were read through.

        Raises:
            ChecksumMismatch: One differs.
        """
        for number, found in self._crc.items():
            chunk = self._located[number][1]
            check_crc(chunk, found, key=self.key)
            self.verified_bytes += chunk.stop - chunk.start

    def _read_run(self, number: int, fd: int, chunk: Chunk, inner: Shape, lengths: Shape) -> memoryview:
        num_bytes = self.dtype.itemsize
        for length in lengths:
            num_bytes *= length
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        block = memoryview(self._buffer)[:num_bytes]
        position = chunk.start + linear_offset(inner, chunk.lengths) * self.dtype.itemsize
        if read_into(fd, block, position) < num_bytes:
            raise MalformedFile(f"{chunk.file} ends within `{self.key}`")
        if number in self._crc:
            self._crc[number] = crc32(block, self._crc[number])
        return block

    def _restore(self, chunk: Chunk, values: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
        """Apply torch's lazy conj and neg bits, on the bits of the values."""
        if not chunk.conj and not chunk.neg:
            return values
        flat = np.ascontiguousarray(values).reshape(-1)
        if self.dtype.name in _COMPLEX_PARTS:
            parts = flat.view(_COMPLEX_PARTS[self.dtype.name]).reshape(-1, 2).copy()
            if chunk.neg:
                parts = -parts
            if chunk.conj:
                parts[:, 1] = -parts[:, 1]
            return parts.reshape(-1).view(self.bits).reshape(values.shape)
        return (-flat.view(numpy_dtype(self.dtype))).view(self.bits).reshape(values.shape)

    @contextmanager
    def _strided(self, fd: int, chunk: Chunk) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
        """Show a record as an array of the chunk's shape; its pages are given back afterwards."""
        if os.fstat(fd).st_size < chunk.stop:
            raise MalformedFile(f"{chunk.file} ends within `{self.key}`")
        base = chunk.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(fd, chunk.stop - base, access=mmap.ACCESS_READ, offset=base)
        strides = chunk.strides or contiguous_strides(chunk.lengths)
        try:
            raw = np.frombuffer(mapped, dtype=np.uint8, offset=chunk.start - base)
            view = np.ndarray(
                chunk.lengths,
                dtype=self.bits,
                buffer=raw,
                strides=tuple(stride * self.dtype.itemsize for stride in strides),
            )
            yield view
            del view, raw
        finally:
            with suppress(BufferError):  # an exception's traceback may still hold the view
                mapped.close()
