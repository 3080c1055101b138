"""A job of the scenarios about silent failures: saved, loaded, and left as it is where a load is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_ckpt import load_state, save_state
from tests.dist.accelerate_job import Job

FRESH: dict[str, Any] = {"seed": 99}
KINDS = ("FSDP1", "FSDP1-flat", "FSDP2")


def save(folder: Path, job: Job, **options: Any) -> Any:
    return save_state(folder, job.model, job.optimizer, job.scheduler, objects=job.counter, **options)


def load(folder: Path, job: Job, **options: Any) -> Any:
    return load_state(folder, job.model, job.optimizer, job.scheduler, objects=job.counter, **options)


def attempt(action: Callable[[], Any]) -> tuple[str, str]:
    """Return class and message of what is raised, or ("", "")."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - this is the outcome
        return type(error).__name__, str(error)
    return "", ""


def refused(action: Callable[[Job], Any], job: Job) -> dict[str, Any]:
    """Return the error of an action that must leave the job as it is, and the job before and after."""
    before = job.state()
    return {"error": attempt(lambda: action(job)), "before": before, "after": job.state()}


def on_first(action: Callable[[], Any]) -> None:
    """Do something to files, on one rank."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def names(folder: Path) -> list[str]:
    dist.barrier()
    names = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    return names
