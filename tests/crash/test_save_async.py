"""Saves in the background: killed, refused by the disk, terminated; and what was there is there."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.crash.save_strace import Fault, skip_without_attaching, strike
from tests.crash.save_trial import KILL, MUST_FAIL, SCENES, Trial, check_errors, sample
from tests.crash.save_yard import Yard

pytestmark = pytest.mark.dist

SLOWLY_S = 0.02
"""Per write, so that a save of a few dozen is under way for a second or so."""


@pytest.fixture
def trial(yard: Yard, tmp_path: Path) -> Trial:
    skip_without_attaching()
    return Trial(yard, SCENES["async"], tmp_path)


def test_a_rank_is_killed_while_it_saves_in_the_background(trial: Trial) -> None:
    for number, count in ((0, 4), (1, 1)):
        for point in sample(trial.points(number), count):
            trial.disturb(number, Fault(point, KILL))
    print(trial.tally)
    assert trial.tally.faults.total() == 5
    assert trial.tally.ends["old"] >= 3


def test_a_system_call_fails_in_the_background(trial: Trial) -> None:
    """Every rank is told at ``wait``."""
    for number, count in ((0, 4), (1, 1)):
        points = [point for point in trial.points(number) if point.call in MUST_FAIL]
        for turn, point in enumerate(sample(points, count)):
            trial.disturb(number, Fault(point, ("error=ENOSPC", "error=EIO")[turn % 2]))
    print(trial.tally)
    assert trial.tally.faults.total() == 5
    assert trial.tally.ends["old"] >= 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_is_killed_at_every_system_call_in_the_background(trial: Trial) -> None:
    for number in (0, 1):
        for point in trial.points(number):
            trial.disturb(number, Fault(point, KILL))
    print(trial.tally)
    assert trial.tally.faults.total() >= 100
    assert trial.tally.ends["old"] >= 90


@pytest.mark.parametrize("error", ["error=ENOSPC", "error=EIO"])
def test_the_next_save_raises_the_error_that_nobody_waited_for(trial: Trial, error: str) -> None:
    point = next(point for point in trial.points(1) if point.call == "pwrite64")
    name = {"error=ENOSPC": "NotEnoughSpace", "error=EIO": "RankFailed"}[error]
    version, path = trial.next_version(), str(trial.run / "step-1")
    with strike(Fault(point, error), trial.team.ranks[1], trial.log) as trace:
        trial.team.must("begin", path=path, version=version, durable=False)
        found = trial.team.order("save", path=path, version=version, durable=False)
    assert trace.struck(error)
    assert check_errors(found, name, error).kind == name
    assert trial.check_folder(version, error) == trial.old
    trial.go_on(trial.old, error, fresh=False)


@pytest.mark.parametrize("whom", [(0,), (1,), (0, 1)])
def test_sigterm_lets_a_save_in_the_background_end_first(trial: Trial, whom: tuple[int, ...]) -> None:
    """No handler was set: what was begun is completed before the process ends, by SIGTERM."""
    version, path = trial.next_version(), str(trial.run / "step-1")
    victims = [trial.team.ranks[number] for number in whom]
    trial.team.must("dawdle", seconds=SLOWLY_S)
    trial.team.must("begin", path=path, version=version, durable=False)
    assert trial.check_folder(version, "at once") == trial.old, "it is not slow enough to be met"
    for rank in victims:
        rank.kill(signal.SIGTERM)
    begun = time.monotonic()
    for rank in victims:
        assert rank.answer() is None
    assert time.monotonic() - begun < 20
    assert trial.check_folder(version, f"SIGTERM to {whom}") == version
    trial.go_on(version, f"SIGTERM to {whom}", fresh=True)


def test_the_end_of_the_program_waits_for_the_save(trial: Trial) -> None:
    """A script that saves and ends: the interpreter waits for the thread."""
    version, path = trial.next_version(), str(trial.run / "step-1")
    trial.team.must("dawdle", seconds=SLOWLY_S)
    trial.team.must("begin", path=path, version=version, durable=False)
    assert trial.check_folder(version, "at once") == trial.old, "it is not slow enough to be met"
    trial.team.send("leave")
    assert trial.team.answers() == [None, None]
    assert trial.check_folder(version, "the program has ended") == version
    trial.go_on(version, "the program has ended", fresh=True)
