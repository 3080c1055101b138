"""From parts of a checkpoint to what is written: names, filters, dtypes, and the optimizer's form, without a target."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_ckpt.catalog import ObjectEntry, Part
from fsdp_ckpt.errors import CheckpointNotFound, Incompatible, NameCollision, UsageError
from fsdp_ckpt.layouts.optimizer_paths import PARAM_GROUPS, STATE
from fsdp_ckpt.names import Rename, clean_fqn, glob_filter, parse_rename
from fsdp_ckpt.ops.conversion.optimizer import canonical_optimizer
from fsdp_ckpt.ops.conversion.optimizer_forms import by_index, flattened
from fsdp_ckpt.ops.conversion.options import ConvertOptions
from fsdp_ckpt.ops.conversion.unstack import unstack_layers
from fsdp_ckpt.ops.conversion.values import load_value, read_small_tensor
from fsdp_ckpt.plan.merge import Selection, select_tensors
from fsdp_ckpt.plan.output import OutputObject, OutputPart, OutputTensor
from fsdp_ckpt.run.sources import Sources

__all__ = ["Naming", "model_content", "naming_of", "optimizer_content", "read_param_names", "whole_content"]

_PARAMS = "params"
_PARAM_NAMES = "param_names"
"""What torch 2.6 and newer keep beside ``params`` where parameters came with their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Which names are kept, and what they become.

    Attributes:
        keep: Matches names that are kept.
        renames: Applied to those, in order.
    """

    keep: re.Pattern[str]
    renames: Sequence[Rename]

    def __call__(self, name: str) -> str | None:
        """Return the new name of a parameter, None when it is left out."""
        if self.keep.match(name) is None:
            return None
        for rename in self.renames:
            name = rename(name)
        return name


def naming_of(options: ConvertOptions) -> Naming:
    """Return what --include, --exclude and --rename say."""
    return Naming(keep=glob_filter(options.include, options.exclude), renames=parse_rename(options.rename))


def model_content(part: Part, options: ConvertOptions) -> tuple[Selection, OutputPart]:
    """Return a model under clean names, in the dtype asked for; filters and renames count for its objects as well.

    Raises:
        NameCollision: Two tensors would get one name.
        UsageError: Nothing is left.
        Incompatible: A stack of layers that cannot be taken apart.
    """
    selection = select_tensors(
        list(part.tensors.values()),
        dtype=options.target_dtype,
        include=options.include,
        exclude=options.exclude,
        renames=parse_rename(options.rename),
    )
    if options.unstack_layers:
        selection = replace(selection, tensors=unstack_layers(selection.tensors))
    naming, dropped = naming_of(options), list(selection.excluded)
    objects: list[OutputObject] = []
    for entry in part.objects.values():
        name = naming(clean_fqn(entry.name))
        if name is None:
            dropped.append(entry.name)
        else:
            objects.append(OutputObject(path=(name,), source=entry))
    selection = replace(selection, excluded=dropped)
    return selection, OutputPart(name=part.name, role=part.role, tensors=selection.tensors, objects=objects)


def optimizer_content(
    part: Part, *, model: Part | None, sources: Sources, options: ConvertOptions, notes: list[str]
) -> OutputPart:
    """Return an optimizer in the form asked for, with the names that its parameters get.

    Args:
        part: The saved optimizer.
        model: The model that it is for, where there is exactly one.
        sources: Reads objects.
        options: The options.
        notes: What to tell the user is added here.

    Raises:
        Incompatible: Something would be lost, or names cannot be told for certain.
    """
    if options.unstack_layers:
        raise Incompatible(
            "--unstack-layers takes the model's stacks apart, not the optimizer's", hint="add --part model"
        )
    names = read_param_names(options.param_names) if options.param_names is not None else None
    found = canonical_optimizer(
        part,
        lambda entry: load_value(entry, sources.store),
        model=model,
        param_names=names,
        scalars=lambda entry: read_small_tensor(entry, sources),
        exclude=options.exclude,
    )
    notes += found.notes
    renamed = _renamed(found.part, naming_of(options))
    match options.optimizer_form:
        case "by-index":
            return by_index(renamed)
        case "flattened":
            return flattened(renamed)
        case _:
            return renamed


def whole_content(part: Part, values: Callable[[ObjectEntry], Any] | None = None) -> OutputPart:
    """Return a part as it is, tensors and objects at their places.

    Args:
        part: A scheduler, a data loader, …
        values: Reads objects, where they are to be encoded anew rather than copied.
    """
    tensors = [
        OutputTensor(name=entry.name, dtype=entry.dtype, source=entry, path=entry.path or (entry.name,))
        for entry in part.tensors.values()
    ]
    objects = [
        OutputObject(path=entry.path or (entry.name,), source=entry)
        if values is None
        else OutputObject(path=entry.path or (entry.name,), value=values(entry))
        for entry in part.objects.values()
    ]
    return OutputPart(name=part.name, role=part.role, tensors=tensors, objects=objects)


def read_param_names(path: str | os.PathLike[str]) -> list[str]:
    """Return the names in a file of ``--param-names``: a JSON list of texts.

    Raises:
        CheckpointNotFound: There is no such file.
        UsageError: It is something else.
    """
    text = os.fspath(path)
    example = (
        "names = {p: n for n, p in model.named_parameters()}; "
        'json.dump([names[p] for g in optimizer.param_groups for p in g["params"]], file)'
    )
    try:
        with open(text, encoding="utf-8") as file:
            names = json.load(file)
    except FileNotFoundError:
        raise CheckpointNotFound(f"`{text}` does not exist", hint=f"write it in your program: {example}") from None
    except (ValueError, RecursionError, IsADirectoryError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"`{text}` is no JSON list of names", hint=f"write it in your program: {example}")
    return names


def _renamed(part: OutputPart, naming: Naming) -> OutputPart:
    """Rename the parameters of an optimizer by name, and drop the state of those that are left out."""
    seen: dict[str, str] = {}

    def new(name: str) -> str | None:
        found = naming(name)
        if found is not None and seen.setdefault(found, name) != name:
            raise NameCollision(f"`{seen[found]}` and `{name}` would both be named `{found}` in {part.name}")
        return found

    def moved(path: tuple[str | int, ...]) -> tuple[str | int, ...] | None:
        if path[0] != STATE or len(path) < 2:
            return path
        name = new(str(path[1]))
        return None if name is None else (STATE, name, *path[2:])

    tensors = [
        replace(tensor, name=".".join(map(str, path)), path=path)
        for tensor in part.tensors
        if (path := moved(tensor.path)) is not None
    ]
    members = {
        entry.path[1]: [name for old in entry.value if (name := new(old)) is not None]
        for entry in part.objects
        if len(entry.path) == 3 and (entry.path[0], entry.path[2]) == (PARAM_GROUPS, _PARAMS)
    }
    objects: list[OutputObject] = []
    for entry in part.objects:
        path = moved(entry.path)
        if path is None:
            continue
        if len(path) == 3 and path[0] == PARAM_GROUPS and path[2] in (_PARAMS, _PARAM_NAMES):
            names = members[path[1]]
            if path[2] == _PARAM_NAMES or names != list(entry.value):
                objects.append(OutputObject(path=path, value=names))
                continue
        objects.append(replace(entry, path=path))
    return replace(part, tensors=tensors, objects=objects)
