"""Each target of ``--to``: which files hold what, and what it leaves behind."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.catalog import Part, Role
from fsdp_ckpt.ops.conversion.accelerate import lay_out_accelerate
from fsdp_ckpt.ops.conversion.adapter_config import find_adapter_config
from fsdp_ckpt.ops.conversion.adapters import ADAPTER_FILE, base_of, export_adapter, holds_wrapped_model
from fsdp_ckpt.ops.conversion.beside import (
    add_beside,
    beside,
    is_own_file,
    leave_manifest,
    leave_objects,
    side_files_of,
)
from fsdp_ckpt.ops.conversion.contents import whole_content
from fsdp_ckpt.ops.conversion.hf_export import prepare_export
from fsdp_ckpt.ops.conversion.hf_side import export_side_files
from fsdp_ckpt.ops.conversion.layouts import dcp_folder, full_state, weight_files
from fsdp_ckpt.ops.conversion.options import sharding_of
from fsdp_ckpt.ops.conversion.plan import ConvertPlan
from fsdp_ckpt.ops.side_files import SideFiles
from fsdp_ckpt.ops.ties import tie
from fsdp_ckpt.plan.merge import Selection
from fsdp_ckpt.plan.output import OutputPart
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.units import parse_size

__all__ = ["lay_out"]


def lay_out(plan: ConvertPlan) -> None:
    """Fill in the files of a plan.

    Raises:
        As ``convert``.
    """
    if plan.options.fold_lora:
        _fold(plan)
    targets: Mapping[str, Callable[[ConvertPlan], None]] = {
        "safetensors": _safetensors, "hf": _hf, "torch": _torch, "dcp": _dcp, "accelerate": lay_out_accelerate,
        "adapter": _adapter,
    }  # fmt: skip
    targets[plan.options.to](plan)
    if plan.options.to != "accelerate":
        leave_manifest(plan, f"--to {plan.options.to} has no place for it")


def _fold(plan: ConvertPlan) -> None:
    config = find_adapter_config(
        _path(plan.options.adapter_config), side_files_of(plan), alpha=plan.options.lora_alpha,
        use_rslora=plan.options.rslora,
    )  # fmt: skip
    for number, part in enumerate(plan.models):
        base = base_of(part.tensors, fold=True, config=config, adapter=plan.options.adapter)
        plan.models[number] = replace(part, tensors=base.tensors)
        plan.notes += base.notes
        plan.warnings += base.warnings


def _unwrapped(plan: ConvertPlan, part: OutputPart) -> OutputPart:
    """Give a model the names that it had before PEFT wrapped it; an adapter alone stays as it is."""
    if plan.options.fold_lora or not holds_wrapped_model(part.tensors):
        return part
    return _base(plan, part)


def _base(plan: ConvertPlan, part: OutputPart) -> OutputPart:
    base = base_of(part.tensors, fold=False, adapter=plan.options.adapter)
    plan.notes += base.notes
    plan.warnings += base.warnings
    if base.left_out is not None:
        fold = shlex.join([*plan.sources, plan.out, "--to", plan.options.to, "--fold-lora", "--overwrite"])
        alone = shlex.join([*plan.sources, plan.out.rstrip("/") + "-adapter", "--to", "adapter"])
        plan.warnings.append(
            f"{base.left_out}. To add it to the weights: fsdp-ckpt convert {fold}. "
            f"To write it alone: fsdp-ckpt convert {alone}"
        )
    return replace(part, tensors=base.tensors)


def _path(text: object) -> Path | None:
    return None if text is None else Path(str(text))


def _tied(plan: ConvertPlan, part: OutputPart, config: Mapping[str, object]) -> OutputPart:
    """Drop an output head that equals the embedding, where the options or config.json ask for it."""
    asked = plan.options.tie
    if not (asked or (asked is None and config.get("tie_word_embeddings") is True)):
        return part
    with Sources(plan.roots) as sources:
        selection, warnings = tie(Selection(tensors=part.tensors), sources, asked=asked is True)
    plan.warnings += warnings
    plan.tied = selection.tied
    plan.note_kept([tensor for tensor in part.tensors if tensor.name in selection.tied])
    return replace(part, tensors=selection.tensors)


def _add_beside(plan: ConvertPlan, side: SideFiles, part: OutputPart) -> None:
    plan.laid.files = {**beside(side, part), **plan.laid.files}
    if "config.json" in side.missing:
        plan.warnings.append("no config.json was found beside the checkpoint: from_pretrained needs it")


def _safetensors(plan: ConvertPlan) -> None:
    side = side_files_of(plan)
    part = _tied(plan, _unwrapped(plan, plan.models[0]), side.config)
    leave_objects(plan, part)
    weight_files(
        plan.laid, part.tensors, style="safetensors", max_shard_bytes=parse_size(plan.options.max_shard_size), tied={}
    )
    plan.note_written(replace(part, objects=()), "model.safetensors")
    _add_beside(plan, side, part)


def _torch(plan: ConvertPlan) -> None:
    for part in plan.models:
        side = side_files_of(plan)
        part = _tied(plan, _unwrapped(plan, part), side.config)
        leave_objects(plan, part)
        weight_files(
            plan.laid, part.tensors, style="bin", max_shard_bytes=parse_size(plan.options.max_shard_size),
            tied=plan.tied,
        )  # fmt: skip
        plan.note_written(replace(part, objects=()), "pytorch_model.bin")
        plan.laid.files = {**beside(side, part), **plan.laid.files}
    for number, part in enumerate(plan.optimizers):
        name = "optimizer.bin" if number == 0 else f"optimizer_{number}.bin"
        full_state(plan.laid, part, plan.store, name=name)
        plan.note_written(part, name)
    plan.note_all_left((other, "--to torch holds models and optimizers only") for other in plan.chosen.others)


def _hf(plan: ConvertPlan) -> None:
    folders = [root / part.folder for part in plan.chosen.models for root in plan.roots]
    side = export_side_files(plan.options.config_from, folders)
    part = plan.models[0]
    leave_objects(plan, part)
    if not plan.options.fold_lora:
        part = _base(plan, part)
    part = _tied(plan, part, side.config)
    export = prepare_export(part.tensors, side, dtype=plan.options.target_dtype, tied=plan.tied)
    plan.notes += export.notes
    plan.warnings += export.warnings
    weight_files(
        plan.laid, export.tensors, style="safetensors", max_shard_bytes=parse_size(plan.options.max_shard_size),
        tied={},
    )  # fmt: skip
    plan.laid.files = {**export.files, **plan.laid.files}
    plan.note_written(replace(part, tensors=export.tensors, objects=()), "model.safetensors")


def _adapter(plan: ConvertPlan) -> None:
    options, part = plan.options, plan.models[0]
    config = find_adapter_config(
        _path(options.adapter_config), side_files_of(plan), alpha=options.lora_alpha, use_rslora=options.rslora
    )
    export = export_adapter(part.tensors, config=config, adapter=options.adapter)
    plan.notes += export.notes
    plan.warnings += export.warnings
    pattern = ADAPTER_FILE.replace(".", "{suffix}.")
    weight_files(
        plan.laid, export.tensors, style="safetensors", pattern=pattern, max_shard_bytes=1 << 62, tied={}
    )  # fmt: skip
    if export.config is not None:
        plan.laid.files["adapter_config.json"] = export.config
    leave_objects(plan, part)
    plan.note_written(replace(part, tensors=export.tensors, objects=()), ADAPTER_FILE)


def _dcp(plan: ConvertPlan) -> None:
    plan.sharding = sharding_of(plan.options, plan.saved_world_size)
    parts: list[tuple[tuple[str, ...], OutputPart]] = []
    for role, group in (("model", plan.models), ("optimizer", plan.optimizers)):
        for number, part in enumerate(group):
            parts.append(((role if len(group) == 1 else f"{role}_{number}",), part))
    left: list[tuple[Part, str]] = []
    for other in plan.chosen.others:
        if other.dialect == "dcp" or other.tensors:
            parts.append(((other.name,), whole_content(other)))
        else:
            hint = "; --to accelerate keeps it" if is_own_file(other) or other.role is Role.SCHEDULER else ""
            left.append((other, f"no place in a single folder{hint}"))
    plan.note_all_left(left)
    dcp_folder(plan.laid, parts, plan.sharding, plan.store, folder="")
    for head, part in parts:
        plan.note_written(part, head[0])
    add_beside(plan)
