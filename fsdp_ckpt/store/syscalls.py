"""System calls that Python's os module lacks or leaves to be looped: ranges shared, pages flushed, names exchanged."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "SHARE_ALIGNMENT", "clone_range", "exchange", "fsync_folder", "is_cached", "preallocate", "read_into",
    "start_writeback", "write_all",
]  # fmt: skip

SHARE_ALIGNMENT = 4096
"""File systems share whole blocks: source and target offset must be multiples of this."""

_FICLONERANGE = 0x4020940D
_SYNC_FILE_RANGE_WRITE = 2
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def read_into(fd: int, view: memoryview, position: int) -> int:
    """Fill a buffer from a file; return the number of bytes read, less than asked for only at the file's end."""
    have = 0
    while have < len(view):
        got = os.preadv(fd, [view[have:]], position + have)
        if not got:
            break
        have += got
    return have


def is_cached(fd: int, position: int) -> bool:
    """Tell whether a byte of a file lies in memory (Linux preadv2, RWF_NOWAIT); False where that cannot be told."""
    try:
        return os.preadv(fd, [bytearray(1)], position, os.RWF_NOWAIT) == 1
    except (AttributeError, OSError):
        return False


def write_all(fd: int, view: memoryview | bytes, position: int) -> None:
    """Write a buffer at a position, all of it."""
    done = os.pwrite(fd, view, position)
    while done < len(view):
        done += os.pwrite(fd, memoryview(view)[done:], position + done)


def clone_range(src: int, start: int, num_bytes: int, dst: int, position: int) -> bool:
    """Let a range of one file share the blocks of another one's (Linux FICLONERANGE: XFS, btrfs, bcachefs).

    Returns:
        Whether it did. False where the file system cannot, the two are on different ones, or ranges are not aligned.
    """
    try:
        fcntl.ioctl(dst, _FICLONERANGE, struct.pack("qQQQ", src, start, num_bytes, position))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM):
            return False
        raise
    return True


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    try:
        function = _libc().sync_file_range
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function  # type: ignore[no-any-return]


@functools.cache
def _fallocate() -> Callable[..., int] | None:
    try:
        function = _libc().fallocate
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function  # type: ignore[no-any-return]


def preallocate(fd: int, num_bytes: int) -> bool:
    """Reserve disk space for the beginning of a file, which becomes so long (Linux fallocate).

    Not ``os.posix_fallocate``: where the file system cannot reserve, the C library writes into every block instead.

    Returns:
        Whether it did. False where system or file system cannot; nothing has changed then.

    Raises:
        OSError: There is not so much space, or quota, left.
    """
    function = _fallocate()
    if function is None or function(fd, 0, 0, num_bytes) == 0:
        return function is not None
    code = ctypes.get_errno()
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        raise OSError(code, os.strerror(code))
    return False


def start_writeback(fd: int, position: int, num_bytes: int) -> None:
    """Ask the kernel to begin writing a range to disk; do not wait. A hint: failures do not matter."""
    function = _sync_file_range()
    if function is not None:
        function(fd, position, num_bytes, _SYNC_FILE_RANGE_WRITE)


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(fd)


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step (Linux renameat2); return whether that was possible."""
    try:
        function = _libc().renameat2
    except (AttributeError, OSError):
        return False
    result = function(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_RENAME_EXCHANGE))
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(a))
