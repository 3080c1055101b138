"""What lies beside a model, and what is said of what stays behind; for all targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.catalog import Part
from fsdp_ckpt.layouts.manifest import MANIFEST, read_manifest
from fsdp_ckpt.ops.conversion.adapter_config import ADAPTER_CONFIG
from fsdp_ckpt.ops.conversion.plan import ConvertPlan
from fsdp_ckpt.ops.conversion.remade_manifest import what_is_lost
from fsdp_ckpt.ops.side_files import SideFiles, find_side_files
from fsdp_ckpt.plan.lora import has_adapter
from fsdp_ckpt.plan.output import OutputPart
from fsdp_ckpt.store.local import Folder

__all__ = ["add_beside", "beside", "is_own_file", "leave_manifest", "leave_objects", "side_files_of"]


def side_files_of(plan: ConvertPlan) -> SideFiles:
    """Return the files beside the models that are read, or beside the checkpoint where there are none."""
    folders = [root / part.folder for part in plan.chosen.models for root in plan.roots]
    return find_side_files(*(folders or plan.roots))


def beside(side: SideFiles, part: OutputPart) -> dict[str, Path]:
    """Return the side files; beside a model without adapter, adapter_config.json would make loaders look for one."""
    keeps = has_adapter(tensor.name for tensor in part.tensors)
    return {name: path for name, path in side.files.items() if keeps or name != ADAPTER_CONFIG}


def add_beside(plan: ConvertPlan) -> None:
    """Keep the model's side files where the source has some."""
    for part in plan.models:
        plan.laid.files = {**beside(side_files_of(plan), part), **plan.laid.files}


def leave_objects(plan: ConvertPlan, part: OutputPart) -> None:
    """Say that what is no tensor is not in the result."""
    if part.objects:
        plan.note_left(replace(part, tensors=()), f"--to {plan.options.to} holds tensors only")


def leave_manifest(plan: ConvertPlan, why: str) -> None:
    """Say what is lost where the source has a manifest and the result has none."""
    manifest = read_manifest(Folder(plan.store))
    if manifest is not None:
        said = plan.warnings if plan.options.to in ("dcp", "accelerate", "torch") else plan.notes
        said.append(f"{MANIFEST} stays behind ({what_is_lost(manifest)}): {why}")


def is_own_file(part: Part) -> bool:
    """Tell whether a part is a small file that Accelerate or the Trainer names so."""
    return not part.tensors and len(part.files) == 1 and len(part.objects) == 1 and part.dialect == "torch-file"
