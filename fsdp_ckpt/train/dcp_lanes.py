"""Read records into the tensors that a load planner offers: one lane per thread, each in the order of the files."""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from fsdp_ckpt.catalog import DType, Shape
from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.plan.boxes import Box, bands, slices
from fsdp_ckpt.run.gather import Gatherer, storage_dtype, verify_boxes
from fsdp_ckpt.train.dcp_items import Items
from fsdp_ckpt.train.memory import STAGE_BYTES, bits_of, is_plain_memory, tensor_of_bits

__all__ = ["Lane", "split_evenly"]

T = TypeVar("T")


def split_evenly(items: Sequence[T], costs: Sequence[int], count: int) -> list[list[T]]:
    """Cut a sequence into ``count`` runs of about the same cost; runs may be empty.

    Example:
        >>> split_evenly("abcd", [1, 1, 1, 3], 2)
        [['a', 'b', 'c'], ['d']]
    """
    total, done = sum(costs), 0
    runs: list[list[T]] = [[] for _ in range(count)]
    for item, cost in zip(items, costs, strict=True):
        middle = 2 * done + cost
        runs[min(middle * count // (2 * total), count - 1) if total else 0].append(item)
        done += cost
    return runs


class Lane:
    """Reads items one after the other.

    Args:
        items: Where they lie.
        planner: Says where they go. It need not be thread-safe: it is asked under ``lock``.
        lock: Shared by all lanes.
        stop: Set when a lane has failed; the others end as well.
        verify: Compare checksums.
        parts: Records (key and offsets) that are to be read through for their checksum when a part of them is wanted;
            None for all.
    """

    def __init__(
        self,
        items: Items,
        planner: LoadPlanner,
        lock: threading.Lock,
        stop: threading.Event,
        *,
        verify: bool,
        parts: Container[tuple[str, Shape]] | None = None,
    ) -> None:
        self._items = items
        self._planner = planner
        self._lock = lock
        self._stop = stop
        self._verify = verify
        self._parts = parts
        self._verified: tuple[str, Shape] | None = None
        self._stage: Tensor | None = None

    def run(self, reads: Sequence[ReadItem], *, inference: bool | None = None) -> None:
        """Read items.

        Args:
            reads: In the order of their places.
            inference: Whether the thread that called ``dcp.load`` is in inference mode; None in that thread itself.

        Raises:
            ChecksumMismatch: A record is damaged.
            MalformedFile: A record is broken.
            Incompatible: The planner offers a tensor of another shape, or one without memory.
        """
        try:
            if inference is None:
                self._run(reads)
            else:
                with torch.inference_mode(inference):
                    self._run(reads)
        except BaseException:
            self._stop.set()
            raise

    def _run(self, reads: Sequence[ReadItem]) -> None:
        for item in reads:
            if self._stop.is_set():
                return
            with self._lock:
                target = self._planner.resolve_tensor(item).detach()
            self._read(item, target)
            with self._lock:
                self._planner.commit_tensor(item, target)

    def _read(self, item: ReadItem, target: Tensor) -> None:
        key, offsets, lengths = item.storage_index.fqn, tuple(item.storage_index.offset or ()), tuple(item.lengths)
        if tuple(target.shape) != lengths:
            raise Incompatible(
                f"`{key}`: {lengths} elements are to be read into a tensor of shape {tuple(target.shape)}"
            )
        if target.device.type == "meta":
            raise Incompatible(f"`{key}` is on the meta device, where it has no memory", hint="call to_empty() first")
        if not math.prod(lengths):
            return
        entry, located = self._items.entry(key), self._items.locate(key, offsets)
        chunk = located[1]
        box = (tuple(a + b for a, b in zip(chunk.offsets, item.storage_offsets, strict=True)), lengths)
        is_whole = lengths == chunk.lengths
        is_mine = self._parts is None or (key, offsets) in self._parts
        if self._verify and not is_whole and is_mine and self._verified != (key, offsets):
            verify_boxes(key, entry.dtype, [located], [box])
            self._verified = key, offsets
        passing = self._verify and is_whole
        gatherer = Gatherer(key, entry.dtype, entry.shape, [located], verify="full" if passing else "off")
        self._fill(gatherer, entry.dtype, box, target)
        gatherer.finish()
        if gatherer.unverified_bytes and chunk.crc32 is not None:  # not read in the order of the file
            verify_boxes(key, entry.dtype, [located], [box])

    def _fill(self, gatherer: Gatherer, dtype: DType, box: Box, target: Tensor) -> None:
        if _is_as_stored(target, dtype):
            gatherer.read(box, bits_of(target, dtype))
            return
        for offsets, lengths in bands(box[1], dtype.itemsize, STAGE_BYTES):
            part = self._staged(math.prod(lengths) * dtype.itemsize, target).view(storage_dtype(dtype)).reshape(lengths)
            gatherer.read((tuple(a + b for a, b in zip(offsets, box[0], strict=True)), lengths), part)
            target[slices((offsets, lengths))].copy_(tensor_of_bits(part, dtype))

    def _staged(self, num_bytes: int, target: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
        """Return memory through which bytes pass that are converted, or go to another device."""
        if self._stage is None or self._stage.numel() < num_bytes:
            pinned = target.device.type == "cuda"
            self._stage = torch.empty(max(num_bytes, STAGE_BYTES), dtype=torch.uint8, pin_memory=pinned)
        return self._stage[:num_bytes].numpy()


def _is_as_stored(target: Tensor, dtype: DType) -> bool:
    """Tell whether bytes can be read straight into a tensor: torch's own, of this type, every element in one place."""
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True))
    return (
        type(target) is Tensor
        and is_plain_memory(target)
        and not is_expanded
        and str(target.dtype) == f"torch.{dtype.name}"
    )
