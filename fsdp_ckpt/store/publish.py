"""Write a folder so that it is there whole or not at all.

Files are written into a hidden sibling of the destination, made durable, and the sibling is renamed. A run that dies
leaves only the sibling, whose name tells what it is; the next run to the same destination removes it, or takes it up
when asked to resume and when it was making exactly the same thing.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from fsdp_ckpt.errors import DestinationExists, UsageError
from fsdp_ckpt.store.leftovers import (
    LOCK,
    LOCKS,
    NO_LOCKS,
    hold,
    is_at,
    is_staging,
    leftovers,
    open_lock,
    recover,
    remove_if_idle,
    remove_soon,
    set_aside,
    staging_name,
)
from fsdp_ckpt.store.remote.mirrors import materialise
from fsdp_ckpt.store.syscalls import exchange, fsync_folder, write_all

__all__ = ["WHOLE_FILE", "Staging", "current_umask", "place_identity", "resolve_destination"]

WHOLE_FILE = ""
"""Key of the CRC-32 of a whole file in its note, among those of its tensors."""

_LOCK_TRIES = 20
_LOCK_WAIT_S = 0.02


def resolve_destination(path: Path) -> Path:
    """Return the folder to write, with symlinks resolved, so that a link to a folder stays a link."""
    return Path(os.path.realpath(path))


def place_identity(destination: Path) -> str:
    """Return one identity for all saves to a place, whatever they write: the lock under it keeps two writers apart."""
    return hashlib.sha256(os.fsencode(destination)).hexdigest()[:16]


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
        self.path = (destination if self.inside else destination.parent) / staging_name(owner, identity)
        self.created_parents = _missing_parents(destination)
        self._old: tuple[Path, int | None] | None = None
        self._added: set[Path] = set()
        self._folders: set[Path] = set()
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            recover(destination)
            for other in leftovers(destination):
                if other != self.path or not (resume or shared):
                    remove_if_idle(other)
            self._lock = self._acquire(shared=shared)
            if not (resume or shared):
                try:
                    self._clear()
                except BaseException:  # nobody else can give the lock back
                    self.discard()
                    raise
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
                lock = open_lock(self.path)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock, mode)
                if is_at(lock, self.path / LOCK):
                    return lock
            except BlockingIOError:
                time.sleep(_LOCK_WAIT_S)
            except OSError as error:
                if error.errno in NO_LOCKS:
                    return lock
                os.close(lock)
                raise
            os.close(lock)
        raise DestinationExists(f"another process is writing to `{self.destination}`", hint="wait for it, or stop it")

    def _clear(self) -> None:
        """Remove what a dead run left, where nobody could tell that it is dead (no locks)."""
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()

    def file(self, name: str) -> Path:
        """Return where to write a file of the result."""
        return self.path / name

    def add_file(self, name: str, data: bytes, *, durable: bool) -> None:
        """Write a small file of the result; its name may have folders, and begin with a dot."""
        self._added.add(self._made(name))
        self._write(name, data, durable=durable)

    def keep(self, name: str) -> None:
        """Count a file as one of the result whatever its name is: one that begins with a dot, or ends in ``.part``."""
        self._added |= {self.path / name, self.path / name.partition("/")[0]}

    def add_copy(self, name: str, src: Path, *, durable: bool) -> None:
        """Copy a file into the result, in constant memory."""
        path = self._made(name)
        self._added.add(path)
        path.unlink(missing_ok=True)
        with open(materialise(src), "rb") as source, open(path, "xb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            if durable:
                target.flush()
                os.fsync(target.fileno())

    def _made(self, name: str) -> Path:
        """Make the folders that a name has, and return its path."""
        path = self.path / name
        if path.parent != self.path and path.parent not in self._folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(path.parent)
        return path

    def _write(self, name: str, data: bytes, *, durable: bool) -> None:
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
        path = self._made(f"{name}{owner}.part")
        path.unlink(missing_ok=True)
        return path

    def finish_file(self, name: str, part: Path, note: str) -> None:
        """Give a complete file its name, and leave a note for runs that resume."""
        os.rename(part, self.path / name)
        self._write(_note_name(name), note.encode(), durable=False)

    def finished(self, name: str, size: int) -> str | None:
        """Return the note of an earlier run that finished a file of this size, None when there was none."""
        path, note = self.path / name, self.path / _note_name(name)
        if path.is_file() and path.stat().st_size == size and note.is_file():
            return note.read_text()
        return None

    def publish(self, *, durable: bool = True, keep_old: bool = False) -> None:
        """Put the result in its place, replacing what is there if allowed.

        Args:
            durable: Return when the disk has the new names.
            keep_old: Keep what was replaced for ``take_back``, until ``forget_old``.

        Raises:
            DestinationExists: Something appeared at the destination in the meantime.
        """
        self._clear_folders(durable=durable)
        for entry in self.path.iterdir():  # markers, what another run left; locks stay until the end
            if entry.name in LOCKS or entry in self._added:
                continue
            if entry.name.startswith(".") and entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name.startswith(".") or entry.suffix == ".part":
                entry.unlink()
        if durable:
            fsync_folder(self.path)
        try:
            if self.inside:
                self._move_up()
            else:
                self._rename()
                for name in LOCKS:
                    (self.destination / name).unlink(missing_ok=True)
            if durable:
                fsync_folder(self.destination)
                for folder in (self.destination, *self.created_parents):
                    fsync_folder(folder.parent)
        except BaseException:
            self.forget_old()  # where there is an old one, the new one is in its place
            raise
        if not keep_old:
            self.forget_old()
        self._release()

    def _clear_folders(self, *, durable: bool) -> None:
        """Remove notes and unfinished files from the result's own folders, whichever run or process made those."""
        found = {path for pattern in (".*.done", "*.part") for path in self.path.glob(f"*/**/{pattern}")}
        notes = found - self._added
        for path in notes:
            path.unlink()
        if durable:
            for folder in self._folders | {path.parent for path in notes}:
                fsync_folder(folder)

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
        guard = hold(self.destination)
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
                self._old = set_aside(old, owner="" if self.inside else self.destination.name), guard
        finally:
            if guard is not None and self._old is None:
                if is_at(guard, self.destination / LOCK):  # nothing was replaced
                    (self.destination / LOCK).unlink()
                os.close(guard)

    def forget_old(self) -> None:
        """Remove what was replaced."""
        if self._old is not None:
            (folder, guard), self._old = self._old, None
            remove_soon(folder, guard)

    def take_back(self) -> None:
        """Undo ``publish(keep_old=True)``: what was at the destination is there again, and what was published is gone.

        Raises:
            OSError: It cannot be undone.
        """
        published = set_aside(self.destination, owner=self.destination.name)
        if self._old is not None:
            (folder, guard), self._old = self._old, None
            os.rename(folder, self.destination)
            (self.destination / LOCK).unlink(missing_ok=True)
            if guard is not None:
                os.close(guard)
        remove_soon(published, hold(published))

    def _move_up(self) -> None:
        names = sorted(os.listdir(self.path), key=lambda name: name.endswith((".index.json", ".metadata")))
        for name in names:
            if name not in LOCKS:
                os.rename(self.path / name, self.destination / name)
        shutil.rmtree(self.path)

    def discard(self) -> None:
        """Remove what was written, and the parents that were made for it; what was published stays."""
        if self._lock >= 0 and is_at(self._lock, self.path / LOCK):  # else it is another run's by now
            shutil.rmtree(self.path, ignore_errors=True)
        self._release()
        for parent in self.created_parents:
            try:
                parent.rmdir()
            except OSError:
                break

    def has_finished(self) -> bool:
        """Tell whether any file is finished; False also when the folder is gone."""
        return any(self.path.rglob(".*.done"))

    def suspend(self) -> None:
        """Leave what is finished for a run with ``resume``; remove unfinished files unless others may be at them."""
        if not self.shared:
            for part in self.path.rglob("*.part"):
                part.unlink()
        self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, -1  # first, as a signal handler may raise right after closing
        if lock >= 0:
            with suppress(OSError):  # a process that was forked meanwhile has a copy of the descriptor
                fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def _note_name(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}.{file}.done"


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


def _missing_parents(destination: Path) -> list[Path]:
    missing = []
    parent = destination.parent
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    return missing
