"""The same faults for torch.distributed.checkpoint and for us: who still has a checkpoint afterwards."""

from __future__ import annotations

import itertools
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.crash.save_strace import Fault, Point, hold, points_of, skip_without_attaching, strike, watching
from tests.crash.save_trial import KILL, SCENES, Trial
from tests.crash.save_yard import Team, Yard

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]

WRITES = ("write", "writev", "pwrite64")
WRITTEN_S = 0.5
"""By then a rank has written its few kilobytes."""


class Stock:
    """A folder that ``dcp.save`` overwrites."""

    def __init__(self, yard: Yard, folder: Path) -> None:
        self.yard = yard
        self.path = folder / "stock" / "step-1"
        self.log = folder / "log"
        self._versions = itertools.count(1)

    def points(self, number: int) -> list[Point]:
        """Return the calls of a rank that overwrites a checkpoint."""
        team = self.yard.team()
        for version in (1, 2):
            team.must("become", version=version)
            team.must("stock", path=str(self.path))
        with watching(team.ranks[number], self.log) as trace:
            team.must("stock", path=str(self.path))
        team.end()
        return points_of(trace, self.path.parent)

    def disturb(self, number: int, fault: Fault) -> str:
        """Overwrite a checkpoint with a fault; return what torch reads then: old, new, mixed or nothing."""
        team, old, new = self._overwriting()
        with strike(fault, team.ranks[number], self.log) as trace:
            answers = team.order("stock", path=str(self.path))
            trace.is_over = team.ranks[number].is_gone
        assert trace.struck(fault.what), f"{fault}: {answers}"
        team.end()
        return self._left(old, new)

    def lose(self, number: int, point: Point) -> str:
        """Overwrite a checkpoint; a rank is held up before a call, and killed there when the others have written."""
        team, old, new = self._overwriting()
        with strike(Fault(point, f"delay_enter={4 * WRITTEN_S}s"), team.ranks[number], self.log) as trace:
            team.send("stock", path=str(self.path))
            time.sleep(WRITTEN_S)
            team.ranks[number].kill()
            answers = team.answers()
            trace.is_over = True
        assert answers[number] is None
        team.end()
        return self._left(old, new)

    def _overwriting(self) -> tuple[Team, int, int]:
        """Return a job that is about to replace a version by another one."""
        shutil.rmtree(self.path, ignore_errors=True)
        team, old, new = self.yard.team(), next(self._versions), next(self._versions)
        for version in (old, new):
            team.must("become", version=version)
            if version == old:
                team.must("stock", path=str(self.path))
                assert self.yard.versions(self.path) == [old]
        return team, old, new

    def _left(self, old: int, new: int) -> str:
        found = self.yard.versions(self.path)
        if isinstance(found, str):
            return "unreadable"
        return {(old,): "old", (new,): "new", (old, new): "mixed"}[tuple(found)]


def _data(points: Sequence[Point], calls: Sequence[str]) -> list[Point]:
    return [point for point in points if point.call in calls and ".metadata" not in point.path]


def _compare(yard: Yard, folder: Path, number: int, what: str, calls: Sequence[str]) -> Counter[str]:
    """Let a fault strike at every call of these names; return what torch's saves left, and check ours."""
    stock, theirs = Stock(yard, folder), Counter[str]()
    for point in _data(stock.points(number), calls):
        theirs[stock.disturb(number, Fault(point, what))] += 1
    trial = Trial(yard, SCENES["overwrite"], folder)
    for point in _data(trial.points(number), calls):
        trial.disturb(number, Fault(point, what))
    ours = trial.tally.ends
    print(
        f"{what} at every {' / '.join(calls)} of rank {number}, overwriting a checkpoint: "
        f"torch.distributed.checkpoint {theirs.total()} faults, then {dict(theirs)}; "
        f"fsdp-ckpt {ours.total()} faults, then {dict(ours)}"
    )
    assert set(ours) <= {"old", "new"}
    assert ours.total() >= 5
    assert theirs.total() >= 5
    return theirs


@pytest.fixture(autouse=True)
def _attaching() -> None:
    skip_without_attaching()


@pytest.mark.parametrize("number", [0, 1])
def test_killed_at_any_data_write(yard: Yard, tmp_path: Path, number: int) -> None:
    theirs = _compare(yard, tmp_path, number, KILL, WRITES)
    assert theirs["unreadable"] + theirs["mixed"] >= theirs.total() / 2


@pytest.mark.parametrize("error", ["error=ENOSPC", "error=EIO"])
def test_a_data_write_fails(yard: Yard, tmp_path: Path, error: str) -> None:
    theirs = _compare(yard, tmp_path, 1, error, WRITES)
    assert theirs["unreadable"] + theirs["mixed"] >= theirs.total() / 2


def test_the_second_rank_is_killed_before_it_writes(yard: Yard, tmp_path: Path) -> None:
    """torch then loads a checkpoint that is half old and half new, without a word."""
    stock, theirs = Stock(yard, tmp_path), Counter[str]()
    trial = Trial(yard, SCENES["overwrite"], tmp_path)
    ours = Counter[str]()
    point = trial.points(1)[0]
    for _ in range(3):
        theirs[stock.lose(1, Point("openat", str(stock.path / "__1_0.distcp"), 1))] += 1
        version = trial.next_version()
        begin = partial(trial.team.send, **trial.order(version))
        assert hold(point, trial.team.ranks[1], trial.log, begin), f"{point}: not reached"
        time.sleep(WRITTEN_S)
        trial.team.ranks[1].kill()
        answers = trial.team.answers()
        standing = trial.check_folder(version, "rank 1 killed")
        trial.check_survivors(answers, "rank 1 killed", has_saved=False)
        ours["old" if standing == trial.old else "new"] += 1
        trial.go_on(standing, "rank 1 killed", fresh=True)
    print(
        f"rank 1 killed before it writes, and after rank 0 did: torch.distributed.checkpoint {dict(theirs)}, "
        f"fsdp-ckpt {dict(ours)}"
    )
    assert theirs["mixed"] == 3
    assert ours["old"] == 3
