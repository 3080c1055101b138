"""Read files that nobody vouches for, by the names that a checkpoint has for them.

Names come from metadata that may be hostile. They have to stay inside the checkpoint, and only regular files are
opened. A bounded number of descriptors is kept open, so that a checkpoint of thousands of files fits ``ulimit -n 256``.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from fsdp_ckpt.errors import CheckpointNotFound, IncompleteCheckpoint, MalformedFile, NotPermitted, PathOutside
from fsdp_ckpt.store.remote.mirrors import mirror_of
from fsdp_ckpt.store.syscalls import read_into

__all__ = ["FileReader", "Folder", "LocalFile", "LocalStore", "OpenFile"]

_OPEN_FILES = 48
_SMALL_BYTES = 128 << 20
_CHECKED_BYTES = 1 << 16
_HEAD_BYTES = 16 << 10
_CONNECTIONS = 8


class OpenFile(Protocol):
    """A file that is open for reading, wherever it lies."""

    @property
    def fd(self) -> int | None:
        """Its descriptor, where it is a local file whose bytes are there."""

    @property
    def size(self) -> int:
        """Its bytes."""

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return ``num_bytes`` bytes from ``start``; fewer only at the file's end."""

    def read_into(self, view: memoryview, position: int) -> int:
        """Fill a view from byte ``position`` on; return how many bytes came, fewer only at the file's end."""

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say what is going to be read soon, as byte ranges: a hint for files that are far away."""


class LocalFile:
    """An open local file; see ``OpenFile``.

    Attributes:
        fd: Its descriptor, which somebody else closes.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def size(self) -> int:
        """Its bytes, now."""
        return os.fstat(self.fd).st_size

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return ``num_bytes`` bytes from ``start``; fewer only at the file's end."""
        pieces, have = [], 0
        while have < num_bytes:
            piece = os.pread(self.fd, min(num_bytes - have, 1 << 30), start + have)
            if not piece:
                break
            pieces.append(piece)
            have += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, view: memoryview, position: int) -> int:
        """Fill a view from byte ``position`` on; return how many bytes came, fewer only at the file's end."""
        return read_into(self.fd, view, position)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: a local disk is near."""


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
        with self.store.opened(self.file) as source:
            if num_bytes > _CHECKED_BYTES and start + num_bytes > source.size:
                raise MalformedFile(f"{self.file}: ends before byte {start + num_bytes}")
            data = source.read(start, num_bytes)
        if len(data) < num_bytes:
            missing = num_bytes - len(data)
            raise MalformedFile(f"{self.file}: ends at byte {start + len(data)}, {missing} bytes short")
        return data


class LocalStore:
    """The files below one folder, or below several that hold one checkpoint between them.

    Several folders are those of nodes that do not share a file system: a file is where it is found first, in the order
    of the folders. Whether what two of them have is the same is for ``layouts.nodes`` to see.

    Args:
        root: The folder, or the folders. Each may be reached through a symlink; the files in it may not lead out of
            it, also not into another one of them, except for the links by which the Hugging Face cache shares blobs
            between snapshots.

    Attributes:
        roots: All folders, at least one.
        root: The first of them.
    """

    def __init__(self, root: Path | Sequence[Path]) -> None:
        self.roots = (root,) if isinstance(root, Path) else tuple(root)
        self.root = self.roots[0]
        self._inside = [_allowed(folder) for folder in self.roots]
        self._open: OrderedDict[str, int] = OrderedDict()
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()
        self._paths: dict[str, str] = {}

    def path(self, file: str) -> str:
        """Return the real path of a file: in the first folder that has it, in the first one when none has.

        Args:
            file: Relative to the root, with ``/``.

        Raises:
            PathOutside: The name leads out of the folder.
        """
        known = self._paths.get(file)
        if known is not None:
            return known
        real = self._real(file, 0)
        if len(self.roots) > 1 and not os.path.lexists(real):
            others = (self._real(file, number) for number in range(1, len(self.roots)))
            real = next((path for path in others if os.path.lexists(path)), real)
        self._paths[file] = real
        return real

    def _real(self, file: str, number: int) -> str:
        """Return a file's real path below one of the roots."""
        parts = file.split("/")
        if not file or file.startswith("/") or "\0" in file or ".." in parts:
            raise PathOutside(f"the file name {file!r:.200} leads out of the checkpoint; nothing was read")
        try:
            real = os.path.realpath(self.roots[number] / file)
        except UnicodeEncodeError:
            raise MalformedFile(f"{file!r:.200} is no file name") from None
        if not any(real == inside or real.startswith(inside.rstrip("/") + "/") for inside in self._inside[number]):
            raise PathOutside(f"{file!r:.200} is a link out of the checkpoint; nothing was read")
        return real

    def below(self, folder: str) -> LocalStore:
        """Return a store of a folder below, which becomes the root: of those roots that have it.

        Args:
            folder: Relative to the root, with ``/``.
        """
        found = [root / folder for root in self.roots if (root / folder).is_dir()]
        return LocalStore(found or self.root / folder)

    def size(self, file: str) -> int | None:
        """Return a file's size in bytes, None when it is not there, or a link to what is not there.

        Raises:
            MalformedFile: The name leads out of the folder, or it is no regular file.
        """
        try:
            status = os.stat(self.path(file))
        except PathOutside:
            links = [root / file for root in self.roots if (root / file).is_symlink()]
            if links and not any(link.exists() for link in links):
                return None
            raise
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

    def prefetch_heads(self, files: Sequence[str]) -> None:
        """Ask for the beginnings of remote files at the same time: all of them are read next; local ones are near."""
        if len(files) < 2 or mirror_of(self.root) is None:
            return

        def fetch(file: str) -> None:
            with self.opened(file) as source:
                source.prefetch([(0, _HEAD_BYTES)])

        with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="fsdp-ckpt-heads") as pool:
            list(pool.map(fetch, files))

    @contextmanager
    def opened(self, file: str) -> Iterator[OpenFile]:
        """Lend an open file.

        Raises:
            IncompleteCheckpoint: It is not there.
        """
        path = self.path(file)
        far = mirror_of(path)
        remote = far.file(path) if far is not None else None
        if remote is not None:
            yield remote
            return
        with self._lock:
            fd = self._open.get(path)
            if fd is None:
                fd = self._open[path] = _open_regular(path, file)
                self._users[fd] = 0
            self._open.move_to_end(path)
            self._users[fd] += 1
            self._close_surplus()
        try:
            yield LocalFile(fd)
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


def _allowed(root: Path) -> list[str]:
    """Return the folders that real paths of files below a root may be in."""
    real = Path(os.path.realpath(root))
    return [str(real), *([str(real.parent.parent / "blobs")] if real.parent.name == "snapshots" else [])]


def _open_regular(path: str, file: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        raise IncompleteCheckpoint(f"{file} is missing") from None
    except PermissionError:
        raise NotPermitted(
            f"{file} cannot be read: permission denied", hint=f"ls -l {shlex.quote(path)}    (whose is it?)"
        ) from None
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
    """A folder below a store's root, listed once; of a store with several roots, what all of them have there.

    Attributes:
        store: The store.
        prefix: The folder relative to the store's root, with a trailing ``/``; ``""`` for the root.
    """

    store: LocalStore
    prefix: str = ""

    @cached_property
    def path(self) -> Path:
        """The folder on disk, below the first root."""
        return self.paths[0]

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The folder on disk, below each root; not all of them need exist."""
        return tuple(root / self.prefix for root in self.store.roots)

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
        missing = 0
        for path in self.paths:
            try:
                listed = _list(path)
            except (FileNotFoundError, NotADirectoryError):
                missing += 1
                continue
            except PermissionError:
                raise CheckpointNotFound(f"`{path}` cannot be read: permission denied") from None
            found = listed | found
        if missing == len(self.paths):
            raise CheckpointNotFound(f"there is no folder `{self.path}`")
        return dict(sorted(found.items()))


def _list(path: Path) -> dict[str, int | None]:
    """Return sizes of regular files, None for folders."""
    found: dict[str, int | None] = {}
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                status = entry.stat()
            except OSError:  # a dangling link
                continue
            if stat.S_ISDIR(status.st_mode):
                found[entry.name] = None
            elif stat.S_ISREG(status.st_mode):
                found[entry.name] = status.st_size
    return found
