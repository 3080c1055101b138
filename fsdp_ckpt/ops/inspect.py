"""Describe a checkpoint from its metadata and headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.catalog import Checkpoint, Part, Problem, TensorEntry
from fsdp_ckpt.layouts.registry import PathLike, given_paths, read_checkpoint
from fsdp_ckpt.names import glob_filter
from fsdp_ckpt.ops.objects import read_object
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.store.remote.mirrors import traffic_of
from fsdp_ckpt.store.remote.places import speaks_urls

__all__ = ["InspectReport", "PartReport", "ShardReport", "TensorGroup", "TensorReport", "group_tensors", "inspect"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """A tensor: its name within the part, shape, dtype, number of shards, bytes, placements where recorded."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: int
    num_bytes: int
    placements: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Tensors that differ only in layer numbers.

    Attributes:
        pattern: ``layers.{0..31}.mlp.weight``.
        count: How many.
        shape: Of each.
        dtype: Of each.
        shards: Of each; the largest number when they differ.
        num_bytes: Of all.
    """

    pattern: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    shards: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """A file of a part: its size, the bytes of tensors in it, and the number of shards."""

    file: str
    file_bytes: int | None
    tensor_bytes: int
    shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """A part of a checkpoint.

    Attributes:
        name: As ``--part`` takes it.
        role: What it is for.
        dialect: On-disk format.
        writer: What wrote it, where that shows.
        world_size: Ranks that wrote it, where that shows.
        complete: Whether nothing is missing.
        flat: Why tensors have no names (FSDP flat parameters); None otherwise.
        num_tensors: Tensors.
        num_parameters: Elements of all tensors.
        num_bytes: Bytes of all tensors.
        file_bytes: Bytes of its files.
        dtypes: Tensors by dtype.
        num_objects: Values that are no tensors.
        tensors: All tensors, filtered by ``tensors`` of ``inspect``.
        shards: By file, when asked for.
        objects: Decoded objects, when asked for.
        problems: What is wrong or odd.
    """

    name: str
    role: str
    dialect: str
    writer: str | None
    world_size: int | None
    complete: bool
    flat: str | None
    num_tensors: int
    num_parameters: int
    num_bytes: int
    file_bytes: int
    dtypes: Mapping[str, int]
    num_objects: int
    tensors: Sequence[TensorReport] = ()
    shards: Sequence[ShardReport] = ()
    objects: Mapping[str, Any] = field(default_factory=dict)
    problems: Sequence[Problem] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport:
    """What a checkpoint is.

    Attributes:
        path: As given; the first folder where there are several.
        root: The folder that was read, which may lie below ``path``.
        layout: Layout in a word.
        title: Layout for people.
        step: Training step, where recorded.
        world_size: Ranks, where that shows.
        complete: Whether nothing is missing in any part.
        facts: Further facts: (name, value).
        parts: Models first.
        side_files: config.json and the like.
        problems: About the whole.
        other_paths: Further folders as given, of other nodes.
        other_roots: The same for ``root``.
        fetched_bytes: Bytes that were fetched of a remote checkpoint; None for a local one.
        requests: In how many requests.
    """

    path: str
    root: str
    layout: str
    title: str
    step: int | None
    world_size: int | None
    complete: bool
    facts: Sequence[tuple[str, str]]
    parts: Sequence[PartReport]
    side_files: Sequence[str]
    problems: Sequence[Problem]
    other_paths: Sequence[str] = ()
    other_roots: Sequence[str] = ()
    fetched_bytes: int | None = None
    requests: int | None = None


@speaks_urls
def inspect(
    path: PathLike | Sequence[PathLike],
    *,
    tensors: str | None = None,
    shards: bool = False,
    objects: bool = False,
    part: str | None = None,
) -> InspectReport:
    """Describe whatever lies at a path. torch is not imported, and no pickle is run.

    Args:
        path: A file, a part, a checkpoint, or a run folder (then the newest complete checkpoint in it). Where nodes
            saved to disks of their own: the folders of all nodes.
        tensors: Keep only tensors whose name matches this glob.
        shards: Add up what each file holds.
        objects: Decode values that are no tensors.
        part: Only the part of this name.

    Returns:
        The description. A damaged checkpoint is described with its problems, as far as its metadata can be read.

    Raises:
        CheckpointNotFound: Nothing is there that is a checkpoint.
        UnsafePickle: A pickle asks for code.
        MalformedFile: Metadata or headers are damaged.
        Incompatible: Several folders that are not of one save.

    Example:
        >>> inspect("fixtures/edge/tied").parts[0].num_tensors  # doctest: +SKIP
        3
    """
    first, *others = given_paths(path)
    checkpoint = read_checkpoint([first, *others])
    keep = glob_filter([tensors] if tensors else [], [])
    chosen = [item for item in checkpoint.parts if part is None or item.name == part]
    parts = [_part_report(checkpoint, item, keep, shards=shards, objects=objects) for item in chosen]
    traffic = traffic_of(checkpoint.roots)
    return InspectReport(
        path=first,
        root=str(checkpoint.root),
        layout=checkpoint.layout,
        title=checkpoint.title,
        step=checkpoint.step,
        world_size=checkpoint.world_size,
        complete=checkpoint.is_complete,
        facts=checkpoint.facts,
        parts=parts,
        side_files=checkpoint.side_files,
        problems=checkpoint.problems,
        other_paths=others,
        other_roots=[str(root) for root in checkpoint.other_roots],
        fetched_bytes=None if traffic is None else traffic.num_bytes,
        requests=None if traffic is None else traffic.requests,
    )


def _part_report(
    checkpoint: Checkpoint, part: Part, keep: re.Pattern[str], *, shards: bool, objects: bool
) -> PartReport:
    dtypes: dict[str, int] = {}
    for entry in part.tensors.values():
        dtypes[entry.dtype.name] = dtypes.get(entry.dtype.name, 0) + 1
    decoded: dict[str, Any] = {}
    if objects:
        store = LocalStore(checkpoint.roots)
        decoded = {entry.name: read_object(entry, store) for entry in part.objects.values()}
        store.close()
    return PartReport(
        name=part.name,
        role=part.role.value,
        dialect=part.dialect,
        writer=part.writer,
        world_size=part.world_size,
        complete=part.is_complete,
        flat=part.flat,
        num_tensors=len(part.tensors),
        num_parameters=part.numel,
        num_bytes=part.num_bytes,
        file_bytes=sum(part.files.values()),
        dtypes=dict(sorted(dtypes.items(), key=lambda item: (-item[1], item[0]))),
        num_objects=len(part.objects),
        tensors=[_tensor_report(entry) for entry in part.tensors.values() if keep.match(entry.name)],
        shards=_shards(part) if shards else (),
        objects=decoded,
        problems=part.problems,
    )


def _tensor_report(entry: TensorEntry) -> TensorReport:
    return TensorReport(
        name=entry.name,
        shape=entry.shape,
        dtype=entry.dtype.name,
        shards=len(entry.chunks),
        num_bytes=entry.num_bytes,
        placements=entry.placements,
    )


def _shards(part: Part) -> list[ShardReport]:
    num_bytes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for entry in part.tensors.values():
        itemsize = entry.dtype.itemsize
        for chunk in entry.chunks:
            file = chunk.file
            num_bytes[file] = num_bytes.get(file, 0) + chunk.numel * itemsize
            counts[file] = counts.get(file, 0) + 1
    return [
        ShardReport(file=file, file_bytes=part.files.get(file), tensor_bytes=num_bytes[file], shards=counts[file])
        for file in sorted(num_bytes, key=_natural)
    ]


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name))


def group_tensors(tensors: Iterable[TensorReport]) -> list[TensorGroup]:
    """Collapse repeated layers: tensors whose names differ only in numbers, with equal shape and dtype.

    Example:
        >>> common = {"shape": (2,), "dtype": "float32", "shards": 1, "num_bytes": 8}
        >>> rows = [TensorReport(name=f"layers.{i}.w", **common) for i in range(3)]
        >>> [(group.pattern, group.count) for group in group_tensors(rows)]
        [('layers.{0..2}.w', 3)]
    """
    groups: dict[tuple[str, tuple[int, ...], str], list[TensorReport]] = {}
    for tensor in tensors:
        groups.setdefault((_NUMBER.sub("#", tensor.name), tensor.shape, tensor.dtype), []).append(tensor)
    return [
        TensorGroup(
            pattern=_pattern(mask, [tensor.name for tensor in rows]),
            count=len(rows),
            shape=shape,
            dtype=dtype,
            shards=max(tensor.shards for tensor in rows),
            num_bytes=sum(tensor.num_bytes for tensor in rows),
        )
        for (mask, shape, dtype), rows in groups.items()
    ]


def _pattern(mask: str, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    columns = zip(*([int(number) for number in _NUMBER.findall(name)] for name in names), strict=True)
    shown = iter([_range_text(sorted(set(column))) for column in columns])
    pieces = mask.split("#")
    return pieces[0] + "".join(next(shown) + piece for piece in pieces[1:])


def _range_text(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    shown = ",".join(map(str, numbers[:6]))
    return f"{{{shown},…}}" if len(numbers) > 6 else f"{{{shown}}}"
