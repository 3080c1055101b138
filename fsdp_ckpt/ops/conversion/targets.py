"""Each target of ``--to``: which files hold what, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.catalog import Part, Role
from fsdp_ckpt.codec.value_writer import encode_object
from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.ops.conversion.adapter_config import ADAPTER_CONFIG, find_adapter_config
from fsdp_ckpt.ops.conversion.adapters import ADAPTER_FILE, base_of, export_adapter, holds_wrapped_model
from fsdp_ckpt.ops.conversion.contents import whole_content
from fsdp_ckpt.ops.conversion.hf_export import prepare_export
from fsdp_ckpt.ops.conversion.hf_side import export_side_files
from fsdp_ckpt.ops.conversion.layouts import dcp_folder, full_state, weight_files
from fsdp_ckpt.ops.conversion.nesting import nest
from fsdp_ckpt.ops.conversion.options import sharding_of
from fsdp_ckpt.ops.conversion.plan import ConvertPlan
from fsdp_ckpt.ops.conversion.values import load_value
from fsdp_ckpt.ops.side_files import SideFiles, find_side_files
from fsdp_ckpt.ops.ties import tie
from fsdp_ckpt.plan.lora import has_adapter
from fsdp_ckpt.plan.merge import Selection
from fsdp_ckpt.plan.output import OutputPart
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.store.local import LocalStore
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
        "safetensors": _safetensors, "hf": _hf, "torch": _torch, "dcp": _dcp, "accelerate": _accelerate,
        "adapter": _adapter,
    }  # fmt: skip
    targets[plan.options.to](plan)


def _side_files(plan: ConvertPlan) -> SideFiles:
    folders = [root / part.folder for part in plan.chosen.models for root in plan.roots]
    return find_side_files(*(folders or plan.roots))


def _fold(plan: ConvertPlan) -> None:
    config = find_adapter_config(
        _path(plan.options.adapter_config), _side_files(plan), alpha=plan.options.lora_alpha,
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
    base = base_of(part.tensors, fold=False, adapter=plan.options.adapter)
    plan.notes += base.notes
    plan.warnings += base.warnings
    return replace(part, tensors=base.tensors)


def _beside(side: SideFiles, part: OutputPart) -> dict[str, Path]:
    """Return the side files; beside a model without adapter, adapter_config.json would make loaders look for one."""
    keeps = has_adapter(tensor.name for tensor in part.tensors)
    return {name: path for name, path in side.files.items() if keeps or name != ADAPTER_CONFIG}


def _path(text: object) -> Path | None:
    return None if text is None else Path(str(text))


def _leave_objects(plan: ConvertPlan, part: OutputPart) -> None:
    if part.objects:
        plan.note_left(replace(part, tensors=()), f"--to {plan.options.to} holds tensors only")


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
    plan.laid.files = {**_beside(side, part), **plan.laid.files}
    if "config.json" in side.missing:
        plan.warnings.append("no config.json was found beside the checkpoint: from_pretrained needs it")


def _safetensors(plan: ConvertPlan) -> None:
    side = _side_files(plan)
    part = _tied(plan, _unwrapped(plan, plan.models[0]), side.config)
    _leave_objects(plan, part)
    weight_files(
        plan.laid, part.tensors, style="safetensors", max_shard_bytes=parse_size(plan.options.max_shard_size), tied={}
    )
    plan.note_written(replace(part, objects=()), "model.safetensors")
    _add_beside(plan, side, part)


def _torch(plan: ConvertPlan) -> None:
    for part in plan.models:
        side = _side_files(plan)
        part = _tied(plan, _unwrapped(plan, part), side.config)
        _leave_objects(plan, part)
        weight_files(
            plan.laid, part.tensors, style="bin", max_shard_bytes=parse_size(plan.options.max_shard_size),
            tied=plan.tied,
        )  # fmt: skip
        plan.note_written(replace(part, objects=()), "pytorch_model.bin")
        plan.laid.files = {**_beside(side, part), **plan.laid.files}
    for number, part in enumerate(plan.optimizers):
        name = "optimizer.bin" if number == 0 else f"optimizer_{number}.bin"
        full_state(plan.laid, part, plan.store, name=name)
        plan.note_written(part, name)
    for other in plan.chosen.others:
        plan.note_left(other, "--to torch holds models and optimizers only")


def _hf(plan: ConvertPlan) -> None:
    folders = [root / part.folder for part in plan.chosen.models for root in plan.roots]
    side = export_side_files(plan.options.config_from, folders)
    part = plan.models[0]
    _leave_objects(plan, part)
    if not plan.options.fold_lora:
        base = base_of(part.tensors, fold=False, adapter=plan.options.adapter)
        part = replace(part, tensors=base.tensors)
        plan.notes += base.notes
        plan.warnings += base.warnings
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
        _path(options.adapter_config), _side_files(plan), alpha=options.lora_alpha, use_rslora=options.rslora
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
    _leave_objects(plan, part)
    plan.note_written(replace(part, tensors=export.tensors, objects=()), ADAPTER_FILE)


def _dcp(plan: ConvertPlan) -> None:
    plan.sharding = sharding_of(plan.options, plan.saved_world_size)
    parts: list[tuple[tuple[str, ...], OutputPart]] = []
    for role, group in (("model", plan.models), ("optimizer", plan.optimizers)):
        for number, part in enumerate(group):
            parts.append(((role if len(group) == 1 else f"{role}_{number}",), part))
    for other in plan.chosen.others:
        if other.dialect == "dcp" or other.tensors:
            parts.append(((other.name,), whole_content(other)))
        else:
            hint = "; --to accelerate keeps it" if _is_own_file(other) or other.role is Role.SCHEDULER else ""
            plan.note_left(other, f"a file of its own, which has no place in a single folder{hint}")
    dcp_folder(plan.laid, parts, plan.sharding, plan.store, folder="")
    for head, part in parts:
        plan.note_written(part, head[0])
    _add_beside_quietly(plan)


def _accelerate(plan: ConvertPlan) -> None:
    if not plan.options.full:
        plan.sharding = sharding_of(plan.options, plan.saved_world_size)
    for number, part in enumerate(plan.models):
        if plan.sharding is not None:
            name = f"pytorch_model_fsdp_{number}"
            dcp_folder(plan.laid, [(("model",), part)], plan.sharding, plan.store, folder=name)
            plan.note_written(part, name)
            continue
        _leave_objects(plan, part)
        name = "pytorch_model_fsdp" if number == 0 else f"pytorch_model_fsdp_{number}"
        weight_files(
            plan.laid, part.tensors, style="bin", pattern=name + "{suffix}.bin", max_shard_bytes=1 << 62, tied={}
        )
        plan.note_written(replace(part, objects=()), f"{name}.bin")
    for number, part in enumerate(plan.optimizers):
        if plan.sharding is not None:
            name = f"optimizer_{number}"
            dcp_folder(plan.laid, [(("optimizer",), part)], plan.sharding, plan.store, folder=name)
        else:
            name = "optimizer.bin" if number == 0 else f"optimizer_{number}.bin"
            full_state(plan.laid, part, plan.store, name=name)
        plan.note_written(part, name)
    for other in sorted(plan.chosen.others, key=lambda part: not _is_own_file(part)):
        taken = {*plan.laid.files, *(spec.name for spec in plan.laid.specs)}
        if _is_own_file(other):
            file = next(iter(other.files))
            name = file.rpartition("/")[2]
            if name in taken:  # folders that each have a rank0.pt become one
                plan.note_left(other, f"another `{name}` is in the result already")
                continue
            plan.laid.files[name] = Path(plan.store.path(file))
            plan.note_written(whole_content(other), name)
        elif other.role is Role.SCHEDULER and not other.tensors:
            names = ("scheduler.bin", *(f"scheduler_{number}.bin" for number in range(1, len(plan.chosen.others) + 1)))
            name = next(name for name in names if name not in taken)
            try:
                plan.laid.files[name] = _encoded(other, plan.store, prefix=name.removesuffix(".bin"))
            except FsdpCkptError as error:
                plan.note_left(other, error.message)
                continue
            plan.note_written(whole_content(other), name)
        else:
            hint = "; --to dcp keeps it" if other.dialect == "dcp" or other.tensors else ""
            plan.note_left(other, f"Accelerate has no place for it{hint}")
    if "trainer_state.json" in plan.checkpoint.side_files:
        plan.laid.files["trainer_state.json"] = Path(plan.store.path("trainer_state.json"))
    _add_beside_quietly(plan)


def _is_own_file(part: Part) -> bool:
    """Whether a part is a small file that Accelerate or the Trainer names so."""
    return not part.tensors and len(part.files) == 1 and len(part.objects) == 1 and part.dialect == "torch-file"


def _encoded(part: Part, store: LocalStore, *, prefix: str) -> bytes:
    content = whole_content(part, lambda entry: load_value(entry, store))
    value = nest({entry.path: entry.value for entry in content.objects}, where=part.name)
    return encode_object(value, what=part.name, prefix=prefix)


def _add_beside_quietly(plan: ConvertPlan) -> None:
    """Keep the model's side files where the source has some."""
    for part in plan.models:
        plan.laid.files = {**_beside(_side_files(plan), part), **plan.laid.files}
