"""Make values for tensors on the meta device, module by module, and notice which ones got none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.sharding.tensors import Held

__all__ = ["Initialize", "make_values"]

Initialize = Callable[[nn.Module], None]
"""Fills the tensors that a module holds itself, not those of modules within it."""

_Marks = Mapping[int, tuple[Tensor, int]]
"""Tensors before anyone wrote into them, with their version counters, by ``id`` of their ``Held``."""


def make_values(
    model: nn.Module, tensors: Sequence[Held], wanted: Sequence[Held], initialize: Initialize | None
) -> None:
    """Give values to tensors that are on the meta device, in CPU memory.

    Modules that hold one of them are initialised whole; what else they have on the meta device is put back there.

    Args:
        model: The model.
        tensors: All of its tensors.
        wanted: Those that need values.
        initialize: How; None for the model's own ``_init_weights`` and each module's ``reset_parameters``.

    Raises:
        UsageError: A tensor got no values.
    """
    modules = {module for held in wanted for module, _ in held.places}
    beside = [held for held in tensors if held.is_meta and any(module in modules for module, _ in held.places)]
    before = {id(held): held.tensor for held in beside}
    for held in beside:
        held.materialize(torch.device("cpu"), _unlikely(held.tensor.dtype))
    marks = {id(held): (held.tensor, held.tensor._version) for held in beside}
    with torch.no_grad():
        for module in model.modules():
            if module in modules:
                mine = [held for held in wanted if any(owner is module for owner, _ in held.places)]
                _initialize(model, module, initialize, mine, marks)
    for held in beside:
        held.put(_newest(held, marks) if held in wanted else before[id(held)])
    names = {module: name for name, module in model.named_modules()}
    for held in wanted:
        if not _touched(held, marks):
            module = held.places[0][0]
            raise UsageError(
                f"`{held.name}` is on the meta device and nothing gives it values: "
                + _why(module, names[module], initialize),
                hint="pass initialize=, a function that fills the tensors of the module that it is called with",
            )


def _why(module: nn.Module, name: str, initialize: Initialize | None) -> str:
    where = f"`{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
    if initialize is not None:
        return f"initialize does not fill it when called with {where}"
    return f"{where} has no reset_parameters that fills it, and the model no _init_weights"


def _initialize(
    model: nn.Module, module: nn.Module, initialize: Initialize | None, wanted: Sequence[Held], marks: _Marks
) -> None:
    if initialize is not None:
        initialize(module)
        return
    # transformers' models know better than their layers, but not about all of them.
    owns: Any = getattr(model, "_init_weights", None)
    if callable(owns):
        owns(module)
    resets: Any = getattr(module, "reset_parameters", None)
    if callable(resets) and not all(_touched(held, marks) for held in wanted):
        resets()


def _unlikely(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _newest(held: Held, marks: _Marks) -> Tensor:
    """Return what is there, or what a module has put in its place at one of several."""
    old = marks[id(held)][0]
    return next((tensor for tensor in held.everywhere() if tensor is not old), old)


def _touched(held: Held, marks: _Marks) -> bool:
    """Tell whether someone wrote into a tensor, or put another one there. ``.data`` escapes its version counter."""
    old, version = marks[id(held)]
    now = _newest(held, marks)
    if now is not old or now._version != version or not now.numel():
        return True
    empty = now.isnan() if now.is_floating_point() or now.is_complex() else now == _unlikely(now.dtype)
    return not bool(empty.all())
