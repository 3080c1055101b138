"""Facts of the task, by hand."""

from __future__ import annotations

import pytest
import torch

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.driver.task import GREATER, decode, encode, held_out, samples


def test_answers_are_the_sorted_digits() -> None:
    for row in [*samples(0, 1, 0, 20, 8).tolist(), *held_out(0, 20, 8).tolist()]:
        assert row[8] == GREATER
        assert row[9:] == sorted(row[:8])


def test_slices_of_ranks_make_the_same_batch() -> None:
    whole = samples(5, 7, 0, 12, 6)
    for size in (1, 2, 3, 4):
        part = 12 // size
        assert torch.equal(torch.cat([samples(5, 7, rank * part, part, 6) for rank in range(size)]), whole)
    assert not torch.equal(whole, samples(5, 8, 0, 12, 6))


def test_text() -> None:
    assert encode("3141") == [3, 1, 4, 1, 10]
    assert decode([1, 1, 3, 4, 10, 11]) == "1134>?"
    with pytest.raises(UsageError, match="31a"):
        encode("31a")
