"""Play scenarios on real gloo ranks: many in one launch, each in a process group of its own, none able to hang.

A module of scenarios registers functions and ends in ``main()``::

    @scenario(ranks=2)
    def resumes(place: Path) -> Any:
        ...                      # every rank runs it; ``place`` is an empty folder, the same for all ranks
        return value             # kept with torch.save, one file per rank

    if __name__ == "__main__":
        main()

and its tests ask for ``outcomes(place, "resumes")``: what each rank returned, or the exception that it raised. torch
is imported once; ranks are forked from there. An exception on one rank ends the scenario for the others as well,
because its process group goes away.
"""

from __future__ import annotations

import faulthandler
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from tests.cases.launch import build_once, run_module

__all__ = ["Raised", "main", "outcomes", "play", "scenario"]

Play = Callable[[Path], Any]


@dataclass(frozen=True)
class Raised:
    """An exception of a rank: class name, message and traceback."""

    kind: str
    message: str
    trace: str


_SCENARIOS: dict[str, tuple[int, Play]] = {}


def scenario(*, ranks: int) -> Callable[[Play], Play]:
    """Register a function under its name, to be played on so many ranks."""

    def register(function: Play) -> Play:
        _SCENARIOS[function.__name__] = (ranks, function)
        return function

    return register


def main(*, limit_s: int = 150) -> None:
    """Play all registered scenarios: ``python -m module OUT [NAME...]``."""
    out, wanted = Path(sys.argv[1]), sys.argv[2:]
    chosen = {name: entry for name, entry in _SCENARIOS.items() if not wanted or name in wanted}
    torch.set_num_threads(1)
    for ranks in sorted({ranks for ranks, _ in chosen.values()}):
        names = [name for name, (count, _) in chosen.items() if count == ranks]
        for name in names:
            (out / name / "place").mkdir(parents=True)
        start_processes(_rank, (ranks, out, names, limit_s), nprocs=ranks, start_method="fork")


def _rank(rank: int, ranks: int, out: Path, names: list[str], limit_s: int) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s, exit=True)
    for name in names:
        folder = out / name
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
        )
        value: Any
        try:
            value = _SCENARIOS[name][1](folder / "place")
            dist.barrier()
        except BaseException as error:  # noqa: BLE001 - this is the scenario's outcome
            value = Raised(type(error).__name__, str(error), traceback.format_exc())
        finally:
            dist.destroy_process_group()
        torch.save(value, folder / f"rank_{rank}.pt")


def play(factory: pytest.TempPathFactory, module: str, *, timeout_s: float = 170) -> Path:
    """Play a module's scenarios once per test session; return the folder of what came out."""
    name = module.rpartition(".")[2]
    return build_once(factory, name, lambda folder: run_module(module, str(folder), timeout_s=timeout_s))


def outcomes(folder: Path, name: str, *, may_raise: bool = False) -> list[Any]:
    """Return what each rank returned; fails the test with the rank's traceback when it raised."""
    files = sorted((folder / name).glob("rank_*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    found = [torch.load(path, weights_only=False) for path in files]
    assert found, f"the scenario {name} was not played"
    if not may_raise:
        for rank, value in enumerate(found):
            if isinstance(value, Raised):
                pytest.fail(f"rank {rank} of {name} raised {value.trace}")
    return found
