"""Plays jobs that real signals end: `python -m tests.dist.preemption_ranks OUT`.

Every rank is a process of its own, forked after torch has been imported once, that trains until a signal comes. Exit
codes, and what each rank saw, go to `OUT/outcomes.json`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ckpt import Checkpointer, Preemption  # before ranks are forked

_LIMIT_S = 60
OUTCOMES = "outcomes.json"


@dataclass(frozen=True, kw_only=True)
class Play:
    """A job, and the signals that its ranks get: (rank, signal), once each, when all of them have done a step."""

    ranks: int = 2
    signals: Sequence[tuple[int, int]] = ()
    options: dict[str, Any]
    sets_up: bool = True


PLAYS = {
    "term_to_one": Play(signals=[(1, signal.SIGTERM)], options={}),
    "usr1_to_one": Play(signals=[(0, signal.SIGUSR1)], options={}),
    "term_to_all": Play(signals=[(0, signal.SIGTERM), (1, signal.SIGTERM)], options={}),
    "different": Play(signals=[(0, signal.SIGTERM), (1, signal.SIGUSR1)], options={"every": 150}),
    "own_code": Play(signals=[(1, signal.SIGUSR1)], options={"exit_code": 85}),
    "every_7th": Play(signals=[(0, signal.SIGTERM)], options={"every": 7}),
    "interrupted": Play(signals=[(1, signal.SIGINT)], options={"signals": (signal.SIGINT, signal.SIGTERM)}),
    "alone": Play(ranks=1, signals=[(0, signal.SIGTERM)], options={}, sets_up=False),
    "not_asked_for": Play(
        ranks=1, signals=[(0, signal.SIGUSR1)], options={"signals": (signal.SIGTERM,)}, sets_up=False
    ),
}


def train(folder: Path, rank: int, options: dict[str, Any]) -> int:
    """Train until asked to stop; tell what this rank saw."""
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, 1.0)
    seen: dict[str, Any] = {"asked": 0}
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    with Checkpointer(folder / "run", model, durable=False) as checkpointer, Preemption(**options) as preemption:
        step = 0
        while True:
            step += 1
            time.sleep(0.005)
            seen["asked"] += 1
            if preemption.requested():
                checkpointer.save(step)
                break
            if step == 1:
                (folder / f"began.{rank}").touch()
        seen["again"] = preemption.requested()  # costs nothing now: the other rank does not take part
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    seen |= {"step": step, "signal": preemption.signal, "restored": before == after}
    (folder / f"seen.{rank}").write_text(json.dumps(seen))
    return preemption.exit_code


def _fork(play: Play, folder: Path, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if play.sets_up:
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=play.ranks)
        code = train(folder, rank, play.options)
        if play.sets_up:
            dist.barrier()
        os._exit(code)
    finally:
        os._exit(99)


def _play(name: str, play: Play, folder: Path) -> list[int]:
    folder.mkdir()
    pids = [_fork(play, folder, rank) for rank in range(play.ranks)]
    end = time.monotonic() + _LIMIT_S
    while not all((folder / f"began.{rank}").exists() for rank in range(play.ranks)):
        assert time.monotonic() < end, f"{name} did not begin"
        time.sleep(0.005)
    for rank, number in play.signals:
        os.kill(pids[rank], number)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _stuck(folder: Path) -> dict[str, Any]:
    """A rank that hangs in its step: SIGTERM is noted, and once more at once; a later one ends it."""
    folder.mkdir()
    pid = os.fork()
    if not pid:
        try:
            faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
            with Preemption():
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)  # Slurm and torchrun both send one
                (folder / "began").touch()
                while True:
                    time.sleep(0.01)
        finally:
            os._exit(99)
    while not (folder / "began").exists():
        time.sleep(0.005)
    time.sleep(1.2)
    alive = os.waitpid(pid, os.WNOHANG)[0] == 0
    os.kill(pid, signal.SIGTERM)
    return {"alive": alive, "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    outcomes: dict[str, Any] = {}
    for name, play in PLAYS.items():
        outcomes[name] = _play(name, play, out / name)
    outcomes["stuck"] = _stuck(out / "stuck")
    (out / OUTCOMES).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
