"""Death, asked for: between saves and within one. Signals, after which a run saves, are ``Preemption``'s."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from fsdp_ckpt.errors import RankFailed
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.train.ranks import Ranks

__all__ = ["die_between_saves", "die_within_save"]


def die_between_saves(tell: Callable[[], None]) -> NoReturn:
    """Kill this process as soon as all ranks are here. A collective.

    Args:
        tell: Called before.
    """
    tell()
    try:
        dist.barrier()
    finally:  # also when another rank is dead before it has left the barrier
        _kill()


def die_within_save(ranks: Ranks, save: Callable[[], object], tell: Callable[[], None]) -> None:
    """Save, and kill all ranks when every one of them has written its data and nothing is committed. A collective.

    Args:
        ranks: Those that save.
        save: Saves.
        tell: Called on the first rank, before.
    """
    # Where ranks do not notice that the first one is gone (NCCL), torchrun ends them by this signal.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if ranks.is_first:
        sys.addaudithook(lambda event, details: _die_at_manifest(tell, event, details))
    try:
        save()
    except RankFailed:
        if ranks.is_first:
            raise
        _kill()


def _die_at_manifest(tell: Callable[[], None], event: str, details: tuple[Any, ...]) -> None:
    """Watch files being opened: the manifest is made last, and without it there is no checkpoint."""
    if event != "open" or not isinstance(details[0], str | os.PathLike):
        return
    makes_it = isinstance(details[2], int) and details[2] & os.O_CREAT
    if makes_it and Path(details[0]).name == MANIFEST:
        tell()
        _kill()


def _kill() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody outlives SIGKILL")
