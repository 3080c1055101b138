"""What a comparison of two checkpoints found: the report that tables and JSON are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.catalog import Shape

if TYPE_CHECKING:
    from fsdp_ckpt.run.differences import ValueStats

__all__ = ["Change", "DiffReport", "ObjectDiff", "PartDiff", "TensorDiff"]


class Change(StrEnum):
    """How a tensor or a value differs. A is the older side, B the newer one."""

    CHANGED = "changed"
    """Other values, same dtype and shape."""
    RETYPED = "retyped"
    """Another dtype, whatever the values."""
    RESHAPED = "reshaped"
    """Another shape; the values were not compared."""
    REMOVED = "removed"
    """Only in A."""
    ADDED = "added"
    """Only in B."""
    CLOSE = "close"
    """Every element is within the tolerance: no difference. The dtypes may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """A tensor that is not the same on both sides.

    Attributes:
        name: Cleaned of wrapper prefixes; ``--rename`` was applied.
        change: How it differs.
        dtype_a: Its dtype on side A; None when it is not there.
        dtype_b: The same on side B.
        shape_a: Its shape on side A; None when it is not there.
        shape_b: The same on side B.
        num_elements: Elements; of A where shapes differ.
        stats: How its values differ; None where they were not compared or not asked for.
        cast: Where dtypes differ: ``a-to-b`` when B is exactly A rounded to B's dtype, ``b-to-a`` for the reverse,
            ``both`` when all values are equal; None when neither holds, or when it was not looked at.
    """

    name: str
    change: Change
    dtype_a: str | None
    dtype_b: str | None
    shape_a: Shape | None
    shape_b: Shape | None
    num_elements: int
    stats: ValueStats | None = None
    cast: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectDiff:
    """A value that is no tensor and not the same on both sides.

    Attributes:
        name: Where it stands in its part, with dots (``param_groups.0.lr``).
        change: CHANGED, REMOVED or ADDED.
        a: The value on side A, as plain values, long ones cut; None when it is not there, and for random states.
        b: The same on side B.
        is_random: A random state, which says nothing to people.
    """

    name: str
    change: Change
    a: Any = None
    b: Any = None
    is_random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDiff:
    """Two parts that correspond to each other.

    Attributes:
        part_a: Name of the part in A.
        part_b: Name of the part in B.
        role: What both are for.
        num_tensors: Tensors that are on both sides.
        num_equal: Those of them that are the same bit by bit.
        num_close: Others that are within the tolerance.
        num_settled: Equal ones that nothing was read for.
        num_same_file: Those of the settled ones that are the same bytes of the same file on both sides; recorded
            checksums say it of the others.
        tensors: All that are not the same: also close ones, and those on one side only.
        num_objects: Values on both sides that are no tensors.
        objects: Those that differ.
        excluded: Names that ``--include`` and ``--exclude`` left out, on both sides together.
        tied: Tensors that one side leaves out because they are another one: name kept, by name left out.
        incomparable: Why nothing was compared; None when it was.
        notes: What else there is to know.
        is_equal: Whether there is no difference in it; what is close is none.
    """

    part_a: str
    part_b: str
    role: str
    num_tensors: int = 0
    num_equal: int = 0
    num_close: int = 0
    num_settled: int = 0
    num_same_file: int = 0
    tensors: Sequence[TensorDiff] = ()
    num_objects: int = 0
    objects: Sequence[ObjectDiff] = ()
    excluded: int = 0
    tied: Mapping[str, str] = field(default_factory=dict)
    incomparable: str | None = None
    notes: Sequence[str] = ()
    is_equal: bool = True

    @property
    def different(self) -> list[TensorDiff]:
        """The tensors that make a difference: all in ``tensors`` but close ones."""
        return [tensor for tensor in self.tensors if tensor.change is not Change.CLOSE]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """How two checkpoints differ.

    Attributes:
        a: The first path as given.
        b: The second path as given.
        root_a: The folder that was read for A, which may lie below ``a``.
        root_b: The same for B.
        title_a: Layout of A for people.
        title_b: Layout of B for people.
        world_size_a: Ranks that wrote A, where that shows.
        world_size_b: The same for B.
        is_equal: Whether there is no difference. What is close is none, and neither is what ``aside`` lists.
        parts: Parts that correspond to each other, models first.
        only_in_a: Names of parts that only A has: differences.
        only_in_b: The same for B.
        aside_a: Parts of A that were not compared because B holds models only, and they are none.
        aside_b: The same for B.
        num_tensors: Tensors that are on both sides.
        num_equal: Those of them that are the same bit by bit.
        num_settled: Those of the equal ones that nothing was read for.
        num_same_file: Those of the settled ones that are the same bytes of the same file on both sides; recorded
            checksums say it of the others.
        num_bytes: Bytes of all tensors that are on both sides, of both together.
        read_bytes: Bytes of tensors that were read.
        tolerance: Largest absolute difference that counted as equal; None when nothing did.
        rtol: To which this share of ``|a|`` was added.
        notes: What was chosen on the user's behalf.
        elapsed_s: Wall time in seconds.
    """

    a: str
    b: str
    root_a: str
    root_b: str
    title_a: str
    title_b: str
    world_size_a: int | None
    world_size_b: int | None
    is_equal: bool
    parts: Sequence[PartDiff]
    only_in_a: Sequence[str]
    only_in_b: Sequence[str]
    aside_a: Sequence[str]
    aside_b: Sequence[str]
    num_tensors: int
    num_equal: int
    num_settled: int
    num_same_file: int
    num_bytes: int
    read_bytes: int
    tolerance: float | None
    rtol: float
    notes: Sequence[str] = ()
    elapsed_s: float = 0.0
