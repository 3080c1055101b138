"""Helpers of the tests about publishing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fsdp_ckpt.store.publish import Staging

__all__ = ["content", "in_child", "names", "write"]


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(staging: Staging, **files: str) -> None:
    for name, text in files.items():
        part = staging.part_file(name)
        part.write_text(text)
        staging.finish_file(name, part, f"note on {name}")


def in_child(function: Callable[[], object]) -> int:
    """Run in a forked child; return its wait status."""
    child = os.fork()
    if not child:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]
