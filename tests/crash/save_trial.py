"""Saves that are disturbed, and what must hold after each fault, whatever it was."""

from __future__ import annotations

import errno
import itertools
import platform
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.save_strace import Fault, Point, points_of, repeated, strike, watching
from tests.crash.save_yard import LIMIT_S, ROWS, Answer, Team, Yard

__all__ = [
    "FALLOCATE", "KILL", "MUST_FAIL", "NOTHING", "SCENES", "SOON_S", "Scene", "Tally", "Trial", "check_errors",
    "sample",
]  # fmt: skip

KILL = "signal=KILL"
SOON_S = 10
"""Within which a rank knows of another one's end."""
MUST_FAIL = {"write", "pwrite64", "fsync", "fdatasync", "ftruncate", "mkdir", "renameat2"}
"""Calls whose failure may not be passed over in silence."""
NAMES = {"ENOSPC": "NotEnoughSpace", "EDQUOT": "NotEnoughSpace", "EIO": "RankFailed"}
RENAMEAT2, FALLOCATE = {"x86_64": (316, 285), "aarch64": (276, 47)}.get(platform.machine(), (0, 0))
"""Numbers of system calls."""
NOTHING = ("UnknownLayout", "CheckpointNotFound")
"""What reading the folder of a run says when there is no checkpoint in it."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A save to be disturbed.

    Attributes:
        order: What the ranks are told to do, see ``save_server.Player``.
        old: Whether there is an old checkpoint.
        options: Of the save.
        exchanges: Whether the file system can exchange two names in one step.
    """

    order: str = "save"
    old: bool = True
    options: dict[str, Any] = field(default_factory=lambda: {"durable": False})
    exchanges: bool = True

    @property
    def keeps(self) -> bool:
        """Whether the new checkpoint gets a place of its own, and the old one is removed then."""
        return self.order == "keep"


SCENES = {
    "fresh": Scene(old=False),
    "overwrite": Scene(),
    "no-exchange": Scene(exchanges=False),
    "keep-one": Scene(order="keep", options={}),
    "durable": Scene(order="large", options={"durable": True}),
    "full": Scene(options={"durable": False, "state_dict_type": "FULL_STATE_DICT"}),
    "async": Scene(order="later"),
}


class Tally:
    """How many faults were put in, by kind, and what they led to."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.slowest_s = 0.0

    def add(self, fault: Fault, end: str, answers: Sequence[Answer | None]) -> None:
        kind = fault.what.partition("=")[2]
        self.faults[f"{kind} at {fault.point.call}"] += 1
        self.ends[end] += 1
        self.slowest_s = max([self.slowest_s, *(one.seconds for one in answers if one is not None)])

    def __str__(self) -> str:
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        return (
            f"{self.faults.total()} faults put in and survived, then {dict(self.ends)}, "
            f"ranks answered within {self.slowest_s:.1f} s: {shown}"
        )


class Trial:
    """A run's folder in which saves are disturbed, one after the other."""

    def __init__(
        self, yard: Yard, scene: Scene, folder: Path, *, log: Path | None = None, rows: int = ROWS, forbidden: int = 0
    ) -> None:
        self.yard = yard
        self.scene = scene
        self.rows = rows
        self._forbidden = forbidden
        self.run = folder / "run"
        self.log = log or folder / "log"
        self.tally = Tally()
        self.team = self._new_team()
        self.old: int | None = None
        """Version of what a save would replace; None when there is nothing."""
        self._versions = itertools.count(1)
        self._save_again()

    # ---------------------------------------------------------------------------------------------------- its saves

    def _new_team(self) -> Team:
        team = self.yard.team(rows=self.rows)
        for call in (self._forbidden, 0 if self.scene.exchanges else RENAMEAT2):
            if call:
                team.must("forbid", call=call, error=errno.EOPNOTSUPP)
        return team

    def order(self, version: int, *, is_old: bool = False) -> dict[str, Any]:
        if self.scene.keeps:
            return {"do": "keep", "run": str(self.run), "step": 1 if is_old else 2, "version": version}
        path = str(self.run / "step-1")
        return {"do": self.scene.order, "path": path, "version": version, **self.scene.options}

    def next_version(self) -> int:
        version = next(self._versions)
        self.team.must("become", version=version)
        return version

    def _save_again(self) -> None:
        """Save undisturbed, check that this is right, and leave what the scene begins with."""
        version = self.next_version()
        self.team.must(**self.order(version))
        name = "step-2" if self.scene.keeps else "step-1"
        whole = {"state": "whole", "version": version, "why": ""}
        right = {"visible": {name: whole}, "hidden": {}, "listed": [name], "inspected": name}
        found = self.yard.look(self.run, rows=self.rows)
        assert found == right, f"the next save leaves {found}"
        self.old = version
        if not self.scene.old or self.scene.keeps:
            shutil.rmtree(self.run)
            self.run.mkdir()
            self.old = None
        if self.scene.keeps:
            self.old = self.next_version()
            self.team.must(**self.order(self.old, is_old=True))

    def points(self, rank: int) -> list[Point]:
        """Return the calls of a rank that can be hit: those that are the same in two saves."""
        found = []
        for _ in range(2):
            version = self.next_version()
            with watching(self.team.ranks[rank], self.log) as trace:
                self.team.must(**self.order(version))
            found.append(points_of(trace, self.run))
            self._save_again()
        return repeated(*found)

    # --------------------------------------------------------------------------------------------------- its faults

    def disturb(self, number: int, fault: Fault) -> str:
        """Let a fault strike a rank, and check all that must hold; return what is there then."""
        version = self.next_version()
        victim = self.team.ranks[number]
        with strike(fault, victim, self.log) as trace:
            answers = self.team.order(**self.order(version))
            trace.is_over = victim.is_gone
        assert trace.struck(fault.what), f"{fault} of rank {number}: not reached; {answers}"
        what = f"{fault} of rank {number}"
        standing = self.check_folder(version, what)
        if fault.what.startswith("error"):
            first = check_errors(answers, NAMES[fault.what.removeprefix("error=").removesuffix("+")], what)
            if not first.kind:
                assert standing == version, f"{what}: success, but the new checkpoint is not there"
                assert fault.point.call not in MUST_FAIL, f"{what}: passed over in silence"
        else:
            assert victim.is_gone, f"{what}: {answers}"
            self.check_survivors(answers, what, has_saved=standing == version)
        end = "new" if standing == version else "absent" if standing is None else "old"
        self.tally.add(fault, end, answers)
        # strace does not let a failing close happen: the file stays open, and a lock on it stays held.
        self.go_on(standing, what, fresh=victim.is_gone or fault.point.call == "close")
        return end

    def check_folder(self, version: int, what: str) -> int | None:
        """Make sure that the old checkpoint is there, or the new one, and nothing that could be taken for one.

        Returns:
            The version of the newest; None when there is none.
        """
        found = self.yard.look(self.run, rows=self.rows)
        visible: dict[str, Any] = found["visible"]
        if not visible and self.old is not None and not self.scene.exchanges:
            self._check_set_aside(found, what)
            return self.old
        assert visible or self.old is None, f"{what}: the old checkpoint is gone, and no new one there: {found}"
        right: dict[str, list[int | None]] = {"step-1": [self.old, version]}
        if self.scene.keeps:
            right = {"step-1": [self.old], "step-2": [version]}
        for name, verdict in visible.items():
            assert verdict["state"] == "whole", f"{what}: {name} is {verdict}"
            assert name in right, f"{what}: {found}"
            assert verdict["version"] in right[name], f"{what}: {found}, not {right}"
        assert all(found["hidden"].values()), f"{what}: names that nobody knows: {found['hidden']}"
        assert found["listed"] == sorted(visible, reverse=True), f"{what}: {found}"
        newest = max(visible, default=None)
        if newest is None:
            assert found["inspected"] in NOTHING, f"{what}: {found}"
            return None
        assert found["inspected"] == newest, f"{what}: {found}"
        standing: int = visible[newest]["version"]
        return standing

    def _check_set_aside(self, found: dict[str, Any], what: str) -> None:
        """Without an exchange there is a moment when the old one is set aside: whoever looks for it finds it there."""
        aside = [name for name in found["hidden"] if name.endswith(".old")]
        assert len(aside) == 1, f"{what}: the old checkpoint is gone, and no new one there: {found}"
        right = {"state": "whole", "version": self.old, "why": ""}
        assert self.yard.judge(self.run / aside[0], rows=self.rows) == right, f"{what}: {found}"
        for path in ("step-1", "."):
            copy = self.run.with_name("copy")
            shutil.copytree(self.run, copy)
            team = self._new_team()
            assert team.must("load", path=str(copy / path)) == self.old, what
            team.end()
            shutil.rmtree(copy)

    def check_merged(self) -> None:
        """What is there after all that can be merged, and safetensors reads the right values."""
        version = self.old or self.next_version()
        if self.old is None:
            self.team.must(**self.order(version))
        (name,) = self.yard.look(self.run, rows=self.rows)["visible"]
        found = self.yard.merged(self.run / name, self.run.with_name("merged"), version, rows=self.rows)
        assert found == "", found

    def check_survivors(self, answers: Sequence[Answer | None], what: str, *, has_saved: bool) -> None:
        """Whoever is left has raised ``RankFailed``, soon; or was told before that all is saved, and so it is."""
        for one in answers:
            if one is not None and (one.kind or not has_saved):
                assert (one.kind, one.named) == ("RankFailed", True), f"{what}: {one}"
                assert one.seconds < SOON_S <= LIMIT_S, f"{what}: {one}"

    def go_on(self, standing: int | None, what: str, *, fresh: bool) -> None:
        """Resume, with new ranks where some have died; then save to the same place.

        Resuming takes what is there, and not what is half written.
        """
        if fresh:
            self.team.end()
            self.team = self._new_team()
        resumed = self.team.must("resume", run=str(self.run))
        assert resumed == standing, f"{what}: resumed version {resumed}, {standing} is there"
        if standing is None:
            for one in self.team.order("load", path=str(self.run)):
                assert one is not None, what
                assert one.kind in NOTHING, f"{what}: {one}"
        else:
            assert self.team.must("load", path=str(self.run)) == standing, what
        try:
            self._save_again()
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error


def check_errors(answers: Sequence[Answer | None], name: str, what: str) -> Answer:
    """Make sure that all ranks have raised the same error, of this class, or that none has any; return the first."""
    known = [one for one in answers if one is not None]
    assert len(known) == len(answers), f"{what}: a rank has died: {answers}"
    assert len({(one.kind, one.message) for one in known}) == 1, f"{what}: {answers}"
    assert known[0].kind in ("", name), f"{what}: {answers}"
    assert known[0].named, f"{what}: {answers}"
    return known[0]


def sample(points: Sequence[Point], count: int) -> list[Point]:
    """Return some points, spread evenly, with every kind of call among them."""
    first = list({point.call: point for point in reversed(points)}.values())
    rest = [point for point in points if point not in first]
    step = max(1, len(rest) // max(1, count - len(first)))
    return [*first, *rest[::step]][:count]
