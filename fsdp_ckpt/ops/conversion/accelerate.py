"""``--to accelerate``: the folders and files of Accelerate's ``save_state``, and of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.catalog import Part, Role
from fsdp_ckpt.codec.value_writer import encode_object
from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.layouts.manifest import Manifest, read_manifest
from fsdp_ckpt.ops.conversion.beside import add_beside, is_own_file, leave_manifest, leave_objects
from fsdp_ckpt.ops.conversion.contents import whole_content
from fsdp_ckpt.ops.conversion.layouts import dcp_folder, full_state, weight_files
from fsdp_ckpt.ops.conversion.nesting import nest
from fsdp_ckpt.ops.conversion.options import sharding_of
from fsdp_ckpt.ops.conversion.plan import ConvertPlan
from fsdp_ckpt.ops.conversion.remade_manifest import add_manifest, check_carried, new_save_id
from fsdp_ckpt.ops.conversion.values import load_value, unreadable
from fsdp_ckpt.plan.output import OutputPart
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["lay_out_accelerate"]


def lay_out_accelerate(plan: ConvertPlan) -> None:
    """Fill in the files of ``--to accelerate``: sharded folders, or with ``--full`` whole files.

    Raises:
        As ``convert``.
    """
    if not plan.options.full:
        plan.sharding = sharding_of(plan.options, plan.saved_world_size)
    before = len(plan.written)
    _add_others(plan)
    others, plan.written[before:] = plan.written[before:], []
    if "trainer_state.json" in plan.checkpoint.side_files:
        plan.laid.files["trainer_state.json"] = Path(plan.store.path("trainer_state.json"))
    add_beside(plan)
    manifest = _kept_manifest(plan)
    save_id = new_save_id(manifest, plan.sharding) if manifest is not None else None
    for number, part in enumerate(plan.models):
        _add_model(plan, part, number, save_id)
    for number, part in enumerate(plan.optimizers):
        if plan.sharding is not None:
            name = f"optimizer_{number}"
            dcp_folder(plan.laid, [(("optimizer",), part)], plan.sharding, plan.store, folder=name, save_id=save_id)
        else:
            name = "optimizer.bin" if number == 0 else f"optimizer_{number}.bin"
            full_state(plan.laid, part, plan.store, name=name)
        plan.note_written(part, name)
    plan.written += others
    if manifest is not None and save_id is not None:
        style = "FULL_STATE_DICT" if plan.options.full else "SHARDED_STATE_DICT"
        add_manifest(plan.laid, replace(manifest, state_dict_type=style), save_id)


def _add_model(plan: ConvertPlan, part: OutputPart, number: int, save_id: str | None) -> None:
    if plan.sharding is not None:
        name = f"pytorch_model_fsdp_{number}"
        dcp_folder(plan.laid, [(("model",), part)], plan.sharding, plan.store, folder=name, save_id=save_id)
        plan.note_written(part, name)
        return
    leave_objects(plan, part)
    name = "pytorch_model_fsdp" if number == 0 else f"pytorch_model_fsdp_{number}"
    weight_files(plan.laid, part.tensors, style="bin", pattern=name + "{suffix}.bin", max_shard_bytes=1 << 62, tied={})
    plan.note_written(replace(part, objects=()), f"{name}.bin")


def _kept_manifest(plan: ConvertPlan) -> Manifest | None:
    """Return the source's manifest where the result has the same parts and names; else say why it stays behind."""
    manifest = read_manifest(Folder(plan.store))
    if manifest is None:
        return None
    if plan.options.verify:
        check_carried(plan.laid, manifest, plan.store)
    why = _why_other(plan, manifest)
    if why is None:
        return manifest
    leave_manifest(plan, why)
    return None


def _why_other(plan: ConvertPlan, manifest: Manifest) -> str | None:
    """Return why a result is another checkpoint than a manifest tells of; None where only the files are others."""
    options = plan.options
    if options.part not in (None, "all") or plan.left:
        return "not everything is in the result"
    changed = options.dtype is not None or options.unstack_layers or options.fold_lora
    if changed or options.include or options.exclude or options.rename or plan.renamed:
        return "names or values change"
    parts = [*plan.chosen.models, *plan.chosen.optimizers]
    names = [f"pytorch_model_fsdp_{number}" for number in range(len(plan.models))]
    names += [f"optimizer_{number}" for number in range(len(plan.optimizers))]
    if any(part.name not in (name, name.removesuffix("_0")) for part, name in zip(parts, names, strict=True)):
        return "its parts get other names"
    data = {file for part in parts for file in part.files}
    missing = min(manifest.files.keys() - data - plan.laid.files.keys(), default=None)
    return None if missing is None else f"`{missing}` is not in the result"


def _add_others(plan: ConvertPlan) -> None:
    """Add schedulers, random states and the like."""
    left: list[tuple[Part, str]] = []
    plan.warnings += unreadable(plan.chosen.others, plan.store)
    for other in sorted(plan.chosen.others, key=lambda part: not is_own_file(part)):
        taken = {*plan.laid.files, *(spec.name for spec in plan.laid.specs)}
        if is_own_file(other):
            file = next(iter(other.files))
            name = file.rpartition("/")[2]
            if name in taken:  # folders that each have a rank0.pt become one
                left.append((other, f"another `{name}` is in the result already"))
                continue
            plan.laid.files[name] = Path(plan.store.path(file))
            plan.note_written(whole_content(other), name)
        elif other.role is Role.SCHEDULER and not other.tensors:
            names = ("scheduler.bin", *(f"scheduler_{number}.bin" for number in range(1, len(plan.chosen.others) + 1)))
            name = next(name for name in names if name not in taken)
            try:
                plan.laid.files[name] = _encoded(other, plan.store, prefix=name.removesuffix(".bin"))
            except FsdpCkptError as error:
                left.append((other, error.message))
                continue
            plan.note_written(whole_content(other), name)
        else:
            hint = "; --to dcp keeps it" if other.dialect == "dcp" or other.tensors else ""
            left.append((other, f"Accelerate has no place for it{hint}"))
    plan.note_all_left(left)


def _encoded(part: Part, store: LocalStore, *, prefix: str) -> bytes:
    content = whole_content(part, lambda entry: load_value(entry, store))
    value = nest({entry.path: entry.value for entry in content.objects}, where=part.name)
    return encode_object(value, what=part.name, prefix=prefix)
