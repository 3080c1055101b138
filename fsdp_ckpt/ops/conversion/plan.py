"""Decide everything about a conversion from metadata: what is read, what becomes of it, which files hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_ckpt.catalog import Checkpoint, Part, Role, Severity
from fsdp_ckpt.layouts.flat_params import name_flat_parameters
from fsdp_ckpt.ops.choose import read_source
from fsdp_ckpt.ops.conversion.adapters import holds_wrapped_model
from fsdp_ckpt.ops.conversion.chosen import Chosen, choose_parts
from fsdp_ckpt.ops.conversion.contents import model_content, optimizer_content
from fsdp_ckpt.ops.conversion.layouts import Laid
from fsdp_ckpt.ops.conversion.options import ConvertOptions, as_typed, check_options, wants
from fsdp_ckpt.ops.conversion.report import WrittenPart
from fsdp_ckpt.ops.conversion.shapes_from import shapes_from
from fsdp_ckpt.plan.output import OutputPart, OutputTensor
from fsdp_ckpt.plan.reshard import Sharding
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.units import counted

__all__ = ["ConvertPlan", "begin_plan"]

_ONE_MODEL = ("safetensors", "hf", "torch", "adapter")


@dataclass(kw_only=True)
class ConvertPlan:
    """What a conversion will do; filled step by step.

    Attributes:
        sources: The checkpoint, as given.
        checkpoint: Its catalog.
        store: Its files.
        chosen: The parts that are read.
        options: As given.
        out: The destination, as typed.
        models: What is written of each model.
        optimizers: Likewise.
        laid: The files of the result.
        written: What is in them.
        sharding: How they are sharded; None where they are not.
        renamed: New name by key.
        excluded: Tensors left out by filters.
        tied: Name kept by name not written.
        left: What of the source is not in the result.
        kept: Identities of the source's tensors that are in the result, or the same as one that is.
        notes: What was chosen on the user's behalf.
        warnings: What the user should know.
    """

    sources: Sequence[str]
    checkpoint: Checkpoint
    store: LocalStore
    chosen: Chosen
    options: ConvertOptions
    out: str
    models: list[OutputPart] = field(default_factory=list)
    optimizers: list[OutputPart] = field(default_factory=list)
    laid: Laid = field(default_factory=Laid)
    written: list[WrittenPart] = field(default_factory=list)
    sharding: Sharding | None = None
    renamed: dict[str, str] = field(default_factory=dict)
    excluded: int = 0
    tied: Mapping[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders that all files of the checkpoint are relative to."""
        return self.checkpoint.roots

    @property
    def saved_world_size(self) -> int | None:
        """Ranks that wrote what is read, where that is known."""
        sizes = [part.world_size for part in self.chosen.parts if part.world_size]
        return max(sizes, default=self.checkpoint.world_size)

    def note_written(self, part: OutputPart, written_as: str) -> None:
        """Say that a part is in the result."""
        self.note_kept(part.tensors)
        self.written.append(
            WrittenPart(
                name=part.name,
                role=str(part.role),
                written_as=written_as,
                num_tensors=len(part.tensors),
                num_objects=len(part.objects),
                num_parameters=sum(tensor.numel for tensor in part.tensors),
                tensor_bytes=sum(tensor.num_bytes for tensor in part.tensors),
            )
        )

    def note_kept(self, tensors: Sequence[OutputTensor]) -> None:
        """Say that nothing of these is lost: they are in the result, folded into it, or the same as one that is."""
        for tensor in tensors:
            factors = (tensor.addition.up, tensor.addition.down) if tensor.addition is not None else ()
            self.kept |= {id(tensor.source), *map(id, factors)}

    def lost(self) -> list[str]:
        """Return the keys of tensors that are read, and are not in the result."""
        entries = (entry for part in self.chosen.parts for entry in part.tensors.values())
        return [entry.key for entry in entries if id(entry) not in self.kept]

    def note_left(self, part: Part | OutputPart, why: str) -> None:
        """Say that a part of the source, or the values in it, are not in the result."""
        what = [counted(len(part.tensors), "tensor")] if part.tensors else []
        what += [counted(len(part.objects), "value")] if part.objects else []
        self.left.append(f"{part.name} ({', '.join(what) or 'empty'}): {why}")

    def note_all_left(self, parts: Iterable[tuple[Part, str]]) -> None:
        """Say that parts of the source are not in the result, and why: those of one role and reason in one sentence."""
        groups: dict[tuple[Role, str], list[Part]] = {}
        for part, why in parts:
            groups.setdefault((part.role, why), []).append(part)
        for (_, why), group in groups.items():
            if len(group) == 1:
                self.note_left(group[0], why)
            else:
                self.left.append(f"{group[0].name} and {len(group) - 1} more: {why}")


def begin_plan(sources: Sequence[str], options: ConvertOptions, *, out: str, command: str = "convert") -> ConvertPlan:
    """Read the metadata of a checkpoint and decide what is written of it; the target's layout comes after that.

    Args:
        sources: The checkpoint, as given.
        options: The options.
        out: The destination, for messages.
        command: ``convert`` or ``reshard``, likewise.

    Raises:
        As ``convert``.
    """
    check_options(options)
    typed = as_typed(options, command)
    checkpoint = read_source(sources, out=out, command=typed)
    if options.shapes_from is not None:
        checkpoint = name_flat_parameters(checkpoint, shapes_from(options.shapes_from))
    several = options.to not in _ONE_MODEL
    chosen = choose_parts(checkpoint, wants(options), several=several, paths=sources, out=out, command=typed)
    plan = ConvertPlan(
        sources=sources, checkpoint=checkpoint, store=LocalStore(checkpoint.roots), chosen=chosen, options=options,
        out=out,
    )  # fmt: skip
    plan.notes += chosen.notes
    for part in chosen.models:
        selection, content = model_content(part, options)
        plan.models.append(content)
        plan.renamed |= selection.renamed
        plan.excluded += len(selection.excluded)
    if not _keeps_wrapping(plan):
        for part in chosen.optimizers:
            plan.note_left(part, "its names are those inside PEFT's wrapping")
    elif chosen.optimizers:
        _add_optimizers(plan)
    for part in chosen.parts:
        plan.warnings += [f"{p.where}: {p.message}" for p in part.problems if p.severity is Severity.WARNING]
    if options.part is None and wants(options) == "model":
        plan.notes += _staying_behind(checkpoint)
    return plan


def _keeps_wrapping(plan: ConvertPlan) -> bool:
    """Tell whether parameters are still called in the result as the optimizer calls them."""
    unwraps = plan.options.fold_lora or plan.options.to == "torch"
    return not (unwraps and any(holds_wrapped_model(part.tensors) for part in plan.models))


def _staying_behind(checkpoint: Checkpoint) -> list[str]:
    """Return a sentence about what is no model, where only the model is taken although nobody said so."""
    by_role: dict[Role, list[str]] = {}
    for part in checkpoint.parts:
        if part.role not in (Role.MODEL, Role.OTHER):
            by_role.setdefault(part.role, []).append(part.name)
    if not by_role:
        return []
    words = [names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") for names in by_role.values()]
    return [f"the model alone is written, without {', '.join(words)}; --to accelerate takes all"]


def _add_optimizers(plan: ConvertPlan) -> None:
    chosen, checkpoint = plan.chosen, plan.checkpoint
    only = chosen.models[0] if len(chosen.models) == 1 else None
    if only is None:  # its names may be needed all the same
        models = [part for part in checkpoint.parts if part.role == "model" and part.flat is None and part.is_complete]
        only = models[0] if len(models) == 1 else None
    with Sources(checkpoint.roots) as opened:
        for part in chosen.optimizers:
            content = optimizer_content(part, model=only, sources=opened, options=plan.options, notes=plan.notes)
            plan.optimizers.append(content)
