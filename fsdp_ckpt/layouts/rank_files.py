"""One ``torch.save`` file per rank: verl and kin, Accelerate without DCP, Composer, FSDP1 LOCAL state dicts.

Names as the writers choose them::

    model_world_size_8_rank_0.pt   optim_…   extra_state_…        verl, SkyRL, EasyR1
    pytorch_model_fsdp_0_rank0.bin           optimizer_0_rank0.bin  Accelerate (use_dcp=False, LOCAL_STATE_DICT)
    ep0-ba10-rank0.pt                                              Composer
    model_final.rank_0.pth                                         dinov2
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_ckpt.catalog import Chunk, ObjectEntry, Part, Problem, Role, Severity, TensorEntry
from fsdp_ckpt.codec.tensors import DTensorRef, ShardedTensorRef, TensorRef
from fsdp_ckpt.errors import CorruptCheckpoint
from fsdp_ckpt.layouts.elsewhere import note_elsewhere
from fsdp_ckpt.layouts.faults import coverage_problems, flat_reason
from fsdp_ckpt.layouts.local_slices import LOCAL_SLICES, place_slices
from fsdp_ckpt.layouts.roles import KeyPath, role_of, split_roles
from fsdp_ckpt.layouts.torch_file import TorchFile, open_torch_file, sharded_entry
from fsdp_ckpt.store.local import Folder

__all__ = ["RankGroup", "group_rank_files", "read_rank_files"]

_NAME = re.compile(r"(?P<stem>.*?)(?:_world_size_(?P<world>\d{1,9}))?[._-]rank[_-]?(?P<rank>\d{1,9})\.(?:pt|pth|bin)")


_MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Files of one thing, one per rank.

    Attributes:
        stem: What their names have in common (``model``, ``pytorch_model_fsdp_0``).
        world_size: As the names say, else the highest rank plus one.
        files: Name by rank.
    """

    stem: str
    world_size: int
    files: dict[int, str]


def group_rank_files(folder: Folder) -> list[RankGroup]:
    """Return the groups of per-rank files in a folder, largest world size first for equal stems."""
    found: dict[tuple[str, int | None], dict[int, str]] = {}
    for name in folder.files:
        match = _NAME.fullmatch(name)
        if match and max(int(match["world"] or 0), int(match["rank"])) < _MAX_RANKS:
            world = int(match["world"]) if match["world"] else None
            found.setdefault((match["stem"], world), {})[int(match["rank"])] = name
    groups = [
        RankGroup(stem=stem, world_size=world or max(files) + 1, files=dict(sorted(files.items())))
        for (stem, world), files in found.items()
    ]
    return sorted(groups, key=lambda group: (group.stem, -group.world_size))


def read_rank_files(folder: Folder, group: RankGroup) -> list[Part]:
    """Read all files of a group and put the shards together.

    Returns:
        The parts, models first.

    Raises:
        As ``torch_file.open_torch_file``; CorruptCheckpoint where ranks contradict each other.
    """
    role = role_of(group.stem) or (Role.OTHER if group.stem.startswith("extra") else Role.MODEL)
    allow_unknown = role not in (Role.MODEL, Role.OPTIMIZER)
    gather = _Gather()
    for rank, name in group.files.items():
        opened = open_torch_file(folder.store, folder.prefix + name, allow_unknown=allow_unknown)
        gather.add(rank, opened, group.world_size)
    missing = [rank for rank in range(group.world_size) if rank not in group.files]
    splits = split_roles(gather.paths.items(), default=role)
    files = {folder.prefix + name: folder.files[name] for name in group.files.values()}
    parts = []
    for number, split in enumerate(splits):
        places: dict[str, Any] = {key: {"name": n, "path": split.paths[key]} for key, n in split.names.items()}
        tensors = {key: replace(gather.tensors[key], **place) for key, place in places.items() if key in gather.tensors}
        objects = {key: replace(gather.objects[key], **place) for key, place in places.items() if key in gather.objects}
        problems = [p for p in gather.problems if p.where in tensors]
        if split.role is Role.OPTIMIZER:
            problems = [_moments_differ(p, tensors[p.where]) for p in problems]
        if number == 0:
            problems[:0] = gather.misplaced
        if number == 0 and missing:
            problems.insert(0, _missing_ranks(folder, group, missing))
        flat = flat_reason(tensors.values()) or _local_slices(gather, tensors)
        if flat:  # slices are no replicas
            tensors = place_slices(tensors, gather.lines)
            slices = {key for key, entry in tensors.items() if entry.placements == LOCAL_SLICES}
            problems = [p for p in problems if p.code != "replicas-differ" or p.where not in slices]
        if flat is None:
            holes = list(coverage_problems(tensors.values()))
            problems += holes
            if missing or holes:
                written = range(max(group.world_size, gather.num_ranks))
                problems[:0] = note_elsewhere(folder, written, group.files, holes=True)
        parts.append(
            Part(
                name=group.stem if number == 0 else split.name,
                role=role if len(splits) == 1 else split.role,
                dialect="rank-files",
                folder=folder.prefix.rstrip("/"),
                files=files,
                tensors=tensors,
                objects=objects,
                world_size=group.world_size,
                flat=flat,
                problems=problems,
            )
        )
    return parts


@dataclass
class _Gather:
    """What the ranks' files hold, put together."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, ObjectEntry] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    lines: dict[str, list[Chunk]] = field(default_factory=dict)
    """What each rank has of a plain tensor in one dimension, in the order of the ranks."""
    unequal: set[str] = field(default_factory=set)
    misplaced: list[Problem] = field(default_factory=list)
    num_ranks: int = 0
    """Ranks that sharded tensors are spread over, as far as the tensors say."""

    def add(self, rank: int, opened: TorchFile, world_size: int) -> None:
        by_key = opened.by_key()
        self._compare_rank(rank, opened, (value for _, value in by_key.values()), world_size)
        for key, (path, value) in by_key.items():
            if isinstance(value, TensorRef):
                self._add_plain(rank, key, path, opened, value)
            elif isinstance(value, DTensorRef | ShardedTensorRef):
                self._add_sharded(key, path, opened, value)
            elif key not in self.objects:
                self.paths.setdefault(key, path)
                self.objects[key] = ObjectEntry(
                    key=key, name=key, file=opened.file, start=0, stop=opened.size, value=value, decoded=True
                )

    def _compare_rank(self, rank: int, opened: TorchFile, values: Iterable[Any], world_size: int) -> None:
        """Compare a file's name with the rank that its first sharded tensor says."""
        for value in values:
            saved, severity = None, Severity.ERROR
            if isinstance(value, ShardedTensorRef):
                saved = value.rank
            elif isinstance(value, DTensorRef) and value.coordinate and math.prod(value.mesh_shape) == world_size:
                saved = 0
                for place, size in zip(value.coordinate, value.mesh_shape, strict=False):
                    saved = saved * size + place
                if len(value.mesh_shape) > 1:  # whose ranks may be in any order
                    severity = Severity.WARNING
            if saved is None:
                continue
            if saved != rank:
                message = f"rank {saved} saved it, its name says rank {rank}"
                problem = Problem(severity=severity, code="misplaced-file", where=opened.file, message=message)
                self.misplaced.append(problem)
            return

    def _add_plain(self, rank: int, key: str, path: KeyPath, opened: TorchFile, value: TensorRef) -> None:
        """A tensor that every rank has whole (a buffer), or LOCAL slices, which differ in size."""
        chunk = opened.chunk(value)
        if len(value.shape) == 1:
            self.lines.setdefault(key, []).append(chunk)
        known = self.tensors.get(key)
        if known is None:
            self.paths.setdefault(key, path)
            self.tensors[key] = TensorEntry(key=key, name=key, dtype=value.dtype, shape=value.shape, chunks=(chunk,))
            return
        if known.placements is not None or known.dtype != value.dtype:
            raise CorruptCheckpoint(f"{opened.file}: `{key}` is sharded, or of another dtype, on another rank")
        if known.shape != value.shape:
            self.unequal.add(key)
            return
        self.tensors[key] = replace(known, replicas=(*known.replicas, chunk))
        first = known.chunks[0]
        if None not in (first.crc32, chunk.crc32) and first.crc32 != chunk.crc32:
            self._note_difference(rank, key, value)

    def _note_difference(self, rank: int, key: str, value: TensorRef) -> None:
        """Buffers may differ between ranks; matrices that differ are shards whose placement nobody recorded."""
        if any(problem.where == key for problem in self.problems):
            return
        severity, message = Severity.WARNING, f"rank {rank} has other values than the first rank, whose values are used"
        if len(value.shape) >= 2:
            severity = Severity.ERROR
            message = f"rank {rank} has other values than the first; if these are shards, their places are not recorded"
        self.problems.append(Problem(severity=severity, code="replicas-differ", where=key, message=message))

    def _add_sharded(self, key: str, path: KeyPath, opened: TorchFile, value: DTensorRef | ShardedTensorRef) -> None:
        spread = len(value.boxes) if isinstance(value, ShardedTensorRef) else math.prod(value.mesh_shape)
        self.num_ranks = min(max(self.num_ranks, spread), _MAX_RANKS)
        chunks = opened.boxes(value)
        known = self.tensors.get(key)
        if known is None:
            self.paths.setdefault(key, path)
            self.tensors[key] = sharded_entry(key, key, value, chunks)
            return
        if known.placements is None or known.shape != value.shape:
            raise CorruptCheckpoint(f"{opened.file}: `{key}` has another shape, or is not sharded, on another rank")
        have = {(chunk.offsets, chunk.lengths) for chunk in known.chunks}
        fresh = [chunk for chunk in chunks if (chunk.offsets, chunk.lengths) not in have]
        again = [chunk for chunk in chunks if (chunk.offsets, chunk.lengths) in have and chunk.numel]
        self.tensors[key] = replace(known, chunks=(*known.chunks, *fresh), replicas=(*known.replicas, *again))


def _moments_differ(problem: Problem, entry: TensorEntry) -> Problem:
    """Moments in one dimension that differ are no copies either: FSDP1's, saved with ``optimizer.state_dict()``."""
    if problem.code != "replicas-differ" or len(entry.shape) != 1:
        return problem
    message = "the ranks have other values each: these are shards of flat parameters, and whose they are is not in them"
    return replace(problem, severity=Severity.ERROR, message=message)


def _missing_ranks(folder: Folder, group: RankGroup, missing: Sequence[int]) -> Problem:
    shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
    rank, some = next(iter(group.files.items()))
    gone = re.sub(rf"(rank[_-]?){rank}(?=\.\w+$)", rf"\g<1>{missing[0]}", some)
    ranks = f"rank{'s' if len(missing) > 1 else ''} {shown}"
    message = f"{len(group.files)} of {group.world_size} rank files are there; missing: {ranks}"
    return Problem(severity=Severity.ERROR, code="missing-rank", where=folder.prefix + gone, message=message)


def _local_slices(gather: _Gather, tensors: dict[str, Any]) -> str | None:
    unequal = sorted(gather.unequal & tensors.keys())
    if not unequal:
        return None
    return (
        f"`{unequal[0]}` is a local slice of an FSDP1 flat parameter, of another size on each rank; "
        "the shape of the whole is not in the files"
    )
