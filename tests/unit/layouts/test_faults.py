from __future__ import annotations

import pytest

from fsdp_ckpt.catalog import DTYPES, Chunk, Severity, Shape, TensorEntry
from fsdp_ckpt.layouts.faults import coverage_problems, describe_box
from fsdp_ckpt.plan.boxes import Box


def entry(shape: Shape, *boxes: Box) -> TensorEntry:
    chunks = [Chunk(offsets, lengths, "f", 0, 1) for offsets, lengths in boxes]
    return TensorEntry(key="model.w", name="w", dtype=DTYPES["int8"], shape=shape, chunks=chunks)


def problem(shape: Shape, *boxes: Box) -> tuple[str, str]:
    (found,) = coverage_problems([entry(shape, *boxes)])
    assert found.severity is Severity.ERROR
    assert found.where == "model.w"
    return found.code, found.message


def test_a_hole() -> None:
    # Case "coverage hole": the tensor says 128 rows, the chunks give 64.
    code, message = problem((128, 4), ((0, 0), (64, 4)))
    assert code == "missing-shard"
    assert message == "256 of 512 elements are in no shard, first [64:128, 0:4] of (128, 4)"


def test_no_shards() -> None:
    assert problem((3,)) == ("missing-shard", "3 of 3 elements are in no shard, first [0:3] of (3,)")
    assert problem(()) == ("missing-shard", "1 of 1 elements are in no shard, first [] of ()")


def test_an_overlap() -> None:
    assert problem((6,), ((0,), (4,)), ((3,), (3,))) == ("shard-overlap", "shards at [0:4] and [3:6] overlap")


def test_outside() -> None:
    assert problem((6,), ((0,), (6,)), ((6,), (2,))) == (
        "shard-outside", "a shard at [6:8] lies outside of the shape (6,)",
    )  # fmt: skip


@pytest.mark.parametrize("boxes", [[((0,), (6, 1))], [((0, 0), (6,))], [((0,), ())], [((), ())]])
def test_another_number_of_dimensions(boxes: list[Box]) -> None:
    assert problem((6,), *boxes)[0] == "shard-outside"


def test_tensors_that_are_whole() -> None:
    assert list(coverage_problems([entry((6,), ((0,), (6,))), entry((0,)), entry((), ((), ()))])) == []


def test_boxes_in_slice_notation() -> None:
    assert describe_box(((0, 4), (6, 8))) == "[0:6, 4:12]"
    assert describe_box(((), ())) == "[]"
