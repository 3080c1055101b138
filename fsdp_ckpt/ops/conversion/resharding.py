"""Plan another sharding of a checkpoint that is distributed already: the same keys, values and files beside."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.catalog import Checkpoint, ObjectEntry, Part, Role, TensorEntry
from fsdp_ckpt.errors import MalformedFile, PathOutside
from fsdp_ckpt.layouts.manifest import MANIFEST, manifest_of
from fsdp_ckpt.layouts.optimizer_paths import STATE
from fsdp_ckpt.layouts.roles import KeyPath
from fsdp_ckpt.ops.conversion.chosen import Chosen, choose_parts
from fsdp_ckpt.ops.conversion.contents import whole_content
from fsdp_ckpt.ops.conversion.layouts import dcp_folder
from fsdp_ckpt.ops.conversion.options import ConvertOptions, as_typed, sharding_of
from fsdp_ckpt.ops.conversion.plan import ConvertPlan
from fsdp_ckpt.ops.conversion.remade_manifest import add_manifest, check_carried, new_save_id
from fsdp_ckpt.ops.conversion.values import unreadable
from fsdp_ckpt.ops.side_files import find_side_files
from fsdp_ckpt.plan.output import OutputObject, OutputPart, OutputTensor
from fsdp_ckpt.store.leftovers import is_staging
from fsdp_ckpt.store.local import LocalStore

__all__ = ["plan_resharding"]

_DEPTH = 64

Head = tuple[str, ...]
"""What stands before a part's own names in the keys of a folder."""


def plan_resharding(
    checkpoint: Checkpoint, options: ConvertOptions, *, paths: Sequence[str], out: str
) -> ConvertPlan | None:
    """Return how a distributed checkpoint is written for other ranks; None where the source is none.

    Args:
        checkpoint: The source.
        options: ``world_size``, ``mesh``, ``placements``, ``part``, and how to write.
        paths: As the user typed them, for messages.
        out: The destination, for messages.

    Raises:
        As ``reshard``.
    """
    wanted = options.part or "all"
    command = as_typed(options, "reshard")
    chosen = choose_parts(checkpoint, wanted, several=True, paths=paths, out=out, command=command)
    own = [part for part in chosen.others if part.dialect == "dcp"]
    if any(part.dialect != "dcp" for part in (*chosen.models, *chosen.optimizers)):
        return None
    parts = [*chosen.models, *chosen.optimizers, *own]
    plan = ConvertPlan(
        sources=paths,
        checkpoint=checkpoint,
        store=LocalStore(checkpoint.roots),
        chosen=Chosen(models=chosen.models, optimizers=chosen.optimizers, others=own, notes=chosen.notes),
        options=options,
        out=out,
    )
    plan.notes += chosen.notes
    plan.warnings += [f"{p.where}: {p.message}" for part in parts for p in part.problems if p.severity != "note"]
    plan.sharding = sharding_of(options, plan.saved_world_size)
    manifest = manifest_of(plan.store) if wanted == "all" else None
    save_id = new_save_id(manifest, plan.sharding) if manifest is not None else None
    folders: dict[str, list[tuple[Head, OutputPart]]] = {}
    for part in parts:
        content = whole_content(part)
        folders.setdefault(part.folder, []).extend(_by_place(content))
        plan.models.append(content)
        plan.note_written(content, part.folder or ".")
    for folder, group in folders.items():
        dcp_folder(plan.laid, group, plan.sharding, plan.store, folder=folder, save_id=save_id)
    _add_files_beside(plan, parts, everything=wanted == "all")
    if manifest is not None and save_id is not None:
        if options.verify:
            check_carried(plan.laid, manifest, plan.store)
        add_manifest(plan.laid, manifest, save_id)
    if wanted == "all":
        plan.warnings += unreadable([part for part in checkpoint.parts if part not in parts], plan.store)
    return plan


def _by_place(part: OutputPart) -> list[tuple[Head, OutputPart]]:
    """Return what a part holds by what stands before its own names in the keys: ``("state", "model")``.

    Keys stay as they are, also where they are put together in another way than the names in the part (Megatron).
    """
    tensors: dict[Head, list[OutputTensor]] = {}
    objects: dict[Head, list[OutputObject]] = {}
    for tensor in part.tensors:
        head, path = _place(tensor.source, part)
        is_state = part.role is Role.OPTIMIZER and path != tensor.path and tensor.path[0] == STATE
        name = str(tensor.path[1]) if is_state else tensor.name  # placements go by it
        tensors.setdefault(head, []).append(replace(tensor, name=name, path=path))
    for value in part.objects:
        assert value.source is not None
        head, path = _place(value.source, part)
        objects.setdefault(head, []).append(replace(value, path=path))
    return [
        (head, replace(part, tensors=tensors.get(head, ()), objects=objects.get(head, ())))
        for head in {**tensors, **objects}
    ]


def _place(entry: TensorEntry | ObjectEntry, part: OutputPart) -> tuple[Head, KeyPath]:
    path = entry.path or (entry.name,)
    own = ".".join(map(str, path))
    if entry.key == own:
        return (), path
    if not entry.key.endswith("." + own):
        return (), (entry.key,)
    head = entry.key[: -len(own) - 1]
    return (head,) if part.role is Role.OTHER and head == part.name else tuple(head.split(".")), path


def _add_files_beside(plan: ConvertPlan, parts: Sequence[Part], *, everything: bool) -> None:
    """Add the files that are no data of the checkpoint: random states, configuration, tokenizer."""
    if not everything:
        folders = [root / part.folder for part in plan.chosen.models for root in plan.roots]
        plan.laid.files = {**(find_side_files(*folders).files if folders else {}), **plan.laid.files}
        return
    data = {file for part in parts for file in part.files}
    folders_of_data = {part.folder for part in parts}
    copied: dict[str, Path] = {}
    for root in plan.roots:
        for name in _files_below(root, known=folders_of_data):
            folder, _, file = name.rpartition("/")
            is_data = name in data or (folder in folders_of_data and file.endswith((".distcp", ".metadata", ".tmp")))
            if is_data or name == MANIFEST or name in copied:
                continue
            try:
                if plan.store.size(name) is None:
                    plan.left.append(f"{name}: a link to what is not there")
                else:
                    copied[name] = Path(plan.store.path(name))
            except PathOutside:
                plan.left.append(f"{name}: a link that leads out of the checkpoint")
            except MalformedFile:  # reading a pipe would wait for ever
                is_folder = any((root / name).is_dir() for root in plan.roots)
                plan.left.append(f"{name}: {'a folder that is no part of it' if is_folder else 'no regular file'}")
    plan.laid.files = {**copied, **plan.laid.files}
    per_rank = [part for part in plan.checkpoint.parts if part.role in ("rng", "dataloader") and part.files]
    if per_rank and plan.sharding is not None and plan.saved_world_size != plan.sharding.mesh.num_ranks:
        plan.notes.append(
            f"{len(per_rank)} parts hold what each of the {plan.saved_world_size} ranks kept for itself (random "
            "states, places in the data): they stay as they are"
        )


def _files_below(root: Path, *, known: Collection[str]) -> Iterator[str]:
    """Yield the files of a folder and of those in it, as paths from it.

    Links to folders are not followed. Left out are hidden leftovers, and whatever is a checkpoint of its own rather
    than one of the ``known`` folders of this one.
    """
    for folder, names, files in os.walk(root):
        inner = Path(folder).relative_to(root)
        if ".metadata" in files and _folder_name(inner) not in known:
            names.clear()
            yield inner.as_posix()  # as it is no file, it is said to be left behind
            continue
        names[:] = [name for name in names if not is_staging(name)]
        if len(inner.parts) >= _DEPTH:
            files, names[:] = [*files, *names], []  # as they are no files, they are said to be left behind
        for file in sorted(name for name in files if not is_staging(name)):
            yield (inner / file).as_posix()


def _folder_name(inner: Path) -> str:
    return "" if inner == Path() else inner.as_posix()
