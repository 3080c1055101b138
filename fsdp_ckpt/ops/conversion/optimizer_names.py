"""Tell which parameter each index of an optimizer means, or refuse: never by guessing.

``optimizer.state_dict()`` numbers parameters in the order in which the optimizer got them. Nothing in the file says
what they are called; the model beside it has names and shapes, and where it lists its tensors in the order of its
modules, their order as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_ckpt.catalog import Part, Shape, TensorEntry
from fsdp_ckpt.errors import Incompatible, NameCollision
from fsdp_ckpt.names import clean_fqn

__all__ = ["Indices", "name_indices", "parameter_candidates"]

_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked", "inv_freq"})
"""Last components of names that belong to buffers of torch's and transformers' own modules."""

_IN_MODULE_ORDER = frozenset({"dcp", "rank-files", "torch-file"})
"""Dialects that keep the order of the state dict that was saved, which is that of the modules."""

_MAX_DEPTH = 100

_HINT = (
    "pass --param-names NAMES.json, a list of names in the optimizer's order; where the model is built: "
    "names = {p: n for n, p in model.named_parameters()}; "
    'json.dump([names[p] for g in optimizer.param_groups for p in g["params"]], open("NAMES.json", "w"))'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices:
    """What an optimizer's file says about its parameters.

    Attributes:
        groups: Indices in each group, in order.
        shapes: Shape of the parameter, by index, as far as its state tells.
        unclear: Indices whose state is of several shapes, so that it does not tell the parameter's.
        shapeless: Indices with state in which no shape shows: a number of steps alone.
        names: Names in the order of ``groups``, where the file has them (``param_names`` of torch 2.6 and newer).
    """

    groups: Sequence[Sequence[int]]
    shapes: Mapping[int, Shape]
    unclear: Sequence[int] = ()
    shapeless: Sequence[int] = ()
    names: Sequence[str] | None = None

    @property
    def all(self) -> list[int]:
        """All indices, in ascending order: the optimizer's order."""
        return sorted(index for group in self.groups for index in group)

    @property
    def is_in_one_group(self) -> bool:
        """Whether one group has them all, in ascending order, so that nothing but the model's order is behind them."""
        filled = [list(group) for group in self.groups if group]
        return len(filled) == 1 and filled[0] == list(range(len(filled[0])))


def name_indices(
    indices: Indices, *, where: str, model: Part | None, param_names: Sequence[str] | None
) -> tuple[dict[int, str], str]:
    """Return the name of each index, and where the names come from.

    Args:
        indices: What the optimizer's file says.
        where: The optimizer, for messages.
        model: The model that the optimizer was for; None where there is none.
        param_names: Names in the optimizer's order, from the user; None for none.

    Raises:
        Incompatible: They cannot be told for certain; the message says what stands in the way.
        NameCollision: Two parameters of the model would have one name.
    """
    candidates = parameter_candidates(model) if model is not None else {}
    if param_names is not None:
        found = _listed(indices.all, param_names, f"{where}: the list of parameter names")
        if model is not None:
            _refuse_strangers(found.values(), candidates, model)
        _check_shapes(found, indices, candidates, where)
        return found, "the list of parameter names"
    if indices.names is not None:
        found = _listed([i for group in indices.groups for i in group], indices.names, f"{where}: its `param_names`")
        _check_shapes(found, indices, candidates, where)
        return found, "the names that the optimizer itself has kept"
    if model is None:
        raise Incompatible(
            f"{where} keeps its state by index, and nothing says which parameter each index means",
            hint=f"convert it together with its model, or {_HINT}",
        )
    if len(indices.all) != len(candidates):
        raise Incompatible(
            f"{where} keeps its state by index, for {len(indices.all)} parameters; the model `{model.name}` has "
            f"{len(candidates)} tensors that may be parameters: which index is which cannot be told",
            hint=_HINT,
        )
    if indices.unclear:
        raise Incompatible(
            f"{where} keeps its state by index, and that of index {indices.unclear[0]} does not have its parameter's "
            "shape: which parameter it is cannot be told",
            hint=_HINT,
        )
    if indices.is_in_one_group and _is_in_module_order(model, candidates):
        in_order = dict(zip(indices.all, candidates, strict=True))
        if all(candidates[in_order[index]] == shape for index, shape in indices.shapes.items()):
            return in_order, f"the order of the tensors in `{model.name}`"
    return _forced(indices, candidates, where, model), f"the shapes of the tensors in `{model.name}`"


def parameter_candidates(model: Part) -> dict[str, Shape]:
    """Return the tensors of a model that may be parameters, by clean name, in the order of the part.

    Left out are integers, buffers known by name, and further names of a tensor that has one already.

    Raises:
        NameCollision: Two would have one name.
    """
    found: dict[str, Shape] = {}
    seen: set[object] = set()
    for entry in model.tensors.values():
        name = clean_fqn(entry.name)
        if entry.dtype.kind in ("int", "bool") or name.rpartition(".")[2] in _BUFFERS:
            continue
        place = _place(entry)
        if place in seen:  # model.parameters() has a tied parameter once, under its first name
            continue
        if name in found:
            raise NameCollision(f"two tensors of `{model.name}` would both be named `{name}`")
        if place is not None:
            seen.add(place)
        found[name] = entry.shape
    return found


def _is_in_module_order(model: Part, candidates: Iterable[str]) -> bool:
    """Tell whether a model's tensors stand in the order of its modules.

    What was made from safetensors is sorted by name, perhaps file by file: there layer 10 comes before layer 2, and
    ``k``, ``o``, ``q``, ``v`` in this order. So numbers have to rise, and most modules must have something in an order
    that is not that of the alphabet.
    """
    if model.dialect not in _IN_MODULE_ORDER:
        return False
    children: dict[str, dict[str, None]] = defaultdict(dict)
    for name in candidates:
        if name.count(".") > _MAX_DEPTH:
            return False
        parent, child = "", name
        while child:
            step, _, child = child.partition(".")
            children[parent][step] = None
            parent = f"{parent}.{step}"
    telling = []
    for steps in map(list, children.values()):
        if all(step.isdecimal() for step in steps):
            if steps != sorted(steps, key=lambda step: (len(step), step)):
                return False
        elif len(steps) > 1:
            telling.append(steps != sorted(steps))
    return 2 * sum(telling) >= len(telling) > 0


def _place(entry: TensorEntry) -> object:
    """Return the bytes that a tensor lies in; None for one without elements."""
    if not entry.numel:
        return None
    return tuple((chunk.file, chunk.start, chunk.stop, chunk.offsets, chunk.strides) for chunk in entry.chunks)


def _listed(indices: Sequence[int], names: Sequence[str], what: str) -> dict[int, str]:
    clean = [clean_fqn(name) for name in names]
    twice = [name for name, count in Counter(clean).items() if count > 1]
    if twice:
        raise Incompatible(f"{what} has `{twice[0]}` more than once", hint=_HINT)
    if len(clean) != len(indices):
        raise Incompatible(f"{what} has {len(clean)} names, for {len(indices)} parameters", hint=_HINT)
    return dict(zip(indices, clean, strict=True))


def _refuse_strangers(names: Collection[str], candidates: Mapping[str, Shape], model: Part) -> None:
    """Refuse names from the user that the model does not have; it may have more, which were not trained."""
    known = {clean_fqn(entry.name) for entry in model.tensors.values()}
    strange = next((name for name in names if name not in known), None)
    if strange is None:
        return
    missing = next((name for name in candidates if name not in names), None)
    lacks = "" if missing is None else f", and the list lacks `{missing}`"
    raise Incompatible(
        f"the list of parameter names has `{strange}`, which is not in the model `{model.name}`{lacks}", hint=_HINT
    )


def _check_shapes(found: Mapping[int, str], indices: Indices, candidates: Mapping[str, Shape], where: str) -> None:
    for index, name in found.items():
        shape, expected = indices.shapes.get(index), candidates.get(name)
        if shape is not None and expected is not None and shape != expected:
            raise Incompatible(
                f"{where}: index {index} would be `{name}`, but its state has shape {shape}, the parameter {expected}",
                hint=_HINT,
            )


def _forced(indices: Indices, candidates: Mapping[str, Shape], where: str, model: Part) -> dict[int, str]:
    """Return the only assignment in which every shape fits.

    Indices without state may be any parameter that is left; in one group it does not matter which of them is which.
    """
    by_shape: dict[Shape, list[str]] = defaultdict(list)
    for name, shape in candidates.items():
        by_shape[shape].append(name)
    wanted: dict[Shape, list[int]] = defaultdict(list)
    for index, shape in sorted(indices.shapes.items()):
        wanted[shape].append(index)
    found: dict[int, str] = {}
    for shape, of_shape in wanted.items():
        names = by_shape[shape]
        if len(of_shape) > len(names):
            raise Incompatible(
                f"{where}: {len(of_shape)} of its parameters have shape {shape}, of those of `{model.name}` "
                f"{len(names)}: it is of another model",
                hint=_HINT,
            )
        if len(names) > 1:
            shown = ", ".join(map(str, of_shape[:2]))
            raise Incompatible(
                f"{where} keeps its state by index: `{names[0]}` and `{names[1]}` have the same shape {shape}, and "
                f"which of them is index {shown if len(of_shape) == 1 else f'{shown} …'} cannot be told",
                hint=_HINT,
            )
        found[of_shape[0]] = names[0]
    taken = set(found.values())
    free = [name for name in candidates if name not in taken]
    left = [index for index in indices.all if index not in found]
    homes = {number for number, group in enumerate(indices.groups) if any(index not in found for index in group)}
    if len(left) > 1 and indices.shapeless:
        raise Incompatible(
            f"{where} keeps its state by index, and that of index {indices.shapeless[0]} shows no shape: whether it is "
            f"`{free[0]}` or `{free[1]}` cannot be told",
            hint=_HINT,
        )
    if len(left) > 1 and len(homes) > 1:
        raise Incompatible(
            f"{where} keeps its state by index, and has none for {len(left)} parameters of several groups: whether "
            f"index {left[0]} is `{free[0]}` or `{free[1]}` cannot be told",
            hint=_HINT,
        )
    return found | dict(zip(left, free, strict=True))
