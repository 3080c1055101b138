from __future__ import annotations

import itertools

import numpy as np
import pytest

from fsdp_ckpt.plan.boxes import Box, bands, check_coverage, intersect, is_contiguous_in, linear_offset
from tests.unit.child import outcome

SHAPES = [(), (1,), (5,), (4, 3), (2, 3, 4), (1, 4, 1), (2, 1, 3, 2)]


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True))))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (((0, 0), (4, 4)), ((2, 3), (4, 4)), ((2, 3), (2, 1))),
        (((0,), (4,)), ((4,), (4,)), None),  # they touch
        (((0,), (4,)), ((0,), (4,)), ((0,), (4,))),
        (((1, 1), (1, 1)), ((0, 0), (9, 9)), ((1, 1), (1, 1))),
        (((0,), (0,)), ((0,), (4,)), None),  # an empty box shares nothing
        (((0, 0), (4, 0)), ((0, 0), (4, 4)), None),
        (((), ()), ((), ()), ((), ())),  # a scalar is one element
        (((0, 5), (4, 2)), ((0, 0), (4, 5)), None),
    ],
)
def test_intersections(a: Box, b: Box, expected: Box | None) -> None:
    assert intersect(a, b) == expected
    assert intersect(b, a) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_linear_offsets_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    for index in np.ndindex(shape):
        assert linear_offset(index, shape) == (int(np.ravel_multi_index(index, shape)) if shape else 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_box_is_contiguous_where_its_elements_are_one_run(shape: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for starts in np.ndindex(shape):
        for lengths in np.ndindex(tuple(size - start + 1 for size, start in zip(shape, starts, strict=True))):
            if 0 in lengths:
                continue
            run = numbers[tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True))].ravel()
            is_run = bool((np.diff(run) == 1).all())
            assert is_contiguous_in((starts, lengths), shape) == is_run, (starts, lengths)


@pytest.mark.parametrize("limit", [1, 4, 7, 8, 12, 24, 100, 10_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_bands_are_runs_in_order_within_the_limit(shape: tuple[int, ...], limit: int) -> None:
    itemsize, position = 4, 0
    for box in bands(shape, itemsize, limit):
        assert is_contiguous_in(box, shape)
        assert linear_offset(box[0], shape) == position
        elements = len(cells(box))
        assert elements * itemsize <= max(limit, itemsize)
        position += elements
    assert position == np.prod(shape, dtype=int)


def test_bands_by_hand() -> None:
    assert list(bands((5, 4), 1, 8)) == [((0, 0), (2, 4)), ((2, 0), (2, 4)), ((4, 0), (1, 4))]
    assert list(bands((2, 5), 1, 3)) == [
        ((0, 0), (1, 3)), ((0, 3), (1, 2)), ((1, 0), (1, 3)), ((1, 3), (1, 2)),
    ]  # fmt: skip
    assert list(bands((), 8, 1)) == [((), ())]
    assert list(bands((3, 0, 2), 4, 100)) == []


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((), [((), ())]),
        ((6,), [((0,), (6,))]),
        ((6,), [((4,), (2,)), ((0,), (4,))]),  # in any order
        ((6,), [((0,), (6,)), ((6,), (0,))]),  # an empty shard behind the end
        ((6,), [((0,), (6,)), ((2,), (0,))]),  # an empty shard in the middle
        ((0,), []),
        ((0,), [((0,), (0,))]),
        ((0, 4), [((0, 0), (0, 4))]),
        ((4, 0), []),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))]),
        ((4, 4), [((0, 0), (4, 1)), ((0, 1), (4, 3))]),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]),
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (2, 1)), ((2, 1), (1, 2)), ((1, 1), (1, 1))]),  # a wheel
        ((2, 2, 2), [((0, 0, 0), (1, 2, 2)), ((1, 0, 0), (1, 1, 2)), ((1, 1, 0), (1, 1, 1)), ((1, 1, 1), (1, 1, 1))]),
    ],
)  # fmt: skip
def test_exact_tilings(shape: tuple[int, ...], boxes: list[Box]) -> None:
    coverage = check_coverage(shape, boxes)
    assert coverage.is_exact
    assert (coverage.missing, coverage.overlap, coverage.outside, coverage.missing_elements) == (None, None, None, 0)


@pytest.mark.parametrize(
    ("shape", "boxes", "elements"),
    [
        ((), [], 1),
        ((6,), [], 6),
        ((6,), [((0,), (2,)), ((4,), (2,))], 2),
        ((6,), [((1,), (5,))], 1),
        ((6,), [((0,), (5,))], 1),
        ((6,), [((0,), (0,))], 6),
        ((4, 4), [((0, 0), (4, 2))], 8),
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (2, 1)), ((2, 1), (1, 2))], 1),  # the hub of the wheel
        ((2, 2, 2), [((0, 0, 0), (1, 2, 2)), ((1, 0, 0), (1, 1, 2)), ((1, 1, 0), (1, 1, 1))], 1),
    ],
)  # fmt: skip
def test_holes_are_found(shape: tuple[int, ...], boxes: list[Box], elements: int) -> None:
    coverage = check_coverage(shape, boxes)
    assert not coverage.is_exact
    assert coverage.missing_elements == elements
    assert coverage.missing is not None
    hole = cells(coverage.missing)
    assert hole
    assert hole <= cells(((0,) * len(shape), shape))
    assert not any(hole & cells(box) for box in boxes)


@pytest.mark.parametrize(
    ("shape", "boxes", "pair"),
    [
        ((), [((), ()), ((), ())], {0, 1}),
        ((6,), [((0,), (4,)), ((3,), (3,))], {0, 1}),
        ((6,), [((0,), (6,)), ((0,), (6,))], {0, 1}),
        ((6,), [((4,), (2,)), ((0,), (3,)), ((3,), (2,))], {0, 2}),
        ((6,), [((0,), (3,)), ((0,), (0,)), ((2,), (4,))], {0, 2}),  # indices count empty boxes, too
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((1, 3), (3, 1)), ((2, 2), (2, 1))], {0, 2}),
        ((2, 4), [((0, 0), (2, 2)), ((0, 1), (2, 3))], {0, 1}),
    ],
)
def test_overlaps_are_found(shape: tuple[int, ...], boxes: list[Box], pair: set[int]) -> None:
    coverage = check_coverage(shape, boxes)
    assert coverage.overlap is not None
    assert set(coverage.overlap) == pair


@pytest.mark.parametrize(
    ("shape", "boxes", "index"),
    [
        ((6,), [((0,), (7,))], 0),
        ((6,), [((0,), (3,)), ((3,), (4,))], 1),
        ((6,), [((-1,), (7,))], 0),
        ((6,), [((0,), (6,)), ((7,), (0,))], 1),
        ((6,), [((8,), (-2,))], 0),
        ((4, 4), [((0, 0), (4, 4)), ((0, 4), (1, 1))], 1),
        ((6,), [((0, 0), (6, 1))], 0),  # another number of dimensions
        ((6,), [((0,), (6, 1))], 0),
        ((6,), [((0,), ())], 0),
        ((6,), [((), ())], 0),
        ((6,), [((), (6,))], 0),
        ((4, 4), [((0,), (4, 4))], 0),
        ((4, 4), [((0, 0), (4,))], 0),
        ((), [((0,), (1,))], 0),
        ((), [((), (1,))], 0),
    ],
)
def test_boxes_outside_are_found(shape: tuple[int, ...], boxes: list[Box], index: int) -> None:
    assert check_coverage(shape, boxes).outside == index


MANY = {
    "rows with a hole": ((40_000, 7), [((row, 0), (1, 7)) for row in range(40_000) if row != 12_345]),
    "columns": ((7, 10_000), [((0, column), (7, 1)) for column in range(10_000)]),
    "a grid with a hole": ((200, 200), [((i, j), (1, 1)) for i in range(200) for j in range(200) if (i, j) != (50, 7)]),
}
HOLES = {
    "rows with a hole": ((12_345, 0), (1, 7)),
    "columns": None,
    "a grid with a hole": ((50, 7), (1, 1)),
}


@pytest.mark.parametrize("name", MANY)
def test_thousands_of_boxes_end_in_good_time(name: str) -> None:
    """A fraction of a second is normal, a hundred are not: a checkpoint has hundreds of such tensors."""

    def check() -> None:
        assert check_coverage(*MANY[name]).missing == HOLES[name]

    assert outcome(check, cpu_s=4) == "ok"
