"""Places in flat vectors, counted by hand."""

from __future__ import annotations

import pytest

from fsdp_ckpt.errors import MalformedFile
from fsdp_ckpt.layouts.deepspeed_flat import Member, Segment, cut_members, cut_vector

Place = tuple[int, int, int, int, int]


def places(found: dict[str, list[Segment]]) -> dict[str, list[Place]]:
    """Rank, vector, first element there, first element of the parameter, elements."""
    return {name: [(s.rank, s.group, s.start, s.first, s.numel) for s in held] for name, held in found.items()}


def members(*items: tuple[str, int] | tuple[str, int, int]) -> list[Member]:
    return [Member(name=name, numel=numel, padding=sum(padding)) for name, numel, *padding in items]


def test_a_vector_in_equal_parts() -> None:
    # aaab|bbb. : seven elements, aligned to 2 * 2, in parts of four; the last element is cut off
    found = cut_vector(5, members(("a", 3), ("b", 4)), {0: 4, 1: 3}, 2)
    assert places(found) == {"a": [(0, 5, 0, 0, 3)], "b": [(0, 5, 3, 0, 1), (1, 5, 0, 1, 3)]}


def test_padding_that_is_not_cut_off() -> None:
    assert places(cut_vector(0, members(("a", 3)), {0: 2, 1: 2}, 2)) == {"a": [(0, 0, 0, 0, 2), (1, 0, 0, 2, 1)]}


def test_padding_between_parameters() -> None:
    # a...|bb..|c : each begins at a multiple of four
    found = cut_vector(0, members(("a", 1, 3), ("b", 2, 2), ("c", 1)), {0: 6, 1: 3}, 2)
    assert places(found) == {"a": [(0, 0, 0, 0, 1)], "b": [(0, 0, 4, 0, 2)], "c": [(1, 0, 2, 0, 1)]}


def test_a_parameter_over_many_ranks() -> None:
    found = cut_vector(0, members(("a", 1), ("b", 7)), dict.fromkeys(range(4), 2), 4)
    assert places(found)["b"] == [(0, 0, 1, 0, 1), (1, 0, 0, 1, 2), (2, 0, 0, 3, 2), (3, 0, 0, 5, 2)]


def test_a_vector_that_is_shorter_than_there_are_ranks() -> None:
    # parts of two, of which all but the first are only padding and were cut off, as was half of the first
    assert places(cut_vector(0, members(("a", 1)), {0: 1, 1: 0, 2: 0, 3: 0}, 4)) == {"a": [(0, 0, 0, 0, 1)]}


def test_one_rank() -> None:
    assert places(cut_vector(0, members(("a", 3), ("e", 0)), {0: 3}, 1)) == {"a": [(0, 0, 0, 0, 3)], "e": []}


def test_no_parameters() -> None:
    assert cut_vector(0, [], {0: 0, 1: 0}, 2) == {}


@pytest.mark.parametrize("here", [{0: 4}, {1: 3}, {1: 4}])
def test_what_a_missing_rank_held_is_left_out(here: dict[int, int]) -> None:
    rank = next(iter(here))
    found = places(cut_vector(0, members(("a", 3), ("b", 4)), here, 2))
    assert found == (
        {"a": [(0, 0, 0, 0, 3)], "b": [(0, 0, 3, 0, 1)]} if rank == 0 else {"a": [], "b": [(1, 0, 0, 1, 3)]}
    )


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({0: 6, 1: 6, 2: 6}, "7 elements, those of the ranks 18"),
        ({0: 2, 1: 0, 2: 0}, "7 elements, those of the ranks 2"),
        ({0: 3, 1: 4, 2: 0}, "rank 0 has 3 elements, others 4"),
        ({0: 4, 1: 2, 2: 1}, "rank 1 has 2 elements, others 4"),
        ({0: 2, 1: 2, 2: 4}, "the last rank has more elements"),
        ({0: 0, 1: 0, 2: 0}, "7 elements, those of the ranks 0"),
    ],
)
def test_parts_that_are_not_of_this_vector(sizes: dict[int, int], says: str) -> None:
    with pytest.raises(MalformedFile, match=says):
        cut_vector(0, members(("a", 7)), sizes, 3)


def test_parameters_cut_one_by_one() -> None:
    # shares of three (3, 3, 1) and of one (1, 0, 0)
    found = cut_members(members(("a", 7), ("b", 1)), {0: [4], 1: [4], 2: [4]}, 3)
    assert places(found) == {
        "a": [(0, 0, 0, 0, 3), (1, 0, 0, 3, 3), (2, 0, 0, 6, 1)],
        "b": [(0, 0, 3, 0, 1)],
    }


def test_a_share_that_goes_on_in_the_next_vector() -> None:
    found = cut_members(members(("a", 8), ("b", 2)), {0: [3, 2], 1: [3, 2]}, 2)
    assert places(found) == {
        "a": [(0, 0, 0, 0, 3), (0, 1, 0, 3, 1), (1, 0, 0, 4, 3), (1, 1, 0, 7, 1)],
        "b": [(0, 1, 1, 0, 1), (1, 1, 1, 1, 1)],
    }


def test_shares_of_the_ranks_that_are_there() -> None:
    assert places(cut_members(members(("a", 5)), {1: [3]}, 2)) == {"a": [(1, 0, 0, 3, 2)]}


@pytest.mark.parametrize("lengths", [[3], [5], [2, 1], []])
def test_vectors_of_another_size(lengths: list[int]) -> None:
    with pytest.raises(MalformedFile, match=f"rank 1 has {sum(lengths)} elements of its parameters, 4 are expected"):
        cut_members(members(("a", 7), ("b", 1)), {0: [4], 1: lengths}, 3)
