"""Read local files that nobody vouches for.

Names come from metadata that may be hostile. They have to stay inside the checkpoint, and only regular files are
opened. A bounded number of descriptors is kept open, so that a checkpoint of thousands of files fits ``ulimit -n 256``.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fsdp_ckpt.errors import CheckpointNotFound, IncompleteCheckpoint, MalformedFile

__all__ = ["FileReader", "Folder", "LocalStore"]

_OPEN_FILES = 48
_SMALL_BYTES = 128 << 20
_CHECKED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads one file of a store; see ``codec.ReadAt``."""

    store: LocalStore
    file: str

    def __call__(self, start: int, num_bytes: int, /) -> bytes:
        """Return exactly ``num_bytes`` bytes from ``start``.

        Raises:
            MalformedFile: The file is shorter.
        """
        with self.store.descriptor(self.file) as fd:
            if num_bytes > _CHECKED_BYTES and start + num_bytes > os.fstat(fd).st_size:
                raise MalformedFile(f"{self.file}: ends before byte {start + num_bytes}")
            pieces, have = [], 0
            while have < num_bytes:
                piece = os.pread(fd, min(num_bytes - have, 1 << 30), start + have)
                if not piece:
                    raise MalformedFile(f"{self.file}: ends at byte {start + have}, {num_bytes - have} bytes short")
                pieces.append(piece)
                have += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class LocalStore:
    """The files below one folder.

    Args:
        root: The folder. It may be reached through a symlink; the files in it may not lead out of it, except for the
            links by which the Hugging Face cache shares blobs between snapshots.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        real = Path(os.path.realpath(root))
        self._inside = [str(real)]
        if real.parent.name == "snapshots":
            self._inside.append(str(real.parent.parent / "blobs"))
        self._open: OrderedDict[str, int] = OrderedDict()
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()
        self._paths: dict[str, str] = {}

    def path(self, file: str) -> str:
        """Return the real path of a file.

        Args:
            file: Relative to the root, with ``/``.

        Raises:
            MalformedFile: The name leads out of the folder.
        """
        known = self._paths.get(file)
        if known is not None:
            return known
        parts = file.split("/")
        if not file or file.startswith("/") or "\0" in file or ".." in parts:
            raise MalformedFile(f"the file name {file!r:.200} leads out of the checkpoint; nothing was read")
        try:
            real = os.path.realpath(self.root / file)
        except UnicodeEncodeError:
            raise MalformedFile(f"{file!r:.200} is no file name") from None
        if not any(real == inside or real.startswith(inside.rstrip("/") + "/") for inside in self._inside):
            raise MalformedFile(f"{file!r:.200} is a link out of the checkpoint; nothing was read")
        self._paths[file] = real
        return real

    def size(self, file: str) -> int | None:
        """Return a file's size in bytes, None when it is not there.

        Raises:
            MalformedFile: The name leads out of the folder, or it is no regular file.
        """
        try:
            status = os.stat(self.path(file))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
                raise MalformedFile(f"{file!r:.200} is no file name: {error.strerror}") from None
            raise
        if not stat.S_ISREG(status.st_mode):
            raise MalformedFile(f"{file!r:.200} is no regular file")
        return status.st_size

    def reader(self, file: str) -> FileReader:
        """Return a reader for a file; nothing is opened yet."""
        return FileReader(self, file)

    def read(self, file: str, *, limit_bytes: int = _SMALL_BYTES) -> bytes:
        """Return a whole file.

        Args:
            file: Its name.
            limit_bytes: A larger one is refused rather than taken into memory.

        Raises:
            IncompleteCheckpoint: It is not there.
            MalformedFile: It is larger than the limit.
        """
        size = self.size(file)
        if size is None:
            raise IncompleteCheckpoint(f"{file} is missing")
        if size > limit_bytes:
            raise MalformedFile(f"{file} has {size} bytes, far more than such a file needs")
        return self.reader(file)(0, size)

    @contextmanager
    def descriptor(self, file: str) -> Iterator[int]:
        """Lend an open descriptor of a file.

        Raises:
            IncompleteCheckpoint: It is not there.
        """
        path = self.path(file)
        with self._lock:
            fd = self._open.get(path)
            if fd is None:
                fd = self._open[path] = _open_regular(path, file)
                self._users[fd] = 0
            self._open.move_to_end(path)
            self._users[fd] += 1
            self._close_surplus()
        try:
            yield fd
        finally:
            with self._lock:
                self._users[fd] -= 1

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close all descriptors."""
        with self._lock:
            for fd in self._open.values():
                os.close(fd)
            self._open.clear()
            self._users.clear()

    def _close_surplus(self) -> None:
        for path, fd in list(self._open.items()):
            if len(self._open) <= _OPEN_FILES:
                break
            if not self._users[fd]:
                del self._open[path], self._users[fd]
                os.close(fd)


def _open_regular(path: str, file: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        raise IncompleteCheckpoint(f"{file} is missing") from None
    except PermissionError:
        raise CheckpointNotFound(f"{file} cannot be read: permission denied") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO):
            raise MalformedFile(f"{file!r:.200} is no regular file: {error.strerror}") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise MalformedFile(f"{file} is no regular file")
    return fd


@dataclass(frozen=True)
class Folder:
    """A folder below a store's root, listed once.

    Attributes:
        store: The store.
        prefix: The folder relative to the store's root, with a trailing ``/``; ``""`` for the root.
    """

    store: LocalStore
    prefix: str = ""

    @cached_property
    def path(self) -> Path:
        """The folder on disk."""
        return self.store.root / self.prefix

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Regular files (links resolved) by name, with their sizes in bytes, sorted."""
        return {name: size for name, size in self._entries.items() if size is not None}

    @cached_property
    def folders(self) -> frozenset[str]:
        """Names of sub-folders."""
        return frozenset(name for name, size in self._entries.items() if size is None)

    def sub(self, name: str) -> Folder:
        """Return a sub-folder."""
        return Folder(self.store, f"{self.prefix}{name}/")

    @cached_property
    def _entries(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    try:
                        status = entry.stat()
                    except OSError:  # a dangling link
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        found[entry.name] = None
                    elif stat.S_ISREG(status.st_mode):
                        found[entry.name] = status.st_size
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointNotFound(f"there is no folder `{self.path}`") from None
        except PermissionError:
            raise CheckpointNotFound(f"`{self.path}` cannot be read: permission denied") from None
        return dict(sorted(found.items()))
