"""Show what lies below a URL as a local folder: the same names and sizes, without the bytes.

Layouts are recognised by names, sizes and a few small reads. A mirror gives them the first two: a temporary folder with
empty (sparse) files, made from one listing. Bytes come by range requests when a ``LocalStore`` below the mirror reads.
Whoever opens a file of it in another way has to ``materialise`` it first.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fsdp_ckpt.errors import CheckpointNotFound, MalformedFile, PathOutside, Unreachable
from fsdp_ckpt.store.remote.attempts import attempt
from fsdp_ckpt.store.remote.files import RangeCache, RemoteFile
from fsdp_ckpt.store.remote.mirrors import add_mirror, close_mirrors
from fsdp_ckpt.store.remote.urls import open_file_system, redact, scheme_of

__all__ = ["Mirror", "mirror"]

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

    def __init__(self, url: str, fs: Any, base: str) -> None:
        self.url = redact(url).rstrip("/")
        self.top = Path(tempfile.mkdtemp(prefix="fsdp-ckpt-mirror-"))
        self.scheme = scheme_of(url) or ""
        self._fs = fs
        self._remote: dict[str, tuple[str, int]] = {}
        self._whole: set[str] = set()
        self._lock = threading.Lock()
        self.cache = RangeCache(self._fetch, self.url)
        self.path = self.top / base
        try:
            self._make(base)
        except BaseException:
            self.close()
            raise

    def _make(self, base: str) -> None:
        found = attempt(lambda: _listing(self._fs, base), url=self.url)
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
        if parent:
            # Beside a checkpoint lie its configuration, and above one of its parts its manifest.
            with suppress(Unreachable, FileNotFoundError):
                for remote, facts in attempt(lambda: _files_in(self._fs, parent), url=self.url).items():
                    if remote not in found:
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
        self._remote[str(local)] = (remote, size)

    def _fetch(self, path: str, start: int, stop: int) -> bytes:
        if self.scheme == "hf":
            with self._fs.open(path, "rb", cache_type="none") as file:
                return bytes(file._fetch_range(start, stop))
        return bytes(self._fs.cat_file(path, start=start, end=stop))

    def file(self, path: str) -> RemoteFile | None:
        """Return the remote file behind a path in the mirror, None where there is none or it is whole already."""
        known = self._remote.get(path)
        return None if known is None or path in self._whole else RemoteFile(self.cache, *known)

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
        shutil.rmtree(self.top, ignore_errors=True)


def mirror(url: str) -> Mirror:
    """List what lies below a URL, and make a mirror of it. It goes when the process ends.

    Raises:
        UsageError: The scheme is unknown, or its package is not installed.
        Unreachable: There is nothing, or it cannot be listed.
        CheckpointNotFound: The URL names nothing.
        PathOutside: A name would lead out of the folder.
    """
    fs, base = open_file_system(url)
    if not base:
        raise CheckpointNotFound(f"`{redact(url)}` names no bucket and no repository")
    made = Mirror(url, fs, base)
    add_mirror(made)
    return made


def _listing(fs: Any, base: str) -> dict[str, Mapping[str, Any]]:
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
