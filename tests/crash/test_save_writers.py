"""Two jobs save to one place at the same time: what is there in the end is what one of them saved, all of it."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.crash.save_strace import Point, go_on, hold, points_of, repeated, skip_without_attaching, watching
from tests.crash.save_trial import check_errors, sample
from tests.crash.save_yard import Team, Yard

pytestmark = pytest.mark.dist

BUSY = "DestinationExists"


class Rivals:
    """Two jobs with one target, where a checkpoint is already."""

    def __init__(self, yard: Yard, folder: Path) -> None:
        self.yard = yard
        self.run = folder / "run"
        self.logs = folder / "log-a", folder / "log-b"
        self.teams = [yard.team(), yard.team()]
        self.version = 0
        self.ends: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        """Put an old checkpoint there; this also shows that nothing is left of before."""
        self.version += 1
        for team in self.teams:  # both, so that what is imported at the first call is in place
            team.must("become", version=self.version)
            team.must("save", **self.order(self.version))
        found = self.yard.look(self.run)
        assert found["visible"]["step-1"] == {"state": "whole", "version": self.version, "why": ""}, found
        assert (found["hidden"], found["listed"]) == ({}, ["step-1"]), found

    def order(self, version: int) -> dict[str, Any]:
        return {"path": str(self.run / "step-1"), "version": version, "durable": False}

    def points(self) -> list[Point]:
        """Return the calls of a save's first rank."""
        found = []
        for _ in range(2):
            with watching(self.teams[0].ranks[0], self.logs[0]) as trace:
                self.teams[0].must("save", **self.order(self.version))
            found.append(points_of(trace, self.run))
        return repeated(*found)

    def begin(self) -> tuple[int, int]:
        """Let both jobs train; return their versions."""
        self.version += 2
        versions = self.version - 1, self.version
        for team, version in zip(self.teams, versions, strict=True):
            team.must("become", version=version)
        return versions

    def check(self, before: int, versions: tuple[int, int], kinds: list[str], what: str) -> None:
        """What is there is whole, and of a job that was told that it has saved."""
        found = self.yard.look(self.run)["visible"]
        assert set(found) == {"step-1"}, f"{what}, {kinds}: {found}"
        assert found["step-1"]["state"] == "whole", f"{what}, {kinds}: {found}"
        saved = [version for version, kind in zip(versions, kinds, strict=True) if not kind]
        assert found["step-1"]["version"] in (saved or [before]), f"{what}, {kinds}: {found}, not {saved}"
        self.ends[" and ".join(sorted(kind or "saved" for kind in kinds))] += 1
        self.start()


def _kind(team: Team, what: str) -> str:
    return check_errors(team.answers(), BUSY, what).kind


@pytest.fixture
def rivals(yard: Yard, tmp_path: Path) -> Rivals:
    skip_without_attaching()
    return Rivals(yard, tmp_path)


def _meet(rivals: Rivals, points: list[Point]) -> None:
    """Stop the one job right after a call, let the other one save, and let the first one go on."""
    one, other = rivals.teams
    for point in points:
        before, versions = rivals.version, rivals.begin()
        begin = partial(one.send, "save", **rivals.order(versions[0]))
        assert hold(point, one.ranks[0], rivals.logs[0], begin), f"{point}: not reached"
        other.send("save", **rivals.order(versions[1]))
        second = _kind(other, f"the second while the first stands at {point}")
        go_on(one.ranks[0])
        first = _kind(one, f"the first, met at {point}")
        assert "" in (first, second), f"{point}: nobody has saved"
        rivals.check(before, versions, [first, second], f"met at {point}")
    print(f"{len(points)} times a job met another one: {dict(rivals.ends)}")


def test_a_job_meets_another_one_at_some_system_calls(rivals: Rivals) -> None:
    points = sample(rivals.points(), 7)
    _meet(rivals, points)
    assert rivals.ends["DestinationExists and saved"] >= 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_meets_another_one_at_every_system_call(rivals: Rivals) -> None:
    points = rivals.points()
    _meet(rivals, points)
    assert len(points) >= 90
    assert rivals.ends["DestinationExists and saved"] >= 60


def _cross(rivals: Rivals, first: Point, second: Point, third: Point) -> None:
    """Stop the one job, then the other; let the one go some steps on, then the other to its end, then the one."""
    (one, other), (log, other_log) = rivals.teams, rivals.logs
    what = f"the first after {first}, the second after {second}, the first after one more {third}"
    before, versions = rivals.version, rivals.begin()
    assert hold(first, one.ranks[0], log, partial(one.send, "save", **rivals.order(versions[0]))), f"{first}: missed"
    hold(second, other.ranks[0], other_log, partial(other.send, "save", **rivals.order(versions[1])))
    hold(third, one.ranks[0], log, partial(go_on, one.ranks[0]))
    go_on(other.ranks[0])
    last = _kind(other, what)
    go_on(one.ranks[0])
    rivals.check(before, versions, [_kind(one, what), last], what)


PUBLISHED = ("renameat2", "unlinkat", "rmdir", "unlink")
"""What a save does when its checkpoint is in its place, the first of them included."""


def test_a_job_that_cleans_up_leaves_alone_what_another_one_writes(rivals: Rivals) -> None:
    for second in (Point("mkdir", "", 3), Point("chmod", "", 1)):
        for number in (1, 3) if second.call == "chmod" else (1,):
            _cross(rivals, Point("renameat2", "", 1), second, Point("unlinkat", "", number))
    print(f"3 times two jobs crossed: {dict(rivals.ends)}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_jobs_that_cross_at_every_system_call_of_cleaning_up(rivals: Rivals) -> None:
    points = rivals.points()
    ends = [point for point in points if point.call in PUBLISHED]
    starts = [point for point in sample(points, 14) if point.call not in PUBLISHED]
    for first in ends:
        for second in starts[:: 1 if first.call == "renameat2" else 4]:
            for third in (Point("unlinkat", "", 1), Point("rmdir", "", 1)):
                _cross(rivals, first, second, third)
    print(f"{rivals.ends.total()} times two jobs crossed: {dict(rivals.ends)}")
    assert rivals.ends.total() >= 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_jobs_that_save_again_and_again(rivals: Rivals) -> None:
    """Without any order between them. A short save is waited for; of a long one, the other job is told."""
    for turn in range(60):
        if turn == 30:
            for team in rivals.teams:
                team.must("dawdle", seconds=0.02)
        before, versions = rivals.version, rivals.begin()
        for number in (0, 1) if turn % 2 else (1, 0):
            rivals.teams[number].send("save", **rivals.order(versions[number]))
            time.sleep((turn // 2) * 0.001)
        kinds = [_kind(team, f"turn {turn}") for team in rivals.teams]
        assert "" in kinds, f"turn {turn}: nobody has saved"
        rivals.check(before, versions, kinds, f"turn {turn}")
    print(f"60 times two jobs saved at once: {dict(rivals.ends)}")
    assert rivals.ends["DestinationExists and saved"] >= 10
