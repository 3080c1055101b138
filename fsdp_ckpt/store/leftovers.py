"""What runs leave beside their destinations: unfinished folders, and old ones that were set aside to be removed.

Their names tell whose they are, and a lock in each tells whether somebody is still at it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = [
    "BACKUP", "LOCK", "LOCKS", "NO_LOCKS", "PUBLISH_LOCK", "backup_number", "hold", "is_at", "is_backup", "is_removing",
    "is_staging",
    "leftovers", "open_lock", "recover", "recover_replaced", "remove_folder", "remove_folder_soon", "remove_if_idle",
    "remove_leftovers", "remove_soon", "removing_mark", "saving_mark", "set_aside", "staging_name", "unfinished_marks",
]  # fmt: skip

LOCK = ".fsdp-ckpt-lock"
PUBLISH_LOCK = ".fsdp-ckpt-publish"
"""Held by whoever publishes, where several processes could."""
LOCKS = (LOCK, PUBLISH_LOCK)
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""What flock says on file systems without locks: there, two writers are not kept apart."""

BACKUP = ".before-repair-"
"""With a number, the name of the folder in a checkpoint that keeps what a repair replaced."""

_MARK = "fsdp-ckpt"
_STAGING = re.compile(rf"\.(?P<owner>.*)\.{_MARK}-[0-9a-f]+(\.old)?", re.DOTALL)
_UNFINISHED = re.compile(rf"\.(saving|removing)\.{_MARK}-[0-9a-f]+")
_BACKUP = re.compile(re.escape(BACKUP) + r"([0-9]{1,6})")
_MUCH_BYTES = 256 << 20
"""From this size on a folder is removed in a thread."""


def staging_name(owner: str, identity: str) -> str:
    """Return the name of a folder for unfinished work.

    Args:
        owner: Name of the destination; empty when the folder is in it.
        identity: Hexadecimal.
    """
    return f".{owner}.{_MARK}-{identity}"


def is_staging(name: str) -> bool:
    """Tell whether a name is one that we give to folders of unfinished results."""
    return name in LOCKS or _STAGING.fullmatch(name) is not None


def saving_mark(save_id: str) -> str:
    """Return the name of the object that stands in a remote checkpoint until it is whole.

    Args:
        save_id: Hexadecimal.
    """
    return staging_name("saving", save_id)


def removing_mark(save_id: str) -> str:
    """Return the name of the object that stands in a remote checkpoint that is being removed."""
    return staging_name("removing", save_id)


def is_removing(name: str) -> bool:
    """Tell whether a name is that of an object that ``removing_mark`` names."""
    return _UNFINISHED.fullmatch(name) is not None and name.startswith(".removing.")


def unfinished_marks(names: Iterable[str]) -> list[str]:
    """Return those of the names in a folder which say that it is not whole unless it has a manifest."""
    return [name for name in names if _UNFINISHED.fullmatch(name)]


def is_backup(name: str) -> bool:
    """Tell whether a name in a checkpoint is that of the folder that keeps what a repair replaced."""
    return backup_number(name) is not None


def backup_number(name: str) -> int | None:
    """Return the number of a folder that keeps what a repair replaced; None for any other name."""
    match = _BACKUP.fullmatch(name)
    return int(match[1]) if match else None


def leftovers(destination: Path) -> Iterator[Path]:
    """Yield folders that earlier runs to this destination left behind, beside it or in it."""
    for folder, owner in ((destination.parent, destination.name), (destination, "")):
        if folder.is_dir():
            for entry in sorted(folder.iterdir()):
                match = _STAGING.fullmatch(entry.name)
                if match and match["owner"] == owner and entry.is_dir() and not entry.is_symlink():
                    yield entry


def remove_leftovers(folder: Path) -> None:
    """Remove what dead runs left in a folder, whatever their destinations were called.

    What was left on purpose stays: files that a merge has finished, for a run with ``--resume``.
    """
    recover_replaced(folder)
    for entry in sorted(folder.iterdir()):
        is_left = _STAGING.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
        if is_left and not any(entry.glob(".*.done")):
            remove_if_idle(entry)


def recover_replaced(folder: Path) -> None:
    """Put back what runs in a folder had moved away, when they died before the new one was in its place.

    That can be where two names cannot be exchanged in one step (NFS, Lustre). What cannot be renamed is left.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError:  # a folder that may be entered, but not listed
        return
    for entry in entries:
        match = _STAGING.fullmatch(entry.name)
        if match and match["owner"] and entry.suffix == ".old" and entry.is_dir() and not entry.is_symlink():
            with suppress(OSError):
                _put_back(entry, folder / match["owner"])


def remove_folder(path: Path) -> bool:
    """Remove a folder so that nobody ever sees half of it: it gets a hidden name in one step, then its content goes.

    Args:
        path: A folder, and no link to one.

    Returns:
        Whether all of it is gone. What is not (files that are open on NFS, say) is a leftover, which the next run to
        this place, or ``remove_leftovers``, removes.

    Raises:
        OSError: It could not be renamed, and is as it was. A link raises NotADirectoryError.
    """
    gone = set_aside(path, owner=path.name)
    shutil.rmtree(gone, ignore_errors=True)
    return not gone.exists()


def remove_folder_soon(path: Path) -> None:
    """Do the same, but let a thread remove the content where there is much of it. The process waits for it at its end.

    Raises:
        OSError: As ``remove_folder``.
    """
    gone = set_aside(path, owner=path.name)
    remove_soon(gone, hold(gone))


def set_aside(path: Path, *, owner: str) -> Path:
    """Give a folder a hidden name that nobody else uses, and that tells whose it was; return it."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "no folder, or a link to one", str(path))
    gone = path.with_name(staging_name(owner, os.urandom(8).hex()))
    os.rename(path, gone)
    return gone


def remove_soon(folder: Path, guard: int | None) -> None:
    """Remove a folder, in a thread where that takes long: file systems take time for every gigabyte.

    Args:
        folder: Set aside.
        guard: The lock on it, which keeps others from removing it as well; closed at the end.
    """

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if guard is not None:
            os.close(guard)

    num_bytes = 0
    with suppress(OSError):
        num_bytes = sum(file.lstat().st_size for file in folder.rglob("*"))
    if num_bytes >= _MUCH_BYTES:
        with suppress(RuntimeError):  # no thread can be started any more
            threading.Thread(target=remove, name=f"fsdp-ckpt removing {folder.name}").start()
            return
    remove()


def recover(destination: Path) -> None:
    """Put back what a run moved away before it died, on systems that cannot exchange two names in one step."""
    for other in leftovers(destination):
        if other.suffix == ".old":
            _put_back(other, destination)


def _put_back(old: Path, destination: Path) -> None:
    """Give a folder its name back, when nothing has the name and the run that took it away is dead."""
    guard = None if destination.exists() else hold(old)
    if guard is None:
        return
    try:
        if not destination.exists():
            os.rename(old, destination)
            (destination / LOCK).unlink(missing_ok=True)
    finally:
        os.close(guard)


def hold(folder: Path) -> int | None:
    """Lock a folder that is to be moved or removed; None where another one holds it, or it is not ours."""
    try:
        lock = open_lock(folder)
    except OSError:  # not ours to write into
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            os.close(lock)
            return None
    return lock


def open_lock(folder: Path) -> int:
    """Open a folder's lock, made where it is not there.

    Raises:
        OSError: The folder is gone, or not ours to write into.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    return os.open(folder / LOCK, flags, 0o600)


def is_at(fd: int, path: Path) -> bool:
    """Tell whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def remove_if_idle(path: Path) -> None:
    """Remove a folder of unfinished work, unless somebody is still at it."""
    try:
        lock = open_lock(path)
    except (FileNotFoundError, PermissionError):  # gone, or somebody else's
        return
    except OSError as error:
        if error.errno == errno.EROFS:
            return
        raise
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(lock, path / LOCK):
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        if not isinstance(error, BlockingIOError) and error.errno not in NO_LOCKS:
            raise
    finally:
        os.close(lock)
