"""Put boxes together with NumPy: pieces of several shards, strided storages, lazily conjugated or negated values.

A merge comes here with what is no unbroken run of the result; whole rows go from file to file in ``run.copy``. A
training job comes here with everything: the arrays are the memory of its parameters.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np

from fsdp_ckpt.catalog import Chunk, DType, Shape
from fsdp_ckpt.errors import MalformedFile
from fsdp_ckpt.plan.boxes import Box, intersect, slices
from fsdp_ckpt.run.checksum import BLOCK_BYTES, check_crc, checksum_range, verify_record
from fsdp_ckpt.run.records import Record, Records
from fsdp_ckpt.run.sources import Located
from fsdp_ckpt.store.local import LocalStore, OpenFile

__all__ = ["Gatherer", "numpy_dtype", "storage_dtype", "verify_boxes"]

_Array = np.ndarray[Any, np.dtype[Any]]

_BITS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
_COMPLEX_PARTS = {"complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}
_MAPPED_BYTES = 16 << 20
_SPARSE = 8
"""Where less than one byte in so many is wanted, pages are mapped instead of everything being read."""
_LONG_BYTES = 64 << 10
"""Rows and gaps from this length on are worth a call for each row."""


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
    """Reads boxes of one tensor into arrays, and checks checksums on the way. For one thread at a time.

    What lies in the file as it shall lie in the array is read straight into the array's memory, all else through a
    buffer of 1 MiB, or a few pages mapped where little of much is wanted. A failed read leaves an array half filled;
    ``verify_boxes`` can look first.

    Args:
        key: The tensor's key, for messages.
        dtype: Its element type.
        shape: Its shape.
        located: Its RAW chunks, or those of them that will be needed.
        verify: ``"passing"``: compare the checksum of each record that is read through in order and that the checksum
            covers exactly. ``"full"``: the same, and read records that are strided or part of a larger storage once
            more for their checksum, at once. ``"off"``: compare nothing.

    Attributes:
        verified_bytes: Bytes whose recorded checksum was compared.
        unverified_bytes: Bytes of records that were read, in full or in part, and not compared; known after
            ``finish``, 0 when ``verify`` is ``"off"``.

    Raises:
        ChecksumMismatch: A record that ``"full"`` reads first is damaged.
    """

    def __init__(
        self,
        key: str,
        dtype: DType,
        shape: Shape,
        located: Sequence[Located],
        *,
        verify: Literal["full", "passing", "off"],
    ) -> None:
        self.key = key
        self.dtype = dtype
        self.shape = shape
        self.bits = storage_dtype(dtype)
        self.verified_bytes = 0
        self.unverified_bytes = 0
        self._verify = verify
        self._records = Records(located)
        for record in self._records:
            chunk = record.chunk
            if verify == "off" or chunk.crc32 is None:
                continue
            exact = chunk.crc_range in (None, (chunk.start, chunk.stop))
            if verify == "full" and (chunk.strides is not None or not exact):
                self.verified_bytes += verify_record(record.store, chunk, key=key)
                record.is_verified = True
            elif exact:
                record.crc = 0
        self._buffer: _Array = np.empty(0, dtype=np.uint8)

    def read(self, box: Box, out: _Array) -> None:
        """Fill an array of the box's shape with the stored bits.

        Args:
            box: A box of the tensor. In whatever order boxes come: records are compared as far as they are read from
                their beginning to their end.
            out: Any view, of ``storage_dtype``; a C-contiguous one is filled fastest.

        Raises:
            MalformedFile: A file or a record is too short.
        """
        assert out.shape == box[1]
        assert out.dtype == self.bits
        for record in self._records.near(box):
            chunk = record.chunk
            shared = intersect((chunk.offsets, chunk.lengths), box)
            if shared is None:
                continue
            record.check_extent(self.dtype, key=self.key)
            record.is_touched = True
            target: tuple[Any, ...] = slices(shared, box[0])
            strides = [stride * self.dtype.itemsize for stride in record.strides]
            inner = sum((a - b) * s for a, b, s in zip(shared[0], chunk.offsets, strides, strict=True))
            # In the order of the file: what neighbours there is read together, and each byte once.
            strides = [stride for stride, length in zip(strides, shared[1], strict=True) if length > 1]
            order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
            part = out[*target, ...].squeeze().transpose(order)
            with record.store.opened(chunk.file) as source:
                self._fill(record, source, chunk.start + inner, tuple(strides[dim] for dim in order), part)

    def finish(self) -> None:
        """Compare the checksums of the records that were read through, and count the bytes of the others.

        Raises:
            ChecksumMismatch: One differs.
        """
        if self._verify == "off":
            return
        for record in self._records:
            num_bytes = record.chunk.stop - record.chunk.start
            if record.crc is not None and record.position == record.chunk.stop:
                check_crc(record.chunk, record.crc, key=self.key)
                self.verified_bytes += num_bytes
            elif record.is_touched and not record.is_verified:
                self.unverified_bytes += num_bytes

    def _fill(self, record: Record, source: OpenFile, position: int, strides: Shape, out: _Array) -> None:
        """Fill an array.

        Args:
            record: The record to read.
            source: Its file.
            position: Byte in the file of the array's first element.
            strides: Bytes in the file between neighbours, per dimension of the array, none smaller than the next.
            out: The array.
        """
        chunk = record.chunk
        is_lazy = chunk.conj or chunk.neg
        if strides == out.strides and out.flags.c_contiguous and not is_lazy:
            self._read(record, source, position, out.reshape(-1).view(np.uint8).data)
            return
        span = self.dtype.itemsize + sum((n - 1) * stride for n, stride in zip(out.shape, strides, strict=True))
        is_sparse = span > _SPARSE * out.nbytes
        window = max(_MAPPED_BYTES if is_sparse else BLOCK_BYTES, self.dtype.itemsize)
        if span <= window and is_sparse and source.fd is not None:
            with self._mapped(record, source.fd, position, span) as pages:
                values = np.ndarray(out.shape, dtype=self.bits, buffer=pages, strides=strides)
                out[...] = self._resolve(chunk, values.copy()) if is_lazy else values
                del values
            return
        if span <= window:
            block = self._block(span)
            self._read(record, source, position, block.data)
            if is_lazy:
                self._resolve(chunk, block)
            out[...] = np.ndarray(out.shape, dtype=self.bits, buffer=block, strides=strides)
            return
        row_bytes = span - (out.shape[0] - 1) * strides[0]
        step = 1
        if row_bytes < _LONG_BYTES or strides[0] - row_bytes < _LONG_BYTES:
            step += max(window - row_bytes, 0) // strides[0]
        for row in range(0, out.shape[0], step):
            if step == 1:
                self._fill(record, source, position + row * strides[0], strides[1:], out[row, ...])
            else:
                self._fill(record, source, position + row * strides[0], strides, out[row : row + step])

    def _read(self, record: Record, source: OpenFile, position: int, view: memoryview) -> None:
        for done in range(0, len(view), BLOCK_BYTES):
            block = view[done : done + BLOCK_BYTES]
            if source.read_into(block, position + done) < len(block):
                raise MalformedFile(f"{record.chunk.file} ends within `{self.key}`")
            record.note(position + done, block)

    @contextmanager
    def _mapped(self, record: Record, fd: int, position: int, num_bytes: int) -> Iterator[_Array]:
        """Show a range of a file as bytes; its pages are given back afterwards."""
        if os.fstat(fd).st_size < position + num_bytes:
            raise MalformedFile(f"{record.chunk.file} ends within `{self.key}`")
        base = position // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(fd, position + num_bytes - base, access=mmap.ACCESS_READ, offset=base)
        try:
            raw = np.frombuffer(mapped, dtype=np.uint8, offset=position - base)
            yield raw
            del raw
        finally:
            with suppress(BufferError):  # an exception's traceback may still hold the view
                mapped.close()

    def _block(self, num_bytes: int) -> _Array:
        if len(self._buffer) < num_bytes:
            self._buffer = np.empty(num_bytes, dtype=np.uint8)
        return self._buffer[:num_bytes]

    def _resolve(self, chunk: Chunk, values: _Array) -> _Array:
        """Apply torch's lazy conj and neg bits to elements in a row, in place."""
        flat = values.reshape(-1)
        if self.dtype.name in _COMPLEX_PARTS:
            parts = flat.view(_COMPLEX_PARTS[self.dtype.name])
            if chunk.neg:
                np.negative(parts, out=parts)
            if chunk.conj:
                np.negative(parts[1::2], out=parts[1::2])
        elif chunk.neg:
            numbers = flat.view(numpy_dtype(self.dtype))
            np.negative(numbers, out=numbers)
        return values


def verify_boxes(key: str, dtype: DType, located: Sequence[Located], boxes: Sequence[Box]) -> tuple[int, int]:
    """Read the records behind some boxes through and compare their checksums, before anything is overwritten.

    Args:
        key: The tensor's key, for messages.
        dtype: Its element type.
        located: Its RAW chunks.
        boxes: What will be read.

    Returns:
        Bytes that were compared, and bytes of records that have no checksum. A storage that several chunks share is
        read and counted once.

    Raises:
        ChecksumMismatch: A record is damaged.
        MalformedFile: A file or a record is too short.
    """
    records = Records(located)
    for box in boxes:
        for record in records.near(box):
            if not record.is_touched:
                record.is_touched = intersect((record.chunk.offsets, record.chunk.lengths), box) is not None
    found: dict[tuple[LocalStore, str, int, int], int] = {}
    verified_bytes = unverified_bytes = 0
    for record in records:
        store, chunk = record.store, record.chunk
        if not record.is_touched:
            continue
        record.check_extent(dtype, key=key)
        start, stop = chunk.crc_range or (chunk.start, chunk.stop)
        with store.opened(chunk.file) as source:
            if source.size < max(stop, chunk.stop):
                raise MalformedFile(f"{chunk.file} ends within `{key}`")
            if chunk.crc32 is None:
                unverified_bytes += chunk.stop - chunk.start
                continue
            place = (store, chunk.file, start, stop)
            if place not in found:
                found[place] = checksum_range(source, start, stop)
                verified_bytes += stop - start
        check_crc(chunk, found[place], key=key)
    return verified_bytes, unverified_bytes
