"""Ranks that end in the midst of a save or load; started by hand: torch's launcher would end the others as well."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from fsdp_ckpt import load_state, save_model
from tests.dist.attempt import attempt, tree
from tests.dist.job import Job
from tests.dist.stage import Raised

__all__ = ["DEATHS", "play_deaths"]


def _dying(rank: int, out: Path, name: str) -> None:
    """Save; then let the last of three ranks end in the midst of another save or load."""
    dist.init_process_group(
        "gloo", init_method=f"file://{out / name}/store", rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    act, target, end = DEATHS[name]
    place = out / name / "place"
    job = Job(1)
    job.save(place / "step-1")
    files = tree(place)
    dist.barrier()
    job.train()
    before = job.bits()
    if rank == 2:
        with mock.patch(target, side_effect=end):
            act(place, job)
    found: Any = attempt(lambda: act(place, job))
    if rank == 0:
        found["files"] = tree(place) == files
    torch.save(found | {"live": job.bits() == before}, out / name / f"rank_{rank}.pt")
    os._exit(0)  # the group cannot be left in good order


def _save_again(place: Path, job: Job) -> None:
    job.save(place / "step-1")


def _load_again(place: Path, job: Job) -> None:
    load_state(place / "step-1", **job.state())


def _export(place: Path, job: Job) -> None:
    save_model(job.model, place / "hf")


def _die(*_: Any, **__: Any) -> None:
    os._exit(9)


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


DEATHS: dict[str, tuple[Callable[[Path, Job], None], str, Callable[..., None]]] = {
    "dies_while_collecting": (_save_again, "fsdp_ckpt.train.save_plan.encode", _die),
    "dies_while_writing": (_save_again, "fsdp_ckpt.train.record_file.write_all", _die),
    "dies_while_loading": (_load_again, "fsdp_ckpt.train.load.plan_model", _die),
    "dies_while_exporting": (_export, "fsdp_ckpt.train.export.gather_tensors", _die),
    "is_interrupted_while_writing": (_save_again, "fsdp_ckpt.train.record_file.write_all", _interrupt),
}


def play_deaths(out: Path) -> None:
    """Start three ranks each, and wait for those that are left, half a minute at most."""
    for name in DEATHS:
        (out / name / "place").mkdir(parents=True)
        context = start_processes(_dying, (out, name), nprocs=3, join=False, start_method="fork")
        limit = time.monotonic() + 30
        for rank, process in enumerate(context.processes):
            process.join(max(0.1, limit - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(10)
                torch.save(Raised("Hung", "killed after 30 s", f"rank {rank} hung"), out / name / f"rank_{rank}.pt")
