"""What a save did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["SaveReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What ``save_state`` did.

    Attributes:
        path: The checkpoint.
        step: The step that was given.
        files: Size in bytes of every file, by path.
        num_bytes: Their sum.
        world_size: Ranks that took part.
        elapsed_s: Wall time in seconds, until everything was durable.
        stopped_s: Wall time in seconds for which the training loop was stopped; less than ``elapsed_s`` with
            ``async_save``.
        leaders: For each rank the lowest one that shares its file system: all 0 where all ranks see the same files.
        skipped: Parts that a hook left out.
    """

    path: str
    step: int | None
    files: Mapping[str, int]
    num_bytes: int
    world_size: int
    elapsed_s: float
    stopped_s: float
    leaders: Sequence[int] = ()
    skipped: Sequence[str] = ()
