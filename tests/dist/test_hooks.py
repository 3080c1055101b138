"""Hooks that ask for different things on different ranks: refused before anything is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ckpt import Hooks, load_state, save_state
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.hooks import LoadEvent
from tests.build import run_ranks


class SkipOnTheSecond(Hooks):
    """Leaves the model out, on one rank only."""

    def before_load(self, event: LoadEvent) -> None:
        if dist.get_rank() == 1:
            event.skip("pytorch_model_fsdp_0")


def load_with_hooks_that_differ(rank: int, folder: str) -> None:
    """Be one rank: save, change the model, try to load."""
    model = nn.Linear(2, 2)
    save_state(f"{folder}/x", model)
    with torch.no_grad():
        model.weight.fill_(7 + rank)
    with pytest.raises(UsageError, match="what hooks skip or replace differs between ranks"):
        load_state(f"{folder}/x", model, hooks=[SkipOnTheSecond()])
    assert torch.equal(model.weight, torch.full((2, 2), 7.0 + rank))


def test_ranks_that_load_different_parts_are_refused(tmp_path: Path) -> None:
    run_ranks(load_with_hooks_that_differ, 2, str(tmp_path))
