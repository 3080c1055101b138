"""A training job of the matrix: its data, its loop, and how all that it holds is read, by torch's own means."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.dist.matrix_net import WORDS, Net
from tests.dist.matrix_variants import Variant

HALF = 2
"""Steps before and after the save."""


class Loader:
    """Batches of one rank: shuffled by a generator of its own; rank r takes r + 2 rows each time."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.epoch, self.position = rank, 0, 0
        self.generator = torch.Generator().manual_seed(seed + rank)
        self.order: list[int] = []

    def take(self) -> Tensor:
        rows = []
        for _ in range(self.rank + 2):
            if self.position == len(self.order):
                self.order = torch.randperm(5, generator=self.generator).tolist()
                self.epoch, self.position = self.epoch + 1, 0
            rows.append(self.order[self.position])
            self.position += 1
        table = torch.arange(5 * 6).reshape(5, 6) * 7 % WORDS
        return table[rows]

    def state_dict(self) -> dict[str, Any]:
        state = {"epoch": self.epoch, "position": self.position, "order": self.order}
        return state | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self.order = state["epoch"], state["position"], list(state["order"])
        self.generator.set_state(state["generator"])


class Meter:
    """An object of the caller's."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


@dataclass(kw_only=True)
class Job:
    """Everything that a training loop has."""

    variant: Variant
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loader: Loader
    scaler: Any
    meter: Meter = field(default_factory=Meter)

    @classmethod
    def build(cls, variant: Variant, seed: int) -> Job:
        torch.manual_seed(seed)
        model = variant.wrap(Net(tied=variant.tied, hidden=variant.hidden))
        params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        made = variant.optimizer(params)
        rank = dist.get_rank() * (variant.data_ranks or variant.ranks) // variant.ranks
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(seed * 100 + rank)
        return cls(
            variant=variant,
            model=model,
            optimizer=made,
            scheduler=variant.schedule(made),
            loader=Loader(rank, seed),
            scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=variant.scaled),
        )

    def train(self, steps: int) -> list[float]:
        self.model.train()
        losses = []
        for _ in range(steps):
            loss = self.model(self.loader.take())
            self._update(loss)
            self.scheduler.step()
            self.meter.total += 0.5 + self.meter.total
            losses.append(random.random() + float(np.random.rand()))
            losses.append(float(loss.detach()))
        return losses

    def _update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def evaluate(self) -> float:
        """A forward pass without gradients: it leaves an unsharded root behind."""
        self.model.eval()
        with torch.no_grad():
            return float(self.model(torch.arange(12).reshape(2, 6)))

    def common_step(self) -> None:
        """A step in which all ranks see the same data and draw nothing."""
        self.model.eval()
        self._update(self.model(torch.arange(18).reshape(3, 6) % WORDS))

    def state(self) -> dict[str, Any]:
        found = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        found |= {"dataloader": self.loader, "objects": {"meter": self.meter}}
        return found | ({"scaler": self.scaler} if self.variant.scaled else {})

    def fingerprint(self) -> dict[str, Any]:
        """All that this rank has, as digests of bits or plain values, by name."""
        found: dict[str, Any] = {}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            found[f"model {name}"] = digest(tensor)
        for number, group in enumerate(self.optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                for kind, value in sorted(self.optimizer.state.get(param, {}).items()):
                    if not (isinstance(value, Tensor) and kind != "step" and not value.numel()):
                        found[f"state {number} {index} {kind}"] = digest(value)
            found[f"group {number}"] = {key: value for key, value in group.items() if key != "params"}
        found["scheduler"] = _plain(self.scheduler.state_dict())
        found["scaler"] = self.scaler.state_dict()
        found["loader"] = {key: str(_plain(value)) for key, value in self.loader.state_dict().items()}
        found["meter"] = self.meter.total
        found["draws"] = (random.random(), float(np.random.rand()), float(torch.rand(1)))
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return digest(value) if isinstance(value, Tensor) else value


def digest(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    detached: Any = value.detach()
    local: Tensor = detached.to_local() if isinstance(value, DTensor) else detached
    data = local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(local.shape)} {local.dtype} {hashlib.sha256(data).hexdigest()[:16]}"


def gathered(job: Job) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state whole, by torch's own means."""
    model: nn.Module = getattr(job.model, "_orig_mod", job.model)
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=False),
            FullOptimStateDictConfig(offload_to_cpu=False),
        ):
            found = {name: value.detach().clone() for name, value in model.state_dict().items()}
            state: Any = FullyShardedDataParallel.optim_state_dict(model, job.optimizer)["state"]
    else:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        found = {name: _whole(value) for name, value in inner.state_dict().items()}
        state = {
            name: job.optimizer.state[param] for name, param in inner.named_parameters() if param in job.optimizer.state
        }
    for name, kinds in state.items():
        for kind, value in kinds.items():
            found[f"{name} {kind}"] = _whole(torch.as_tensor(value))
    return found


def _whole(value: Tensor) -> Tensor:
    found: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach().clone()
