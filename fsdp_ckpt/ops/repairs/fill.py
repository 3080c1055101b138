"""Write the new content of a file beside it, in blocks and durable."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from fsdp_ckpt.ops.repairs.actions import Patch
from fsdp_ckpt.run.checksum import BLOCK_BYTES, checksum_range
from fsdp_ckpt.store.local import LocalFile
from fsdp_ckpt.store.publish import current_umask
from fsdp_ckpt.store.syscalls import clone_range, read_into, start_writeback, write_all

__all__ = ["Filled", "fill", "is_unfinished"]

_ENDING = ".fsdp-ckpt-repair"
_WRITEBACK_BYTES = 8 << 20


def is_unfinished(name: str) -> bool:
    """Tell whether a file name is one that we give to a file until it is complete."""
    return name.startswith(".") and name.endswith(_ENDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A file that is complete, under another name.

    Attributes:
        path: Where it is.
        crc32: Of its content.
        owner: Whose it is now, where it could not be given to the owner of the target; empty otherwise.
    """

    path: Path
    crc32: int
    owner: str = ""


def fill(target: Path, content: bytes | Patch) -> Filled:
    """Write a file that is to become ``target``, with its mode and owner.

    Raises:
        OSError: The disk fails, or is full; nothing is left.
    """
    path = target.with_name(f".{os.urandom(8).hex()}{_ENDING}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(path, flags, 0o600)
    try:
        if isinstance(content, bytes):
            write_all(fd, content, 0)
            size = len(content)
        else:
            _copy(content, fd)
            size = content.size
        crc = checksum_range(LocalFile(fd), 0, size)
        like, mode = _like(target)
        owner = _give(fd, like)
        os.fchmod(fd, mode)
        os.fsync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return Filled(path=path, crc32=crc, owner=owner)


def _like(target: Path) -> tuple[os.stat_result | None, int]:
    """Return whose a file is to be, and its mode.

    Root, who mends the checkpoint of somebody else, gives new files to the owner of the folder.
    """
    try:
        status = target.lstat()
    except FileNotFoundError:
        return (target.parent.stat() if os.geteuid() == 0 else None), 0o666 & ~current_umask()
    return status, stat.S_IMODE(status.st_mode)


def _give(fd: int, like: os.stat_result | None) -> str:
    """Give a file to the owner and group of another one; return whose it stays where that is not allowed."""
    mine = os.fstat(fd)
    if like is None or (mine.st_uid, mine.st_gid) == (like.st_uid, like.st_gid):
        return ""
    try:
        os.fchown(fd, like.st_uid, like.st_gid)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return (
            f"belongs to {mine.st_uid}:{mine.st_gid} now: this user may not give it back to {like.st_uid}:{like.st_gid}"
        )
    return ""


def _copy(patch: Patch, fd: int) -> None:
    """Put a file together in blocks; what is replaced is not read from the base, which may not be readable there."""
    base = _open(patch.base)
    try:
        if not clone_range(base, 0, 0, fd, 0):  # 0: to the end
            position = 0
            for start, _, first, last in (*sorted(patch.ranges), (patch.size, patch.base, 0, 0)):
                _stream(base, (position, start), fd, position, patch.base)
                position = max(position, start + last - first)
    finally:
        os.close(base)
    for start, path, first, last in patch.ranges:
        source = _open(path)
        try:
            _stream(source, (first, last), fd, start, path)
        finally:
            os.close(source)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))


def _stream(source: int, span: tuple[int, int], fd: int, position: int, path: Path) -> None:
    start, stop = span
    buffer = memoryview(bytearray(BLOCK_BYTES))
    pending = 0
    for begin in range(start, stop, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, stop - begin)]
        if read_into(source, block, begin) < len(block):
            raise OSError(errno.EIO, "ends before what was to be copied", str(path))
        write_all(fd, block, position + begin - start)
        pending += len(block)
        if pending >= _WRITEBACK_BYTES:
            start_writeback(fd, position, begin - start + len(block))
            pending = 0
