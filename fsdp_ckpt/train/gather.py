"""Bring sharded tensors together on one rank, one at a time.

Each box travels from the rank that holds it straight to its destination; no rank ever has more than one tensor beyond
what it keeps, and ranks that hold nothing of a tensor do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.errors import CorruptCheckpoint, Incompatible
from fsdp_ckpt.plan.boxes import Box, check_coverage, slices
from fsdp_ckpt.train.live import LiveTensor, dtype_of
from fsdp_ckpt.train.memory import checksum_of
from fsdp_ckpt.train.ranks import Ranks

__all__ = ["Described", "describe", "gather_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A tensor as all ranks together hold it.

    Attributes:
        name: Its name.
        shape: Whole shape.
        dtype: Element type.
        aliases: Further names.
        boxes: Disjoint boxes that tile it, and the rank that each is taken from.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    aliases: Sequence[str]
    boxes: Sequence[tuple[Box, int]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def describe(
    tensors: Mapping[str, LiveTensor], ranks: Ranks, doing: str, *, show: Callable[[str], str] = str
) -> list[Described]:
    """Return what the ranks hold between them, the same list on all of them. A collective.

    Args:
        tensors: What this rank holds.
        ranks: The ranks.
        doing: For messages.
        show: Returns a tensor's name for messages.

    Raises:
        Incompatible: Ranks disagree about a dtype or shape, or hold different values of one box.
        CorruptCheckpoint: Their boxes do not tile a tensor.
    """
    mine = [
        (
            tensor.name,
            tensor.shape,
            tensor.dtype,
            tuple(tensor.aliases),
            [piece.box for piece in tensor.pieces],
            tensor.writes,
        )
        for tensor in tensors.values()
    ]
    found: dict[str, Described] = {}
    sources: dict[str, dict[Box, int]] = {}
    writers: dict[tuple[str, Box], int] = {}
    for rank, rows in enumerate(ranks.gather_all(mine, doing)):
        for name, shape, dtype, aliases, boxes, writes in rows:
            known = found.setdefault(name, Described(name=name, shape=shape, dtype=dtype, aliases=aliases, boxes=()))
            if (known.shape, known.dtype) != (shape, dtype):
                raise Incompatible(
                    f"`{show(name)}` is {dtype} {shape} on rank {rank}, {known.dtype} {known.shape} on another"
                )
            for box in boxes:
                if 0 not in box[1]:
                    sources.setdefault(name, {}).setdefault(box, rank)
                    writers[name, box] = writers.get((name, box), 0) + int(writes)
    contested = {place for place, count in writers.items() if count > 1}
    if contested:
        _refuse_different(tensors, contested, ranks, doing, show)
    result = []
    for name, tensor in found.items():
        owners = sources.get(name, {})
        if not check_coverage(tensor.shape, list(owners)).is_exact:
            raise CorruptCheckpoint(f"the ranks do not hold all of `{show(name)}` {tensor.shape} between them")
        result.append(
            Described(
                name=name, shape=tensor.shape, dtype=tensor.dtype, aliases=tensor.aliases, boxes=sorted(owners.items())
            )
        )
    return result


def _refuse_different(
    tensors: Mapping[str, LiveTensor],
    contested: Collection[tuple[str, Box]],
    ranks: Ranks,
    doing: str,
    show: Callable[[str], str],
) -> None:
    """Compare boxes that several ranks would store: they know nothing of each other (meshes of their own)."""
    mine: dict[tuple[str, Box], int] = {}
    with ranks.together(doing):
        for tensor in tensors.values():
            for piece in tensor.pieces:
                if tensor.writes and (tensor.name, piece.box) in contested:
                    mine[tensor.name, piece.box] = checksum_of(piece.tensor, dtype_of(tensor.dtype, tensor.name))
    known: dict[tuple[str, Box], int] = {}
    for rank, theirs in enumerate(ranks.gather_all(mine, doing)):
        for (name, box), crc in theirs.items():
            if known.setdefault((name, box), crc) != crc:
                raise Incompatible(
                    f"rank {rank} holds `{show(name)}` at {box[0]} with other values than an earlier rank",
                    hint="tensors that differ between ranks need names of their own",
                )


def gather_tensors(
    described: Sequence[Described],
    tensors: Mapping[str, LiveTensor],
    ranks: Ranks,
    consume: Callable[[Described, Tensor], None],
    *,
    target: Callable[[Described], int] = lambda _: 0,
) -> Exception | None:
    """Hand whole CPU tensors, one after the other, to the rank that each is for. A collective.

    When ``consume`` fails, the remaining tensors are received and dropped, so that nobody waits for this rank.

    Args:
        described: From ``describe``, in the same order on all ranks.
        tensors: What this rank holds.
        ranks: The ranks.
        consume: Called on the target; the tensor is its to keep.
        target: Rank that a tensor is for.

    Returns:
        The first error of ``consume`` on this rank; to be passed on with ``Ranks.agree``.
    """
    failed: Exception | None = None
    for entry in described:
        goal = target(entry)
        held = tensors.get(entry.name)
        views = {piece.box: piece.tensor for piece in held.pieces} if held else {}
        if ranks.rank != goal:
            for box, owner in entry.boxes:
                if owner == ranks.rank:
                    ranks.send(views[box], goal)
            continue
        whole: Tensor | None = None
        try:
            whole = torch.empty(entry.shape, dtype=entry.dtype) if failed is None else None
        except RuntimeError as error:  # out of memory
            failed = error
        for box, owner in entry.boxes:
            shape = torch.Size(box[1])
            part = views[box] if owner == ranks.rank else ranks.receive(shape, entry.dtype, owner)
            if whole is not None:
                whole[slices(box)].copy_(part)
            del part
        if whole is not None and failed is None:
            try:
                consume(entry, whole)
            except Exception as error:  # noqa: BLE001 - told to all ranks by the caller
                failed = error
        whole = None  # before the next one is allocated
    return failed
