"""Asynchronous saves: the loop goes on, errors surface, memory is used again, one is under way at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.stage import outcomes, play

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory, "tests.dist.async_ranks")


@pytest.mark.parametrize("how", ["is_waited_for", "the_next_save_tells", "the_next_load_tells", "closing_tells"])
def test_an_error_surfaces_on_every_rank(played: Path, how: str) -> None:
    found = outcomes(played, f"fails_and_{how}")
    assert len(found) == 2
    for rank in found:
        assert rank["call"] == "nothing", "the call itself has returned"
        assert rank["kind"] == "NotEnoughSpace"
        assert "rank 1: OSError: [Errno 28]" in rank["message"]
        assert rank["seconds"] < 20
        assert rank["again"] == "nothing", "the next save works"
        assert rank["stored"], "the newer values are others"
        assert rank["unchanged"], "no file of the old one, and nothing hidden"
        assert rank["previous"], "it loads"
        assert rank["newest"]
        assert rank["names"], "and nothing is left"
    assert found[0]["message"] == found[1]["message"]


def test_one_save_is_under_way_at_a_time(played: Path) -> None:
    for rank in outcomes(played, "one_at_a_time"):
        assert rank["most"] == 1
        assert rank["right"] == [True] * 3
        assert rank["report"] == (3, "step-3", True, True)
        assert rank["again"]


def test_memory_holds_what_is_stored_and_is_used_again(played: Path) -> None:
    ranks = outcomes(played, "memory_is_used_again")
    assert [rank["places"] for rank in ranks] == [1, 1]
    for rank in ranks:
        (size,) = rank["sizes"]
        # Step counts and statistics of batches are stored by one of the ranks; each piece begins on 64 bytes.
        assert rank["state"] * 0.9 < size < rank["state"] + 64 * 20


def test_replicas_are_copied_and_written_once_and_by_all(played: Path) -> None:
    ranks = outcomes(played, "replicas_are_copied_once")
    whole = 8 * 32 * 32 * 4
    assert sum(rank["copied"] for rank in ranks) == whole
    assert min(rank["copied"] for rank in ranks) > 0
    assert len(ranks[0]["files"]) == 4
    assert all(rank["right"] for rank in ranks)


def test_groups_of_ranks_save_at_the_same_time(played: Path) -> None:
    ranks = outcomes(played, "two_groups_at_once")
    assert [(rank["step"], rank["world"], rank["right"]) for rank in ranks] == [
        (0, 2, True), (0, 2, True), (1, 2, True), (1, 2, True),
    ]  # fmt: skip


def test_hooks_run_in_the_callers_thread_and_values_are_those_of_the_call(played: Path) -> None:
    for rank in outcomes(played, "hooks_and_values"):
        assert rank["before"] == []
        assert rank["threads"] == [(True, 1)], "once"
        assert rank["seen"] == [1]
        assert torch.equal(rank["tensor"], torch.zeros(3))
        assert rank["values"] == {"list": [1]}
        assert rank["lr"] == pytest.approx(0.01 * 0.5)


def test_a_checkpointer_prunes_after_the_commit(played: Path) -> None:
    for rank in outcomes(played, "prunes_after_the_commit"):
        assert rank == {"left": ["step-4", "step-5"], "kinds": {"PendingSave"}}
