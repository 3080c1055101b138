"""A small checkpoint that ``save_state`` wrote, in one process."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import save_state

__all__ = ["save_small"]


def save_small(path: Path) -> Path:
    """Save a model and an optimizer that has run, as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 5))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(torch.randn(3, 30)).square().mean().backward()
        optimizer.step()
        save_state(path, model, optimizer, step=7, durable=False)
    finally:
        dist.destroy_process_group()
    return path
