"""Scenarios of test_silent_failures about hooks: what they may skip, replace, add and veto.

Sections 1 and 2 of facts/accelerate.md; silent_ranks plays them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_ckpt import Hooks, load_state
from fsdp_ckpt.train.hooks import LoadEvent, SaveEvent
from tests.dist.accelerate_job import Job
from tests.dist.silent_job import FRESH, attempt, load, names, refused, save
from tests.dist.stage import scenario


class _Do(Hooks):
    """Run a function at one of the points, and keep what it could see."""

    def __init__(self, save: Callable[[SaveEvent], Any] | None = None, load: Callable[[LoadEvent], Any] | None = None):
        self.save, self.load = save, load
        self.parts: list[str] = []
        self.existed: bool | None = None
        self.reports: list[Any] = []

    def before_save(self, event: SaveEvent) -> None:
        self.parts, self.existed = sorted(event.parts), Path(event.path).exists()
        if self.save:
            self.save(event)

    def before_load(self, event: LoadEvent) -> None:
        self.parts = sorted(event.parts)
        if self.load:
            self.load(event)

    def after_save(self, report: Any) -> None:
        self.reports.append(report)

    def after_load(self, report: Any) -> None:
        self.reports.append(report)


@scenario(ranks=2)
def hooks_on_save(place: Path) -> Any:
    job = Job.trained("FSDP2")
    state = {name: torch.full(value.shape, 3.5) for name, value in job.tensors().items() if "state." not in name}

    def change(event: SaveEvent) -> None:
        event.skip("optimizer_0")
        event.skip("random_states")
        event.replace("pytorch_model_fsdp_0", state)
        event.add_file("config.json", b"{}")

    hook, veto = _Do(change), _Do(lambda event: event.veto("not now") if event.rank == 1 else None)
    report = save(place / "saved", job, hooks=[hook])
    fresh = Job.build("FSDP2", **FRESH)
    load_state(place / "saved", fresh.model)
    return {
        "parts": hook.parts,
        "existed": hook.existed,
        "skipped": report.skipped,
        "reports": len(hook.reports),
        "names": names(place / "saved"),
        "found": fresh.tensors(),
        "expected": state,
        "veto": attempt(lambda: save(place / "vetoed", job, hooks=[veto])),
        "after_veto": (names(place), len(veto.reports)),
        "unknown": attempt(lambda: save(place / "odd", job, hooks=[_Do(lambda event: event.skip("optimiser_0"))])),
        "loads_skipped": attempt(lambda: load(place / "saved", fresh)),
    }


def _load_with(folder: Path, hook: Hooks, job: Job) -> Any:
    return load(folder, job, hooks=[hook])


@scenario(ranks=2)
def hooks_on_load(place: Path) -> Any:
    job = Job.trained("FSDP2")
    save(place / "saved", job)
    expected = job.state()
    state = {name: torch.full(value.shape, 3.5) for name, value in job.tensors().items() if "state." not in name}
    found: dict[str, Any] = {"expected": expected, "replacement": state}

    def skip(event: LoadEvent) -> None:
        for part in ("optimizer_0", "random_states", "scheduler"):
            event.skip(part)

    hook = _Do(load=skip)
    fresh = Job.trained("FSDP2", **FRESH)
    found["before_skip"] = fresh.state()
    load(place / "saved", fresh, hooks=[hook])
    found |= {"skipped": fresh.state(), "parts": hook.parts, "reports": len(hook.reports)}

    fresh = Job.build("FSDP2", **FRESH)
    load(place / "saved", fresh, hooks=[_Do(load=lambda event: event.replace("pytorch_model_fsdp_0", state))])
    found["replaced"] = fresh.state()

    sharded = Job.build("FSDP2", **FRESH)
    state_of_job = job.model.state_dict()  # DTensors
    with_dtensors = Job.build("FSDP1-flat", **FRESH)
    for other in (sharded, with_dtensors):
        hook = _Do(load=lambda event: event.replace("pytorch_model_fsdp_0", state_of_job))
        load(place / "saved", other, hooks=[hook])
    found["replaced_by_dtensors"] = [sharded.tensors(), with_dtensors.tensors()]

    flat = Job.build("FSDP1", **FRESH)
    load(place / "saved", flat, hooks=[_Do(load=lambda event: event.replace("pytorch_model_fsdp_0", state))])
    found["replaced_fsdp1"] = flat.tensors()

    veto = _Do(load=lambda event: event.veto("not this one") if event.rank == 1 else None)
    found["veto"] = refused(lambda job: load(place / "saved", job, hooks=[veto]), Job.trained("FSDP2", **FRESH))

    # What cannot be replaced has to be refused, and what was given must fit.
    wrong: dict[str, tuple[str, dict[str, Any]]] = {
        "optimizer": ("optimizer_0", {"state": {}, "param_groups": []}),
        "scheduler": ("scheduler", {"last_epoch": 3}),
        "lacking": ("pytorch_model_fsdp_0", {name: value for name, value in state.items() if name != "up.bias"}),
        "extra": ("pytorch_model_fsdp_0", state | {"more.bias": torch.zeros(2)}),
        "shape": ("pytorch_model_fsdp_0", state | {"up.bias": torch.zeros(4, 2)}),
    }
    for name, (part, value) in wrong.items():
        change = _Do(load=partial(LoadEvent.replace, part=part, state=value))
        action = partial(_load_with, place / "saved", change)
        found[f"wrong {name}"] = refused(action, Job.trained("FSDP2", **FRESH))
    return found
