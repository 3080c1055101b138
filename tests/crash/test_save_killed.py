"""A rank is killed at the n-th system call of a save: the checkpoint is the old one or the new one, always."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.crash.save_strace import Fault, skip_without_attaching
from tests.crash.save_trial import KILL, SCENES, Trial, sample
from tests.crash.save_yard import Yard

pytestmark = pytest.mark.dist

TERM = "signal=TERM"
SYNCHRONOUS = [name for name in SCENES if name != "async"]


@pytest.fixture
def trial(request: pytest.FixtureRequest, yard: Yard, tmp_path: Path) -> Trial:
    skip_without_attaching()
    return Trial(yard, SCENES[request.param], tmp_path)


def _sweep(trial: Trial, what: str, counts: Sequence[int | None]) -> None:
    """Let one fault after the other strike rank 0, then rank 1: at all of their calls, or at so many of them."""
    for number, count in enumerate(counts):
        points = trial.points(number)
        for point in points if count is None else sample(points, count):
            trial.disturb(number, Fault(point, what))
    trial.check_merged()
    print(trial.tally)


@pytest.mark.parametrize("trial", ["fresh", "overwrite", "durable"], indirect=True)
def test_a_rank_is_killed_at_some_system_calls(trial: Trial) -> None:
    _sweep(trial, KILL, [8, 2])
    assert trial.tally.faults.total() == 10
    assert len(trial.tally.faults) >= 6, "too few kinds of calls"
    assert trial.tally.ends["old" if trial.scene.old else "absent"] >= 6
    assert trial.tally.ends["new"] >= (1 if trial.scene.old else 0)


@pytest.mark.parametrize("trial", ["no-exchange", "keep-one"], indirect=True)
def test_the_first_rank_is_killed_while_it_makes_room(trial: Trial) -> None:
    """At what this scene does otherwise than those above: it renames and removes."""
    points = [point for point in trial.points(0) if point.call in ("rename", "unlinkat", "rmdir")]
    for point in [*(point for point in points if point.call == "rename"), points[-1]]:
        trial.disturb(0, Fault(point, KILL))
    print(trial.tally)
    assert trial.tally.faults["KILL at rename"] >= 2
    assert trial.tally.ends["new"] >= 2


@pytest.mark.parametrize("trial", ["overwrite"], indirect=True)
def test_a_rank_is_terminated_at_some_system_calls(trial: Trial) -> None:
    """SIGTERM without a handler, as a scheduler sends it."""
    _sweep(trial, TERM, [3, 1])
    assert trial.tally.faults.total() == 4
    assert trial.tally.ends["old"] >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trial", SYNCHRONOUS, indirect=True)
def test_a_rank_is_killed_at_every_system_call(trial: Trial) -> None:
    _sweep(trial, KILL, [None, None])
    assert trial.tally.faults.total() >= 80
    assert len(trial.tally.faults) >= 10, "too few kinds of calls"
    assert trial.tally.ends["old" if trial.scene.old else "absent"] >= 60
    assert trial.tally.ends["new"] >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trial", ["overwrite", "keep-one"], indirect=True)
def test_a_rank_is_terminated_at_every_system_call(trial: Trial) -> None:
    _sweep(trial, TERM, [None, None])
    assert trial.tally.faults.total() >= 80
    assert trial.tally.ends["old"] >= 60
