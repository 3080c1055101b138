"""Files that are not here, and whose they are: ranks may have saved to disks that they do not share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fsdp_ckpt.catalog import Problem, Severity
from fsdp_ckpt.store.local import Folder

__all__ = ["ELSEWHERE", "note_elsewhere", "of_rank", "rank_of"]

ELSEWHERE = "ranks-elsewhere"
"""Code of the note that nothing some ranks wrote is here."""

_NAMES = re.compile(
    r"(?:.*__)?(?P<dcp>\d{1,9})_\d+\.distcp|__(?P<metadata>\d{1,9})\.metadata"
    r"|(?:random_states|rng_state|dl_states)_(?P<state>\d{1,9})\.(?:pkl|pth)"
    r"|.*[._-]rank[_-]?(?P<file>\d{1,9})\.(?:pt|pth|bin)"
)
_SHOWN = 16


def rank_of(file: str) -> int | None:
    """Return the rank that wrote a file, as its name says; None for files that any rank may have written.

    Example:
        >>> [rank_of(name) for name in ("optimizer_0/__3_0.distcp", "random_states_1.pkl", "scheduler.bin")]
        [3, 1, None]
    """
    match = _NAMES.fullmatch(file.rpartition("/")[2])
    return None if match is None else int(next(number for number in match.groups() if number is not None))


def of_rank(file: str) -> str:
    """Return `` (of rank 3)`` for the end of a sentence about a file; nothing where its name does not say."""
    rank = rank_of(file)
    return "" if rank is None else f" (of rank {rank})"


def note_elsewhere(
    folder: Folder, missing: Iterable[int | None], here: Iterable[int | None], *, holes: bool = False
) -> Iterator[Problem]:
    """Say which ranks have left nothing here, as when each node saved to a disk of its own.

    Args:
        folder: Where files are missing.
        missing: Ranks of the missing files.
        here: Ranks of those that are there.
        holes: Tensors have holes, where nothing tells how many ranks there were.
    """
    gone = sorted({rank for rank in missing if rank is not None} - set(here))
    if not gone and not holes:
        return
    shown = ", ".join(map(str, gone[:_SHOWN])) + (f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else "")
    ranks = f"rank{'s' if len(gone) > 1 else ''} {shown}" if gone else "some ranks"
    number = len(folder.store.roots)
    message = f"nothing of {ranks} is in these {number} folders: add the folders of their nodes"
    if number == 1:
        message = f"nothing of {ranks} is here: where nodes saved to disks of their own, give the folders of all nodes"
    yield Problem(severity=Severity.NOTE, code=ELSEWHERE, where=folder.prefix.rstrip("/") or ".", message=message)
