"""Nodes with disks of their own: a rank is killed on one of them, and what is on all of them together is one save."""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.crash.save_strace import Fault, Point, points_of, repeated, skip_without_attaching, strike, watching
from tests.crash.save_trial import KILL, SOON_S, sample
from tests.crash.save_yard import Team, Yard

pytestmark = pytest.mark.dist

REFUSED = ("IncompleteCheckpoint", "Incompatible", "CheckpointNotFound")


class Nodes:
    """A job of two ranks, each on a node of its own; each save replaces the one before, or is put beside it."""

    def __init__(self, yard: Yard, folder: Path, *, keeps: bool) -> None:
        self.yard = yard
        self.place = folder / "place"
        self.place.mkdir()
        self.disk = self.place / "disk"
        self.nodes = [self.place / "node0" / "run", self.place / "node1" / "run"]
        self.log = folder / "log"
        self.keeps = keeps
        self.ends: Counter[str] = Counter()
        self._versions = itertools.count(1)
        self.team = self._new_team()
        self.old = self._start()

    def _new_team(self) -> Team:
        team = self.yard.team()
        found = team.order("own_disk", place=str(self.place))
        if any(one is None or one.kind for one in found):
            pytest.skip(f"a process may not have a disk of its own here: {found}")
        return team

    def _next(self) -> int:
        version = next(self._versions)
        self.team.must("become", version=version)
        return version

    def _order(self, version: int, *, is_old: bool) -> dict[str, Any]:
        run = self.disk / "run"
        if self.keeps:
            return {"do": "keep", "run": str(run), "step": 1 if is_old else 2, "version": version}
        return {"do": "save", "path": str(run / "step-1"), "version": version, "durable": False}

    def _start(self) -> int:
        """Save undisturbed, check that this is right and that nothing else is left; leave an old checkpoint."""
        version = self._next()
        self.team.must(**self._order(version, is_old=False))
        name = "step-2" if self.keeps else "step-1"
        assert [os.listdir(node) for node in self.nodes] == [[name], [name]]
        assert self.judge(name) == {"state": "whole", "version": version, "why": ""}
        if self.keeps:
            for node in self.nodes:
                shutil.rmtree(node)
            version = self._next()
            self.team.must(**self._order(version, is_old=True))
        return version

    def judge(self, name: str) -> dict[str, Any]:
        """Say what torch reads where the folders of both nodes are put together."""
        both = self.place / "both"
        shutil.rmtree(both, ignore_errors=True)
        for node in self.nodes:
            if (node / name).is_dir():
                shutil.copytree(node / name, both, dirs_exist_ok=True)
        return self.yard.judge(both)

    def points(self, number: int) -> list[Point]:
        """Return a rank's calls."""
        found = []
        for _ in range(2):
            version = self._next()
            with watching(self.team.ranks[number], self.log) as trace:
                self.team.must(**self._order(version, is_old=False))
            found.append(points_of(trace, self.disk / "run"))
            self.old = self._start()
        return repeated(*found)

    def kill(self, number: int, point: Point) -> str:
        """Kill a rank; return what is there then: old, new, or nothing that can be loaded."""
        what = f"killed at {point} of rank {number}"
        version = self._next()
        with strike(Fault(point, KILL), self.team.ranks[number], self.log) as trace:
            answers = self.team.order(**self._order(version, is_old=False))
            trace.is_over = True
        assert answers[number] is None, f"{what}: not reached"
        other = answers[1 - number]
        assert other is not None, what
        assert (other.kind, other.named) == ("RankFailed", True), f"{what}: {other}"
        assert other.seconds < SOON_S
        self.team.end()
        self.team = self._new_team()
        end = self._resume(version, what)
        self.ends[end] += 1
        self.old = self._start()
        return end

    def _resume(self, version: int, what: str) -> str:
        """The first rank decides what is there; what it has, all nodes have, or it is refused."""
        names = sorted(name for name in os.listdir(self.nodes[0]) if not name.startswith("."))
        assert names, f"{what}: nothing is there"
        verdict = self.judge(names[-1])
        found = self.team.order("resume", run=str(self.disk / "run"))
        first = found[0]
        assert first is not None, what
        assert all(one is not None and (one.kind, one.value) == (first.kind, first.value) for one in found), found
        if verdict["state"] != "whole":
            assert first.kind in REFUSED, f"{what}: {first}, though {verdict}"
            assert first.named
            return "refused"
        assert verdict["version"] in (self.old, version), f"{what}: {verdict}"
        assert (first.kind, first.value) == ("", verdict["version"]), f"{what}: {first}, but {verdict}"
        return "new" if verdict["version"] == version else "old"


@pytest.fixture
def nodes(request: pytest.FixtureRequest, yard: Yard, tmp_path: Path) -> Nodes:
    if os.geteuid() != 0:
        pytest.skip("only root may give a process a disk of its own")
    skip_without_attaching()
    return Nodes(yard, tmp_path, keeps=request.param)


def _sweep(nodes: Nodes, counts: Sequence[int | None]) -> None:
    for number, count in enumerate(counts):
        points = nodes.points(number)
        for point in points if count is None else sample(points, count):
            nodes.kill(number, point)
    print(f"{nodes.ends.total()} times a rank was killed on a node with a disk of its own, then {dict(nodes.ends)}")


@pytest.mark.parametrize("nodes", [True], indirect=True)
def test_a_rank_is_killed_on_a_node_with_its_own_disk(nodes: Nodes) -> None:
    _sweep(nodes, [3, 2])
    assert nodes.ends.total() == 5
    assert nodes.ends["old"] >= 2
    assert nodes.ends["refused"] == 0, "the checkpoint before is on all nodes"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [True, False], indirect=True)
def test_a_rank_is_killed_at_every_call_on_a_node_with_its_own_disk(nodes: Nodes) -> None:
    """Where one checkpoint replaces another one, there is a moment when the nodes have different ones: refused."""
    _sweep(nodes, [None, None])
    assert nodes.ends.total() >= 100
    assert nodes.ends["old"] >= 60
    assert nodes.ends["refused"] == 0 if nodes.keeps else nodes.ends["refused"] >= 1
