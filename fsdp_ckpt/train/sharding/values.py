"""Bring first values to where they belong: from rank 0, tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.live import dtensor_pieces
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.sharding.initial import Initialize, make_values
from fsdp_ckpt.train.sharding.origin import Origin
from fsdp_ckpt.train.sharding.tensors import Held, Signature

__all__ = ["Values", "demand_same_model", "prepare_values"]


@dataclass(kw_only=True)
class Values:
    """The first values of a model on their way.

    Attributes:
        origin: Where they come from.
        ranks: The ranks that have one model.
        device: What they travel on.
        whole: Rank 0's values of tensors that are cut before they are sent, by ``id``.
    """

    origin: Origin
    ranks: Ranks
    device: torch.device
    whole: dict[int, Tensor] = field(default_factory=dict)

    def sends(self, held: Held) -> bool:
        """Whether rank 0 sends this one; a file has everything but buffers that are not saved."""
        return self.origin in (Origin.FIRST, Origin.MADE) or (self.origin is Origin.FILE and not held.persistent)

    def hold_back(self, held: Held) -> None:
        """Put a parameter on the meta device, to be cut there; rank 0 keeps its values."""
        if not self.sends(held):
            return
        values = held.tensor.detach()
        if self.ranks.is_first:
            self.whole[id(held)] = values
        held.put(held.like(values.to("meta")))

    def settle(self, held: Held, device: torch.device) -> None:
        """Bring a tensor to a device, with the values of rank 0 where that sends them. A collective."""
        if held.is_meta:
            held.materialize(device)
        elif not isinstance(held.tensor, DTensor) and held.tensor.device != device:
            held.tensor.data = held.tensor.data.to(device)
        if not self.sends(held):
            return
        source = self.whole.pop(id(held), None)
        if source is None and self.ranks.is_first:
            source = held.tensor.detach()
        self._receive(held.tensor, source)

    @torch.no_grad()
    def _receive(self, target: Tensor, source: Tensor | None) -> None:
        shape = target.shape
        if source is None:
            data = torch.empty(shape, dtype=target.dtype, device=self.device)
        else:
            data = source.to(self.device).contiguous()
        if data.numel():
            # As bytes: not every backend knows every dtype.
            raw = data.reshape(-1).view(torch.uint8)
            dist.broadcast(raw, src=self.ranks.global_rank(0), group=self.ranks.group)
        if isinstance(target, DTensor):
            for piece in dtensor_pieces(target, "")[0]:
                box = tuple(slice(at, at + length) for at, length in zip(*piece.box, strict=True))
                piece.tensor.copy_(data[box])
        else:
            target.detach().copy_(data)


def prepare_values(
    model: nn.Module,
    tensors: Sequence[Held],
    origin: Origin,
    initialize: Initialize | None,
) -> None:
    """Make on rank 0 what it will send and does not have yet.

    Raises:
        UsageError: A tensor got no values.
    """
    missing = [held for held in tensors if held.is_meta and (origin is Origin.MADE or not held.persistent)]
    if missing and origin in (Origin.MADE, Origin.FILE):
        make_values(model, tensors, missing, initialize)


def demand_same_model(tensors: Sequence[Held], ranks: Ranks, doing: str) -> None:
    """Make sure that all ranks have one model: the same names, ties, shapes and dtypes.

    Raises:
        UsageError: With the first tensor that differs.
    """
    mine: list[Signature] = [held.signature() for held in tensors]
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(ranks.gather_all(digest, doing))) == 1:
        return
    first = ranks.from_first(lambda: mine, doing)
    with ranks.together(doing):
        nothing: Signature = ("nothing",)
        longer = max(len(first), len(mine))
        pairs = zip(first + [nothing] * (longer - len(first)), mine + [nothing] * (longer - len(mine)), strict=True)
        for theirs, own in pairs:
            if theirs != own:
                raise UsageError(
                    f"the model differs between ranks: {' '.join(own)} on rank {ranks.rank}, {' '.join(theirs)} on "
                    "rank 0",
                    hint="build the same model on every rank; on the meta device, weights have to be tied there, too",
                )
