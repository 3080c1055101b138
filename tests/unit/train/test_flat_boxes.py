from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.plan.boxes import flat_boxes, is_contiguous_in, linear_offset


@st.composite
def _runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(_runs())
def test_boxes_hold_the_run_in_its_order_and_nothing_else(run: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = run
    tensor = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(flat_boxes(shape, start, stop))
    found = [
        tensor[tuple(slice(offset, offset + n) for offset, n in zip(offsets, lengths, strict=True))].reshape(-1)
        for offsets, lengths in boxes
    ]
    assert np.array_equal(np.concatenate([*found, np.empty(0, dtype=int)]), np.arange(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    for box in boxes:
        assert is_contiguous_in(box, shape)
        assert tensor[box[0]] == linear_offset(box[0], shape)


def test_the_whole_is_one_box() -> None:
    assert list(flat_boxes((4, 3, 2), 0, 24)) == [((0, 0, 0), (4, 3, 2))]
    assert list(flat_boxes((), 0, 1)) == [((), ())]
    assert list(flat_boxes((5,), 0, 5)) == [((0,), (5,))]


def test_nothing_is_no_box() -> None:
    for shape in ((4, 3), (5,), (), (0, 3)):
        assert list(flat_boxes(shape, 0, 0)) == []


def test_a_large_tensor_costs_nothing() -> None:
    shape = (1 << 20, 1 << 20, 3)
    assert list(flat_boxes(shape, 1, 3 << 40)) == [
        ((0, 0, 1), (1, 1, 2)),
        ((0, 1, 0), (1, (1 << 20) - 1, 3)),
        ((1, 0, 0), ((1 << 20) - 1, 1 << 20, 3)),
    ]
