"""Training that goes on: optimizers, schedules, positions in the data and random numbers, on any number of ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fsdp_ckpt
from fsdp_ckpt import LoadReport
from tests.cases import models
from tests.cases import recipes as r
from tests.cases.state_training import (
    Position,
    blank,
    caught,
    full,
    groups_of,
    halved,
    mesh,
    moments_of,
    of,
    seeded,
    shard,
    state_of,
    three_groups,
    train,
    two_groups,
)
from tests.dist.stage import scenario


@scenario(ranks=2)
def p33_save(place: Path) -> dict[str, Any]:
    """Two steps and a save; and a control of four steps."""
    model = shard(seeded(1))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for number in (1, 2):
        train(model, optimizer, number)
    fsdp_ckpt.save_state(place / "ck", model, optimizer, step=2)
    found = {"moments": moments_of(model, optimizer), "state": state_of(model)}
    for number in (3, 4):  # saving has changed nothing
        train(model, optimizer, number)
    control = shard(seeded(1))
    optimizer = AdamW(control.parameters(), lr=1e-3)
    for number in (1, 2, 3, 4):
        train(control, optimizer, number)
    return {**found, "went on": state_of(model), "control": state_of(control)}


@scenario(ranks=2)
def p33_resume(place: Path) -> dict[str, Any]:
    """New processes, fresh model, fresh optimizer."""
    model = shard(seeded(2))
    optimizer = AdamW(model.parameters(), lr=0.5)
    report = fsdp_ckpt.load_state(of(place, "p33_save") / "ck", model, optimizer)
    found = {"moments": moments_of(model, optimizer), "state": state_of(model), "step": report.step}
    for number in (3, 4):
        train(model, optimizer, number)
    return {**found, "end": state_of(model), "fresh": list(report.optimizer_fresh)}


@scenario(ranks=2)
def p34_save(place: Path) -> None:
    """Three groups with a scheduler, so that lr and initial_lr differ; by us and by stock torch."""
    model = shard(seeded(1))
    optimizer = three_groups(model, fresh=False)
    scheduler = LambdaLR(optimizer, halved())
    train(model, optimizer, 1)
    scheduler.step()
    fsdp_ckpt.save_state(place / "ours", model, optimizer)
    r.p34(place / "stock", mesh())


@scenario(ranks=2)
def p34_resume(place: Path) -> dict[str, list[dict[str, Any]]]:
    """The same number of ranks; a step works afterwards."""
    found = {}
    for kind in ("ours", "stock"):
        model = shard(seeded(2))
        optimizer = three_groups(model, fresh=True)
        fsdp_ckpt.load_state(of(place, "p34_save") / kind, model, optimizer)
        found[kind] = groups_of(model, optimizer)
        train(model, optimizer, 2)
    return found


class Partly(nn.Module):
    """P36: a layer that is used and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.inactive = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.a(x)
        return found


@scenario(ranks=2)
def p36_inactive(place: Path) -> dict[str, Any]:
    """(a) A parameter without a gradient."""
    model = shard(Partly())
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    fsdp_ckpt.save_state(place / "ck", model, optimizer)
    saved = moments_of(model, optimizer)
    model = shard(Partly())
    optimizer = AdamW(model.parameters())
    report = fsdp_ckpt.load_state(place / "ck", model, optimizer)
    loaded = moments_of(model, optimizer)
    train(model, optimizer, 2)
    return {"saved": saved, "loaded": loaded, "fresh": list(report.optimizer_fresh)}


@scenario(ranks=2)
def p36_frozen(place: Path) -> dict[str, Any]:
    """(b) A parameter that is frozen later: still with the optimizer, or left out of it."""
    model = shard(seeded(1))
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    fsdp_ckpt.save_state(place / "ck", model, optimizer)
    found: dict[str, Any] = {"saved": moments_of(model, optimizer)}
    for kind in ("kept", "left out"):
        model = seeded(2)
        model.up.weight.requires_grad_(False)
        shard(model)
        optimizer = AdamW([value for value in model.parameters() if kind == "kept" or value.requires_grad])
        report = fsdp_ckpt.load_state(place / "ck", model, optimizer)
        found[kind] = moments_of(model, optimizer)
        found[f"{kind} report"] = report
        train(model, optimizer, 2)
    return found


@scenario(ranks=2)
def p36_gradients(place: Path) -> dict[str, Any]:
    """(c) A fresh optimizer whose parameters have gradients."""
    model = shard(seeded(1))
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    fsdp_ckpt.save_state(place / "ck", model, optimizer)
    saved = moments_of(model, optimizer)
    model = shard(seeded(2))
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    before = {name: full(value.grad) for name, value in model.named_parameters()}
    fsdp_ckpt.load_state(place / "ck", model, optimizer)
    after = {name: full(value.grad) for name, value in model.named_parameters()}
    return {"saved": saved, "loaded": moments_of(model, optimizer), "before": before, "after": after}


@scenario(ranks=2)
def p36_stateless(place: Path) -> dict[str, Any]:
    """(d) An optimizer without state; and one that has taken no step yet."""
    model = shard(seeded(1))
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    fsdp_ckpt.save_state(place / "sgd", model, optimizer)
    found: dict[str, Any] = {"saved": optimizer.state_dict()["state"]}
    fresh = SGD(model.parameters(), lr=9.0)
    fsdp_ckpt.load_state(place / "sgd", model, fresh)
    found |= {"loaded": fresh.state_dict()["state"], "lr": fresh.param_groups[0]["lr"]}
    adam = AdamW(model.parameters(), lr=0.25)
    fsdp_ckpt.save_state(place / "adam", model, adam)
    found["saved before a step"] = adam.state_dict()["state"]
    stepped = AdamW(model.parameters(), lr=9.0)
    train(model, stepped, 2)
    fsdp_ckpt.load_state(place / "adam", model, stepped)
    return {**found, "loaded from before a step": stepped.state_dict()["state"]}


@scenario(ranks=2)
def p37(place: Path) -> dict[str, Any]:
    """Three layouts of one optimizer, none of them with a model."""
    r.p37(place, mesh())
    found: dict[str, Any] = {}
    for layout in ("index", "name", "flat"):
        model = shard(models.Mlp())
        optimizer = two_groups(model, (9.0, 8.0))
        found[f"{layout}, strict"] = caught(lambda: fsdp_ckpt.load_state(place / layout, model, optimizer))  # noqa: B023
        fsdp_ckpt.load_state(place / layout, model, optimizer, exclude=["*"])
        found[layout] = moments_of(model, optimizer), groups_of(model, optimizer)
        found[f"{layout}, model"] = state_of(model)
        r.step(model, optimizer)
    return found


@scenario(ranks=2)
def p39_save(place: Path) -> dict[str, Any]:
    """Two ranks save after two steps and take a third."""
    model = shard(seeded(1, 5, 7))
    optimizer = two_groups(model)
    for number in (1, 2):
        train(model, optimizer, number, 5)
    fsdp_ckpt.save_state(place / "ck", model, optimizer, step=2)
    return resumed(model, optimizer)


def resumed(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return everything about P39's training after step 2, and its parameters after one more."""
    found = {"state": state_of(model), "moments": moments_of(model, optimizer), "groups": groups_of(model, optimizer)}
    train(model, optimizer, 3, 5)
    return {**found, "third": state_of(model)}


def p39_resume(place: Path) -> dict[str, Any]:
    """Resume on any number of ranks, whose model and optimizer are fresh."""
    model = shard(seeded(2, 5, 7))
    optimizer = two_groups(model, (9.0, 8.0))
    fsdp_ckpt.load_state(of(place, "p39_save") / "ck", model, optimizer)
    return resumed(model, optimizer)


@scenario(ranks=3)
def p39_three(place: Path) -> dict[str, Any]:
    """From two ranks to three."""
    return p39_resume(place)


@scenario(ranks=4)
def p39_four(place: Path) -> dict[str, Any]:
    """From two ranks to four."""
    return p39_resume(place)


@scenario(ranks=2)
def p43(place: Path) -> dict[str, Any]:
    """Restore a schedule in two orders; the scheduler may be built anew or as one that goes on."""
    model = shard(seeded(1))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, halved())
    for number in (1, 2, 3):
        train(model, optimizer, number)
        scheduler.step()
    fsdp_ckpt.save_state(place / "ck", model, optimizer, scheduler, step=3)
    found: dict[str, Any] = {"saved": optimizer.param_groups[0]["lr"]}
    for order in ("before, goes on", "before, anew", "after"):
        model = shard(seeded(2))
        optimizer = AdamW(model.parameters(), lr=1e-3)
        if order == "after":
            scheduler = LambdaLR(optimizer, halved())
            fsdp_ckpt.load_state(place / "ck", model, optimizer, scheduler)
        else:
            fsdp_ckpt.load_state(place / "ck", model, optimizer)
            found[f"{order}: loaded"] = [optimizer.param_groups[0][name] for name in ("lr", "initial_lr")]
            if order == "before, goes on":
                scheduler = LambdaLR(optimizer, halved(), last_epoch=2)
            else:
                scheduler = LambdaLR(optimizer, halved())
                fsdp_ckpt.load_state(place / "ck", scheduler=scheduler)
        group = optimizer.param_groups[0]
        found[order] = [group["lr"], group["initial_lr"], list(scheduler.base_lrs)]
        train(model, optimizer, 4)
        scheduler.step()
        found[order].append(group["lr"])
    return found


@scenario(ranks=2)
def p44(place: Path) -> dict[str, Any]:
    """Containers as one blob and flattened."""
    r.p44(place, mesh())
    found: dict[str, Any] = {}
    for layout in ("old", "new"):
        model, extra = shard(blank(models.Mlp())), Position()
        optimizer = AdamW(model.parameters(), lr=9.0, betas=(0.1, 0.2), weight_decay=0.9)
        fsdp_ckpt.load_state(place / layout, model, optimizer, objects={"extra": extra})
        found[layout] = (
            state_of(model), moments_of(model, optimizer), groups_of(model, optimizer), extra.state
        )  # fmt: skip
    return found


@scenario(ranks=4)
def p40_save(place: Path) -> None:
    """Each rank's position in its data."""
    position = Position({"pos": 10 * (dist.get_rank() + 1)})
    model = shard(seeded(1))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 1)
    fsdp_ckpt.save_state(place / "ours", model, optimizer, dataloader=position)
    r.p40(place / "stock", mesh())


def p40_load(place: Path) -> dict[str, Any]:
    """Load the positions on any number of ranks; where that is refused, again without them."""
    found: dict[str, Any] = {}
    for kind in ("ours", "stock"):
        folder = of(place, "p40_save") / kind
        model, position = shard(blank(models.Mlp())), Position()
        optimizer = AdamW(model.parameters(), lr=9.0) if kind == "ours" else None
        found[f"{kind} refused"] = caught(lambda: fsdp_ckpt.load_state(folder, model, optimizer, dataloader=position))  # noqa: B023
        found[f"{kind} after that"] = state_of(model), len(optimizer.state) if optimizer else 0, position.state
        report = fsdp_ckpt.load_state(folder, model, optimizer, dataloader=position, positions="fresh")
        found[kind] = report, state_of(model), len(optimizer.state) if optimizer else 6, position.state
    return found


@scenario(ranks=2)
def p40_two(place: Path) -> dict[str, Any]:
    """From four ranks to two."""
    return p40_load(place)


@scenario(ranks=4)
def p40_four(place: Path) -> dict[str, Any]:
    """Four ranks again."""
    return p40_load(place)


@scenario(ranks=6)
def p40_six(place: Path) -> dict[str, Any]:
    """From four ranks to six."""
    return p40_load(place)


def draw() -> list[list[float]]:
    """Draw three numbers of each kind."""
    return [[random.random() for _ in range(3)], list(np.random.rand(3)), torch.rand(3).tolist()]


@scenario(ranks=4)
def p41_save(place: Path) -> list[list[float]]:
    """Each rank has its own streams; return what it draws next."""
    rank, model = dist.get_rank(), shard(seeded(1))
    random.seed(100 + rank)
    np.random.seed(200 + rank)
    torch.manual_seed(300 + rank)
    fsdp_ckpt.save_state(place / "ck", model)
    return draw()


def p41_load(place: Path) -> tuple[LoadReport, list[list[float]]]:
    """Other seeds, then those of the checkpoint."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    model = shard(seeded(2))
    report = fsdp_ckpt.load_state(of(place, "p41_save") / "ck", model, rng=True)
    return report, draw()


@scenario(ranks=2)
def p41_two(place: Path) -> tuple[LoadReport, list[list[float]]]:
    """From four ranks to two."""
    return p41_load(place)


@scenario(ranks=4)
def p41_four(place: Path) -> tuple[LoadReport, list[list[float]]]:
    """Four ranks again."""
    return p41_load(place)
