"""What lies in the memory store, and everything that is done to it, one call after the other."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

__all__ = ["MemoryStore", "contents", "memory_store"]

_NUMBERS = itertools.count(1)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder, by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class MemoryStore:
    """A place on ``memory://`` of its own.

    Attributes:
        calls: ``("put", name)`` and ``("rm", name)`` in the order in which they were done.
        before: Called before each of them; may raise.
    """

    def __init__(self) -> None:
        self.base = f"/store-{os.getpid()}-{next(_NUMBERS)}"
        self.fs = fsspec.filesystem("memory")
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = _nothing
        self.lock = threading.RLock()

    def heal(self) -> None:
        """Call nothing before the calls from now on, and forget those that were made."""
        self.before = _nothing
        self.calls.clear()

    def url(self, name: str = "out") -> str:
        return f"memory:/{self.base}/{name}"

    def files(self, name: str = "out") -> dict[str, bytes]:
        """Return the bytes of all objects below a name."""
        prefix = f"{self.base}/{name}/"
        return {
            path.removeprefix(prefix): self.fs.cat_file(path)
            for path in self.fs.find(f"{self.base}/{name}")
            if path.startswith(prefix)
        }

    def put(self, name: str, content: bytes) -> None:
        self.fs.pipe_file(f"{self.base}/{name}", content)

    def upload(self, folder: Path, name: str) -> str:
        for path, content in contents(folder).items():
            self.put(f"{name}/{path}", content)
        return self.url(name)

    def done(self, verb: str, name: str, call: Callable[[], Any]) -> Any:
        name = "/" + name.strip("/")
        if not name.startswith(self.base):
            return call()
        name = name.removeprefix(self.base + "/")
        with self.lock:
            self.before(verb, name)
            result = call()
            self.calls.append((verb, name))
            return result


def _nothing(_verb: str, _name: str) -> None:
    pass


@contextmanager
def memory_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    store = MemoryStore()
    put, remove = MemoryFileSystem.put_file, MemoryFileSystem.rm_file

    def put_file(self: Any, lpath: str, rpath: str, **options: Any) -> Any:
        return store.done("put", rpath, lambda: put(self, lpath, rpath, **options))

    def rm_file(self: Any, path: str) -> Any:
        return store.done("rm", path, lambda: remove(self, path))

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    monkeypatch.setattr(MemoryFileSystem, "rm_file", rm_file)
    try:
        yield store
    finally:
        monkeypatch.undo()
        if store.fs.exists(store.base):
            store.fs.rm(store.base, recursive=True)
