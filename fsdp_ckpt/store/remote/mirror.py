"""Show what lies below a URL as a local folder: the same names and sizes, without the bytes.

Layouts are recognised by names, sizes and a few small reads. A mirror gives them the first two: a temporary folder with
empty (sparse) files, made from one listing. Bytes come by range requests when a ``LocalStore`` below the mirror reads.
Whoever opens a file of it in another way has to ``materialise`` it first.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fsdp_ckpt.errors import CheckpointNotFound, MalformedFile, PathOutside, Unreachable
from fsdp_ckpt.store.remote.attempts import attempt
from fsdp_ckpt.store.remote.files import Held, RangeCache, RemoteFile
from fsdp_ckpt.store.remote.mirrors import add_mirror, close_mirrors
from fsdp_ckpt.store.remote.urls import open_file_system, redact, scheme_of
from fsdp_ckpt.store.remote.versions import at_commit, read_unchanged
from fsdp_ckpt.store.temporary import make_temporary, remove_temporary

__all__ = ["Listing", "Mirror", "list_files", "mirror"]

Listing = Mapping[str, Mapping[str, Any]]
"""Files by their path as the URL has it, with ``size`` and, where known, ``mtime`` and ``ETag``; with ``at``, the path
in the file system, where that is another one."""

_MAX_FILES = 1_000_000
_COPY_BYTES = 4 << 20


class Mirror:
    """A local folder that stands for a URL.

    Attributes:
        url: The URL, without credentials.
        scheme: Its scheme.
        top: The temporary folder; below it stand the URL's path components as folders.
        path: The folder or file in it that the URL names.
        cache: What was fetched.
    """

    def __init__(self, url: str, fs: Any, base: str, listing: Listing | None = None) -> None:
        self.url = redact(url).rstrip("/")
        self.top = make_temporary("mirror")
        self.scheme = scheme_of(url) or ""
        self._fs = fs
        self._is_forked = False
        self._remote: dict[str, tuple[str, int]] = {}
        self._tags: dict[str, str] = {}
        self._whole: set[str] = set()
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()
        self.cache = RangeCache(self._fetch, self.url)
        self.path = self.top / base
        try:
            if listing is None:
                self._make(base)
            else:
                self._take(base, listing)
        except BaseException:
            self.close()
            raise

    def _take(self, base: str, listing: Listing) -> None:
        if not any(remote == base for remote in listing):
            self.path.mkdir(parents=True, exist_ok=True)
        for remote, facts in listing.items():
            self._add(remote, facts)

    def listing(self, path: Path) -> Listing:
        """Return what is known of a file or folder in the mirror and of the files beside it, for another mirror."""
        base = path.relative_to(self.top).as_posix()
        parent = base.rpartition("/")[0]
        names = {local[len(str(self.top)) + 1 :]: local for local in self._remote}
        found: dict[str, Mapping[str, Any]] = {}
        for name, local in names.items():
            if name.startswith(f"{base}/") or name.rpartition("/")[0] == parent:
                at, size = self._remote[local]
                found[name] = {"size": size, "mtime": os.stat(local).st_mtime, "at": at, "ETag": self._tags.get(at)}
        return found

    def _make(self, base: str) -> None:
        top, at = at_commit(self._fs, base, self.url) if self.scheme == "hf" else ("", "")
        found: Listing = {}
        with suppress(FileNotFoundError):  # not even the bucket is there
            found = _renamed(attempt(lambda: list_files(self._fs, at + base[len(top) :]), url=self.url), at, top)
        if not found:
            raise Unreachable(f"`{self.url}` does not exist, or is empty", hint="check the name")
        if len(found) > _MAX_FILES:
            raise MalformedFile(f"`{self.url}` holds {len(found)} files, more than {_MAX_FILES}")
        is_file = base in found
        if not is_file:
            self.path.mkdir(parents=True, exist_ok=True)
        for remote, facts in found.items():
            self._add(remote, facts)
        parent = base.rpartition("/")[0]
        if parent and parent.startswith(top):
            # Beside a checkpoint lie its configuration, and above one of its parts its manifest.
            with suppress(Unreachable, FileNotFoundError):
                beside = attempt(lambda: _files_in(self._fs, at + parent[len(top) :]), url=self.url)
                for remote, facts in _renamed(beside, at, top).items():
                    if remote not in found:
                        with suppress(MalformedFile, PathOutside):  # odd names of others are no matter of ours
                            self._add(remote, facts)

    def _add(self, remote: str, facts: Mapping[str, Any]) -> None:
        size = int(facts.get("size") or 0)
        parts = remote.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise PathOutside(f"the name {remote!r:.200} leads out of `{self.url}`; nothing was read")
        local = self.top / remote
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            with open(local, "xb") as file:
                file.truncate(size)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise MalformedFile(f"`{self.url}`: {remote!r:.200} is both a file and a folder") from None
        except OSError as error:
            raise MalformedFile(f"`{self.url}`: {remote!r:.200} is no file name: {error.strerror}") from None
        when = _modified(facts)
        if when is not None:
            os.utime(local, (when, when))
        at = str(facts.get("at", remote))
        self._remote[str(local)] = (at, size)
        if isinstance(facts.get("ETag"), str):
            self._tags[at] = facts["ETag"]

    def begin_anew(self) -> None:
        """Go on in a forked process, which has threads and connections of its own."""
        self._lock = threading.Lock()
        self.cache.begin_anew()
        self._is_forked = True

    def _fetch(self, path: str, start: int, stop: int) -> bytes:
        if self._is_forked:
            self._fs, _ = open_file_system(self.url)
            self._is_forked = False
        if self.scheme == "hf":
            with self._fs.open(path, "rb", cache_type="none") as file:
                return bytes(file._fetch_range(start, stop))
        if self.scheme == "s3" and path in self._tags:
            return read_unchanged(self._fs, path, start, stop, self._tags[path])
        return bytes(self._fs.cat_file(path, start=start, end=stop))

    def file(self, path: str) -> RemoteFile | None:
        """Return the remote file behind a path in the mirror, None where there is none or it is whole already."""
        known = self._remote.get(path)
        return None if known is None or path in self._whole else RemoteFile(self.cache, *known, self._held.get(path))

    def hold(self, path: str, start: int, stop: int) -> None:
        """Fetch a range of a file to its place on the local disk, where it is read from then on.

        Raises:
            OSError: The disk is full, say; the range is fetched again when it is read.
        """
        known = self._remote.get(path)
        if known is None or path in self._whole:
            return
        data = self.cache.request(known[0], start, stop)
        with self._lock:
            held = self._held.setdefault(path, Held(path))
        held.write(start, data)

    def materialise(self, path: str) -> None:
        """Fetch a file as a whole, once."""
        with self._lock:
            source = self.file(path)
            if source is None:
                return
            status = os.stat(path)
            with open(path, "r+b") as target:
                target.writelines(source.read(start, _COPY_BYTES) for start in range(0, source.size, _COPY_BYTES))
            os.utime(path, (status.st_atime, status.st_mtime))
            self._whole.add(path)

    def shown(self, path: Path) -> str:
        """Return the URL of a path in the mirror."""
        return f"{self.scheme}://{path.relative_to(self.top).as_posix()}"

    def close(self) -> None:
        """Remove the folder."""
        self.cache.close()
        remove_temporary(self.top)


def mirror(url: str, listing: Listing | None = None) -> Mirror:
    """List what lies below a URL, and make a mirror of it. It goes when the process ends.

    Args:
        url: The URL.
        listing: What lies there, by the path in the file system, where that is known already; see ``Mirror.listing``.

    Raises:
        UsageError: The scheme is unknown, or its package is not installed.
        Unreachable: There is nothing, or it cannot be listed.
        CheckpointNotFound: The URL names nothing.
        PathOutside: A name would lead out of the folder.
    """
    fs, base = open_file_system(url)
    if not base:
        raise CheckpointNotFound(f"`{redact(url)}` names no bucket and no repository")
    made = Mirror(url, fs, base, listing)
    add_mirror(made)
    return made


def list_files(fs: Any, base: str) -> dict[str, Mapping[str, Any]]:
    """Return the files below a path, or the file that it is, with what the listing says of them."""
    try:
        found = fs.find(base, detail=True)
    except NotADirectoryError:
        found = {}
    files = {name.strip("/"): facts for name, facts in found.items() if _is_file(name, facts)}
    if files:
        return files
    try:
        facts = fs.info(base)
    except FileNotFoundError:
        return {}
    return {base: facts} if facts.get("type") == "file" else {}


def _renamed(found: Mapping[str, Mapping[str, Any]], at: str, top: str) -> Listing:
    """Return a listing by the names that the URL has for the files."""
    if at == top:
        return found
    return {top + name[len(at) :]: {**facts, "at": name} for name, facts in found.items()}


def _files_in(fs: Any, folder: str) -> dict[str, Mapping[str, Any]]:
    listed = fs.ls(folder, detail=True)
    return {facts["name"].strip("/"): facts for facts in listed if _is_file(facts["name"], facts)}


def _is_file(name: str, facts: Mapping[str, Any]) -> bool:
    return facts.get("type") == "file" and not name.endswith("/")


def _modified(facts: Mapping[str, Any]) -> float | None:
    for key in ("LastModified", "last_modified", "updated", "mtime", "created"):
        value = facts.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


atexit.register(close_mirrors)
