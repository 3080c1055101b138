"""Boxes against brute force: a counter for every element of a small tensor."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.plan.boxes import Box, bands, check_coverage, intersect, is_contiguous_in, linear_offset
from tests.property.tilings import boxes_in, shapes, tilings


def cells(box: Box) -> set[Shape]:
    return set(itertools.product(*(range(offset, offset + length) for offset, length in zip(*box, strict=True))))


def counts(shape: Shape, boxes: list[Box]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    found = np.zeros(shape, dtype=np.int64)
    for offsets, lengths in boxes:
        found[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
    return found


@given(st.data())
def test_an_intersection_is_what_both_hold(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    shared = intersect(a, b)
    assert (set() if shared is None else cells(shared)) == cells(a) & cells(b)
    assert shared is None or cells(shared)


@settings(max_examples=300)
@given(st.data())
def test_exact_tilings_are_never_accused(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    boxes = data.draw(tilings(shape))
    assert check_coverage(shape, boxes).is_exact


@settings(max_examples=300)
@given(st.data())
def test_a_hole_is_always_found(data: st.DataObject) -> None:
    shape = data.draw(shapes(min_side=1))
    boxes = data.draw(tilings(shape))
    solid = [box for box in boxes if 0 not in box[1]]
    gone = data.draw(st.sampled_from(solid))
    left = [box for box in boxes if box is not gone]
    coverage = check_coverage(shape, left)
    assert coverage.missing_elements == math.prod(gone[1])
    assert coverage.missing is not None
    assert cells(coverage.missing) <= cells(gone)
    assert cells(coverage.missing)


@settings(max_examples=300)
@given(st.data())
def test_an_overlap_is_always_found(data: st.DataObject) -> None:
    shape = data.draw(shapes(min_side=1))
    boxes = data.draw(tilings(shape))
    extra = data.draw(boxes_in(shape, smallest=1))
    boxes.insert(data.draw(st.integers(0, len(boxes))), extra)
    pair = check_coverage(shape, boxes).overlap
    assert pair is not None
    assert pair[0] != pair[1]
    assert cells(boxes[pair[0]]) & cells(boxes[pair[1]])


@settings(max_examples=200)
@given(st.data())
def test_a_box_outside_is_always_found(data: st.DataObject) -> None:
    shape = data.draw(shapes(min_side=1).filter(bool))
    boxes = data.draw(tilings(shape))
    index = data.draw(st.integers(0, len(boxes) - 1))
    dim = data.draw(st.integers(0, len(shape) - 1))
    offsets, lengths = (list(part) for part in boxes[index])
    offsets[dim] += data.draw(st.integers(shape[dim] + 1 - offsets[dim] - lengths[dim], 9))
    boxes[index] = (tuple(offsets), tuple(lengths))
    assert check_coverage(shape, boxes).outside == index


@settings(max_examples=300)
@given(st.data())
def test_any_boxes_are_judged_as_counting_does(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=3, max_side=4))
    boxes = data.draw(st.lists(boxes_in(shape), max_size=6))
    number, coverage = counts(shape, boxes), check_coverage(shape, boxes)
    assert coverage.outside is None
    assert (coverage.overlap is not None) == bool((number > 1).any())
    assert coverage.is_exact == bool((number == 1).all())
    if coverage.overlap is None:
        assert coverage.missing_elements == int((number == 0).sum())
        assert (coverage.missing is not None) == bool((number == 0).any())


@settings(max_examples=200)
@given(st.data())
def test_bands_cover_in_order_and_within_the_limit(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    itemsize, limit = data.draw(st.sampled_from([1, 2, 4, 8, 16])), data.draw(st.integers(1, 300))
    found = list(bands(shape, itemsize, limit))
    assert check_coverage(shape, found).is_exact
    position = 0
    for box in found:
        assert is_contiguous_in(box, shape)
        assert linear_offset(box[0], shape) == position
        assert math.prod(box[1]) * itemsize <= max(limit, itemsize)
        position += math.prod(box[1])


@settings(max_examples=200)
@given(st.data())
def test_contiguous_boxes_are_runs_of_memory(data: st.DataObject) -> None:
    shape = data.draw(shapes(min_side=1))
    box = data.draw(boxes_in(shape, smallest=1))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    run = numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].ravel()
    assert is_contiguous_in(box, shape) == (run[-1] - run[0] + 1 == len(run))
    assert linear_offset(box[0], shape) == run[0]
