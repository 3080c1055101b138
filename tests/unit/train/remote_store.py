"""An object store in this process, for tests of what is saved to URLs and loaded from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

__all__ = ["Store", "make_store", "small_job"]


class Store:
    """fsspec's file system in memory, emptied."""

    def __init__(self) -> None:
        self.fs: Any = fsspec.filesystem("memory")
        self.fs.store.clear()
        self.fs.pseudo_dirs[:] = [""]

    def names(self, folder: str = "") -> list[str]:
        """All objects below a folder of the bucket, relative to it."""
        top = f"/bucket/{folder}".rstrip("/")
        return sorted(name.removeprefix(f"{top}/") for name in self.fs.find(top))

    def get(self, name: str) -> bytes:
        return bytes(self.fs.cat_file(f"/bucket/{name}"))

    def put(self, name: str, data: bytes = b"x") -> None:
        self.fs.pipe_file(f"/bucket/{name}", data)

    def remove(self, name: str) -> None:
        self.fs.rm_file(f"/bucket/{name}")

    def upload(self, folder: Path, name: str) -> str:
        """Copy a folder; return its URL."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"memory://bucket/{name}"


def make_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    """Run a store; temporary files go to ``tmp_path / "tmp"``, pauses are short."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("FSDP_CKPT_RETRY_SCALE", "0.001")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    store = Store()
    yield store
    store.fs.store.clear()


def small_job(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has run."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer
