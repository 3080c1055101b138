"""Copy what a save will write into host memory that is used again and again, so that training can go on.

Only what this rank stores is copied: of replicas one rank has a copy. The first snapshot allocates the memory, later
ones of the same size allocate nothing, which is several times faster as no page has to be found for it.
"""

from __future__ import annotations

import copy
import os
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
    """One buffer for everything, registered with CUDA where it takes part in copies from a GPU.

    Not torch's pinned memory, whose allocator takes the next power of two and keeps what is given back.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._is_registered = False

    def take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """Return that many bytes; what was taken before is no longer valid.

        Args:
            num_bytes: Bytes that this rank needs; others on this machine will need as many.
            pinned: Whether copies from a GPU go there.

        Raises:
            NotEnoughSpace: The machine has less to spare.
        """
        if self._buffer.numel() < num_bytes:
            self.release()
            here = os.environ.get("LOCAL_WORLD_SIZE", "")
            needed, free = num_bytes * (int(here) if here.isdecimal() else 1), available_memory()
            if free is not None and needed > free:
                raise NotEnoughSpace(
                    f"an asynchronous save needs {format_size(needed)} of host memory on this machine, "
                    f"{format_size(free)} are free",
                    hint="save with async_save=False, which needs none",
                )
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if pinned and not self._is_registered and num_bytes:
            done = torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), self._buffer.numel(), 0)
            self._is_registered = int(done) == 0  # else copies are slower, and right
        return self._buffer[:num_bytes]

    def release(self) -> None:
        """Give the memory back."""
        if self._is_registered:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._is_registered = False
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
    devices = {tensor.device for tensor in pieces if tensor.device.type == "cuda"}
    buffer = memory.take(size, pinned=bool(devices))
    seen: dict[int, Any] = {}
    copies = iter([_copy(tensor, buffer, start) for tensor, start in zip(pieces, starts, strict=True)])
    taken = [
        replace(
            part,
            tensors={place: _replaced(tensor, copies) for place, tensor in part.tensors.items()},
            values={place: _detached(value, seen) for place, value in part.values.items()},
        )
        for part in parts
    ]
    for device in devices:
        torch.cuda.synchronize(device)
    return taken


def _copy(tensor: Tensor, buffer: Tensor, start: int) -> Tensor:
    raw = buffer[start : start + tensor.numel() * tensor.itemsize]
    copied = raw.view(tensor.dtype).view(tensor.shape)
    return copied.copy_(tensor.detach(), non_blocking=tensor.device.type == "cuda")


def _replaced(tensor: LiveTensor, copies: Any) -> LiveTensor:
    return replace(tensor, pieces=[replace(piece, tensor=next(copies)) for piece in stored_pieces(tensor)])


def _detached(value: Any, seen: dict[int, Any]) -> Any:
    """Return a copy of a value, containers and arrays in it as well; instances of classes stay what they are.

    Args:
        value: The value.
        seen: Copies by the identity of what they are of: what stands in several places does so in the copy, too.
    """
    if id(value) in seen:
        return seen[id(value)]
    copied = value
    if isinstance(value, Tensor):
        copied = value.detach().clone()
    elif isinstance(value, np.ndarray):
        copied = value.copy()
    elif isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _detached(item, seen) for key, item in value.items()})
    elif type(value) in (list, tuple, set):
        copied = type(value)(_detached(item, seen) for item in value)
    else:
        return value
    seen[id(value)] = copied
    return copied
