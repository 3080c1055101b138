"""Several processes merge one checkpoint: each writes some of the files, the last one publishes.

They agree without talking: all make the same plan, and the staging folder's name follows from it. A process that is
done leaves a marker there.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.run.engine import OutputSpec
from fsdp_ckpt.store.leftovers import PUBLISH_LOCK, is_at
from fsdp_ckpt.store.publish import Staging

__all__ = ["Share", "all_done", "note_done", "process_share", "publish_lock", "share_from_environment"]

_SPECIAL_STEPS = 4294967290
"""SLURM gives batch scripts and interactive shells step ids from here on: one process, whatever SLURM_NTASKS says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Share ``index`` of ``count``, counted from 1."""

    index: int
    count: int

    @staticmethod
    def parse(text: str) -> Share:
        """Return the share of a text ``I/N``.

        Raises:
            UsageError: It is not of this form, or I is not between 1 and N.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UsageError(f"`{text}` is not a share", hint="write it as I/N with I from 1 to N, such as 1/4")
        return Share(index=int(match[1]), count=int(match[2]))

    def of(self, specs: Sequence[OutputSpec]) -> list[OutputSpec]:
        """Return this share's files: largest first to whoever has least, the same in every process."""
        loads = [0] * self.count
        mine = []
        for number, spec in sorted(enumerate(specs), key=lambda item: (-item[1].size, item[0])):
            taker = loads.index(min(loads))
            loads[taker] += spec.size
            if taker == self.index - 1:
                mine.append(number)
        return [specs[number] for number in sorted(mine)]


def share_from_environment(environment: Mapping[str, str]) -> Share | None:
    """Return the share that torchrun or ``srun`` gave this process; None for a process on its own.

    Raises:
        UsageError: A rank outside of its world.
    """
    rank, count = environment.get("RANK"), environment.get("WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in environment:
        rank, count = environment.get("SLURM_PROCID"), environment.get("SLURM_STEP_NUM_TASKS")
        step = environment.get("SLURM_STEP_ID", "")
        if not step.isdigit() or int(step) >= _SPECIAL_STEPS:
            return None
    if rank is None or count is None or not rank.isdigit() or not count.isdigit() or int(count) < 2:
        return None
    if int(rank) >= int(count):
        raise UsageError(f"the environment says rank {rank} of {count} processes, which cannot be")
    return Share(index=int(rank) + 1, count=int(count))


def process_share() -> Share | None:
    """Return this process's share of the work as torchrun or srun says, None when it is alone."""
    return share_from_environment(os.environ)


def note_done(staging: Staging, share: Share) -> None:
    """Leave the marker that this share is written."""
    staging.file(f".done-{share.index}-of-{share.count}").touch()


def all_done(staging: Staging, share: Share) -> list[int]:
    """Return the shares that are still missing. Another process may have published already: then none are."""
    if not staging.path.is_dir():
        return []
    try:
        names = set(os.listdir(staging.path))
    except FileNotFoundError:
        return []
    missing = [n for n in range(1, share.count + 1) if f".done-{n}-of-{share.count}" not in names]
    return missing if staging.path.is_dir() else []


@contextmanager
def publish_lock(staging: Staging, *, shared: bool) -> Iterator[bool]:
    """Let one process publish; the value tells whether it is still to be done."""
    if not shared:
        yield True
        return
    path = staging.file(PUBLISH_LOCK)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield is_at(fd, path)
    finally:
        os.close(fd)
