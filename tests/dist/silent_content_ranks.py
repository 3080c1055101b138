"""Scenarios of test_silent_failures about what a checkpoint holds and which object gets it.

Sections 1 and 2 of facts/accelerate.md; silent_ranks plays them.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_ckpt import load_state, save_state
from tests.cases.models import Mlp
from tests.dist.accelerate_job import Accelerate, Counter, Job, wrap
from tests.dist.silent_job import FRESH, KINDS, attempt, load, on_first, refused, save
from tests.dist.stage import scenario


@scenario(ranks=2)
def broken_random_states(place: Path) -> Any:
    found: dict[str, Any] = {}
    job = Job.trained("FSDP2")
    for damage in ("garbage", "truncated", "other", "missing", "other state"):
        folder = place / damage
        Accelerate("FSDP2").save(folder, job)
        file = folder / "random_states_1.pkl"

        def spoil(file: Path = file, damage: str = damage) -> None:
            match damage:
                case "garbage":
                    file.write_bytes(b"no pickle " * 100)
                case "truncated":
                    file.write_bytes(file.read_bytes()[:5000])
                case "other":
                    torch.save({"step": 3}, file)
                case "missing":
                    file.unlink()
                case _:
                    torch.save(torch.load(file, weights_only=False) | {"torch_manual_seed": torch.zeros(3)}, file)

        on_first(spoil)
        fresh = Job.trained("FSDP2", **FRESH)
        if damage == "missing":
            before = fresh.state()
            report = load(folder, fresh)
            found[damage] = {"before": before, "after": fresh.state(), "rng": report.rng, "warnings": report.warnings}
        else:
            found[damage] = refused(partial(load, folder), fresh)
        found[damage]["accelerate"] = attempt(partial(Accelerate("FSDP2").load_rest, folder, fresh))
    save(place / "ours", job)
    on_first((place / "ours" / "random_states_1.pkl").unlink)
    found["missing of ours"] = refused(partial(load, place / "ours"), Job.trained("FSDP2", **FRESH))
    return found


@scenario(ranks=2)
def objects_by_name(place: Path) -> Any:
    job = Job.trained("FSDP2")
    objects = {"epochs": Counter(3), "samples": Counter(500)}
    save_state(place / "saved", job.model, objects=objects)
    samples, epochs, only = Counter(), Counter(), Counter()
    load_state(place / "saved", objects={"samples": samples, "epochs": epochs})
    load_state(place / "saved", objects={"samples": only})
    unknown = attempt(lambda: load_state(place / "saved", objects={"sample": Counter()}))
    return {"samples": samples.count, "epochs": epochs.count, "only": only.count, "unknown": unknown}


@scenario(ranks=2)
def schedulers(place: Path) -> Any:
    job = Job.trained("FSDP2")
    save(place / "saved", job)
    save_state(place / "without", job.model, job.optimizer)
    expected = job.scheduler.state_dict()
    fresh = Job.build("FSDP2", **FRESH)
    load(place / "saved", fresh)
    lacking = refused(
        lambda job: load_state(place / "without", job.model, job.optimizer, job.scheduler),
        Job.trained("FSDP2", **FRESH),
    )
    save_state(place / "two", job.model, job.optimizer, [job.scheduler, job.scheduler])
    other = Job.build("FSDP2", **FRESH)
    left = load_state(place / "two", other.model, other.optimizer, other.scheduler).left
    return {"expected": expected, "found": fresh.scheduler.state_dict(), "lacking": lacking, "left": left}


@scenario(ranks=2)
def pairs_optimizers(place: Path) -> Any:
    """Two models with the same names: only the parameters tell which optimizer is whose."""
    found: dict[Any, Any] = {}
    one, two = Job.trained("FSDP2", seed=1), Job.trained("FSDP2", seed=2, steps=3)
    found["expected"] = [one.tensors(), two.tensors()]
    save_state(place / "ours", [one.model, two.model], [two.optimizer, one.optimizer])
    members = json.loads((place / "ours" / "fsdp_ckpt.json").read_text())["optimizers"]
    found["members"] = [member["of"] for member in members]
    theirs = Accelerate("FSDP2")
    for number, job in enumerate((one, two)):
        theirs.save_numbered(place / "accelerate", job, number)
    for folder in ("ours", "accelerate"):
        for order in ("saved", "other"):
            first, second = Job.build("FSDP2", **FRESH), Job.build("FSDP2", **FRESH)
            optimizers = [second.optimizer, first.optimizer]
            if order == "other":
                optimizers.reverse()
            load_state(place / folder, [first.model, second.model], optimizers)
            found[folder, order] = [first.tensors(), second.tensors()]
        first, second = Job.build("FSDP2", **FRESH), Job.build("FSDP2", **FRESH)
        load_state(place / folder, [first.model, second.model], second.optimizer)
        found[folder, "second alone"] = [second.tensors()]
    return found


class _More(Mlp):
    """Has what Mlp has not."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)
        self.register_buffer("extra", torch.ones(2))


@scenario(ranks=2)
def extra_names(place: Path) -> Any:
    larger = wrap(_More(), "FSDP2", ("up",))
    save_state(place / "larger", larger)
    fresh = Job.trained("FSDP2", **FRESH)
    strict = refused(lambda job: load_state(place / "larger", job.model), fresh)
    report = load_state(place / "larger", fresh.model, strict=False)
    lists = {}
    try:
        load_state(place / "larger", fresh.model)
    except ValueError as error:
        lists = {name: sorted(getattr(error, name)) for name in ("missing", "unexpected", "mismatched")}
    expected = {name: value.detach() for name, value in Mlp().named_parameters()}
    found = {name: value for name, value in fresh.tensors().items() if not name.startswith("state.")}
    return {"strict": strict, "lists": lists, "loose": sorted(report.unexpected), "expected": expected, "found": found}


@scenario(ranks=2)
def other_dtype(place: Path) -> Any:
    job = Job.trained("FSDP2")
    save(place / "saved", job)
    expected = job.tensors()
    fresh = Job.build("FSDP2", dtype=torch.bfloat16, **FRESH)
    report = load(place / "saved", fresh)
    return {"expected": expected, "found": fresh.tensors(), "cast": report.cast}


@scenario(ranks=2)
def before_the_first_step(place: Path) -> Any:
    found = {}
    for kind in KINDS:
        job = Job.build(kind)
        job.loss(0).backward()
        save(place / kind, job)
        untouched = dict(job.optimizer.state)
        grads = all(parameter.grad is not None for parameter in job.model.parameters() if parameter.numel())
        expected = job.state()
        fresh, trained = Job.build(kind, **FRESH), Job.trained(kind, **FRESH)
        report = load(place / kind, fresh)
        load(place / kind, trained)
        found[kind] = {
            "untouched": untouched,
            "grads": grads,
            "fresh": dict(fresh.optimizer.state),
            "trained": dict(trained.optimizer.state),
            "optimizer_fresh": sorted(report.optimizer_fresh),
            "expected": expected,
            "found": [fresh.state(), trained.state()],
        }
    return found
