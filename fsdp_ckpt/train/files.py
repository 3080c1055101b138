"""New files of a checkpoint: never over something that is there, with their size and CRC-32 for the manifest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fsdp_ckpt.run.checksum import crc32
from fsdp_ckpt.store.publish import current_umask
from fsdp_ckpt.store.syscalls import write_all

__all__ = ["FileFacts", "HashingFile", "open_new", "write_file"]

FileFacts = tuple[int, str]
"""Size in bytes and CRC-32 as eight hexadecimal digits."""


def open_new(path: Path) -> int:
    """Create a file for writing and reading; it must not be there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags, 0o666 & ~current_umask())


def write_file(path: Path, data: bytes, *, durable: bool) -> FileFacts:
    """Write a small file."""
    fd = open_new(path)
    try:
        write_all(fd, data, 0)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    return len(data), f"{crc32(data, 0):08x}"


class HashingFile:
    """A file that counts and checksums what torch.save streams into it."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_new(path), "wb")
        self._size = 0
        self._crc = 0

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        self._crc = crc32(view, self._crc)
        self._size += len(view)
        return self._file.write(view)

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._file.flush()

    def finish(self, *, durable: bool) -> FileFacts:
        """Return size and checksum of everything."""
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())
        return self._size, f"{self._crc:08x}"

    def close(self) -> None:
        """Close the file."""
        self._file.close()
