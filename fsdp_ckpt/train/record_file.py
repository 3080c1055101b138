"""One data file of a checkpoint, written record by record: aligned, checksummed on the way, flushed early."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fsdp_ckpt.catalog import DType
from fsdp_ckpt.codec.distcp_item import lay_out_item, seal_item
from fsdp_ckpt.run.checksum import checksum_range, combine_crc, crc32
from fsdp_ckpt.store.local import LocalFile
from fsdp_ckpt.store.syscalls import preallocate, start_writeback, write_all
from fsdp_ckpt.train.files import open_new
from fsdp_ckpt.train.memory import byte_blocks

__all__ = ["OBJECT_ALIGNMENT", "RecordFile", "WrittenRecord"]

OBJECT_ALIGNMENT = 64
"""What bytes that are no tensor begin on a multiple of."""

_WRITEBACK_BYTES = 8 << 20
"""How much is handed to the disk at a time while more is being written: fsync then finds little left to do."""


@dataclass(frozen=True, slots=True)
class WrittenRecord:
    """Where a record lies: its first byte in the file, its length in bytes, and the CRC-32 of what it holds.

    For a tensor, the checksum is that of its elements in row-major order, without the archive around them.
    """

    start: int
    num_bytes: int
    crc: int


class RecordFile:
    """A new file, made when its first record is written. For one thread at a time.

    Args:
        path: The file; it must not be there.
        durable: Hand bytes to the disk as they come, and let ``close`` wait until it has them all.
        expected_bytes: Size that it will have, as far as it is known. So much is reserved at once: a full disk is
            noticed before anything is written, and the file lies in one piece.
        stamp: Its first bytes, before any record.

    Attributes:
        path: As given.
        expected_bytes: As given; may be set until the first record is written.
    """

    def __init__(self, path: Path, *, durable: bool, expected_bytes: int = 0, stamp: bytes = b"") -> None:
        self.path = path
        self._durable = durable
        self.expected_bytes = expected_bytes
        self._reserved_bytes = 0
        self._fd = -1
        self._stamp = stamp
        self._position = len(stamp)
        self._flushed = 0
        self._crc: int | None = crc32(stamp, 0)

    @property
    def is_open(self) -> bool:
        """Whether anything was written, and ``close`` not called yet."""
        return self._fd >= 0

    def add_tensor(self, tensor: Tensor, dtype: DType) -> WrittenRecord:
        """Append a tensor as an item that torch reads; its elements begin on a multiple of 4096 when it has as many.

        Args:
            tensor: On any device, of any strides.
            dtype: Its element type.

        Raises:
            OSError: The disk is full or broken.
        """
        layout = lay_out_item(dtype, tuple(tensor.shape), self._position)
        fd = self._open()
        crc, position = 0, layout.data_start
        for block in byte_blocks(tensor, dtype):
            crc = crc32(block, crc)
            write_all(fd, block, position)
            position += len(block)
            self._hand_over(position)
        head, tail = seal_item(layout, crc)
        write_all(fd, head, layout.start)
        write_all(fd, tail, layout.data_stop)
        self._account(bytes(layout.start - self._position) + head)
        self._account_crc(crc, layout.data_stop - layout.data_start)
        self._account(tail)
        return WrittenRecord(layout.start, layout.stop - layout.start, crc)

    def add_bytes(self, data: bytes, *, alignment: int = OBJECT_ALIGNMENT) -> WrittenRecord:
        """Append bytes as they are, beginning on a multiple of ``alignment``.

        Raises:
            OSError: The disk is full or broken.
        """
        gap = -self._position % alignment
        start = self._position + gap
        write_all(self._open(), data, start)
        self._account(bytes(gap) + data)
        return WrittenRecord(start, len(data), crc32(data, 0))

    def close(self) -> tuple[int, int]:
        """Finish the file.

        Returns:
            Its size in bytes, and the CRC-32 of the whole of it.
        """
        if self._fd >= 0:
            if self._reserved_bytes > self._position:
                os.ftruncate(self._fd, self._position)
            if self._durable:
                os.fsync(self._fd)
            if self._crc is None:  # no library that combines checksums
                self._crc = checksum_range(LocalFile(self._fd), 0, self._position)
            self.abort()
        return self._position, self._crc or 0

    def abort(self) -> None:
        """Close the file as it is."""
        fd, self._fd = self._fd, -1  # first, as a signal handler may raise right after closing
        if fd >= 0:
            os.close(fd)

    def _open(self) -> int:
        if self._fd < 0:
            self._fd = open_new(self.path)
            if self.expected_bytes and preallocate(self._fd, self.expected_bytes):
                self._reserved_bytes = self.expected_bytes
            write_all(self._fd, self._stamp, 0)
        return self._fd

    def _account(self, data: bytes) -> None:
        self._account_crc(crc32(data, 0), len(data))

    def _account_crc(self, crc: int, num_bytes: int) -> None:
        """Take bytes that follow the ones so far into the file's checksum."""
        if self._crc is not None and num_bytes:
            self._crc = combine_crc(self._crc, crc, num_bytes)
        self._position += num_bytes

    def _hand_over(self, position: int) -> None:
        """Let the disk begin with what was written up to a position, when that is worth a call."""
        if self._durable and position - self._flushed >= _WRITEBACK_BYTES:
            start_writeback(self._fd, self._flushed, position - self._flushed)
            self._flushed = position
