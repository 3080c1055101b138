"""Bring a saved optimizer, whatever its form, into the one that every writer takes: by name.

In it tensors and values of a parameter's state stand at ``("state", fqn, kind)``, options of a group at
``("param_groups", number, option)``, with names in ``params``. The forms on disk are in ``layouts.optimizer_paths``;
how indices get their names is in ``optimizer_names``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.catalog import ObjectEntry, Part, Shape, TensorEntry
from fsdp_ckpt.errors import FlatParameters, MalformedFile, NameCollision
from fsdp_ckpt.layouts.optimizer_paths import PARAM_GROUPS, STATE
from fsdp_ckpt.layouts.roles import KeyPath
from fsdp_ckpt.names import clean_fqn
from fsdp_ckpt.ops.conversion.optimizer_groups import grouped_by_options
from fsdp_ckpt.ops.conversion.optimizer_leaves import Leaf, OptimizerLeaves, sort_leaves
from fsdp_ckpt.ops.conversion.optimizer_names import Indices, name_indices
from fsdp_ckpt.plan.output import OutputObject, OutputPart, OutputTensor

__all__ = ["CanonicalOptimizer", "canonical_optimizer"]

_PARAMS = "params"
_PARAM_NAMES = "param_names"
_MAX_INDEX = 1 << 31
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_STEP = "step"
"""The one kind of state that is a number for each parameter, whatever the parameter's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalOptimizer:
    """An optimizer by name.

    Attributes:
        part: What is to be written. Objects at ``("param_groups", number, "params")`` always have their ``value``, a
            list of names, even where ``source`` can be copied as it is.
        form: The form that it was in: ``by name``, ``by index`` or ``flattened``.
        notes: What to tell the user, one sentence each.
    """

    part: OutputPart
    form: str
    notes: Sequence[str] = ()


@dataclass(kw_only=True)
class _Groups:
    """The groups by number: their options, and their parameters as the file calls them."""

    options: list[dict[KeyPath, Leaf]] = field(default_factory=list)
    params: list[list[Any]] = field(default_factory=list)
    sources: list[ObjectEntry | None] = field(default_factory=list)


def canonical_optimizer(
    part: Part,
    values: Callable[[ObjectEntry], Any],
    *,
    model: Part | None = None,
    param_names: Sequence[str] | None = None,
    scalars: Callable[[TensorEntry], bytes] | None = None,
    exclude: Sequence[str] = (),
) -> CanonicalOptimizer:
    """Return an optimizer by name.

    Args:
        part: The saved optimizer.
        values: Reads an object, see ``values.load_value``.
        model: The model that it is for; names of state that is kept by index come from there.
        param_names: Names in the optimizer's order, from the user; they go before the model's.
        scalars: Reads a small tensor; needed where a flattened optimizer has options that are tensors.
        exclude: Globs of keys to leave out among what belongs to neither state nor groups; such things are refused
            otherwise.

    Raises:
        Incompatible: Something would be lost, or names cannot be told for certain.
        NameCollision: Two parameters would have one name.
        CorruptCheckpoint: The entries make no optimizer.
    """
    if part.flat is not None:
        raise FlatParameters(part.flat)
    where = f"`{part.name}`"
    leaves = sort_leaves(part, values, params=_model_names(model, param_names), exclude=exclude)
    notes: list[str] = []
    groups = _numbered(leaves, values, where)
    form = "by name"
    if leaves.options:
        if groups.options:
            raise MalformedFile(f"{where}: its groups are both numbered and by parameter")
        form, groups = "flattened", _by_options(leaves, values, scalars, notes)
    listed = [param for params in groups.params for param in params]
    if any(type(param) is int for param in listed) or (not groups.options and _are_numbers(leaves.state)):
        form = "by index"
        indices = _indices(leaves, groups, values, where)
        by_index, origin = name_indices(indices, where=where, model=model, param_names=param_names)
        notes.append(f"{where}: the names of its {len(by_index)} parameters are from {origin}")
        names: dict[Any, str] = {**by_index, **{str(index): name for index, name in by_index.items()}}
    else:
        names = _clean_names(leaves, listed, where)
    tensors, objects = _state(leaves, names, where)
    _add_groups(groups, names, tensors, objects)
    output = OutputPart(name=part.name, role=part.role, tensors=tensors, objects=objects)
    return CanonicalOptimizer(part=output, form=form, notes=tuple(notes))


def _model_names(model: Part | None, param_names: Sequence[str] | None) -> set[str]:
    entries = model.tensors.values() if model is not None else ()
    return {entry.name for entry in entries} | {clean_fqn(entry.name) for entry in entries} | {*(param_names or ())}


def _are_numbers(state: Mapping[str, Any]) -> bool:
    return bool(state) and all(_INDEX.fullmatch(owner) for owner in state)


def _is_param(param: Any) -> bool:
    return type(param) is str or (type(param) is int and 0 <= param < _MAX_INDEX)


def _numbered(leaves: OptimizerLeaves, values: Callable[[ObjectEntry], Any], where: str) -> _Groups:
    """Take the lists of parameters out of numbered groups."""
    found = _Groups()
    if sorted(leaves.groups) != list(range(len(leaves.groups))):
        raise MalformedFile(f"{where}: groups {sorted(leaves.groups)[:8]} are not numbered from 0")
    for number in range(len(leaves.groups)):
        options = dict(leaves.groups[number])
        leaf = options.pop((_PARAMS,), None)
        if leaf is None or isinstance(leaf.source, TensorEntry):
            raise MalformedFile(f"{where}: group {number} does not say which parameters it has")
        params = leaf.read(values)
        if not isinstance(params, list | tuple) or not all(map(_is_param, params)):
            raise MalformedFile(f"{where}: the parameters of group {number} are neither names nor numbers")
        found.options.append(options)
        found.params.append(list(params))
        found.sources.append(leaf.source)
    listed = [param for params in found.params for param in params]
    if len({type(param) for param in listed}) > 1:
        raise MalformedFile(f"{where}: its groups list both names and numbers")
    if len(set(listed)) < len(listed):
        raise MalformedFile(f"{where}: a parameter is in its groups more than once")
    return found


def _by_options(
    leaves: OptimizerLeaves,
    values: Callable[[ObjectEntry], Any],
    scalars: Callable[[TensorEntry], bytes] | None,
    notes: list[str],
) -> _Groups:
    """Put parameters with equal options into one group, as flattened optimizers do not say which group is whose."""
    groups = grouped_by_options(leaves, values, scalars)
    notes.append(
        f"`{leaves.name}` is flattened, which leaves open what its groups were: parameters with the same options are "
        f"one group now, {len(groups)} in all"
    )
    return _Groups(
        options=[leaves.options[names[0]] for names in groups],
        params=[list(names) for names in groups],
        sources=[None] * len(groups),
    )


def _indices(leaves: OptimizerLeaves, groups: _Groups, values: Callable[[ObjectEntry], Any], where: str) -> Indices:
    listed = groups.params or [sorted(map(int, leaves.state))]
    known = {str(index) for group in listed for index in group}
    shapes: dict[int, Shape] = {}
    unclear: list[int] = []
    shapeless: list[int] = []
    for owner, kinds in leaves.state.items():
        if owner not in known:
            raise MalformedFile(f"{where}: state for `{owner}`, which is in no group")
        found = {
            leaf.source.shape
            for kind, leaf in kinds.items()
            if isinstance(leaf.source, TensorEntry) and kind != (_STEP,)
        }
        if len(found) == 1:
            shapes[int(owner)] = found.pop()
        elif found:
            unclear.append(int(owner))
        elif any(isinstance(leaf.source, TensorEntry) or leaf.read(values) is not None for leaf in kinds.values()):
            shapeless.append(int(owner))
    return Indices(
        groups=listed, shapes=shapes, unclear=unclear, shapeless=shapeless, names=_kept_names(groups, values)
    )


def _kept_names(groups: _Groups, values: Callable[[ObjectEntry], Any]) -> list[str] | None:
    """Return the names that torch 2.6 and newer keep of an optimizer built with ``named_parameters``, if all do."""
    names: list[str] = []
    for params, options in zip(groups.params, groups.options, strict=True):
        leaf = options.get((_PARAM_NAMES,))
        value = leaf.read(values) if leaf is not None and not isinstance(leaf.source, TensorEntry) else []
        if not isinstance(value, list | tuple) or len(value) != len(params):
            return None
        if any(type(name) is not str for name in value):
            return None
        names += value
    return names or None


def _clean_names(leaves: OptimizerLeaves, listed: Sequence[str], where: str) -> dict[Any, str]:
    """Return clean names of all parameters.

    Raises:
        NameCollision: Two in the state, or two in the groups, would get one name.
    """
    for names in (leaves.state, listed):
        seen: dict[str, str] = {}
        for name in names:
            first = seen.setdefault(clean_fqn(name), name)
            if first != name:
                raise NameCollision(
                    f"{where}: `{first}` and `{name}` would both be named `{clean_fqn(name)}`",
                    hint="convert the model alone with --part model",
                )
    return {name: clean_fqn(name) for name in (*leaves.state, *listed)}


def _state(
    leaves: OptimizerLeaves, names: Mapping[Any, str], where: str
) -> tuple[list[OutputTensor], list[OutputObject]]:
    tensors: list[OutputTensor] = []
    objects: list[OutputObject] = []
    for owner, kinds in leaves.state.items():
        for kind, leaf in kinds.items():
            _add((STATE, names[owner], *kind), leaf, tensors, objects)
    if not tensors and not objects and not leaves.groups and not leaves.options:
        raise MalformedFile(f"{where} holds neither state nor groups")
    return tensors, objects


def _add_groups(
    groups: _Groups, names: Mapping[Any, str], tensors: list[OutputTensor], objects: list[OutputObject]
) -> None:
    for number, (options, params, source) in enumerate(zip(groups.options, groups.params, groups.sources, strict=True)):
        clean = [names[param] for param in params]
        kept = source if clean == params else None
        objects.append(OutputObject(path=(PARAM_GROUPS, number, _PARAMS), source=kept, value=clean))
        for option, leaf in options.items():
            _add((PARAM_GROUPS, number, *option), leaf, tensors, objects)


def _add(path: KeyPath, leaf: Leaf, tensors: list[OutputTensor], objects: list[OutputObject]) -> None:
    if isinstance(leaf.source, TensorEntry):
        name = ".".join(map(str, path))
        tensors.append(OutputTensor(name=name, dtype=leaf.source.dtype, source=leaf.source, path=path))
    else:
        objects.append(OutputObject(path=path, source=leaf.source, value=leaf.value))
