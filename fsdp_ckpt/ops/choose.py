"""Choose the part of a checkpoint that a command means."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from fsdp_ckpt.catalog import Checkpoint, Part, Role, Severity
from fsdp_ckpt.errors import (
    AmbiguousPart,
    CheckpointNotFound,
    CorruptCheckpoint,
    FlatParameters,
    IncompleteCheckpoint,
    NoModelWeights,
    NotPermitted,
    UnknownLayout,
    UsageError,
)
from fsdp_ckpt.layouts.elsewhere import ELSEWHERE
from fsdp_ckpt.layouts.manifest import check_stamps, manifest_of
from fsdp_ckpt.layouts.registry import checkpoints_inside, members_of_run, read_checkpoint
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.units import format_size

__all__ = [
    "choose_model_part", "describe_choice", "describe_part", "read_source", "refuse_incomplete", "refuse_mixed",
    "show_paths", "tier",
]  # fmt: skip

_TRAINING_DIALECTS = ("dcp", "deepspeed", "rank-files", "torch-file")


def read_source(paths: Sequence[str], *, out: str = "OUT", command: str = "merge") -> Checkpoint:
    """Read the catalog of what a command is to read; errors say what to type where the path was too high up.

    Args:
        paths: As the user typed them.
        out: The destination, for messages.
        command: The command that was typed, for messages.

    Raises:
        As ``read_checkpoint``.
    """
    try:
        return read_checkpoint(paths)
    except (UnknownLayout, IncompleteCheckpoint) as error:
        only = paths[0] if len(paths) == 1 else None
        if only is None or isinstance(error, NotPermitted):
            raise
        if isinstance(error, UnknownLayout):
            inside = checkpoints_inside(only)
            if len(inside) == 1:
                hint = f"fsdp-ckpt {command} {shlex.join([str(inside[0]), out])}"
                raise UnknownLayout(error.message, hint=hint) from None
            raise
        newest = next((str(path) for path in members_of_run(only) if _has_whole_model(path)), None)
        if newest is None:
            raise
        options = [] if command == "merge" else ["--part", "model"]
        hint = f"fsdp-ckpt {command} {shlex.join([newest, out, *options])}    (its model is whole)"
        raise IncompleteCheckpoint(error.message, hint=hint) from None


def _has_whole_model(path: Path) -> bool:
    try:
        found = read_checkpoint(path)
    except (CheckpointNotFound, CorruptCheckpoint):
        return False
    models = [part for part in found.parts if part.role is Role.MODEL]
    return bool(models) and all(part.is_complete and part.flat is None for part in models)


def choose_model_part(
    checkpoint: Checkpoint, name: str | None, *, paths: Sequence[str], out: str = "OUT", command: str = "merge"
) -> tuple[Part, list[str]]:
    """Return the part that holds the model, and notes about what was left aside.

    Args:
        checkpoint: The checkpoint.
        name: What the user asked for; None for the obvious one.
        paths: As the user typed them, for messages.
        out: The destination, for messages.
        command: The command that was typed, for messages.

    Raises:
        NoModelWeights: There is none.
        AmbiguousPart: There are several and none stands out.
        UsageError: There is no part of that name.
    """
    shown = show_paths(paths)
    if name is not None:
        for part in checkpoint.parts:
            if name in (part.name, part.folder) and part.role is not Role.OPTIMIZER:
                return part, []
        named = [part for part in checkpoint.parts if name == part.name]
        if named:
            raise NoModelWeights(
                f"`{name}` holds optimizer state, not model weights", hint=_optimizer_hint(paths, out, f"--part {name}")
            )
        names = ", ".join(part.name for part in checkpoint.parts)
        raise UsageError(f"{shown} has no part `{name}`", hint=f"its parts are: {names}")
    models = [part for part in checkpoint.parts if part.role is Role.MODEL]
    if not models:
        raise _no_model(checkpoint, paths, out, command)
    best = min(map(tier, models))
    chosen = [part for part in models if tier(part) == best]
    if len(chosen) > 1:
        listing = "; ".join(describe_part(part) for part in chosen)
        raise AmbiguousPart(
            f"{shown} holds {len(chosen)} models: {listing}",
            hint=f"fsdp-ckpt {command} {shlex.join([*paths, out])} --part {shlex.quote(chosen[0].name)}",
        )
    notes = []
    if len(checkpoint.parts) > 1 or checkpoint.chosen is not None:
        notes = describe_choice(checkpoint, chosen)
    others = [part for part in checkpoint.parts if part is not chosen[0] and part.tensors]
    aside = [f"{part.name} ({len(part.tensors)} tensors)" for part in others if _is_near(part, chosen[0])]
    if aside:
        notes.append(f"left aside: {', '.join(aside)}; choose with --part")
    return chosen[0], notes


def describe_choice(checkpoint: Checkpoint, parts: Sequence[Part]) -> list[str]:
    """Return what was taken, and what newer checkpoints of the run were passed over, one sentence each."""
    notes = [f"passed over: {value}" for fact, value in checkpoint.facts if fact == "passed over"]
    notes.append(f"reading {', '.join(map(describe_part, parts))} of {' + '.join(map(str, checkpoint.roots))}")
    return notes


def describe_part(part: Part) -> str:
    """Return a part in a few words: ``pytorch_model_fsdp_0 (8 files, 14.5 GB, complete)``."""
    files = [file for file in part.files if not file.rpartition("/")[2].endswith(".metadata")]
    state = "complete" if part.is_complete else "incomplete"
    return f"{part.name} ({len(files)} file{'' if len(files) == 1 else 's'}, {format_size(part.num_bytes)}, {state})"


def refuse_mixed(checkpoint: Checkpoint, part: Part, *, paths: Sequence[str]) -> None:
    """Make sure that the files of a part are of the save that a manifest of ours tells of.

    Raises:
        IncompleteCheckpoint: One is of another save, or of another rank.
    """
    store = LocalStore(checkpoint.roots)
    for problem in check_stamps(Folder(store), manifest_of(store), part.files):
        if problem.where in part.files:
            raise IncompleteCheckpoint(
                f"`{problem.where}` {problem.message}; nothing was written",
                hint=f"fsdp-ckpt validate {shlex.join(paths)}",
            )


def show_paths(paths: Sequence[str]) -> str:
    """Return paths for a sentence."""
    return " + ".join(f"`{path}`" for path in paths)


def refuse_incomplete(part: Part, *, paths: Sequence[str], out: str = "OUT", command: str = "merge") -> None:
    """Refuse to read a part with holes.

    Args:
        part: The part.
        paths: As the user typed them, for messages.
        out: The destination, for messages.
        command: The command that was typed, for messages.

    Raises:
        FlatParameters: Names and shapes are not in the files.
        IncompleteCheckpoint: Data are missing or contradictory.
    """
    if part.flat is not None:
        hint = "load it into the wrapped model it was saved from, and save that as SHARDED_STATE_DICT"
        if part.role is Role.MODEL:
            typed = "convert --to safetensors" if command == "merge" else command
            typed = f"fsdp-ckpt {typed} {shlex.join([*paths, out])} --shapes-from shapes.json"
            hint = f"{typed}    (the model's shapes in the module's order; its config.json will do as well)"
        raise FlatParameters(f"{part.name}: {part.flat}; the wrapped model that it was saved from knows", hint=hint)
    errors = [problem for problem in part.problems if problem.severity is Severity.ERROR]
    if errors:
        more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        hint = f"fsdp-ckpt validate {shlex.join(paths)}"
        elsewhere = next((problem.message for problem in part.problems if problem.code == ELSEWHERE), None)
        if elsewhere is not None:
            more += f"; {elsewhere}"
            another = os.path.join("ANOTHER_NODE", os.path.basename(os.path.abspath(paths[0])))
            hint = f"fsdp-ckpt {command} {shlex.join([*paths, another, out])}"
        raise IncompleteCheckpoint(f"`{errors[0].where}`: {errors[0].message}{more}; nothing was written", hint=hint)


def _is_near(part: Part, chosen: Part) -> bool:
    """Whether somebody may have expected the part's tensors in the result: a model, or something in the same files."""
    return part.role in (Role.MODEL, Role.OTHER) or bool(part.files.keys() & chosen.files.keys())


def tier(part: Part) -> int:
    """Return how far a model is from what FSDP itself saved; that is preferred to copies beside it, lower is nearer."""
    if part.dialect in _TRAINING_DIALECTS or part.name == "sharded":
        return 0
    return 1 if part.name in ("model", "pytorch_model") else 2


def _optimizer_hint(paths: Sequence[str], out: str, option: str = "--part optimizer") -> str:
    return f"fsdp-ckpt convert --to dcp {option} {shlex.join([*paths, out])}    (accelerate and torch take it as well)"


def _no_model(checkpoint: Checkpoint, paths: Sequence[str], out: str, command: str) -> NoModelWeights:
    shown = show_paths(paths)
    optimizers: Sequence[Part] = [part for part in checkpoint.parts if part.role is Role.OPTIMIZER]
    if optimizers:
        beside = checkpoint.root.resolve().parent
        hint = None
        if checkpoint.root.name.startswith("optimizer") and beside.is_dir():
            found = sorted(p.name for p in beside.iterdir() if p.name.startswith("pytorch_model"))
            hint = f"fsdp-ckpt {command} {shlex.quote(str(beside / found[0]))} {shlex.quote(out)}" if found else None
        hint = hint or _optimizer_hint(paths, out)
        return NoModelWeights(f"{shown} holds optimizer state, not model weights", hint=hint)
    names = ", ".join(part.name for part in checkpoint.parts) or "nothing"
    return NoModelWeights(
        f"{shown} holds no model weights, only: {names}", hint=f"fsdp-ckpt inspect {shlex.join(paths)}"
    )
