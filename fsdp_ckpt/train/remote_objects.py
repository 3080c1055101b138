"""The objects of a checkpoint, put and removed in an order in which half of it is never taken for a checkpoint.

Object stores have no rename, so that nothing appears in one step but a single object. The manifest is that object: it
is put last, and removed first. A mark stands beside what is not whole for as long as it is not, because a checkpoint
without its manifest can look like somebody else's that is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.store.leftovers import unfinished_marks
from fsdp_ckpt.store.remote.mirrors import add_mirror
from fsdp_ckpt.store.remote.target import Target
from fsdp_ckpt.store.remote.urls import open_file_system, redact, scheme_of

__all__ = ["Objects", "check_url", "take_down"]

_FILES_AT_ONCE = 2
"""Uploads of one rank; each of them has several connections of its own."""
_MAX_MARK_BYTES = 64 << 20


class Objects(Target):
    """What lies below the URL of a checkpoint, or of a run.

    Args:
        url: As typed.
        found: What is there, by path in the file system, where that is known; an empty one to list nothing.

    Raises:
        UsageError: A URL that cannot be saved to.
        Unreachable: It cannot be listed.
    """

    def __init__(self, url: str, *, found: Mapping[str, Mapping[str, object]] | None = None) -> None:
        check_url(url)
        self._stop = threading.Event()
        super().__init__(url, *open_file_system(url), found=found)
        add_mirror(self)

    def put_files(self, folder: Path, names: Iterable[str], begun: list[str]) -> None:
        """Upload files, several at a time; each is removed from the disk when it is in its place.

        Args:
            folder: Where they are.
            names: Their names below it, and below the URL.
            begun: Gets the names of those that may be there, whole or not.

        Raises:
            Unreachable: One cannot be uploaded; all others that were begun have ended.
        """

        def upload(name: str) -> None:
            begun.append(name)
            self.put(folder / name, name, self._stop.is_set)
            (folder / name).unlink()

        def call(name: str) -> Callable[[], None]:
            return lambda: upload(name)

        with ThreadPoolExecutor(_FILES_AT_ONCE, "fsdp-ckpt-upload") as pool:
            try:
                for one in [pool.submit(call(name)) for name in names]:
                    one.result()
            except BaseException:  # Ctrl-C as well: none may upload any more after that
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def put_bytes(self, folder: Path, name: str, data: bytes) -> None:
        """Put a small object in its place, by way of a file in a folder.

        Raises:
            Unreachable: It cannot be put.
        """
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        self.put(folder / name, name, self._stop.is_set)
        (folder / name).unlink()

    def mark(self, folder: Path, name: str, files: Iterable[str]) -> None:
        """Say that a checkpoint is not whole, and which objects are of it.

        Args:
            folder: For temporary files.
            name: As ``leftovers.saving_mark`` or ``removing_mark`` gives it, perhaps below a folder.
            files: Names of the objects.

        Raises:
            Unreachable: It cannot be put.
        """
        self.put_bytes(folder, name, json.dumps({"files": sorted(set(files))}).encode())

    def unfinished(self) -> set[str]:
        """Return the names that a save or a removal which did not end says to be of it; none beside a manifest."""
        marks = unfinished_marks(self.sizes)
        if MANIFEST in self.sizes or not marks:
            return set()
        return set(marks).union(*(self.marked(mark, self.sizes[mark]) for mark in marks))

    def marked(self, mark: str, num_bytes: int) -> set[str]:
        """Return the names in a mark; none where it cannot be understood.

        Args:
            mark: Its name.
            num_bytes: Its size.
        """
        with suppress(ValueError, KeyError, TypeError):
            if num_bytes <= _MAX_MARK_BYTES:
                return set(map(str, json.loads(self.read(mark))["files"]))
        return set()


def take_down(target: Target, names: Iterable[str]) -> None:
    """Remove objects of a checkpoint: the manifest, then what says where tensors are, then all the others.

    Raises:
        Unreachable: One cannot be removed; those that come after it are still there.
    """
    steps: tuple[list[str], list[str], list[str]] = ([], [], [])
    for name in names:
        file = name.rpartition("/")[2]
        steps[0 if file == MANIFEST else 1 if file == ".metadata" else 2].append(name)
    for step in steps:
        target.remove(step)


def check_url(url: str) -> None:
    """Make sure that a URL is one that may be saved to.

    Raises:
        UsageError: Its scheme is unknown or takes whole commits; its package is not installed; it names no bucket.
    """
    shown = redact(url)
    if scheme_of(url) == "hf":
        raise UsageError(
            f"`{shown}`: the Hub takes whole commits, not a checkpoint rank by rank",
            hint=f"save to a local folder, and then: fsdp-ckpt push FOLDER {shown}",
        )
    if shown != url:
        raise UsageError(
            f"`{shown}`: there are credentials in the URL, where they end up in logs",
            hint="give them by the environment, or by the configuration file of the store's tools",
        )
    _, base = open_file_system(url)
    if any(part in ("", ".", "..") or "\0" in part for part in base.split("/")):
        raise UsageError(f"`{shown}` is no place to save to", hint="name a bucket and a folder: s3://bucket/run")
