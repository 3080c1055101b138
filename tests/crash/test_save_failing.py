"""The n-th system call of a save fails: all ranks raise one error, nothing is lost, and the next save works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.save_strace import Fault, Point, skip_without_attaching
from tests.crash.save_trial import SCENES, Trial, sample
from tests.crash.save_yard import Yard

pytestmark = pytest.mark.dist

ERRORS = ("error=ENOSPC", "error=EIO", "error=EDQUOT")
FULL = ("openat", "write", "pwrite64", "fallocate", "mkdir", "ftruncate", "rename", "renameat2", "fsync")
"""Calls that a disk without room refuses."""


@pytest.fixture
def trial(request: pytest.FixtureRequest, yard: Yard, tmp_path: Path) -> Trial:
    skip_without_attaching()
    return Trial(yard, SCENES[request.param], tmp_path)


def _middles(points: list[Point]) -> list[Point]:
    """Return the point in the middle of each call."""
    calls = sorted({point.call for point in points})
    found = []
    for call in calls:
        own = [point for point in points if point.call == call]
        found.append(own[len(own) // 2])
    return found


@pytest.mark.parametrize("trial", ["fresh", "overwrite", "durable"], indirect=True)
def test_some_system_calls_fail_on_a_rank(trial: Trial) -> None:
    for number, count in ((0, 9), (1, 2)):
        for turn, point in enumerate(sample(trial.points(number), count)):
            trial.disturb(number, Fault(point, ERRORS[turn % 3]))
    print(trial.tally)
    assert trial.tally.faults.total() == 11
    assert len(trial.tally.faults) >= 8, "too few kinds of faults"
    assert trial.tally.ends["old" if trial.scene.old else "absent"] >= 7


@pytest.mark.parametrize("trial", ["overwrite"], indirect=True)
def test_a_disk_that_is_full_from_some_call_on(trial: Trial) -> None:
    points = [point for point in trial.points(0) if point.call in FULL]
    for point in _middles(points):
        trial.disturb(0, Fault(point, "error=ENOSPC+"))
    print(trial.tally)
    assert trial.tally.faults.total() >= 6
    assert trial.tally.ends["old"] >= 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("trial", SCENES, indirect=True)
def test_every_system_call_fails_on_a_rank(trial: Trial, error: str) -> None:
    for number in (0, 1):
        for point in trial.points(number):
            trial.disturb(number, Fault(point, error))
    trial.check_merged()
    print(trial.tally)
    assert trial.tally.faults.total() >= 80
    assert len(trial.tally.faults) >= 10, "too few kinds of calls"
    assert trial.tally.ends["old" if trial.scene.old else "absent"] >= 60
    assert trial.tally.ends["new"] >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trial", SCENES, indirect=True)
def test_a_disk_that_is_full_from_every_call_on(trial: Trial) -> None:
    for number in (0, 1):
        for point in [point for point in trial.points(number) if point.call in FULL]:
            trial.disturb(number, Fault(point, "error=ENOSPC+"))
    print(trial.tally)
    assert trial.tally.faults.total() >= 40
    assert trial.tally.ends["old" if trial.scene.old else "absent"] >= 30
