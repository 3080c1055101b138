"""A sharded training job, and the bits of everything in it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ckpt import save_state

__all__ = ["Feed", "Job", "digest"]


class Feed:
    """A data loader: where it is."""

    def __init__(self) -> None:
        self.position = dist.get_rank() + 10

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Job:
    """A model, an optimizer that has run, a scheduler, and data."""

    def __init__(self, seed: int, *, width: int = 5, style: str = "SHARDED_STATE_DICT") -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width, affine=False), nn.Linear(width, 6))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.feed = Feed()
        self.style: Any = style
        self.train()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.feed.position += 1

    def state(self) -> dict[str, Any]:
        found = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return found | {"dataloader": self.feed}

    def save(self, path: Path, **options: Any) -> None:
        save_state(path, **self.state(), state_dict_type=self.style, durable=False, **options)

    def bits(self, *, live: bool = True) -> list[Any]:
        """Everything in it; not the random generators, which tests draw from."""
        found: list[Any] = [digest(param) for param in self.model.parameters()]
        if live:  # batch statistics are each rank's own, and those of one rank are stored
            found += [digest(buffer) for buffer in self.model.buffers()]
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                found.append({kind: digest(value) for kind, value in self.optimizer.state.get(param, {}).items()})
            found.append({key: value for key, value in group.items() if key != "params"})
        return [*found, self.scheduler.last_epoch, self.feed.position]


def digest(value: Any) -> str:
    detached: Any = value.detach()
    local: Tensor = detached.to_local() if isinstance(value, DTensor) else detached
    return hashlib.sha256(local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
