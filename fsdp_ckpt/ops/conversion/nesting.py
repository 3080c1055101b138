"""Put values back into the nested state dict that they were taken from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_ckpt.errors import NameCollision
from fsdp_ckpt.layouts.optimizer_paths import STATE

__all__ = ["nest"]


class _Branch(dict[Any, Any]):
    """A dictionary that was made for what lies in it, unlike one that is a value itself."""


def nest(items: Mapping[tuple[str | int, ...], Any], *, where: str) -> Any:
    """Return a nested state dict; integers that count from 0 on are list indices, but not in an optimizer's state.

    ``Optimizer.load_state_dict`` wants a dictionary there, also when its parameters are numbered.

    Args:
        items: Values by place.
        where: Name of the part, for messages.

    Raises:
        NameCollision: One place is within another one.

    Example:
        >>> nest({("state", "w"): 1, ("param_groups", 0, "lr"): 0.1}, where="optimizer")
        {'state': {'w': 1}, 'param_groups': [{'lr': 0.1}]}
        >>> nest({("state", 0, "step"): 1}, where="optimizer")
        {'state': {0: {'step': 1}}}
    """
    root = _Branch()
    for path, value in items.items():
        place: Any = root
        for step in path[:-1]:
            place = place.setdefault(step, _Branch())
            if not isinstance(place, _Branch):
                raise NameCollision(f"{where}: `{'.'.join(map(str, path))}` lies within another value")
        if path[-1] in place:
            raise NameCollision(f"{where}: two values at `{'.'.join(map(str, path))}`")
        place[path[-1]] = value
    return _plain(root, ())


def _plain(value: Any, path: tuple[str | int, ...]) -> Any:
    if not isinstance(value, _Branch):
        return value
    done = {key: _plain(item, (*path, key)) for key, item in value.items()}
    if path != (STATE,) and done and all(type(key) is int for key in done) and sorted(done) == list(range(len(done))):
        return [done[number] for number in range(len(done))]
    return done
