"""What an optimizer holds on this rank, by parameter name: moments as boxes, step counts, options of each group.

Names and nesting are those that Accelerate and ``torch.distributed.checkpoint.state_dict`` write::

    state.<fqn>.exp_avg          sharded like the parameter
    state.<fqn>.step             stored once, by the rank that holds the parameter's first element
    param_groups.<g>.lr          one item per option
    param_groups.<g>.params      the names of the group's parameters

Collecting reads ``optimizer.state`` and nothing else: no step is taken, no entry is made, no gradient is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_ckpt.errors import Incompatible, UsageError
from fsdp_ckpt.layouts.roles import KeyPath
from fsdp_ckpt.train.live import LiveTensor, ParamSlot, Span, dtensor_pieces, takes_turn, whole

__all__ = ["LiveOptimizer", "Slots", "collect_optimizer", "find_slots", "unwrap_optimizer"]

Slots = Mapping[int, ParamSlot]
"""What the models hold, by ``id`` of the parameter."""


@dataclass(kw_only=True)
class LiveOptimizer:
    """An optimizer as one rank sees it.

    Attributes:
        optimizer: The optimizer, without wrappers.
        tensors: Moments, step counts and options that are tensors, by their place in the state dict.
        values: Everything else that this rank stores, by its place.
        groups: Names of the parameters of each group.
    """

    optimizer: torch.optim.Optimizer
    tensors: dict[KeyPath, LiveTensor] = field(default_factory=dict)
    values: dict[KeyPath, Any] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer in a wrapper (``AcceleratedOptimizer`` and others that keep it as ``.optimizer``).

    Raises:
        UsageError: It is none.
    """
    found = optimizer
    while hasattr(found, "optimizer"):  # AcceleratedOptimizer is itself an Optimizer
        found = found.optimizer
    if not isinstance(found, torch.optim.Optimizer):
        raise UsageError(f"{type(optimizer).__name__} is no optimizer and does not wrap one as `.optimizer`")
    if isinstance(getattr(found, "optim", None), torch.optim.Optimizer):
        raise UsageError(
            f"{type(found).__name__} keeps its state in an optimizer of its own, sharded in a way that cannot be told",
            hint="let FSDP shard the optimizer's state: build a plain optimizer from model.parameters()",
        )
    return found


def find_slots(optimizer: torch.optim.Optimizer, slots: Slots) -> list[list[ParamSlot]]:
    """Return the parameters of each group.

    Raises:
        UsageError: A parameter is in none of the given models.
    """
    found = []
    for number, group in enumerate(optimizer.param_groups):
        row = []
        for index, param in enumerate(group["params"]):
            slot = slots.get(id(param))
            if slot is None:
                raise UsageError(
                    f"parameter {index} of group {number} of the {type(optimizer).__name__} is in none of the models",
                    hint="pass all models that it optimizes; build it from model.parameters() after FSDP wrapped them",
                )
            row.append(slot)
        found.append(row)
    return found


def collect_optimizer(optimizer: torch.optim.Optimizer, slots: Slots, *, is_first: bool) -> LiveOptimizer:
    """Find out what this rank holds of an optimizer's state. Nothing in it is changed.

    Args:
        optimizer: The optimizer.
        slots: What the models hold.
        is_first: Whether this rank stores the options of the groups.

    Raises:
        UsageError: A parameter is in none of the models.
        Incompatible: State whose sharding cannot be told.
    """
    live = LiveOptimizer(optimizer=optimizer)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    strange: list[Any] = [key for key in optimizer.state if id(key) not in held]
    if strange:
        what = repr(strange[0]) if isinstance(strange[0], str) else f"a {type(strange[0]).__name__}"
        raise Incompatible(f"the {type(optimizer).__name__} keeps state for {what}, which is in none of its groups")
    for number, (group, row) in enumerate(zip(optimizer.param_groups, find_slots(optimizer, slots), strict=True)):
        names = [name for slot in row for name in slot.names]
        live.groups.append(names)
        for slot in row:
            state = optimizer.state.get(slot.param)  # never [...]: that would add an entry
            if state:
                _collect_state(live, slot, state)
        for option, value in group.items():
            path: KeyPath = ("param_groups", number, option)
            if option == "params":
                value = names
            if isinstance(value, Tensor):
                live.tensors[path] = _once(path, value, writes=is_first)
            elif is_first:
                live.values[path] = value
    return live


def _collect_state(live: LiveOptimizer, slot: ParamSlot, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        for span in slot.spans:
            path: KeyPath = ("state", span.name, key)
            if not isinstance(value, Tensor):
                if _holds_tensors(value) and not slot.is_whole(span):
                    raise Incompatible(
                        f"`{'.'.join(map(str, path))}` is a {type(value).__name__} that holds tensors, for a parameter "
                        "that is sharded: how they are sharded cannot be told",
                        hint="the optimizer has to keep each of them in its state as a tensor of its own",
                    )
                if span.is_owner:
                    live.values[path] = value
                continue
            pieces = span.cut(value)
            if pieces is not None:
                live.tensors[path] = LiveTensor(
                    name=".".join(map(str, path)),
                    shape=span.shape,
                    dtype=value.dtype,
                    pieces=pieces,
                    writes=slot.writes,
                )
            elif value.numel() == 1 and not isinstance(value, DTensor):
                live.tensors[path] = _once(path, value, writes=span.is_owner)
            else:
                live.tensors[path] = _own_layout(path, value, span, slot)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(item) for item in value.values())
    if isinstance(value, list | tuple | set):
        return any(_holds_tensors(item) for item in value)
    return isinstance(value, Tensor)


def _own_layout(path: KeyPath, value: Tensor, span: Span, slot: ParamSlot) -> LiveTensor:
    """State of another shape than the parameter's (Adafactor's rows, say): it must tell its sharding itself."""
    name = ".".join(map(str, path))
    if slot.is_whole(span) and not isinstance(value, DTensor):
        return LiveTensor(
            name=name, shape=tuple(value.shape), dtype=value.dtype, pieces=[whole(value)], writes=slot.writes
        )
    if isinstance(value, DTensor):
        pieces, copy, copies = dtensor_pieces(value, name)
        turn = takes_turn(name, copy, copies)
        return LiveTensor(name=name, shape=tuple(value.shape), dtype=value.dtype, pieces=pieces, writes=turn)
    raise Incompatible(
        f"`{name}` has shape {tuple(value.shape)} on this rank, its parameter {span.shape} in all: how the state is "
        "sharded cannot be told",
        hint="the optimizer has to keep such state as DTensors; block-wise 8-bit optimizers do not work with FSDP",
    )


def _once(path: KeyPath, value: Tensor, *, writes: bool) -> LiveTensor:
    local = value.full_tensor() if isinstance(value, DTensor) else value
    return LiveTensor(
        name=".".join(map(str, path)),
        shape=tuple(local.shape),
        dtype=local.dtype,
        pieces=[whole(local)],
        writes=writes,
    )
