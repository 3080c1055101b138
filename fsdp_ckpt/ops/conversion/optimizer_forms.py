"""Turn an optimizer by name into the other forms: flattened, and by index as ``optimizer.load_state_dict`` takes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.optimizer_paths import PARAM_GROUPS, STATE
from fsdp_ckpt.layouts.roles import KeyPath
from fsdp_ckpt.plan.output import OutputObject, OutputPart, OutputTensor

__all__ = ["by_index", "flattened", "group_params"]

_PARAMS = "params"


def group_params(part: OutputPart) -> list[list[str]]:
    """Return the parameters of each group, in the optimizer's order.

    Args:
        part: An optimizer by name, see ``optimizer.CanonicalOptimizer``.

    Raises:
        MalformedFile: Its groups are not numbered from 0.
    """
    found = {
        entry.path[1]: list(entry.value)
        for entry in part.objects
        if len(entry.path) == 3 and (entry.path[0], entry.path[2]) == (PARAM_GROUPS, _PARAMS)
    }
    if set(found) != set(range(len(found))):
        raise MalformedFile(f"`{part.name}`: its groups are not numbered from 0")
    return [found[number] for number in range(len(found))]


def flattened(part: OutputPart) -> OutputPart:
    """Return an optimizer by name in torch's flattened form: one flat dictionary, options under each parameter.

    Args:
        part: An optimizer by name.

    Raises:
        Incompatible: A group without parameters would be lost, or two keys would be one.
    """
    groups = group_params(part)
    empty = [number for number, params in enumerate(groups) if not params]
    if empty:
        raise Incompatible(
            f"`{part.name}`: group {empty[0]} has no parameters, and the flattened form keeps options with parameters",
            hint="write it with --optimizer-form by-name",
        )

    def places(path: KeyPath) -> list[KeyPath]:
        if path[0] != PARAM_GROUPS:
            return [(_dotted(path),)]
        number, option = path[1], path[2]
        if option == _PARAMS:
            return []
        assert isinstance(number, int)
        return [(_dotted((PARAM_GROUPS, name, *path[2:])),) for name in groups[number]]

    return _moved(part, places)


def by_index(part: OutputPart) -> OutputPart:
    """Return an optimizer by name as ``optimizer.state_dict()`` has it: parameters numbered through all groups.

    The order is that of ``params`` in the groups; an optimizer that is given its parameters in this order loads it.

    Args:
        part: An optimizer by name.

    Raises:
        Incompatible: State of a parameter that is in no group, which would have no number.
    """
    groups = group_params(part)
    numbers = {name: number for number, name in enumerate(name for params in groups for name in params)}

    def places(path: KeyPath) -> list[KeyPath]:
        if path[0] != STATE:
            return [path]
        number = numbers.get(str(path[1]))
        if number is None:
            raise Incompatible(
                f"`{part.name}`: `{path[1]}` has state, but is in no group, so that it has no number",
                hint=f"leave it out with --exclude '{path[1]}', or write it with --optimizer-form by-name",
            )
        return [(STATE, number, *path[2:])]

    moved = _moved(part, places)
    objects = []
    for entry in moved.objects:
        if len(entry.path) == 3 and (entry.path[0], entry.path[2]) == (PARAM_GROUPS, _PARAMS):
            entry = OutputObject(path=entry.path, value=[numbers[name] for name in entry.value])
        objects.append(entry)
    return replace(moved, objects=objects)


def _moved(part: OutputPart, places: Callable[[KeyPath], list[KeyPath]]) -> OutputPart:
    tensors: list[OutputTensor] = []
    objects: list[OutputObject] = []
    for tensor in part.tensors:
        tensors += [replace(tensor, name=_dotted(path), path=path) for path in places(tensor.path)]
    for entry in part.objects:
        objects += [replace(entry, path=path) for path in places(entry.path)]
    counts = Counter(_dotted(path) for path in [*(item.path for item in tensors), *(item.path for item in objects)])
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise Incompatible(f"`{part.name}`: two of its entries would both be `{twice[0]}`")
    return replace(part, tensors=tensors, objects=objects)


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))
