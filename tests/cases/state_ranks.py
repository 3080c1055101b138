"""Play the save_state and load_state halves of ../shared/cases.md: `python -m tests.cases.state_ranks OUT`.

What a later job loads stays in the `place` of the scenario that saved it; `AFTER` names those that are played by new
processes, when the ones of the first round are gone.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what every forked rank would import anew
import torch.distributed as dist
from torch.multiprocessing import start_processes

from fsdp_ckpt import LoadReport, SaveReport  # noqa: F401 - lazy: imported before the ranks are forked
from tests.cases import state_costs, state_failures, state_model, state_resume  # noqa: F401 - they register scenarios
from tests.cases.state_failures import MORTAL
from tests.dist import stage
from tests.dist.stage import Raised

AFTER = (
    "p28_after", "p33_resume", "p34_resume", "p39_three", "p39_four", "p40_two", "p40_four", "p40_six", "p41_two",
    "p41_four",
)  # fmt: skip
"""Scenarios that load what an earlier one saved."""


def play_alone(out: Path, play: Callable[[Path], Any], *, limit_s: float = 40) -> None:
    """Play a scenario in which ranks die, on two ranks that are waited for one by one."""
    folder = out / play.__name__
    (folder / "place").mkdir(parents=True)
    context = start_processes(_mortal, (folder, play), nprocs=2, join=False, start_method="fork")
    end = time.monotonic() + limit_s
    for process in context.processes:
        process.join(max(end - time.monotonic(), 0))
        if process.is_alive():  # a hang: its outcome is missing, which fails the test
            process.kill()
            process.join()


def _mortal(rank: int, folder: Path, play: Callable[[Path], Any]) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(35, exit=True)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        value = play(folder / "place")
    except Exception as error:  # noqa: BLE001 - the scenario's outcome
        value = Raised(type(error).__name__, str(error), traceback.format_exc())
    torch.save(value, folder / f"rank_{rank}.pt")
    os._exit(0 if value is None else 1)  # without leaving the process group, as a job that ends by an exception


def main() -> None:
    """Play everything: a first round, the deaths, and what new processes load then."""
    out, everything = sys.argv[1], list(stage._SCENARIOS)
    sys.argv[1:] = [out, *(name for name in everything if name not in AFTER)]
    stage.main()
    for play in MORTAL:
        play_alone(Path(out), play)
    sys.argv[1:] = [out, *AFTER]
    stage.main()


if __name__ == "__main__":
    main()
