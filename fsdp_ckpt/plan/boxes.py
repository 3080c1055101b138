"""Boxes: half-open, axis-parallel pieces of a tensor's index space."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_ckpt.catalog import Shape

__all__ = [
    "Box", "Coverage", "bands", "check_coverage", "flat_boxes", "intersect", "is_contiguous_in", "linear_offset",
    "slices",
]  # fmt: skip

Box = tuple[Shape, Shape]
"""Offsets and lengths, in elements per dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What is wrong with a set of boxes that should tile a tensor; all None when nothing is.

    Attributes:
        missing: A box that nothing covers, one of possibly several.
        overlap: Indices of two boxes that share elements.
        outside: Index of a box that reaches beyond the tensor.
        missing_elements: Elements that nothing covers; 0 while there are overlaps or boxes outside.
    """

    missing: Box | None = None
    overlap: tuple[int, int] | None = None
    outside: int | None = None
    missing_elements: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the boxes tile the tensor."""
        return self.missing is None and self.overlap is None and self.outside is None


def intersect(a: Box, b: Box) -> Box | None:
    """Return what two boxes share, None when that is nothing.

    Example:
        >>> intersect(((0, 0), (4, 4)), ((2, 3), (4, 4)))
        ((2, 3), (2, 1))
    """
    starts = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    stops = (min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, lengths) if all(n > 0 for n in lengths) else None


def slices(box: Box, origin: Shape | None = None) -> tuple[slice, ...]:
    """Return the index of a box in an array that begins at ``origin``; None for the tensor's own beginning.

    Example:
        >>> slices(((4, 0), (2, 3)), (3, 0))
        (slice(1, 3, None), slice(0, 3, None))
    """
    begin = origin or (0,) * len(box[0])
    return tuple(slice(a - b, a - b + n) for a, b, n in zip(box[0], begin, box[1], strict=True))


def linear_offset(offsets: Shape, shape: Shape) -> int:
    """Return the row-major element number of an index in a tensor of this shape."""
    number = 0
    for offset, size in zip(offsets, shape, strict=True):
        number = number * size + offset
    return number


def is_contiguous_in(box: Box, shape: Shape) -> bool:
    """Tell whether a box is one unbroken run of a row-major tensor of this shape."""
    lengths = box[1]
    dim = len(shape) - 1
    while dim >= 0 and lengths[dim] == shape[dim]:
        dim -= 1
    return all(n == 1 for n in lengths[: max(dim, 0)])


def bands(shape: Shape, itemsize: int, limit_bytes: int) -> Iterator[Box]:
    """Cut a tensor into boxes that are unbroken runs of its row-major order, none above ``limit_bytes``.

    The boxes come in that order. A limit below one element gives boxes of one element.
    """
    if 0 in shape:
        return
    dim, inner = len(shape), itemsize
    while dim > 0 and inner * shape[dim - 1] <= limit_bytes:
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield (0,) * len(shape), shape
        return
    cut = dim - 1
    step = max(1, limit_bytes // inner)
    tail = shape[dim:]
    zeros = (0,) * len(tail)
    for head in itertools.product(*map(range, shape[:cut])):
        ones = (1,) * cut
        for start in range(0, shape[cut], step):
            yield (*head, start, *zeros), (*ones, min(step, shape[cut] - start), *tail)


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that the elements ``[start, stop)`` of a tensor's row-major order form, in that order.

    This is what one rank holds of a parameter that FSDP1 flattened: at most ``2 * len(shape) - 1`` boxes.

    Example:
        >>> list(flat_boxes((4, 3), 2, 10))
        [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    inner = math.prod(shape[1:])
    row, within = divmod(start, inner)
    if within or stop - start < inner:
        end = min(stop, (row + 1) * inner)
        for offsets, lengths in flat_boxes(shape[1:], within, end - row * inner):
            yield (row, *offsets), (1, *lengths)
        yield from flat_boxes(shape, end, stop)
        return
    rows = (stop - start) // inner
    yield (row, *[0] * (len(shape) - 1)), (rows, *shape[1:])
    yield from flat_boxes(shape, start + rows * inner, stop)


def check_coverage(shape: Shape, boxes: Sequence[Box]) -> Coverage:
    """Check that boxes tile a tensor: inside, disjoint, nothing left over. Empty boxes count for nothing.

    Args:
        shape: The tensor.
        boxes: In any order.

    Returns:
        The first fault found, or an exact coverage.
    """
    if shape and _are_row_blocks(shape, boxes):
        return Coverage()
    solid: list[_Solid] = []
    volume = 0
    for index, (offsets, lengths) in enumerate(boxes):
        if len(offsets) != len(shape) or len(lengths) != len(shape):
            return Coverage(outside=index)
        for offset, length, size in zip(offsets, lengths, shape, strict=True):
            if offset < 0 or length < 0 or offset + length > size:
                return Coverage(outside=index)
        elements = math.prod(lengths)
        if elements:
            solid.append((offsets, lengths, index))
            volume += elements
    solid.sort()
    overlap = _find_overlap(solid)
    if overlap is not None:
        return Coverage(overlap=overlap)
    total = math.prod(shape)
    if volume == total:
        return Coverage()
    return Coverage(missing=_find_gap(shape, solid), missing_elements=total - volume)


def _are_row_blocks(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Tell quickly whether the boxes are consecutive blocks of dimension 0, as FSDP shards are; False may be wrong."""
    tail, zeros, row = shape[1:], (0,) * (len(shape) - 1), 0
    for offsets, lengths in sorted(boxes):
        if offsets[:1] != (row,) or offsets[1:] != zeros or lengths[1:] != tail or not lengths or lengths[0] < 0:
            return False
        row += lengths[0]
    return row == shape[0] and 0 not in shape


_Solid = tuple[Shape, Shape, int]
"""Offsets, lengths, and the box's number."""


def _find_overlap(solid: list[_Solid], dims: tuple[int, ...] | None = None) -> tuple[int, int] | None:
    """Return two boxes that share elements.

    Shards form rows, columns or grids: along some dimension their intervals are equal or disjoint. Then only boxes
    with equal intervals can meet, and the question is the same for the dimensions that are left.
    """
    if len(solid) < 2:
        return None
    dims = tuple(range(len(solid[0][0]))) if dims is None else dims
    if not dims:
        return solid[0][2], solid[1][2]
    for dim in dims:
        groups: dict[tuple[int, int], list[_Solid]] = {}
        for box in solid:
            groups.setdefault((box[0][dim], box[0][dim] + box[1][dim]), []).append(box)
        intervals = sorted(groups)
        if all(first[1] <= second[0] for first, second in itertools.pairwise(intervals)):
            rest = tuple(other for other in dims if other != dim)
            found = (_find_overlap(group, rest) for group in groups.values())
            return next((pair for pair in found if pair is not None), None)
    return _sweep(solid, dims)


def _sweep(solid: list[_Solid], dims: tuple[int, ...]) -> tuple[int, int] | None:
    """The same for boxes in no order, along the dimension in which they begin at most places."""
    dim = max(dims, key=lambda dim: len({box[0][dim] for box in solid}))
    active: list[_Solid] = []
    for box in sorted(solid, key=lambda box: box[0][dim]):
        start = box[0][dim]
        active = [other for other in active if other[0][dim] + other[1][dim] > start]
        for other in active:
            if intersect((other[0], other[1]), (box[0], box[1])) is not None:
                return other[2], box[2]
        active.append(box)
    return None


def _find_gap(shape: Shape, solid: list[_Solid]) -> Box:
    """Return one uncovered box: the first slab along dimension 0 that is not full, narrowed dimension by dimension."""
    if not solid or not shape:
        return (0,) * len(shape), shape
    cuts = sorted({0, shape[0]} | {o[0] for o, _, _ in solid} | {o[0] + n[0] for o, n, _ in solid})
    slab_volume = math.prod(shape[1:])
    waiting = deque(sorted(solid, key=lambda box: box[0][0]))
    active: list[_Solid] = []
    for start, stop in itertools.pairwise(cuts):
        active = [box for box in active if box[0][0] + box[1][0] > start]
        while waiting and waiting[0][0][0] <= start:
            active.append(waiting.popleft())
        if sum(math.prod(n[1:]) for _, n, _ in active) < slab_volume:
            offsets, lengths = _find_gap(shape[1:], [(o[1:], n[1:], i) for o, n, i in active])
            return (start, *offsets), (stop - start, *lengths)
    raise AssertionError("volume is missing, but every slab is full")
