"""The bytes of a live tensor, wherever it is: straight from its memory on the CPU, through a small buffer elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_ckpt.catalog import DType
from fsdp_ckpt.plan.boxes import bands, slices
from fsdp_ckpt.run.checksum import BLOCK_BYTES, crc32
from fsdp_ckpt.run.gather import storage_dtype

__all__ = ["STAGE_BYTES", "bits_of", "byte_blocks", "checksum_of", "is_plain_memory", "tensor_of_bits"]

STAGE_BYTES = 16 << 20
"""Size of the buffer through which bytes pass that do not lie in the CPU's memory as they are stored."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_plain_memory(tensor: Tensor) -> bool:
    """Tell whether the elements lie in the CPU's memory as they are stored."""
    return tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()


def bits_of(tensor: Tensor, dtype: DType) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the elements of a CPU tensor as NumPy bits that share its memory; strides are kept."""
    tensor = tensor.detach()
    integers = _INTEGERS.get(dtype.itemsize)
    array: np.ndarray[Any, np.dtype[Any]] = (tensor if integers is None else tensor.view(integers)).numpy()
    return array.view(storage_dtype(dtype))


def tensor_of_bits(bits: np.ndarray[Any, np.dtype[Any]], dtype: DType) -> Tensor:
    """Return contiguous NumPy bits as a tensor of their type that shares their memory."""
    raw = torch.from_numpy(bits.reshape(-1).view(np.uint8))
    return raw.view(getattr(torch, dtype.name)).reshape(bits.shape)


def byte_blocks(tensor: Tensor, dtype: DType) -> Iterator[memoryview]:
    """Yield the elements of a tensor in row-major order, in blocks that the processor's cache can hold.

    A block is valid until the next one is asked for.
    """
    tensor = tensor.detach()
    if not tensor.numel():
        return
    if is_plain_memory(tensor) and tensor.is_contiguous():
        yield from _cut(bits_of(tensor, dtype))
        return
    shape = tuple(tensor.shape)
    pinned = tensor.device.type == "cuda"
    stage = torch.empty(min(STAGE_BYTES, tensor.numel() * dtype.itemsize), dtype=torch.uint8, pin_memory=pinned)
    for offsets, lengths in bands(shape, dtype.itemsize, STAGE_BYTES):
        view = tensor[slices((offsets, lengths))]
        part = stage[: view.numel() * dtype.itemsize].view(tensor.dtype).view(lengths)
        part.copy_(view)
        yield from _cut(bits_of(part, dtype))


def checksum_of(tensor: Tensor, dtype: DType) -> int:
    """Return the CRC-32 of a tensor's elements in row-major order."""
    crc = 0
    for block in byte_blocks(tensor, dtype):
        crc = crc32(block, crc)
    return crc


def _cut(bits: np.ndarray[Any, np.dtype[Any]]) -> Iterator[memoryview]:
    flat: Any = bits.reshape(-1).view(np.uint8)
    data = memoryview(flat)
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]
