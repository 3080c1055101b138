"""How tensors and boxes of them are cut into tasks. Judge: every element is written once, from where torch has it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch

from fsdp_ckpt.catalog import DTYPES, Chunk, TensorEntry
from fsdp_ckpt.plan.boxes import Box
from fsdp_ckpt.run import tasks
from fsdp_ckpt.run.tasks import ChunkIndex, CopyTask, cut_tasks


def entry(shape: tuple[int, ...], boxes: Sequence[Box], dtype: str = "int32") -> TensorEntry:
    chunks, position = [], 0
    for offsets, lengths in boxes:
        size = math.prod(lengths) * DTYPES[dtype].itemsize
        chunks.append(Chunk(offsets, lengths, "f", position, position + size))
        position += size
    return TensorEntry(key="w", name="w", dtype=DTYPES[dtype], shape=shape, chunks=chunks)


def grid(*cuts: Sequence[int]) -> list[Box]:
    """Return the boxes between the given positions, per dimension."""
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)]


def written(found: Sequence[CopyTask], whole: torch.Tensor, box: Box, start: int) -> torch.Tensor:
    """Carry tasks out on a tensor of numbers: what they would put into a buffer for ``box``; -1 where nothing is."""
    target = torch.full((math.prod(box[1]),), -1)
    for task in found:
        piece = whole[tuple(slice(a, a + n) for a, n in zip(*task.box, strict=True))].reshape(-1)
        first = (task.position - start) // task.dtype.itemsize
        assert task.num_bytes == len(piece) * task.dtype.itemsize
        assert (target[first : first + len(piece)] == -1).all()
        target[first : first + len(piece)] = piece
        for element in piece.tolist():
            index = [int(number) for number in torch.unravel_index(torch.tensor(element), whole.shape)]
            holders = [
                chunk for chunk in task.chunks
                if all(a <= i < a + n for a, n, i in zip(chunk.offsets, chunk.lengths, index, strict=True))
            ]  # fmt: skip
            assert len(holders) == 1, "exactly one chunk of the task has the element"
    return target.reshape(box[1])


LAYOUTS: dict[str, tuple[tuple[int, ...], list[Box]]] = {
    "whole": ((6, 5), grid([0, 6], [0, 5])),
    "rows": ((9, 5), grid([0, 3, 4, 8, 9], [0, 5])),
    "columns": ((6, 7), grid([0, 6], [0, 2, 5, 7])),
    "cells": ((6, 7), grid([0, 2, 6], [0, 4, 7])),
    "vector": ((11,), grid([0, 4, 5, 11])),
    "rows of slabs": ((4, 3, 5), grid([0, 1, 3, 4], [0, 3], [0, 5])),
    "scalar": ((), [((), ())]),
    "with empty chunks": ((4, 3), [((0, 0), (0, 3)), ((0, 0), (4, 3)), ((4, 0), (0, 3)), ((2, 0), (2, 0))]),
}


@pytest.mark.parametrize("split_bytes", [1, 40, 1 << 25])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_of_every_box_is_written_once(
    name: str, split_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_SPLIT_BYTES", split_bytes)
    shape, boxes = LAYOUTS[name]
    generator = random.Random(name)
    generator.shuffle(boxes)
    tensor = entry(shape, boxes)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    index = ChunkIndex(tensor)
    for _ in range(25):
        offsets = tuple(generator.randrange(size) for size in shape)
        lengths = tuple(generator.randint(1, size - offset) for size, offset in zip(shape, offsets, strict=True))
        box = offsets, lengths
        found = list(cut_tasks(tensor, DTYPES["int64"], position=1000, box=box, index=index))
        wanted = whole[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]
        assert torch.equal(written(found, whole, box, 1000), wanted)
        assert list(cut_tasks(tensor, DTYPES["int64"], position=1000, box=box)) == found, "with or without an index"
    found = list(cut_tasks(tensor, DTYPES["int32"], position=0))
    assert torch.equal(written(found, whole, ((0,) * len(shape), shape), 0), whole)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_index_finds_what_a_box_needs_and_no_more(name: str) -> None:
    shape, boxes = LAYOUTS[name]
    tensor = entry(shape, boxes)
    index = ChunkIndex(tensor)
    for offsets in itertools.product(*map(range, shape)):
        for lengths in itertools.product(*(range(1, size - a + 1) for size, a in zip(shape, offsets, strict=True))):
            wanted = [
                chunk for chunk in tensor.chunks
                if chunk.numel and all(
                    max(a, b) < min(a + n, b + m)
                    for a, n, b, m in zip(offsets, lengths, chunk.offsets, chunk.lengths, strict=True)
                )
            ]  # fmt: skip
            assert sorted(index.within((offsets, lengths))) == sorted(wanted)


def test_large_tensors_become_a_task_per_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = entry((9, 5), grid([0, 3, 4, 8, 9], [0, 5]))
    assert len(list(cut_tasks(tensor, tensor.dtype, position=0))) == 1
    monkeypatch.setattr(tasks, "_SPLIT_BYTES", 100)
    found = list(cut_tasks(tensor, tensor.dtype, position=8))
    assert [(task.position, task.num_bytes, len(task.chunks)) for task in found] == [
        (8, 60, 1), (68, 20, 1), (88, 80, 1), (168, 20, 1),
    ]  # fmt: skip
    columns = entry((6, 7), grid([0, 6], [0, 2, 5, 7]))
    assert len(list(cut_tasks(columns, columns.dtype, position=0))) == 1, "they have to be gathered"


def test_nothing_is_written_of_nothing() -> None:
    assert list(cut_tasks(entry((0, 3), [((0, 0), (0, 3))]), DTYPES["int32"], position=0)) == []
    assert list(cut_tasks(entry((4, 3), grid([0, 4], [0, 3])), DTYPES["int32"], position=0, box=((1, 0), (0, 3)))) == []
