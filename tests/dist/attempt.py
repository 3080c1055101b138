"""Calls that fail on one rank: how they are made to, what each rank raised, and what is left."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

__all__ = ["Break", "attempt", "failing", "nothing_left", "only", "tree"]

Break = Callable[[], AbstractContextManager[Any]]


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call raised, and after how many seconds."""
    begun = time.monotonic()
    kind, message, hint = "nothing", "", None
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - this is what is looked at
        kind, message, hint = type(error).__name__, str(error), getattr(error, "hint", None)
    return {"kind": kind, "message": message, "hint": hint, "seconds": time.monotonic() - begun}


def tree(folder: Path) -> dict[str, str]:
    """Everything in a folder, hidden or not, with digests."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def only(rank: int, breaking: Break) -> AbstractContextManager[Any]:
    return breaking() if dist.get_rank() == rank else nullcontext()


def failing(target: str, error: BaseException, *, after: int = 0) -> Break:
    """Let a function of the package raise, after so many calls that work."""

    def begin() -> AbstractContextManager[Any]:
        module, _, name = target.rpartition(".")
        owner: Any = sys.modules.get(module)
        if owner is None:
            owner = getattr(sys.modules[module.rpartition(".")[0]], module.rpartition(".")[2])
        real, calls = getattr(owner, name), [0]

        def broken(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] > after:
                raise error
            return real(*args, **options)

        return mock.patch.object(owner, name, broken)

    return begin


def nothing_left(place: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Add what is in the folder when all ranks are done."""
    dist.barrier()
    return found | {"left": sorted(path.name for path in place.iterdir())}
