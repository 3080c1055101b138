"""Checkpoints of the corruption sweep that are no fixtures: of save_state, on one rank and on two, and a composite."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from fsdp_ckpt import save_state
from tests.cases.models import Mlp
from tests.dist.stage import main, scenario

STEPS = (1, 2)


def _job() -> tuple[nn.Module, AdamW, StepLR]:
    torch.manual_seed(5)
    model = Mlp()
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, StepLR(optimizer, 1)


def _step(model: nn.Module, optimizer: AdamW, scheduler: StepLR) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    scheduler.step()


def _save_two_steps(place: Path, **options: Any) -> None:
    model, optimizer, scheduler = _job()
    for step in STEPS:
        _step(model, optimizer, scheduler)
        values = {"loss": 0.5 / step, "tokens": 1000 * step}
        save_state(place / f"step-{step}", model, optimizer, scheduler, step=step, values=values, **options)


@scenario(ranks=1)
def own_w1(place: Path) -> None:
    """Of one rank, everything in it."""
    _save_two_steps(place)


@scenario(ranks=2)
def own_w2(place: Path) -> None:
    """Of two ranks."""
    _save_two_steps(place)


@scenario(ranks=2)
def own_full_w2(place: Path) -> None:
    """Of two ranks, gathered."""
    _save_two_steps(place, state_dict_type="FULL_STATE_DICT")


@scenario(ranks=2)
def composite_w2(place: Path) -> None:
    """As Accelerate's save_state lays it out, written by torch."""
    model, optimizer, scheduler = _job()
    _step(model, optimizer, scheduler)
    rank = dist.get_rank()
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=place / "checkpoint-1/pytorch_model_fsdp_0")
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": state}, checkpoint_id=place / "checkpoint-1/optimizer_0")
    random.seed(rank)
    states = {
        "step": 0,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.RandomState(rank).get_state(),
        "torch_manual_seed": torch.Generator().manual_seed(rank).get_state(),
    }
    torch.save(states, place / f"checkpoint-1/random_states_{rank}.pkl")
    if rank == 0:
        torch.save(scheduler.state_dict(), place / "checkpoint-1/scheduler.bin")


if __name__ == "__main__":
    main()
