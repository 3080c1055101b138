"""Copy what a save will write into host memory that is used again and again, so that training can go on.

Only what this rank stores is copied: of replicas one rank has a copy. The first snapshot allocates the memory, later
ones of the same size allocate nothing, which is several times faster as no page has to be found for it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_ckpt.errors import NotEnoughSpace
from fsdp_ckpt.store.memory import available_memory
from fsdp_ckpt.train.live import LiveTensor, stored_pieces
from fsdp_ckpt.train.parts import PartState, encode_local
from fsdp_ckpt.units import format_size

__all__ = ["HostMemory", "snapshot"]

_ALIGNMENT = 64


class HostMemory:
    """One buffer for everything, pinned where it takes part in copies from a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """Return that many bytes; what was taken before is no longer valid.

        Raises:
            NotEnoughSpace: The machine has less to spare.
        """
        if self._buffer.numel() < num_bytes or (pinned and not self._buffer.is_pinned()):
            self.release()
            free = available_memory()
            if free is not None and num_bytes > free:
                raise NotEnoughSpace(
                    f"an asynchronous save needs {format_size(num_bytes)} of host memory on this rank, "
                    f"{format_size(free)} are free",
                    hint="save with async_save=False, which needs none",
                )
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer[:num_bytes]

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


def snapshot(parts: Sequence[PartState], memory: HostMemory) -> list[PartState]:
    """Return parts that no longer change with the live state.

    Args:
        parts: Models and optimizers; values of parts that are sharded have been encoded.
        memory: Where tensors are copied to.

    Raises:
        NotEnoughSpace: The host's memory does not hold what this rank stores.
    """
    parts = [encode_local(part) for part in parts]
    pieces = [piece.tensor for part in parts for tensor in part.tensors.values() for piece in stored_pieces(tensor)]
    starts: list[int] = []
    size = 0
    for tensor in pieces:
        starts.append(size)
        size += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
    on_gpu = any(tensor.device.type == "cuda" for tensor in pieces)
    buffer = memory.take(size, pinned=on_gpu)
    copies = iter([_copy(tensor, buffer, start) for tensor, start in zip(pieces, starts, strict=True)])
    if on_gpu:
        torch.cuda.synchronize()
    return [
        replace(
            part,
            tensors={place: _replaced(tensor, copies) for place, tensor in part.tensors.items()},
            values={place: _detached(value) for place, value in part.values.items()},
        )
        for part in parts
    ]


def _copy(tensor: Tensor, buffer: Tensor, start: int) -> Tensor:
    raw = buffer[start : start + tensor.numel() * tensor.itemsize]
    copied = raw.view(tensor.dtype).view(tensor.shape)
    return copied.copy_(tensor.detach(), non_blocking=True)


def _replaced(tensor: LiveTensor, copies: Any) -> LiveTensor:
    return replace(tensor, pieces=[replace(piece, tensor=next(copies)) for piece in stored_pieces(tensor)])


def _detached(value: Any) -> Any:
    """Return a copy of a value, containers and arrays in it as well; instances of classes stay what they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _detached(item) for key, item in value.items()})
        return copied
    if type(value) in (list, tuple, set):
        return type(value)(map(_detached, value))
    return value
