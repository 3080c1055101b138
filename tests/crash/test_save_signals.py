"""Signals while a save is under way: to one rank or to all, with a handler or without; and a rank that hangs."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.crash.save_strace import Fault, Point, go_on, hold, skip_without_attaching
from tests.crash.save_trial import SCENES, Trial, sample
from tests.crash.save_yard import Rank, Yard

pytestmark = pytest.mark.dist

GROUP_S = 20
"""The process group's time-out, in ``save_server``."""


@pytest.fixture
def trial(yard: Yard, tmp_path: Path) -> Trial:
    skip_without_attaching()
    return Trial(yard, SCENES["overwrite"], tmp_path)


def _terminate(trial: Trial, point: Point, *, number: int, how: str, everyone: bool) -> str:
    """Stop a rank at a point, send SIGTERM to it, or to all, and let it go on; return what is there then."""
    what = f"SIGTERM at {point} of rank {number}, {how}, to all: {everyone}"
    version = trial.next_version()
    trial.team.must("on_term", how=how)
    victim = trial.team.ranks[number]
    assert hold(point, victim, trial.log, partial(trial.team.send, **trial.order(version))), f"{point}: missed"
    for rank in trial.team.ranks if everyone else [victim]:
        rank.kill(signal.SIGTERM)
    go_on(victim)
    answers = trial.team.answers()
    assert victim.is_gone or _ends(victim), f"{what}: the signal is lost: {answers}"
    standing = trial.check_folder(version, what)
    trial.check_survivors(answers, what, has_saved=standing == version)
    end = "new" if standing == version else "old"
    trial.tally.add(Fault(point, "signal=TERM"), end, answers)
    trial.go_on(standing, what, fresh=True)
    return end


def _ends(victim: Rank) -> bool:
    """Say whether a rank ends after it has answered.

    Of threads that stood still, any may take the signal, a little after the rank goes on; the handler runs in the main
    thread, which has to be woken when it waits for an order.
    """
    for _ in range(30):
        with suppress(BrokenPipeError, ConnectionResetError):
            victim.send("become", version=0)
        if victim.answer() is None:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("how", ["default", "exit"])
def test_sigterm_to_all_ranks_during_a_save(trial: Trial, how: str) -> None:
    for point in sample(trial.points(0), 3):
        _terminate(trial, point, number=0, how=how, everyone=True)
    print(trial.tally)
    assert trial.tally.ends["old"] >= 1


def test_sigterm_to_a_rank_whose_handler_exits(trial: Trial) -> None:
    """SystemExit in the midst of a save: the rank cleans up and ends, the other one is told."""
    for number in (0, 1):
        for point in sample(trial.points(number), 2):
            _terminate(trial, point, number=number, how="exit", everyone=False)
    print(trial.tally)
    assert trial.tally.ends["old"] >= 2


def _outside_destructors(trial: Trial, number: int) -> list[Point]:
    """Leave out where files of the old checkpoint are closed: Python drops what is raised in a destructor."""
    inside = f"{trial.run}/step-1/"
    return [point for point in trial.points(number) if point.call != "close" or not point.path.startswith(inside)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("everyone", [True, False])
@pytest.mark.parametrize("how", ["default", "exit"])
def test_sigterm_at_every_system_call(trial: Trial, how: str, everyone: bool) -> None:
    for number in (0, 1):
        for point in trial.points(number)[::2] if how == "default" else _outside_destructors(trial, number):
            _terminate(trial, point, number=number, how=how, everyone=everyone)
    print(trial.tally)
    assert trial.tally.faults.total() >= 60
    assert trial.tally.ends["old"] >= 40


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_hangs_is_given_up_after_the_time_out(trial: Trial, number: int) -> None:
    """It stands still for good in the midst of a save: the other one raises when the process group's time is over."""
    point = sample(trial.points(number), 4)[-1]
    version = trial.next_version()
    victim, other = trial.team.ranks[number], trial.team.ranks[1 - number]
    assert hold(point, victim, trial.log, partial(trial.team.send, **trial.order(version)))
    answer = other.answer(GROUP_S + 10)
    assert answer is not None
    assert (answer.kind, answer.named) == ("RankFailed", True)
    assert GROUP_S - 5 < answer.seconds < GROUP_S + 8
    standing = trial.check_folder(version, "a rank hangs")
    victim.kill()
    assert victim.answer() is None
    trial.go_on(standing, "a rank hung", fresh=True)
