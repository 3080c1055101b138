"""Live tensors as boxes: what this rank holds of each parameter, buffer and moment, as views of its memory.

The counterpart of ``catalog``: a checkpoint is boxes in files, a training job is boxes in memory, and saving or
loading moves bytes between the two. Nothing is gathered, and nothing is copied here.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_ckpt.catalog import DTYPES, DType, Shape
from fsdp_ckpt.codec.tensors import DTensorRef, StorageRef, TensorRef
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.mesh import local_boxes
from fsdp_ckpt.plan.boxes import Box, flat_boxes, linear_offset
from fsdp_ckpt.train.ranks import Ranks

__all__ = [
    "LiveTensor",
    "ParamSlot",
    "Piece",
    "Span",
    "dtensor_pieces",
    "dtype_of",
    "flat_pieces",
    "plain",
    "stored_pieces",
    "takes_turn",
    "whole",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor that lies in this rank's memory.

    Attributes:
        offsets: Where it begins in the whole tensor, per dimension.
        lengths: Its extent.
        tensor: The view that holds it, of shape ``lengths``; writing into it changes the model.
    """

    offsets: Shape
    lengths: Shape
    tensor: Tensor

    @property
    def box(self) -> Box:
        """Offsets and lengths."""
        return self.offsets, self.lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A tensor of a running job, as one rank sees it.

    Attributes:
        name: Fully qualified name, without wrappers.
        shape: Shape of the whole tensor.
        dtype: Element type.
        pieces: What this rank holds.
        writes: Whether this rank stores its pieces; of several ranks with the same box exactly one does.
        aliases: Further names of the same tensor (tied weights).
        everywhere: Whether each rank that has the tensor has all of it.
        spreads: Whether any of these ranks may store it. Buffers may differ, and the first rank's are stored.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    pieces: Sequence[Piece]
    writes: bool
    aliases: Sequence[str] = ()
    everywhere: bool = False
    spreads: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named parameter within the object that an optimizer holds (FSDP1 flattens several into one).

    Attributes:
        name: Fully qualified name.
        shape: Shape of the whole parameter.
        cut: Returns the pieces in a local tensor laid out like the parameter; None when it is not laid out so.
        is_owner: Whether this rank stores what is recorded once per parameter (its step count).
    """

    name: str
    shape: Shape
    cut: Callable[[Tensor], list[Piece] | None]
    is_owner: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlot:
    """A parameter as an optimizer knows it.

    Attributes:
        param: The object in ``param_groups``.
        spans: The named parameters in it. Empty on a rank that holds nothing of them, unless it holds padding.
        names: The names of all parameters in it, also of those that other ranks hold.
        writes: Whether this rank stores its pieces, see ``LiveTensor``.
        local: Returns FSDP1's shard of the parameter; None where the parameter itself has the right layout.
    """

    param: Tensor
    spans: Sequence[Span]
    names: Sequence[str]
    writes: bool
    local: Callable[[], Tensor] | None = None

    def is_whole(self, span: Span) -> bool:
        """Tell whether this rank has all of a parameter, as one plain tensor."""
        return tuple(self.template().shape) == span.shape and not isinstance(self.param, DTensor)

    def template(self) -> Tensor:
        """Return the tensor whose layout new moments get: the parameter, or FSDP1's local shard of it."""
        return self.param.detach() if self.local is None else self.local()


def dtype_of(dtype: torch.dtype, name: str) -> DType:
    """Return the catalog's element type.

    Raises:
        Incompatible: torch has it, checkpoints do not (quantised types).
    """
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise Incompatible(f"`{name}` has dtype {dtype}, which no checkpoint format holds")
    return found


def plain(name: str, tensor: Tensor, ranks: Ranks, *, spreads: bool = True) -> LiveTensor:
    """Return the live tensor of one that every rank holds whole.

    Args:
        name: Its name.
        tensor: The tensor.
        ranks: The ranks.
        spreads: Whether the ranks share the work of storing such tensors; otherwise the first rank does it.
    """
    return LiveTensor(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        pieces=[whole(tensor)],
        writes=takes_turn(name, ranks.rank, ranks.size) if spreads else ranks.is_first,
        everywhere=True,
        spreads=spreads,
    )


def stored_pieces(tensor: LiveTensor) -> Sequence[Piece]:
    """Return the pieces that this rank stores: none when another one does; empty ones only of empty tensors."""
    if not tensor.writes:
        return ()
    return [piece for piece in tensor.pieces if 0 in tensor.shape or 0 not in piece.lengths]


def whole(tensor: Tensor) -> Piece:
    """Return a plain tensor as one piece."""
    return Piece(offsets=(0,) * tensor.dim(), lengths=tuple(tensor.shape), tensor=tensor.detach())


def takes_turn(name: str, index: int, count: int) -> bool:
    """Tell whether copy ``index`` of ``count`` equal ones is the one that is stored; names spread over the copies."""
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % count == index


def dtensor_pieces(tensor: DTensor, name: str) -> tuple[list[Piece], int, int]:
    """Return this rank's pieces of a DTensor, and which copy of them it has: (pieces, index, number of copies).

    Raises:
        Incompatible: A reduction is pending (Partial placement).
    """
    detached: Any = tensor.detach()
    local: Tensor = detached.to_local()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return [], 0, 1
    placements = tuple(_placement(placement) for placement in tensor.placements)
    if ("partial",) in placements:
        raise Incompatible(f"`{name}` has a pending reduction (Partial placement)", hint="reduce it before saving")
    sizes = tuple(mesh.shape)
    strides = tuple(local.stride())
    try:
        boxes = _boxes_of(
            shape=tuple(tensor.shape),
            local_shape=tuple(local.shape),
            strides=strides,
            mesh_shape=sizes,
            coordinate=tuple(coordinate),
            placements=placements,
        )
    except MalformedFile as error:  # no file is at fault
        raise Incompatible(f"`{name}`: {error.message}") from None
    start = local.storage_offset()
    pieces = [
        Piece(offsets=offsets, lengths=lengths, tensor=local.as_strided(lengths, strides, start + element))
        for offsets, lengths, element in boxes
    ]
    index, count = 0, 1
    for size, place, placement in zip(sizes, coordinate, placements, strict=True):
        if placement == ("replicate",):
            index, count = index * size + place, count * size
    return pieces, index, count


@lru_cache(maxsize=4096)
def _boxes_of(
    *,
    shape: Shape,
    local_shape: Shape,
    strides: Shape,
    mesh_shape: Shape,
    coordinate: Shape,
    placements: tuple[tuple[str | int, ...], ...],
) -> Sequence[tuple[Shape, Shape, int]]:
    """Return boxes as ``local_boxes`` does; most tensors of a model are laid out like many others."""
    local = TensorRef(
        storage=StorageRef("", None, 0), dtype=DTYPES["uint8"], offset=0, shape=local_shape, strides=strides
    )
    reference = DTensorRef(
        local=local, shape=shape, mesh_shape=mesh_shape, coordinate=coordinate, placements=placements
    )
    return tuple(local_boxes(reference))


def _placement(placement: object) -> tuple[str | int, ...]:
    kind = type(placement).__name__
    if kind == "Shard":
        return ("shard", placement.dim)  # type: ignore[attr-defined]
    if kind == "_StridedShard":
        return ("strided", placement.dim, placement.split_factor)  # type: ignore[attr-defined]
    return ("replicate",) if kind == "Replicate" else ("partial",)


def flat_pieces(shape: Shape, start: int, local: Tensor, order: Sequence[int] | None = None) -> list[Piece]:
    """Return the boxes in a run of a flattened tensor.

    Args:
        shape: Shape of the whole tensor.
        start: Its element (in the order in which it was flattened) that the run begins with.
        local: The run, 1-D.
        order: The dimensions from the outermost in memory to the innermost, for a tensor that was not row-major
            when it was flattened (channels last); None for row-major.
    """
    stored = shape if order is None else tuple(shape[dim] for dim in order)
    return list(_flat(stored, start, local, order))


def _flat(stored: Shape, start: int, local: Tensor, order: Sequence[int] | None) -> Iterator[Piece]:
    back = None if order is None else [order.index(dim) for dim in range(len(order))]
    for offsets, lengths in flat_boxes(stored, start, start + local.numel()):
        first = linear_offset(offsets, stored) - start
        view = local[first : first + math.prod(lengths)].view(lengths)
        if back is None:
            yield Piece(offsets=offsets, lengths=lengths, tensor=view)
        else:
            yield Piece(
                offsets=tuple(offsets[dim] for dim in back),
                lengths=tuple(lengths[dim] for dim in back),
                tensor=view.permute(back),
            )
