"""Ranks that save without a pause are killed at random: what was reported as saved is there, and right."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.crash.save_yard import Rank, Team, Yard

pytestmark = pytest.mark.dist

SEED = 20260728
KEEP = 2


class Soak:
    """A run that is killed and resumed.

    Attributes:
        acked: Last step that the first rank said was saved; 0 for none.
        saves: How many were.
        kills: By rank, ``both`` for both at once.
    """

    def __init__(self, yard: Yard, run: Path, seed: int) -> None:
        self.yard = yard
        self.run = run
        self.random = random.Random(seed)
        self.acked = 0
        self.saves = 0
        self.kills: Counter[str] = Counter()
        self.slowest_s = 0.0

    def round(self) -> None:
        """Resume, save on, kill somebody at some moment, and compare with what was said."""
        team = self.yard.team()
        resumed = team.must("resume", run=str(self.run)) or 0
        assert resumed in (self.acked, self.acked + 1), f"resumed step {resumed}, after {self.acked} was saved"
        self.acked = resumed
        team.send("run_on", run=str(self.run), first=resumed + 1, keep=KEEP)
        whom, after_s = self.random.choice(["0", "1", "both"]), self.random.uniform(0.0, 0.4)
        time.sleep(after_s)
        victims = [rank for rank in team.ranks if whom in (str(rank.number), "both")]
        for rank in victims:
            rank.kill()
        self.kills[whom] += 1
        self._listen(team, victims, f"seed {SEED}, rank {whom} killed after {after_s:.3f} s of step {resumed} on")
        team.end()

    def _listen(self, team: Team, victims: list[Rank], what: str) -> None:
        for rank in reversed(team.ranks):
            saved, end = self._hear(rank)
            assert saved == list(range(self.acked + 1, self.acked + 1 + len(saved))), f"{what}: {saved}"
            if rank in victims:
                assert end is None, f"{what}: {end}"
            else:
                assert end is not None, f"{what}: rank {rank.number} has died as well"
                assert (end["kind"], end["named"]) == ("RankFailed", True), f"{what}: {end}"
            if rank.number == 0:
                self.saves += len(saved)
                self.acked += len(saved)
        self._compare(what)

    def _hear(self, rank: Rank) -> tuple[list[int], dict[str, Any] | None]:
        """Return the steps that a rank says it has saved, and its last word; None when it died."""
        saved: list[int] = []
        while True:
            begun = time.monotonic()
            word = rank.receive()
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
            if word is None or "saved" not in word:
                return saved, word
            saved.append(word["saved"])

    def _compare(self, what: str) -> None:
        found = self.yard.look(self.run)
        steps = sorted(int(name.removeprefix("step-")) for name in found["visible"])
        assert (steps or [0])[-1] in (self.acked, self.acked + 1), f"{what}: {steps}, step {self.acked} was saved"
        for name, verdict in found["visible"].items():
            right = {"state": "whole", "version": int(name.removeprefix("step-")), "why": ""}
            assert verdict == right, f"{what}: {name} is {verdict}"
        assert len(steps) >= min(self.acked, KEEP), f"{what}: {steps}"
        assert all(found["hidden"].values()), f"{what}: {found['hidden']}"


def _soak(yard: Yard, run: Path, rounds: int) -> None:
    soak = Soak(yard, run, SEED)
    for _ in range(rounds):
        soak.round()
    print(
        f"seed {SEED}: {rounds} rounds, {soak.saves} saves, ranks killed: {dict(soak.kills)}; nothing that was saved "
        f"is lost, and a rank that was left knew within {soak.slowest_s:.1f} s"
    )
    assert soak.kills.total() == rounds
    assert soak.saves >= rounds, "it was killed before it had saved much"


def test_some_random_kills(yard: Yard, tmp_path: Path) -> None:
    _soak(yard, tmp_path / "run", 5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_random_kills(yard: Yard, tmp_path: Path) -> None:
    _soak(yard, tmp_path / "run", 150)
