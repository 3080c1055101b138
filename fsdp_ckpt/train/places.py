"""Where the ranks of a job write: into one folder that all of them see, or into one on each file system.

Nodes may have disks of their own under the same path. Which ranks share one is found out by looking: a rank makes a
folder, and others see it or do not.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fsdp_ckpt.store.publish import resolve_destination
from fsdp_ckpt.train.ranks import Ranks

__all__ = ["find_leaders", "is_visible"]

_LOOKS = 4
_LOOK_AGAIN_S = 0.1
"""Network file systems may show a new name late."""


def is_visible(path: Path) -> bool:
    """Tell whether this process sees a name that another one has just made."""
    return bool(_visible(path.parent, [path.name]))


def _visible(folder: Path, names: Sequence[str]) -> set[str]:
    """Return those of the names that are in a folder; looks again while none is."""
    found: set[str] = set()
    for look in range(_LOOKS):
        with suppress(FileNotFoundError, NotADirectoryError):
            found = set(os.listdir(folder)).intersection(names)  # listing makes NFS ask the server
        if found:
            break
        if look + 1 < _LOOKS:
            time.sleep(_LOOK_AGAIN_S)
    return found


def find_leaders(target: Path, sees_first: bool, ranks: Ranks, doing: str) -> Sequence[int]:
    """Return for each rank the lowest one that has the same file system at a path. A collective.

    Args:
        target: The destination.
        sees_first: Whether this rank sees what the first one has made there.
        ranks: The ranks.
        doing: For messages.
    """
    rows = ranks.gather_all((sees_first, platform.node()), doing)
    hosts = [host for _, host in rows]
    leaders: list[int | None] = [0 if sees else None for sees, _ in rows]
    while None in leaders:
        undecided = [rank for rank, leader in enumerate(leaders) if leader is None]
        lowest = {hosts[rank]: rank for rank in reversed(undecided)}
        leaders = _ask(target, sorted(lowest.values()), leaders, ranks, doing)
    return [leader for leader in leaders if leader is not None]


def _ask(
    target: Path, candidates: Sequence[int], leaders: Sequence[int | None], ranks: Ranks, doing: str
) -> list[int | None]:
    """Let some ranks make a folder each, and the others look; return what is known after that."""
    probe: Path | None = None
    destination = resolve_destination(target)
    with ranks.together(doing):
        if ranks.rank in candidates:
            # Named as what a dead run leaves behind, so that the next one removes it.
            name = f".{destination.name}.fsdp-ckpt-{os.urandom(8).hex()}"
            destination.parent.mkdir(parents=True, exist_ok=True)
            (destination.parent / name).mkdir()
            probe = destination.parent / name
    try:
        names = ranks.gather_all(None if probe is None else probe.name, doing)
        mine = leaders[ranks.rank]
        with ranks.together(doing):
            if mine is None:
                seen = _visible(destination.parent, [name for name in names if name is not None])
                mine = next((rank for rank, name in enumerate(names) if name in seen), None)
        return ranks.gather_all(mine, doing)
    finally:
        if probe is not None:
            with suppress(OSError):  # the next save removes it
                probe.rmdir()
