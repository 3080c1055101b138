"""What is to be written of a checkpoint, whatever the format: tensors with their sources, objects, parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.catalog import DType, ObjectEntry, Role, Shape, TensorEntry

__all__ = ["LowRank", "OutputFile", "OutputObject", "OutputPart", "OutputTensor", "Window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A box of a tensor that becomes a tensor of its own: one layer of a stack, one expert.

    Attributes:
        offsets: Where it begins in the source, per dimension.
        lengths: Its extent there.
        shape: Its shape in the result: ``lengths``, perhaps without leading dimensions of length 1.
    """

    offsets: Shape
    lengths: Shape
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What an adapter adds to a matrix: ``scale * up @ down``.

    Attributes:
        up: ``lora_B``, of shape (out, rank).
        down: ``lora_A``, of shape (rank, in).
        scale: Factor, such as alpha / rank.
        transposed: The matrix is stored as (in, out): the product is transposed before it is added.
    """

    up: TensorEntry
    down: TensorEntry
    scale: float
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """A tensor to write.

    Attributes:
        name: Its name in the result.
        dtype: Its element type in the result.
        source: Where it comes from.
        path: Its place in the nested state dict of its part; ``(name,)`` when empty.
        window: The box of the source that it is; None for all of it.
        addition: What is added to the source's values; None for nothing.
    """

    name: str
    dtype: DType
    source: TensorEntry
    path: tuple[str | int, ...] = ()
    window: Window | None = None
    addition: LowRank | None = None

    @property
    def shape(self) -> Shape:
        """Its shape in the result."""
        return self.source.shape if self.window is None else self.window.shape

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the result."""
        return self.numel * self.dtype.itemsize

    @property
    def is_cast(self) -> bool:
        """Whether elements are converted."""
        return self.dtype != self.source.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file of the result: its name and the tensors in it."""

    name: str
    tensors: Sequence[OutputTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputObject:
    """A value to write that is no tensor.

    Attributes:
        path: Its place in the nested state dict of its part.
        source: The record to copy as it is; None when ``value`` stands for it.
        value: What to encode, as ``codec.pickles`` decodes values.
    """

    path: tuple[str | int, ...]
    source: ObjectEntry | None = None
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPart:
    """A part to write: a model, an optimizer, something else.

    Attributes:
        name: As the source names it.
        role: What it is for.
        tensors: In order.
        objects: In order.
    """

    name: str
    role: Role
    tensors: Sequence[OutputTensor]
    objects: Sequence[OutputObject] = field(default=())
