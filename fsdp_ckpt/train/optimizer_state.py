"""Read an optimizer's saved state whatever its layout: by name, by index, flattened, or with groups in one blob.

===================  =====================================================  ======================================
layout               keys                                                   written by
===================  =====================================================  ======================================
by name              ``state.<fqn>.exp_avg``, ``param_groups.0.lr``         Accelerate, torch's state_dict API
groups in one blob   ``state.<fqn>.exp_avg``, ``param_groups`` (a list)     the same with torch 2.3 and older
by index             ``state.0.exp_avg``, ``param_groups.0.lr``             ``optimizer.state_dict()`` as it is
flattened            ``state.<fqn>.exp_avg``, ``param_groups.<fqn>.lr``     ``flatten_optimizer_state_dict=True``
===================  =====================================================  ======================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.catalog import ObjectEntry, Part, TensorEntry
from fsdp_ckpt.errors import Incompatible, MalformedFile
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
    for entry in entries:
        path = _path(entry, names)
        if path[0] == "state" and len(path) == 3:
            saved.state.setdefault(path[1], {})[path[2]] = entry
        elif path[0] == "param_groups":
            content = value(entry) if isinstance(entry, ObjectEntry) else tensor(entry)
            if len(path) == 1:
                if not isinstance(content, list) or not all(isinstance(group, dict) for group in content):
                    raise MalformedFile(f"`{part.name}`: `{'.'.join(path)}` is no list of groups")
                groups = {number: dict(group) for number, group in enumerate(content)}
                saved.layout = "groups in one blob"
            elif path[1].isdecimal():
                rest = entry.path[2:] if len(entry.path) > 3 else (path[2],)  # an option that is a dictionary
                nested.setdefault(int(path[1]), {})[rest] = content
            else:
                saved.options.setdefault(path[1], {})[path[2]] = content
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


def _path(entry: Entry, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return ("state", parameter, kind), ("param_groups", group or parameter, option) or ("param_groups",)."""
    path = tuple(map(str, entry.path)) or (entry.name,)
    if len(path) == 3 and path[0] in ("state", "param_groups"):
        return path[0], _known(path[1], names), path[2]
    if len(path) > 3 and path[0] == "param_groups" and path[1].isdecimal():
        return path[0], path[1], path[2]
    text = ".".join(path)
    head, _, rest = text.partition(".")
    if head == "param_groups" and not rest:
        return (head,)
    if head not in ("state", "param_groups") or "." not in rest:
        return ("", text)
    pieces = rest.split(".")
    for cut in range(len(pieces) - 1, 0, -1):
        name = ".".join(pieces[:cut])
        if _known(name, names) in names:
            return head, _known(name, names), ".".join(pieces[cut:])
    return head, ".".join(pieces[:-1]), pieces[-1]


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
