"""Check what each rank keeps for itself: random states and positions in the data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fsdp_ckpt.catalog import Checkpoint, Part, Problem, Role
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.ops.validation.wording import counted, finding, rank_ranges
from fsdp_ckpt.store.local import LocalStore

__all__ = ["check_rank_state", "numbered_files", "ranks_in", "ranks_of_files"]

_RNG = re.compile(r"(?:random_states|rng_state)_(\d{1,9})\.(?:pkl|pth)")
_POSITION = re.compile(r"dl_states_(\d{1,9})\.pkl")
_RANK = re.compile(r"(?:dp_)?rank_(\d{1,9})")
_MAX_RANKS = 1 << 20


def check_rank_state(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield which ranks' random states and positions are missing, where other ranks have left theirs."""
    yield from _missing_files(checkpoint, Role.RNG, "missing-rng", "random state")
    yield from _missing_files(checkpoint, Role.DATALOADER, "missing-position", "position in the data")
    yield from _missing_entries(checkpoint)


def numbered_files(checkpoint: Checkpoint, role: Role) -> dict[int, str]:
    """Return the files of random states or of positions that have the number of a rank in their name, by rank."""
    return ranks_of_files((file for part in checkpoint.parts if part.role is role for file in part.files), role)


def ranks_of_files(files: Iterable[str], role: Role) -> dict[int, str]:
    """Return those of some files that are random states, or positions, by rank."""
    pattern = _RNG if role is Role.RNG else _POSITION
    matches = ((file, pattern.fullmatch(file.rpartition("/")[2])) for file in files)
    return {int(match[1]): file for file, match in matches if match is not None}


def ranks_in(part: Part) -> set[int]:
    """Return the ranks whose entries a part holds under ``dp_rank_R`` or ``rank_R``."""
    steps = (str(step) for entry in part.objects.values() for step in entry.path or (entry.name,))
    return {int(match[1]) for step in steps if (match := _RANK.fullmatch(step)) is not None}


def _missing_files(checkpoint: Checkpoint, role: Role, name: str, what: str) -> Iterator[Problem]:
    have = numbered_files(checkpoint, role)
    if not have or _has_manifest(checkpoint):  # which lists every file: the reader has compared them
        return
    first, file = next(iter(have.items()))
    missing = _gaps(have, _written_by(checkpoint))
    if missing:
        where = file.replace(f"_{first}.", f"_{missing[0]}.")
        message = f"no {what} of {rank_ranges(missing)}; {counted(len(have), 'rank')} left one, first rank {first}"
        yield finding(name, where, message)


def _missing_entries(checkpoint: Checkpoint) -> Iterator[Problem]:
    for part in checkpoint.parts:
        if part.role is Role.DATALOADER:
            missing = _gaps(ranks_in(part), 0)  # with tensor parallelism several ranks share a position
            if missing:
                yield finding("missing-position", part.name, f"no position in the data of {rank_ranges(missing)}")


def _gaps(have: Iterable[int], world_size: int) -> list[int]:
    ranks = set(have)
    return [rank for rank in range(min(max(world_size, max(ranks, default=-1) + 1), _MAX_RANKS)) if rank not in ranks]


def _written_by(checkpoint: Checkpoint) -> int:
    """Return how many ranks wrote shards, 0 where that cannot be told."""
    sizes = (part.world_size for part in checkpoint.parts if part.dialect in ("dcp", "rank-files"))
    return max((size for size in sizes if size is not None), default=0)


def _has_manifest(checkpoint: Checkpoint) -> bool:
    return LocalStore(checkpoint.roots).size(MANIFEST) is not None
