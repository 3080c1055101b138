"""Write a folder so that it is there whole or not at all.

Files are written into a hidden sibling of the destination, made durable, and the sibling is renamed. A run that dies
leaves only the sibling, whose name tells what it is; the next run to the same destination removes it, or takes it up
when asked to resume and when it was making exactly the same thing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fsdp_ckpt.errors import DestinationExists, UsageError
from fsdp_ckpt.store.syscalls import exchange, fsync_folder, write_all

__all__ = [
    "PUBLISH_LOCK", "Staging", "current_umask", "is_at", "is_staging", "leftovers", "recover_replaced",
    "remove_folder", "remove_leftovers", "resolve_destination",
]  # fmt: skip

_MARK = "fsdp-ckpt"
_LOCK = ".fsdp-ckpt-lock"
PUBLISH_LOCK = ".fsdp-ckpt-publish"
"""Held by whoever publishes, where several processes could."""
_LOCKS = (_LOCK, PUBLISH_LOCK)
_LOCK_TRIES = 20
_LOCK_WAIT_S = 0.02
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""What flock says on file systems without locks: there, two writers are not kept apart."""
_STAGING = re.compile(rf"\.(?P<owner>.*)\.{_MARK}-[0-9a-f]+(\.old)?", re.DOTALL)


def resolve_destination(path: Path) -> Path:
    """Return the folder to write, with symlinks resolved, so that a link to a folder stays a link."""
    return Path(os.path.realpath(path))


def is_staging(name: str) -> bool:
    """Tell whether a name is one that we give to folders of unfinished results."""
    return name in _LOCKS or _STAGING.fullmatch(name) is not None


def leftovers(destination: Path) -> Iterator[Path]:
    """Yield folders that earlier runs to this destination left behind, beside it or in it."""
    for folder, owner in ((destination.parent, destination.name), (destination, "")):
        if folder.is_dir():
            for entry in sorted(folder.iterdir()):
                match = _STAGING.fullmatch(entry.name)
                if match and match["owner"] == owner and entry.is_dir() and not entry.is_symlink():
                    yield entry


class Staging:
    """The hidden folder that a run writes into.

    It lies beside the destination and becomes it by one rename. Where that cannot be - the destination is a mount
    point, or its parent is not writable - it lies in the (empty) destination, and its files are moved up, the index
    last.

    Args:
        destination: The folder to publish, links resolved.
        identity: Hexadecimal; equal for runs that would write the same bytes.
        overwrite: Whether a destination with content may be replaced.
        resume: Keep what an earlier run with this identity finished.
        shared: Several processes fill it together (one share each); nobody clears it.
        into: Put the files into the destination as it is: files of the same name are replaced, one by one.

    Raises:
        DestinationExists: Another run is writing to the destination, or it cannot be replaced in one step.
        UsageError: It cannot be written to.
    """

    def __init__(
        self,
        destination: Path,
        identity: str,
        *,
        overwrite: bool = False,
        resume: bool = False,
        shared: bool = False,
        into: bool = False,
    ) -> None:
        self.destination = destination
        self.overwrite = overwrite
        self.shared = shared
        self.inside = destination.is_dir() and (
            into or os.path.ismount(destination) or not os.access(destination.parent, os.W_OK)
        )
        if self.inside and not into and any(not is_staging(entry.name) for entry in destination.iterdir()):
            raise DestinationExists(
                f"`{destination}` is a mount point or its parent is read-only: it cannot be replaced in one step",
                hint=f"use a new folder in it, such as {destination / 'merged'}",
            )
        owner = "" if self.inside else destination.name
        self.path = (destination if self.inside else destination.parent) / f".{owner}.{_MARK}-{identity}"
        self.created_parents = _missing_parents(destination)
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            _recover(destination)
            for other in leftovers(destination):
                if other != self.path or not (resume or shared):
                    _remove_if_idle(other)
            self._lock = self._acquire(shared=shared)
        except DestinationExists:
            raise
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
                raise
            raise UsageError(
                f"cannot write to `{destination.parent}`: {error.strerror}", hint="choose another output folder"
            ) from None

    def _acquire(self, *, shared: bool) -> int:
        """Make the folder and lock it; another run may be removing it as a leftover at this moment."""
        mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        for _ in range(_LOCK_TRIES):
            with suppress(FileExistsError):
                self.path.mkdir()
            if self.path.is_symlink():
                raise DestinationExists(f"`{self.path}` is a link; nothing was written", hint=f"remove {self.path}")
            try:
                lock = _open_lock(self.path)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock, mode)
                if is_at(lock, self.path / _LOCK):
                    return lock
            except BlockingIOError:
                time.sleep(_LOCK_WAIT_S)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return lock
                os.close(lock)
                raise
            os.close(lock)
        raise DestinationExists(f"another process is writing to `{self.destination}`", hint="wait for it, or stop it")

    def file(self, name: str) -> Path:
        """Return where to write a file of the result."""
        return self.path / name

    def add_file(self, name: str, data: bytes, *, durable: bool) -> None:
        """Write a small file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        fd = os.open(self.path / name, flags, 0o666 & ~current_umask())
        try:
            write_all(fd, data, 0)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def part_file(self, name: str) -> Path:
        """Return where to write a file until it is complete; processes that share the folder get different places."""
        owner = f".{os.getpid()}-{os.urandom(4).hex()}" if self.shared else ""
        path = self.path / f"{name}{owner}.part"
        path.unlink(missing_ok=True)
        return path

    def finish_file(self, name: str, part: Path, note: str) -> None:
        """Give a complete file its name, and leave a note for runs that resume."""
        os.rename(part, self.path / name)
        self.add_file(f".{name}.done", note.encode(), durable=False)

    def finished(self, name: str, size: int) -> str | None:
        """Return the note of an earlier run that finished a file of this size, None when there was none."""
        path, note = self.path / name, self.path / f".{name}.done"
        if path.is_file() and path.stat().st_size == size and note.is_file():
            return note.read_text()
        return None

    def publish(self, *, durable: bool = True) -> None:
        """Put the result in its place, replacing what is there if allowed.

        Raises:
            DestinationExists: Something appeared at the destination in the meantime.
        """
        for entry in self.path.iterdir():  # markers, what another run left; locks stay until the end
            if entry.name in _LOCKS:
                continue
            if entry.name.startswith(".") and entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name.startswith(".") or entry.suffix == ".part":
                entry.unlink()
        if durable:
            fsync_folder(self.path)
        if self.inside:
            self._move_up()
        else:
            self._rename()
            for name in _LOCKS:
                (self.destination / name).unlink(missing_ok=True)
        if durable:
            fsync_folder(self.destination)
            for folder in (self.destination, *self.created_parents):
                fsync_folder(folder.parent)
        self._release()

    def _rename(self) -> None:
        os.chmod(self.path, 0o777 & ~current_umask())
        try:
            os.rename(self.path, self.destination)  # also over an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if not self.overwrite:
                raise DestinationExists(f"`{self.destination}` appeared while it was being written") from None
            self._replace()

    def _replace(self) -> None:
        # What is set aside must look busy to others until it has a name that nobody else uses.
        guard = _hold(self.destination)
        try:
            old = self.path.with_name(self.path.name + ".old")
            if exchange(self.path, self.destination):
                old = self.path
            else:
                os.rename(self.destination, old)
                try:
                    os.rename(self.path, self.destination)
                except OSError:
                    os.rename(old, self.destination)
                    raise
            with suppress(OSError):  # the result is in place; the next run removes what is left
                remove_folder(old, owner="" if self.inside else self.destination.name)
        finally:
            if guard is not None:
                if is_at(guard, self.destination / _LOCK):  # nothing was replaced
                    (self.destination / _LOCK).unlink()
                os.close(guard)

    def _move_up(self) -> None:
        names = sorted(os.listdir(self.path), key=lambda name: name.endswith(".index.json"))
        for name in names:
            if name not in _LOCKS:
                os.rename(self.path / name, self.destination / name)
        shutil.rmtree(self.path)

    def discard(self) -> None:
        """Remove what was written, and the parents that were made for it; what was published stays."""
        if self._lock >= 0 and is_at(self._lock, self.path / _LOCK):  # else it is another run's by now
            shutil.rmtree(self.path, ignore_errors=True)
        self._release()
        for parent in self.created_parents:
            try:
                parent.rmdir()
            except OSError:
                break

    def has_finished(self) -> bool:
        """Tell whether any file is finished; False also when the folder is gone."""
        return any(self.path.glob(".*.done"))

    def suspend(self) -> None:
        """Leave what is finished for a run with ``resume``; remove unfinished files unless others may be at them."""
        if not self.shared:
            for part in self.path.glob("*.part"):
                part.unlink()
        self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, -1  # first, as a signal handler may raise right after closing
        if lock >= 0:
            os.close(lock)


def remove_leftovers(folder: Path) -> None:
    """Remove what dead runs left in a folder, whatever their destinations were called."""
    recover_replaced(folder)
    for entry in sorted(folder.iterdir()):
        if _STAGING.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            _remove_if_idle(entry)


def recover_replaced(folder: Path) -> None:
    """Put back what runs in a folder had moved away, when they died before the new one was in its place.

    That can be where two names cannot be exchanged in one step (NFS, Lustre). What cannot be renamed is left.
    """
    for entry in sorted(folder.iterdir()):
        match = _STAGING.fullmatch(entry.name)
        if match and match["owner"] and entry.suffix == ".old" and entry.is_dir() and not entry.is_symlink():
            with suppress(OSError):
                _put_back(entry, folder / match["owner"])


def remove_folder(path: Path, *, owner: str | None = None) -> bool:
    """Remove a folder so that nobody ever sees half of it: it gets a hidden name in one step, then its content goes.

    Args:
        path: A folder, and no link to one.
        owner: Name of the destination that it belongs to; None for its own.

    Returns:
        Whether all of it is gone. What is not (files that are open on NFS, say) is a leftover, which the next run to
        this place, or ``remove_leftovers``, removes.

    Raises:
        OSError: It could not be renamed, and is as it was. A link raises NotADirectoryError.
    """
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "no folder, or a link to one", str(path))
    gone = path.with_name(f".{path.name if owner is None else owner}.{_MARK}-{os.urandom(8).hex()}")
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)
    return not gone.exists()


def current_umask() -> int:
    """Return the process's umask without changing it."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _recover(destination: Path) -> None:
    """Put back what a run moved away before it died, on systems that cannot exchange two names in one step."""
    for other in leftovers(destination):
        if other.suffix == ".old":
            _put_back(other, destination)


def _put_back(old: Path, destination: Path) -> None:
    """Give a folder its name back, when nothing has the name and the run that took it away is dead."""
    guard = None if destination.exists() else _hold(old)
    if guard is None:
        return
    try:
        if not destination.exists():
            os.rename(old, destination)
            (destination / _LOCK).unlink(missing_ok=True)
    finally:
        os.close(guard)


def _hold(folder: Path) -> int | None:
    """Lock a folder that is to be moved or removed; None where another one holds it, or nobody can lock here."""
    try:
        lock = _open_lock(folder)
    except OSError:  # not ours to write into
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(lock)
            return None
    return lock


def _missing_parents(destination: Path) -> list[Path]:
    missing = []
    parent = destination.parent
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    return missing


def _open_lock(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    return os.open(folder / _LOCK, flags, 0o600)


def is_at(fd: int, path: Path) -> bool:
    """Tell whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove_if_idle(path: Path) -> None:
    try:
        lock = _open_lock(path)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(lock, path / _LOCK):
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        if not isinstance(error, BlockingIOError) and error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(lock)
