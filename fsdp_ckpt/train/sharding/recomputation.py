"""Activation checkpointing: keep the inputs of layers, and compute what is within them again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from fsdp_ckpt.train.sharding.units import Unit

__all__ = ["recompute", "replace_module"]


def recompute(model: nn.Module, layers: Sequence[Unit], units: Sequence[Unit], *, offload: bool) -> list[Unit]:
    """Put activation checkpointing around layers; return the units, with what is around their modules now.

    It is within a unit, so that parameters are gathered once more before the layer is computed once more. Random
    states are restored for that, so that dropout drops the same elements.

    Args:
        model: The model, changed in place.
        layers: What is wrapped.
        units: All units of the model.
        offload: Keep the inputs of the layers in CPU memory.
    """
    around: dict[nn.Module, nn.Module] = {}
    for layer in layers:
        wrapped = checkpoint_wrapper(layer.module)
        if offload:
            # Outside: what it moves is what checkpointing keeps, the layer's inputs.
            wrapped = offload_wrapper(wrapped)
        replace_module(model, layer.module, wrapped)
        around[layer.module] = wrapped
    return [replace(unit, module=around.get(unit.module, unit.module)) for unit in units]


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in another one's place, everywhere in a model."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old and parent is not new:
                setattr(parent, name, new)
