"""Scenarios of test_accelerate: Accelerate saves and we load, we save and Accelerate loads.

What is expected is read by torch from the job that was saved (``Job.tensors``, ``Job.locals``, ``Job.rest``), and what
training would have gone on to do is that job, going on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fsdp_ckpt import load_state, save_state
from fsdp_ckpt.train.save import StateDictType
from tests.dist.accelerate_job import MODELS, Accelerate, Job, prepared
from tests.dist.stage import main, scenario

SHARDED: Final = "SHARDED_STATE_DICT"
FULL: Final = "FULL_STATE_DICT"
LOCAL: Final = "LOCAL_STATE_DICT"
FRESH_SEED = 99
PAIRS = [(kind, name) for kind in ("FSDP1", "FSDP1-flat", "FSDP2") for name in MODELS]

Load = Callable[[Path, Job], Any]


def _ours(folder: Path, job: Job) -> Any:
    return load_state(folder, job.model, job.optimizer, job.scheduler, objects=job.counter)


def _resume(folder: Path, job: Job, load: Load, *, steps: int = 0) -> dict[str, Any]:
    """Load what a job has saved into another one; let both go on."""
    expected = job.state()
    losses = job.run(range(2, 4))
    other = Job.trained(job.kind, job.name, steps=steps, seed=FRESH_SEED)
    before = other.state()
    report = load(folder, other)
    return {
        "before": before,
        "expected": expected,
        "found": other.state(),
        "expected_losses": losses,
        "found_losses": other.run(range(2, 4)),
        "expected_end": job.state(),
        "found_end": other.state(),
        "report": report,
    }


def _accelerate_saves(place: Path, kind: str, name: str, style: str, *, use_dcp: bool = True) -> dict[str, Any]:
    job = Job.trained(kind, name)
    folder = place / f"{kind}-{name}"
    Accelerate(kind, style, use_dcp=use_dcp).save(folder, job)
    return _resume(folder, job, _ours)


@scenario(ranks=2)
def accelerate_saves_sharded(place: Path) -> Any:
    return {(kind, name): _accelerate_saves(place, kind, name, SHARDED) for kind, name in PAIRS}


@scenario(ranks=2)
def accelerate_saves_full(place: Path) -> Any:
    return {(kind, name): _accelerate_saves(place, kind, name, FULL) for kind, name in PAIRS if kind == "FSDP2"}


@scenario(ranks=2)
def accelerate_saves_local(place: Path) -> Any:
    return {(kind, name): _accelerate_saves(place, kind, name, LOCAL) for kind, name in PAIRS if kind != "FSDP2"}


@scenario(ranks=2)
def accelerate_saves_without_dcp(place: Path) -> Any:
    return {(kind, name): _accelerate_saves(place, kind, name, SHARDED, use_dcp=False) for kind, name in PAIRS}


@scenario(ranks=2)
def accelerate_loses_fsdp1_moments(place: Path) -> Any:
    """Finding 1: what Accelerate itself makes of the checkpoint, and what we make of the same folder."""
    job = Job.trained("FSDP1")
    theirs = Accelerate("FSDP1")
    theirs.save(place / "saved", job)
    found = _resume(place / "saved", job, _ours)
    fresh = Job.build("FSDP1", seed=FRESH_SEED)
    theirs.load_model(place / "saved", fresh)
    theirs.load_optimizer(place / "saved", fresh)
    return found | {
        "moments": [name for name in fresh.tensors() if name.startswith("state.")],
        "groups": fresh.groups(),
    }


def _accelerate_loads(style: str) -> Load:
    def load(folder: Path, job: Job) -> Any:
        theirs = Accelerate(job.kind, style)
        theirs.load_model(folder, job)
        theirs.load_optimizer(folder, job)
        return theirs.load_rest(folder, job)

    return load


def _we_save(folder: Path, job: Job, style: StateDictType = SHARDED) -> Any:
    return save_state(
        folder, job.model, job.optimizer, job.scheduler, objects=job.counter, step=2, state_dict_type=style
    )


def _accelerate_reads(place: Path, style: StateDictType) -> Any:
    found = {}
    for kind, name in PAIRS:
        job = Job.trained(kind, name)
        _we_save(place / f"{kind}-{name}", job, style)
        # Into a fresh optimizer of FSDP1 Accelerate restores nothing, whoever saved.
        steps = 0 if kind == "FSDP2" else 1
        found[kind, name] = _resume(place / f"{kind}-{name}", job, _accelerate_loads(style), steps=steps)
    return found


@scenario(ranks=2)
def we_save_sharded(place: Path) -> Any:
    return _accelerate_reads(place, SHARDED)


@scenario(ranks=2)
def we_save_full(place: Path) -> Any:
    return _accelerate_reads(place, FULL)


@scenario(ranks=2)
def crosses_wrappers(place: Path) -> Any:
    """Save under one wrapper, load under another, model and optimizer."""
    found = {}
    styles: tuple[StateDictType, ...] = (SHARDED, FULL)
    for style in styles:
        for source, target in (
            ("FSDP1", "FSDP2"),
            ("FSDP1-flat", "FSDP2"),
            ("FSDP2", "FSDP1"),
            ("FSDP2", "FSDP1-flat"),
        ):
            for name in MODELS:
                job = Job.trained(source, name)
                folder = place / f"{style}-{source}-{target}-{name}"
                _we_save(folder, job, style)
                expected = job.state()
                fresh = Job.build(target, name, seed=FRESH_SEED)
                report = _ours(folder, fresh)
                found[style, source, target, name] = {"expected": expected, "found": fresh.state(), "report": report}
    return found


@scenario(ranks=2)
def saves_for_other_sizes(place: Path) -> Any:
    """Checkpoints of two ranks, ours and Accelerate's, for other numbers of ranks."""
    found = {}
    for kind, name in PAIRS:
        job = Job.trained(kind, name)
        _we_save(place / f"ours-{SHARDED}-{kind}-{name}", job)
        _we_save(place / f"ours-{FULL}-{kind}-{name}", job, FULL)
        if kind != "FSDP2":
            _we_save(place / f"ours-{LOCAL}-{kind}-{name}", job, LOCAL)
        Accelerate(kind).save(place / f"accelerate-{SHARDED}-{kind}-{name}", job)
        Accelerate(kind, use_dcp=False).save(place / f"accelerate-NO_DCP-{kind}-{name}", job)
        found[kind, name] = job.state()
    return found


@scenario(ranks=3)
def loads_on_three(place: Path) -> Any:
    found = {}
    for folder in sorted((place.parents[1] / saves_for_other_sizes.__name__ / "place").iterdir()):
        writer, style, *kind, name = folder.name.split("-")
        fresh = Job.build("-".join(kind), name, seed=FRESH_SEED)
        before = fresh.rest()
        report = _ours(folder, fresh)
        found[writer, style, "-".join(kind), name] = {"before": before, "found": fresh.state(), "report": report}
    return found


@scenario(ranks=3)
def accelerate_loads_on_three(place: Path) -> Any:
    """FSDP2 alone: with FSDP1 Accelerate's load on more ranks fails for its own checkpoints as well."""
    found = {}
    for name in MODELS:
        folder = place.parents[1] / saves_for_other_sizes.__name__ / "place" / f"ours-{SHARDED}-FSDP2-{name}"
        fresh = Job.build("FSDP2", name, seed=FRESH_SEED)
        theirs = Accelerate("FSDP2")
        theirs.load_model(folder, fresh)
        theirs.load_optimizer(folder, fresh)
        found[name] = fresh.state()
    return found


@scenario(ranks=2)
def trainer_folder(place: Path) -> Any:
    """A folder as transformers' Trainer writes it under FSDP: facts/accelerate.md, 5.

    With FULL_STATE_DICT it holds the weights twice: as model.safetensors, and as Accelerate's file.
    """
    found = {}
    for kind, name, style in (("FSDP1", "mlp", SHARDED), ("FSDP2", "mlp", SHARDED), ("FSDP2", "rich", FULL)):
        job = Job.trained(kind, name)
        # A folder that was put aside under another name still knows its step.
        folder = place / f"{kind}-{style}" / ("kept" if style == FULL else "checkpoint-20")
        Accelerate(kind, style).save_sharded(folder, job)
        rank = dist.get_rank()
        states: Mapping[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.random.get_rng_state(),
        }
        torch.save(states, folder / f"rng_state_{rank}.pth")
        weights = {key: value for key, value in job.state()["tensors"].items() if not key.startswith("state.")}
        if rank == 0:
            if style == FULL:
                save_file(weights, folder / "model.safetensors", {"format": "pt"})
            torch.save(job.scheduler.state_dict(), folder / "scheduler.pt")
            state = {"epoch": 0.5, "global_step": 20, "max_steps": 40, "log_history": [], "is_world_process_zero": True}
            (folder / "trainer_state.json").write_text(json.dumps(state))
        dist.barrier()

        def load(folder: Path, other: Job) -> Any:
            other.counter.count = 2  # the Trainer has no objects
            return load_state(folder, other.model, other.optimizer, other.scheduler)

        found[kind, style] = _resume(folder if style == FULL else folder.parent, job, load)
    return found


@scenario(ranks=2)
def prepared_by_accelerate(place: Path) -> Any:
    """Optimizer and scheduler in Accelerate's wrappers, which step the scheduler once per process."""
    job = Job.trained("FSDP2")
    expected = job.state()
    save_state(place / "ours", job.model, *prepared(job), objects=job.counter)
    Accelerate("FSDP2").save(place / "accelerate", job)
    return {"expected": expected} | {name: _load_prepared(place / name) for name in ("ours", "accelerate")}


@scenario(ranks=3)
def prepared_for_three(place: Path) -> Any:
    folder = place.parents[1] / prepared_by_accelerate.__name__ / "place"
    return {name: _load_prepared(folder / name) for name in ("ours", "accelerate")}


def _load_prepared(folder: Path) -> dict[str, Any]:
    fresh = Job.build("FSDP2", seed=FRESH_SEED)
    report = load_state(folder, fresh.model, *prepared(fresh), objects=fresh.counter)
    return {"found": fresh.state(), "warnings": report.warnings}


if __name__ == "__main__":
    main()
