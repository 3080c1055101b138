"""The optimizer of a DeepSpeed checkpoint, by name: moments cut out of flat vectors, options of the groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_ckpt.catalog import ObjectEntry, Problem, Severity, Shape, TensorEntry
from fsdp_ckpt.codec.tensors import TensorRef
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.deepspeed_flat import Segment
from fsdp_ckpt.layouts.deepspeed_model import Pieces
from fsdp_ckpt.layouts.deepspeed_state import RankState, Stored

__all__ = ["ByName", "group_entries", "optimizer_entries", "scalar_entry"]

_Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByName:
    """Tensors and values of an optimizer by key, and what is wrong with them."""

    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, ObjectEntry]
    problems: Sequence[Problem]


def optimizer_entries(
    shapes: Mapping[str, Shape], segments: Mapping[str, Sequence[Segment]], ranks: Mapping[int, RankState]
) -> ByName:
    """Return the state of every parameter and the options of every group.

    Args:
        shapes: All trained parameters, in order.
        segments: Where they lie.
        ranks: The ranks' files.

    Raises:
        MalformedFile: Ranks keep different things.
        Incompatible: A parameter lies in vectors of two groups.
    """
    first = next(iter(ranks.values()))
    _demand_one_kind(ranks)
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    problems = list(_disagreements(ranks))
    pieces = Pieces()
    strange: dict[str, str] = {}
    for name, shape in shapes.items():
        held = segments.get(name, ())
        if not held:
            continue
        owner = ranks[held[0].rank]
        for field, value in owner.moments[held[0].group].items():
            path = ("state", name, field)
            if not isinstance(value, Stored):
                objects |= _object(path, value, owner)
            elif field == "step" or not value.tensor.shape:
                tensors |= scalar_entry(path, value)
            elif not _is_flat(value, owner.weights[held[0].group], owner.stage):
                strange.setdefault(field, f"has the shape {value.tensor.shape} in {owner.file}, not one per weight")
            else:
                key = ".".join(path)

                def flat(segment: Segment, field: str = field) -> Stored:
                    return _moment(ranks[segment.rank], segment.group, field)

                entry = pieces.entry(key, shape, held, flat)
                if entry is not None:
                    tensors[key] = replace(entry, path=path)
    for field, message in strange.items():
        problems.append(Problem(severity=Severity.ERROR, code="moment-shape", where=field, message=message))
    members = _members(segments, shapes, first)
    options = [dict(group) for group in first.groups] or [{} for _ in members]
    more_tensors, more_objects = group_entries(options, members, first.file, first.size, first.weights[:1])
    return ByName(tensors=tensors | more_tensors, objects=objects | more_objects, problems=problems)


def group_entries(
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Sequence[str]],
    file: str,
    size: int,
    stored: Sequence[Stored],
) -> tuple[dict[str, TensorEntry], dict[str, ObjectEntry]]:
    """Return options of parameter groups, and which parameters are in each.

    Args:
        groups: The options, without ``params``.
        members: Names of the parameters of each group.
        file: The file that they are from.
        size: Its size in bytes.
        stored: Something of this file, for options that are tensors.
    """
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    for number, (group, names) in enumerate(zip(groups, members, strict=True)):
        for key, value in {**group, "params": list(names)}.items():
            path: _Path = ("param_groups", number, key)
            if isinstance(value, TensorRef) and stored:
                tensors |= scalar_entry(path, replace(stored[0], tensor=value))
                continue
            text = ".".join(map(str, path))
            objects[text] = ObjectEntry(
                key=text, name=text, file=file, start=0, stop=size, value=value, decoded=True, path=path
            )
    return tensors, objects


def _demand_one_kind(ranks: Mapping[int, RankState]) -> None:
    """Make sure that all ranks keep the same about a vector; those that have none of it may keep nothing."""
    known: dict[int, list[str]] = {}
    for state in ranks.values():
        for vector, fields in enumerate(state.moments):
            kinds = sorted(fields)
            if state.weights[vector].tensor.shape[0] and known.setdefault(vector, kinds) != kinds:
                said, others = (", ".join(listed) or "nothing" for listed in (kinds, known[vector]))
                raise MalformedFile(f"{state.file}: it keeps {said} of vector {vector}, the first rank {others}")


def _members(
    segments: Mapping[str, Sequence[Segment]], shapes: Mapping[str, Shape], first: RankState
) -> list[list[str]]:
    """Return the parameters of each group, by the vectors that they lie in."""
    group_of = {vector: number for number, vectors in enumerate(first.vectors) for vector in vectors}
    members: list[list[str]] = [[] for _ in first.vectors]
    for name in shapes:
        groups = {group_of[segment.group] for segment in segments.get(name, ())}
        if len(groups) > 1:
            raise Incompatible(f"`{name}` lies in vectors of {len(groups)} parameter groups")
        for group in groups:
            members[group].append(name)
    return members


def _is_flat(moment: Stored, weights: Stored, stage: int | None) -> bool:
    """Tell whether there is an element for each weight; up to ZeRO-2 padding is cut off weights, not off moments."""
    if len(moment.tensor.shape) != 1 or (moment.tensor.shape[0] > 1 and moment.tensor.strides != (1,)):
        return False
    have, needed = moment.tensor.shape[0], weights.tensor.shape[0]
    return have == needed if stage == 3 else have >= needed


def _moment(rank: RankState, vector: int, field: str) -> Stored:
    value = rank.moments[vector].get(field)
    if not isinstance(value, Stored) or not _is_flat(value, rank.weights[vector], rank.stage):
        raise MalformedFile(f"{rank.file}: `{field}` of vector {vector} is missing, or has another size than elsewhere")
    return value


def scalar_entry(path: _Path, value: Stored) -> dict[str, TensorEntry]:
    """Return a tensor that is taken as it is, such as a number of steps, by its key."""
    key, tensor = ".".join(map(str, path)), value.tensor
    chunks = (value.chunk(),)
    return {key: TensorEntry(key=key, name=key, dtype=tensor.dtype, shape=tensor.shape, chunks=chunks, path=path)}


def _object(path: _Path, value: Any, rank: RankState) -> dict[str, ObjectEntry]:
    key = ".".join(map(str, path))
    entry = ObjectEntry(
        key=key, name=key, file=rank.file, start=0, stop=rank.size, value=value, decoded=True, path=path
    )
    return {key: entry}


def _disagreements(ranks: Mapping[int, RankState]) -> Iterator[Problem]:
    """Compare steps: ranks that counted differently were not saved together."""
    known: dict[int, tuple[Any, str]] = {}
    for state in ranks.values():
        for vector, fields in enumerate(state.moments):
            step = fields.get("step")
            mark = step.chunk().crc32 if isinstance(step, Stored) else step
            if type(mark) not in (int, float):
                continue
            before = known.setdefault(vector, (mark, state.file))
            if type(before[0]) is type(mark) and before[0] != mark:
                message = f"its optimizer made another number of steps than that of {before[1]}"
                yield Problem(severity=Severity.ERROR, code="mixed-saves", where=state.file, message=message)
                return
