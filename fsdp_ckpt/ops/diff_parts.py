"""Find the parts of two checkpoints that correspond to each other: model to model, optimizer to optimizer."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_ckpt.catalog import Checkpoint, Part, Role, Severity
from fsdp_ckpt.errors import FlatParameters, IncompleteCheckpoint, UsageError

__all__ = ["Pairing", "pair_parts", "refuse_damaged"]

_ORDERED = (Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER)
"""Roles whose parts go by order where names differ; random states of ranks and unknown things go by name only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Which parts are compared.

    Attributes:
        pairs: Parts of A and B, models first.
        only_a: Parts of A that B should have and has not.
        only_b: The same for B.
        aside_a: Parts of A that are no models, where B holds models only.
        aside_b: The same for B.
    """

    pairs: Sequence[tuple[Part, Part]]
    only_a: Sequence[Part] = ()
    only_b: Sequence[Part] = ()
    aside_a: Sequence[Part] = ()
    aside_b: Sequence[Part] = ()


def pair_parts(a: Checkpoint, b: Checkpoint, wanted: Sequence[str]) -> Pairing:
    """Pair parts by role; within a role by name, and models, optimizers and schedulers that are left by order.

    Parts that only one side has are a difference. But where one side holds models only (a merged folder, a full file,
    a save without training state), what the other has that is no model is left aside, unless parts were named.

    Args:
        a: The first checkpoint.
        b: The second one.
        wanted: Names of parts, or roles; empty for everything.

    Raises:
        UsageError: A wanted part is on neither side, or nothing is left that could be compared.
    """
    parts_a, parts_b = _choose(a, b, wanted)
    pairs: list[tuple[Part, Part]] = []
    for role in Role:
        mine = [part for part in parts_a if part.role is role]
        theirs = {part.name: part for part in parts_b if part.role is role}
        named = [(part, theirs[part.name]) for part in mine if part.name in theirs]
        pairs += named
        if role in _ORDERED:
            taken = {part.name for part, _ in named}
            rest = [part for name, part in theirs.items() if name not in taken]
            pairs += zip([part for part in mine if part.name not in taken], rest, strict=False)
    pairs.sort(key=lambda pair: next(number for number, part in enumerate(parts_a) if part is pair[0]))
    only_a = [part for part in parts_a if all(part is not first for first, _ in pairs)]
    only_b = [part for part in parts_b if all(part is not second for _, second in pairs)]
    if not pairs and len(only_a) == len(only_b) == 1 and only_a[0].tensors and only_b[0].tensors:
        return Pairing(pairs=[(only_a[0], only_b[0])])
    if not pairs or wanted:
        return Pairing(pairs=pairs, only_a=only_a, only_b=only_b)
    only_a, aside_a = _set_aside(only_a, b)
    only_b, aside_b = _set_aside(only_b, a)
    return Pairing(pairs=pairs, only_a=only_a, only_b=only_b, aside_a=aside_a, aside_b=aside_b)


def refuse_damaged(checkpoint: Checkpoint, compared: Sequence[Part], *, label: str, path: str, whole: bool) -> None:
    """Refuse to compare what has holes: what is missing would look like a difference.

    Args:
        checkpoint: The checkpoint.
        compared: Its parts that will be read.
        label: ``A`` or ``B``.
        path: As the user typed it.
        whole: Whether everything in it counts, rather than the parts named.

    Raises:
        FlatParameters: Names and shapes are not in the files.
        IncompleteCheckpoint: Data are missing or contradictory.
    """
    folders = {part.folder for part in compared}
    problems = [problem for part in compared for problem in part.problems]
    problems += [
        problem
        for problem in checkpoint.problems
        if whole or "" in folders or problem.where.rpartition("/")[0] in folders
    ]
    for problem in problems:
        if problem.severity is Severity.ERROR:
            where = f"`{problem.where}`: " if problem.where else ""
            raise IncompleteCheckpoint(
                f"{label} (`{path}`) is damaged or incomplete: {where}{problem.message}",
                hint=f"fsdp-ckpt validate {shlex.quote(path)}",
            )
    for part in compared:
        if part.flat is not None:
            raise FlatParameters(
                f"{label} (`{path}`): {part.name}: {part.flat}",
                hint=f"fsdp-ckpt convert {shlex.quote(path)} OUT --to accelerate --shapes-from shapes.json"
                "    (and compare OUT)",
            )


def _choose(a: Checkpoint, b: Checkpoint, wanted: Sequence[str]) -> tuple[list[Part], list[Part]]:
    """Return the parts of both sides that the user wants."""
    if not wanted:
        return list(a.parts), list(b.parts)
    chosen: tuple[list[Part], list[Part]] = ([], [])
    for name in wanted:
        found = [_named(checkpoint, name) for checkpoint in (a, b)]
        if not any(found):
            names = [", ".join(part.name for part in side.parts) or "none" for side in (a, b)]
            raise UsageError(f"neither side has a part `{name}`", hint=f"A has {names[0]}; B has {names[1]}")
        if not all(found) and all(name != role.value for role in Role):
            # One side's own name for it: on the other side it is the part of the same role.
            given = found[0] or found[1]
            other = b if found[0] else a
            found[1 if found[0] else 0] = [part for part in other.parts if part.role is given[0].role][: len(given)]
        for side, parts in zip(chosen, found, strict=True):
            side += [part for part in parts if all(part is not known for known in side)]
    order = list(Role)
    first, second = (sorted(side, key=lambda part: order.index(part.role)) for side in chosen)
    return first, second


def _named(checkpoint: Checkpoint, name: str) -> list[Part]:
    named = [part for part in checkpoint.parts if name in (part.name, part.folder)]
    return named or [part for part in checkpoint.parts if name == part.role.value]


def _set_aside(alone: Sequence[Part], other: Checkpoint) -> tuple[list[Part], list[Part]]:
    """Split parts that the other side lacks into those that it should have, and those that it holds nothing like."""
    if any(part.role is not Role.MODEL for part in other.parts):
        return list(alone), []
    models = [part for part in alone if part.role is Role.MODEL]
    return models, [part for part in alone if part.role is not Role.MODEL]
