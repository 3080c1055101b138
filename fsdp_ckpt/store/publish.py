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
from collections.abc import Iterator
from pathlib import Path

from fsdp_ckpt.errors import DestinationExists
from fsdp_ckpt.store.syscalls import exchange, fsync_folder

__all__ = ["Staging", "current_umask", "leftovers", "resolve_destination"]

_MARK = "fsdp-ckpt"
_LOCK = ".lock"


def resolve_destination(path: Path) -> Path:
    """Return the folder to write, with symlinks resolved, so that a link to a folder stays a link."""
    return Path(os.path.realpath(path))


def _staging_path(destination: Path, identity: str) -> Path:
    return destination.with_name(f".{destination.name}.{_MARK}-{identity}")


def leftovers(destination: Path) -> Iterator[Path]:
    """Yield siblings that earlier runs to this destination left behind."""
    pattern = re.compile(rf"\.{re.escape(destination.name)}\.{_MARK}-[0-9a-f]+(\.old)?")
    if destination.parent.is_dir():
        for entry in sorted(destination.parent.iterdir()):
            if pattern.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
                yield entry


class Staging:
    """The hidden sibling that a run writes into.

    Args:
        destination: The folder to publish, links resolved.
        identity: Hexadecimal; equal for runs that would write the same bytes.
        overwrite: Whether a destination with content may be replaced.
        resume: Keep what an earlier run with this identity finished.
        shared: Several processes fill it together (one share each); nobody clears it.

    Raises:
        DestinationExists: The destination has content and ``overwrite`` is off, or another run is writing to it.
    """

    def __init__(
        self, destination: Path, identity: str, *, overwrite: bool = False, resume: bool = False, shared: bool = False
    ) -> None:
        self.destination = destination
        self.overwrite = overwrite
        self.path = _staging_path(destination, identity)
        self.created_parents = _missing_parents(destination)
        destination.parent.mkdir(parents=True, exist_ok=True)
        for other in leftovers(destination):
            if other != self.path:
                _remove_if_idle(other)
        if self.path.exists() and not resume and not shared:
            _remove_if_idle(self.path)
        self.path.mkdir(exist_ok=True)
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise DestinationExists(
                f"another process is writing to `{destination}`", hint="wait for it, or stop it"
            ) from None

    def file(self, name: str) -> Path:
        """Return where to write a file of the result."""
        return self.path / name

    def finish_file(self, name: str) -> None:
        """Give a file that was written as ``NAME.part`` its name."""
        os.rename(self.path / f"{name}.part", self.path / name)

    def finished(self, name: str, size: int) -> bool:
        """Tell whether an earlier run finished a file of this size."""
        path = self.path / name
        return path.is_file() and path.stat().st_size == size

    def publish(self, *, durable: bool = True) -> None:
        """Rename the sibling to the destination, replacing what is there if allowed.

        Raises:
            DestinationExists: Something appeared at the destination in the meantime.
        """
        (self.path / _LOCK).unlink(missing_ok=True)
        for part in self.path.glob("*.part"):
            part.unlink()
        os.chmod(self.path, 0o777 & ~current_umask())
        if durable:
            fsync_folder(self.path)
        try:
            os.rename(self.path, self.destination)  # also over an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if not self.overwrite:
                raise DestinationExists(f"`{self.destination}` appeared while it was being written") from None
            self._replace()
        if durable:
            fsync_folder(self.destination.parent)
        self._release()

    def _replace(self) -> None:
        old = self.path.with_name(self.path.name + ".old")
        if exchange(self.path, self.destination):
            old = self.path
        else:
            os.rename(self.destination, old)
            os.rename(self.path, self.destination)
        shutil.rmtree(old)

    def discard(self) -> None:
        """Remove what was written, and the parents that were made for it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()
        for parent in self.created_parents:
            try:
                parent.rmdir()
            except OSError:
                break

    def suspend(self) -> None:
        """Leave what is finished for a run with ``resume``; remove unfinished files."""
        for part in self.path.glob("*.part"):
            part.unlink()
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


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


def _remove_if_idle(path: Path) -> None:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)
