"""Take layers out of the stacks that Megatron-core saves: one tensor per name for all layers, the layer first.

``decoder.layers.mlp.linear_fc1.weight`` of shape (layers, out, in) becomes ``decoder.layers.0.mlp.linear_fc1.weight``
of shape (out, in), and so on. Where layers are not alike, Megatron saves them with their numbers, and there is nothing
to do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fsdp_ckpt.errors import Incompatible, NameCollision, UsageError
from fsdp_ckpt.plan.output import OutputTensor, Window

__all__ = ["unstack_layers"]

_STACKED = re.compile(r"(?P<stack>(?:.*?\.)?layers)\.(?!\d+(?:\.|$))(?P<rest>.+)")
_MOST = 1 << 14
"""Layers that a model may have: a tensor of another kind may have any number of rows."""


def unstack_layers(tensors: Sequence[OutputTensor]) -> list[OutputTensor]:
    """Return a model's tensors with those of stacked layers replaced by one for each layer.

    Args:
        tensors: What is to be written.

    Returns:
        Layer by layer where a stack began; other tensors are unchanged.

    Raises:
        UsageError: No layers are stacked.
        Incompatible: Tensors of one stack differ in the number of layers, or a tensor is part of another already.
        NameCollision: There is a tensor of a layer's name.
    """
    stacks: dict[str, list[OutputTensor]] = {}
    for tensor in tensors:
        match = _STACKED.fullmatch(tensor.name)
        if match is not None:
            stacks.setdefault(match["stack"], []).append(tensor)
    if not stacks:
        raise UsageError(
            "no layers are stacked: no name is like `decoder.layers.mlp.linear_fc1.weight`",
            hint="leave out --unstack-layers",
        )
    found: list[OutputTensor] = []
    for tensor in tensors:
        match = _STACKED.fullmatch(tensor.name)
        if match is None:
            found.append(tensor)
        elif tensor is stacks[match["stack"]][0]:
            found += _layers(match["stack"], stacks[match["stack"]])
    twice = [name for name, count in Counter(tensor.name for tensor in found).items() if count > 1]
    if twice:
        raise NameCollision(f"two tensors would both be named `{twice[0]}`: one is there already, one is in a stack")
    return found


def _layers(stack: str, members: Sequence[OutputTensor]) -> Iterator[OutputTensor]:
    counts = {tensor.name: tensor.shape[0] if tensor.shape else 0 for tensor in members}
    first = members[0].name
    for tensor in members:
        if tensor.window is not None or tensor.addition is not None:
            raise Incompatible(f"`{tensor.name}` is not written as it is saved: its layers cannot be taken apart")
        if counts[tensor.name] != counts[first]:
            raise Incompatible(
                f"`{stack}` is no stack of layers: `{first}` has {counts[first]} in its first dimension, "
                f"`{tensor.name}` has {counts[tensor.name]}",
                hint="leave out --unstack-layers",
            )
    if not 0 < counts[first] <= _MOST:
        raise Incompatible(f"`{first}` is no stack of layers: its shape is {members[0].shape}")
    for layer in range(counts[first]):
        for tensor in members:
            yield _one(tensor, layer)


def _one(tensor: OutputTensor, layer: int) -> OutputTensor:
    inner = tensor.shape[1:]
    zeros = (0,) * len(inner)
    return replace(
        tensor,
        name=_numbered(tensor.name, layer),
        path=tuple(_numbered(step, layer) if isinstance(step, str) else step for step in tensor.path),
        window=Window(offsets=(layer, *zeros), lengths=(1, *inner), shape=inner),
    )


def _numbered(name: str, layer: int) -> str:
    match = _STACKED.fullmatch(name)
    return name if match is None else f"{match['stack']}.{layer}.{match['rest']}"
