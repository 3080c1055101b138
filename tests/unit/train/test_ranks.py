from __future__ import annotations

import errno
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_ckpt import errors
from fsdp_ckpt.train.ranks import Ranks, _pack, _unpack


def _raised(failed: dict[int, BaseException], size: int) -> errors.FsdpCkptError:
    return _unpack({rank: _pack(error) for rank, error in failed.items()}, size, "saving run/step-1")


def test_what_all_ranks_say_is_said_once_and_by_nobody() -> None:
    error = errors.StateMismatch("does not fit", missing=["a"], unexpected=["b"], mismatched=["c"], hint="look")
    found = _raised({0: error, 1: error}, 2)
    assert type(found) is errors.StateMismatch
    assert (str(found), found.hint) == ("does not fit", "look")
    assert (found.missing, found.unexpected, found.mismatched) == (["a"], ["b"], ["c"])


def test_what_one_rank_says_is_said_with_its_number() -> None:
    found = _raised({2: errors.ChecksumMismatch("`w` is damaged")}, 4)
    assert type(found) is errors.ChecksumMismatch
    assert str(found) == "saving run/step-1 failed: rank 2: `w` is damaged"


def test_an_unforeseen_error_is_told_with_its_class_and_what_was_done() -> None:
    for size in (1, 2):
        found = _raised(dict.fromkeys(range(size), ValueError("first line\nsecond line")), size)
        assert type(found) is errors.RankFailed
        where = " on all 2 ranks" if size == 2 else ""
        assert str(found) == f"saving run/step-1 failed{where}: ValueError: first line"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_not_enough_space(number: int) -> None:
    found = _raised({1: OSError(number, "full")}, 2)
    assert type(found) is errors.NotEnoughSpace
    assert "rank 1: OSError" in str(found)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyError("x"), CheckpointException("m", {})])
def test_other_errors_are_a_failed_rank(error: BaseException) -> None:
    found = _raised({1: error}, 2)
    assert type(found) is errors.RankFailed
    assert f"rank 1: {type(error).__name__}: " in str(found)


def test_an_error_without_a_message_is_told_by_its_class() -> None:
    assert "rank 0: AssertionError: AssertionError" in str(_raised({0: AssertionError()}, 2))


def test_ranks_with_one_message_are_listed_together() -> None:
    failed: dict[int, BaseException] = {rank: ValueError("a") for rank in (0, 1, 2, 3, 5, 8)}
    failed |= {6: ValueError("b")}
    text = str(_raised(failed, 16))
    assert text == "saving run/step-1 failed: ranks 0, 1, 2, 3 and 2 more: ValueError: a; rank 6: ValueError: b"


def test_of_many_messages_some_are_shown() -> None:
    text = str(_raised({rank: ValueError(f"m{rank}") for rank in range(7)}, 8))
    assert "rank 3: ValueError: m3; and 3 other messages" in text
    assert "m4" not in text


def test_the_class_of_the_first_rank_that_failed_counts() -> None:
    failed: dict[int, BaseException] = {1: errors.Vetoed("no"), 3: errors.ChecksumMismatch("damaged")}
    found = _raised(failed, 4)
    assert type(found) is errors.Vetoed
    assert "rank 1: no; rank 3: damaged" in str(found)


def test_an_unsafe_pickle_stays_one() -> None:
    found = _raised({1: errors.UnsafePickle("os.system", where="a.pkl")}, 2)
    assert isinstance(found, errors.UnsafePickle)
    assert (found.name, found.where) == ("os.system", "a.pkl")
    assert "rank 1: a.pkl: the pickle refers to `os.system`" in str(found)


def test_every_class_of_the_tree_arrives_as_itself() -> None:
    for name in errors.__all__:
        cls: Any = getattr(errors, name)
        if name in ("StateMismatch", "UnsafePickle"):
            continue
        found = _raised({1: cls("text", hint="do this")}, 2)
        assert (type(found), found.hint) == (cls, "do this")


def test_a_process_alone_is_the_first_of_one() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.size, ranks.is_first) == (0, 1, True)
    assert ranks.gather_all("x", "") == ["x"] == ranks.gather_first("x", "")
    assert ranks.from_first(lambda: 5, "") == 5
    ranks.demand_same("x", "the path", "")
    ranks.agree(None, "")
    with pytest.raises(errors.DestinationExists, match="there") as caught:
        ranks.from_first(lambda: _raise(errors.DestinationExists("there", hint="move it")), "saving x")
    assert (str(caught.value), caught.value.hint) == ("there", "move it")
    with (
        pytest.raises(errors.RankFailed, match=r"saving x failed: .*ZeroDivisionError") as failed,
        ranks.together("saving x"),
    ):
        _raise(ZeroDivisionError("by zero"))
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_an_interrupt_is_not_turned_into_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), Ranks().together("saving x"):
        raise KeyboardInterrupt


def _raise(error: BaseException) -> None:
    raise error
