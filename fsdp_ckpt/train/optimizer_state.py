"""Read an optimizer's saved state whatever its form, see ``layouts.optimizer_paths``, for the live parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.catalog import ObjectEntry, Part, TensorEntry
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.optimizer_paths import PARAM_GROUPS, STATE, has_numbered_groups, optimizer_place
from fsdp_ckpt.names import clean_fqn, strip_wrappers
from fsdp_ckpt.train.full import nest

__all__ = ["SavedOptimizer", "read_optimizer"]

Entry = TensorEntry | ObjectEntry


@dataclass(kw_only=True)
class SavedOptimizer:
    """An optimizer's saved state by parameter name.

    Attributes:
        state: Entries by parameter name and kind (``exp_avg``).
        groups: Options of each group, with ``params`` as names; None when only ``options`` are known.
        options: Options by parameter name, of the flattened layout.
        layout: For messages.
    """

    state: dict[str, dict[str, Entry]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    layout: str = "by name"


def read_optimizer(
    part: Part,
    names: Mapping[str, str],
    order: Sequence[str] | None,
    value: Callable[[ObjectEntry], Any],
    tensor: Callable[[TensorEntry], Any],
) -> SavedOptimizer:
    """Sort a part's entries.

    Args:
        part: The saved optimizer.
        names: Live parameter by each of its names.
        order: Live parameters in the order of ``param_groups``, for state that is kept by index; None when one object
            holds several parameters, so that an index means no single one.
        value: Reads an object.
        tensor: Reads a small tensor.

    Raises:
        MalformedFile: The entries make no optimizer state.
        Incompatible: State by index that cannot be mapped to names.
    """
    saved = SavedOptimizer()
    groups: dict[int, dict[str, Any]] = {}
    nested: dict[int, dict[tuple[str | int, ...], Any]] = {}
    entries: list[Entry] = [*part.tensors.values(), *part.objects.values()]
    is_numbered = has_numbered_groups(entry.name for entry in entries)
    for entry in entries:
        place = optimizer_place(
            entry.path or (entry.name,), is_param=lambda text: _known(text, names) in names, is_numbered=is_numbered
        )
        owner, kind = place.owner, ".".join(map(str, place.rest))
        if place.prefix:  # of something else
            continue
        if place.head == STATE and isinstance(owner, str) and kind:
            saved.state.setdefault(_known(owner, names), {})[kind] = entry
        elif place.head == PARAM_GROUPS:
            content = value(entry) if isinstance(entry, ObjectEntry) else tensor(entry)
            if owner is None:
                if not isinstance(content, list) or not all(isinstance(group, dict) for group in content):
                    raise MalformedFile(f"`{part.name}`: `{entry.name}` is no list of groups")
                groups = {number: dict(group) for number, group in enumerate(content)}
                saved.layout = "groups in one blob"
            elif isinstance(owner, int):
                nested.setdefault(owner, {})[place.rest] = content  # an option that is a dictionary has several steps
            else:
                saved.options.setdefault(_known(owner, names), {})[kind] = content
                saved.layout = "flattened"
    groups |= {number: nest(flat) for number, flat in nested.items()}
    if groups:
        if sorted(groups) != list(range(len(groups))):
            raise MalformedFile(f"`{part.name}`: groups {sorted(groups)} are not numbered from 0")
        saved.groups = [groups[number] for number in range(len(groups))]
        _clean_groups(saved.groups)
    if _is_by_index(saved):
        _map_indices(part, saved, order)
    return saved


def _clean_groups(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        params = group.get("params")
        if isinstance(params, list) and all(isinstance(name, str) for name in params):
            group["params"] = [strip_wrappers(name) for name in params]


def _known(name: str, names: Mapping[str, str]) -> str:
    """Return the live name for a saved one; the saved one without wrappers where there is none."""
    for candidate in (name, strip_wrappers(name), clean_fqn(name)):
        if candidate in names:
            return names[candidate]
    return strip_wrappers(name)


def _is_by_index(saved: SavedOptimizer) -> bool:
    params = [param for group in saved.groups or () for param in group.get("params", ())]
    return bool(params) and all(type(param) is int for param in params)


def _map_indices(part: Part, saved: SavedOptimizer, order: Sequence[str] | None) -> None:
    saved.layout = "by index"
    assert saved.groups is not None
    indices = [index for group in saved.groups for index in group["params"]]
    if order is None:
        raise Incompatible(
            f"`{part.name}` keeps its state by index, and this optimizer holds flattened parameters of several names",
            hint="build the model with use_orig_params=True, so that each parameter has one index",
        )
    if len(indices) != len(order):
        raise Incompatible(
            f"`{part.name}` keeps its state by index, for {len(indices)} parameters; this optimizer has {len(order)}: "
            "which is which cannot be told",
            hint="build the optimizer with the same parameters in the same order, or save it by name",
        )
    by_index = dict(zip(indices, order, strict=True))
    try:
        saved.state = {by_index[int(index)]: kinds for index, kinds in saved.state.items()}
        for group in saved.groups:
            group["params"] = [by_index[index] for index in group["params"]]
    except (KeyError, ValueError) as error:
        raise MalformedFile(f"`{part.name}`: state for {error}, which is in no group") from None
