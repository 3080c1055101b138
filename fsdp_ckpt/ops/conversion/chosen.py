"""Choose what of a checkpoint is converted, and refuse what cannot be read whole."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_ckpt.catalog import Checkpoint, Part, Role, Severity
from fsdp_ckpt.errors import CorruptCheckpoint, FlatParameters, IncompleteCheckpoint, NoModelWeights, UsageError
from fsdp_ckpt.ops.choose import (
    choose_model_part,
    describe_choice,
    refuse_incomplete,
    refuse_mixed,
    show_paths,
    tier,
)
from fsdp_ckpt.ops.validation.names import check_names
from fsdp_ckpt.plan.extents import find_shared_bytes

__all__ = ["Chosen", "choose_parts"]

_FULL_DIALECTS = ("safetensors", "torch-file")
_SLICES = ("empty-tensor", "flattened-tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Parts to convert.

    Attributes:
        models: In order; one where the target holds one only.
        optimizers: In order.
        others: Schedulers, random states and the like, where everything was asked for.
        notes: What was chosen on the user's behalf.
    """

    models: Sequence[Part] = ()
    optimizers: Sequence[Part] = ()
    others: Sequence[Part] = ()
    notes: Sequence[str] = field(default=())

    @property
    def parts(self) -> list[Part]:
        """All of them."""
        return [*self.models, *self.optimizers, *self.others]


def choose_parts(
    checkpoint: Checkpoint, wanted: str, *, several: bool, paths: Sequence[str], out: str, command: str
) -> Chosen:
    """Return the parts that a conversion is about.

    Args:
        checkpoint: The source.
        wanted: ``model``, ``optimizer``, ``all``, or the name of a part.
        several: Whether the target can hold several models.
        paths: As the user typed them, for messages.
        out: The destination, for messages.
        command: What was typed (``convert --to dcp``), for messages.

    Raises:
        NoModelWeights: What was asked for is not there.
        AmbiguousPart: The target holds one model, there are several.
        UsageError: There is no part of that name.
        FlatParameters: Names and shapes are not in the files.
        IncompleteCheckpoint: Data are missing or contradictory.
        CorruptCheckpoint: Two tensors claim the same bytes.
    """
    models: list[Part] = []
    notes: list[str] = []
    optimizers = [part for part in checkpoint.parts if part.role is Role.OPTIMIZER]
    if wanted in ("model", "all"):
        candidates = [part for part in checkpoint.parts if part.role is Role.MODEL]
        best = min(map(tier, candidates), default=0)
        models = [part for part in candidates if tier(part) == best]
        if wanted == "model" or not models:
            optimizers = optimizers if wanted == "all" else []
        if (len(models) > 1 and not several) or (not models and not optimizers):
            chosen, notes = choose_model_part(checkpoint, None, paths=paths, out=out, command=command)
            models = [chosen]
        aside = [part.name for part in candidates if part not in models]
        if aside:
            notes.append(f"left aside: {', '.join(aside)}; choose with --part")
    elif wanted != "optimizer":
        optimizers = [part for part in optimizers if wanted in (part.name, part.folder)]
        if not optimizers:
            chosen, notes = choose_model_part(checkpoint, wanted, paths=paths, out=out, command=command)
            _refuse_small(chosen, wanted)
            models = [chosen]
    if wanted == "optimizer" and not optimizers:
        names = ", ".join(part.name for part in checkpoint.parts) or "nothing"
        raise NoModelWeights(
            f"{show_paths(paths)} holds no optimizer, only: {names}", hint=f"fsdp-ckpt inspect {shlex.join(paths)}"
        )
    others = [part for part in checkpoint.parts if part.role not in (Role.MODEL, Role.OPTIMIZER)]
    found = Chosen(
        models=models, optimizers=optimizers, others=others if wanted == "all" else (), notes=notes
    )  # fmt: skip
    if checkpoint.chosen is not None and not any(note.startswith("reading ") for note in notes):
        notes[:0] = describe_choice(checkpoint, [*models, *optimizers])
    _refuse_unreadable(checkpoint, found, is_all=wanted == "all", paths=paths, out=out, command=command)
    _refuse_slices(checkpoint, models, paths=paths)
    if not found.parts:
        raise UsageError(f"{show_paths(paths)} holds nothing to convert")
    return found


def _refuse_small(part: Part, wanted: str) -> None:
    """Refuse a scheduler or random states on their own: no target is made of them."""
    if part.role not in (Role.MODEL, Role.OTHER) and not part.tensors:
        raise UsageError(
            f"`{wanted}` is no model and no optimizer: it goes along with them, not alone",
            hint="leave out --part: --to accelerate keeps it",
        )


def _refuse_unreadable(
    checkpoint: Checkpoint, chosen: Chosen, *, is_all: bool, paths: Sequence[str], out: str, command: str
) -> None:
    """Refuse parts with holes, of several saves, or in which two tensors claim the same bytes."""
    models = chosen.models
    for part in (*models, *chosen.optimizers, *(part for part in chosen.others if part.tensors)):
        try:
            refuse_incomplete(part, paths=paths, out=out, command=command)
        except (IncompleteCheckpoint, FlatParameters) as error:
            if not is_all or part in models or not models:
                raise
            hint = f"fsdp-ckpt {command} {shlex.join([*paths, out])} --part model    (the model is whole)"
            raise type(error)(error.message, hint=hint) from None
        refuse_mixed(checkpoint, part, paths=paths)
        shared = find_shared_bytes(part.tensors.values())
        if shared is not None:
            raise CorruptCheckpoint(
                f"`{shared[0]}` and `{shared[1]}` claim the same bytes; nothing was written",
                hint=f"fsdp-ckpt validate {shlex.join(paths)}",
            )
        if part.role is Role.MODEL and not part.tensors:
            raise NoModelWeights(
                f"{show_paths(paths)}: {part.name} holds no tensors, only {len(part.objects)} pickled objects",
                hint="it was saved with flatten_state_dict=False or outside of a state dict; load it with torch",
            )


def _refuse_slices(checkpoint: Checkpoint, models: Sequence[Part], *, paths: Sequence[str]) -> None:
    """Refuse a whole model that one rank wrote from its own view: embeddings without rows, flattened matrices.

    In distributed checkpoints shapes are those of the whole; a tensor without elements is meant so there.
    """
    suspects = {key for part in models if part.dialect in _FULL_DIALECTS for key in part.tensors}
    found = [
        problem
        for problem in (check_names(checkpoint) if suspects else ())
        if problem.code in _SLICES and problem.severity is Severity.ERROR and problem.where in suspects
    ]
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise CorruptCheckpoint(
            f"`{found[0].where}` {found[0].message}{more}: this is one rank's view of the model; nothing was written",
            hint=f"fsdp-ckpt validate {shlex.join(paths)}",
        )
