"""The suite on fsspec's file system in memory: no network, every other step the same."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.remote.store_suite import Place, StoreSuite


@dataclass(frozen=True)
class Memory:
    fs: Any
    base: str

    def put(self, folder: Path, name: str) -> str:
        for file in folder.rglob("*"):
            if file.is_file():
                self.fs.pipe_file(f"/{self.base}/{name}/{file.relative_to(folder).as_posix()}", file.read_bytes())
        return f"memory://{self.base}/{name}"

    def remove(self, url: str) -> None:
        self.fs.rm_file(url.removeprefix("memory:/"))


class TestMemory(StoreSuite):
    @pytest.fixture
    def place(self) -> Iterator[Place]:
        memory = Memory(fsspec.filesystem("memory"), uuid.uuid4().hex)
        yield memory
        if memory.fs.exists(f"/{memory.base}"):
            memory.fs.rm(f"/{memory.base}", recursive=True)
