"""Strategies: shapes, and ways to cut them into boxes."""

from __future__ import annotations

from hypothesis import strategies as st

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.plan.boxes import Box

__all__ = ["boxes_in", "shapes", "tilings"]


def shapes(*, max_dims: int = 4, max_side: int = 5, min_side: int = 0) -> st.SearchStrategy[Shape]:
    """Return shapes; small, so that brute force can judge."""
    return st.lists(st.integers(min_side, max_side), max_size=max_dims).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape, *, smallest: int = 0) -> Box:
    """Return a box inside of a shape, at least ``smallest`` long in every dimension."""
    offsets = [draw(st.integers(0, size - smallest)) for size in shape]
    lengths = [draw(st.integers(smallest, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    return tuple(offsets), tuple(lengths)


@st.composite
def tilings(draw: st.DrawFn, shape: Shape, *, max_cuts: int = 6) -> list[Box]:
    """Return boxes that tile a shape, made by cutting one box after the other in two, in any order.

    Grids, row blocks, and wheels of boxes that no grid can make are all among them.
    """
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, max_cuts)) if shape else 0):
        offsets, lengths = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, lengths[dim]))
        first = (offsets, (*lengths[:dim], cut, *lengths[dim + 1 :]))
        second = (
            (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :]),
            (*lengths[:dim], lengths[dim] - cut, *lengths[dim + 1 :]),
        )
        boxes += [first, second]
    return draw(st.permutations(boxes))
