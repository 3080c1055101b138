"""Load a model from a state dict that a hook gave instead of the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor

from fsdp_ckpt.plan.boxes import slices
from fsdp_ckpt.train.model_plan import Fit
from fsdp_ckpt.train.modules import LiveModel

__all__ = ["check_replacement", "load_replacement"]


def check_replacement(live: LiveModel, state: Mapping[str, Any], what: str, *, strict: bool) -> None:
    """Make sure that a state dict fits a model.

    Args:
        live: The model.
        state: Whole tensors or DTensors, and extra state, by name.
        what: For messages.
        strict: Refuse names that only one side has.

    Raises:
        StateMismatch: It does not.
    """
    fit = Fit()
    for name, tensor in live.tensors.items():
        given = next((other for other in (name, *tensor.aliases) if other in state), None)
        if given is None:
            fit.missing.append(name)
        elif tuple(getattr(state[given], "shape", ())) != tensor.shape:
            fit.mismatched[name] = (tuple(getattr(state[given], "shape", ())), tensor.shape)
    fit.missing += [name for name in live.extra if name not in state]
    fit.unexpected += [name for name in state if name not in live.names() and name not in live.extra]
    fit.raise_for(what, strict=strict)


def load_replacement(live: LiveModel, state: Mapping[str, Any]) -> None:
    """Load a state dict that fits. A collective where it holds DTensors."""
    names = live.names()
    for key, value in state.items():
        if key in names:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            for piece in live.tensors[names[key]].pieces:
                piece.tensor.copy_(whole[slices(piece.box)])
        elif key in live.extra:
            live.extra[key][0].set_extra_state(value)
