"""Jobs of several models, with an optimizer each or one for all: trained and saved, then resumed in new processes.

Scenarios of matrix_ranks, which plays them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp_ckpt import load_state, save_state
from fsdp_ckpt.errors import UsageError
from tests.dist.matrix_job import HALF, digest
from tests.dist.stage import scenario


class Pair(nn.Module):
    """A model of a GAN: both have the same names."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(6, size)
        self.outer = nn.Linear(size, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(torch.relu(self.inner(x)))
        return found


def _pair(seed: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    maker: nn.Module = FullyShardedDataParallel(Pair(5), device_id=torch.device("cpu"), use_orig_params=True)
    critic = Pair(7)
    fully_shard(critic)
    return (
        maker,
        critic,
        torch.optim.AdamW(maker.parameters(), lr=0.01, foreach=False),
        torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9),
    )


def _train_pair(models: tuple[nn.Module, nn.Module], optimizers: tuple[torch.optim.Optimizer, ...], seed: int) -> float:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    loss = torch.zeros(())
    for _ in range(HALF):
        loss = models[1](models[0](torch.randn(4, 6, generator=generator))).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return float(loss.detach())


def _prints(models: tuple[nn.Module, ...], optimizers: tuple[torch.optim.Optimizer, ...]) -> list[Any]:
    found: list[Any] = [digest(param) for model in models for param in model.parameters()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                found.append({kind: digest(value) for kind, value in state.items() if torch.as_tensor(value).numel()})
    return found


@scenario(ranks=2)
def trained_pairs(place: Path) -> Any:
    """Dictionaries of two models with equal names, and their optimizers."""
    maker, critic, adam, momentum = _pair(1)
    _train_pair((maker, critic), (adam, momentum), 5)
    models, optimizers = {"maker": maker, "critic": critic}, {"adam": adam, "momentum": momentum}
    save_state(place / "pair", models, optimizers, durable=False)
    save_state(place / "file", models, optimizers, durable=False, state_dict_type="FULL_STATE_DICT")
    loss = _train_pair((maker, critic), (adam, momentum), 6)
    both = torch.optim.SGD([*maker.parameters(), *critic.parameters()], lr=0.1)
    try:
        save_state(place / "both", models, both, durable=False)
    except UsageError as error:
        refused = f"{error} / {error.hint}"
    else:
        refused = "not refused"
    left = sorted(path.name for path in place.iterdir())
    return {"loss": loss, "end": _prints((maker, critic), (adam, momentum)), "refused": refused, "left": left}


def _resumed_pairs(name: str, place: Path) -> Any:
    maker, critic, adam, momentum = _pair(2)
    source = place.parents[1] / "trained_pairs" / "place" / name
    load_state(source, {"critic": critic, "maker": maker}, {"momentum": momentum, "adam": adam})
    loss = _train_pair((maker, critic), (adam, momentum), 6)
    return {"loss": loss, "end": _prints((maker, critic), (adam, momentum))}


@scenario(ranks=2)
def resumed_pairs(place: Path) -> Any:
    return _resumed_pairs("pair", place)


@scenario(ranks=2)
def resumed_pairs_of_files(place: Path) -> Any:
    return _resumed_pairs("file", place)


def _common(seed: int) -> tuple[tuple[nn.Module, nn.Module], torch.optim.Optimizer]:
    torch.manual_seed(seed)
    first, second = nn.Sequential(nn.Linear(6, 6)), Pair(4)
    fully_shard(first)
    fully_shard(second)
    params = [*second.parameters(), *first.parameters()]
    return (first, second), torch.optim.AdamW(params, lr=0.01, foreach=False)


def _train_common(models: tuple[nn.Module, nn.Module], optimizer: torch.optim.Optimizer) -> None:
    for step in range(HALF):
        x = torch.arange(12.0).reshape(2, 6) * (1 + dist.get_rank() + step)
        loss = models[1](models[0](x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@scenario(ranks=2)
def trained_common(place: Path) -> Any:
    """One optimizer for two models."""
    models, optimizer = _common(1)
    _train_common(models, optimizer)
    save_state(place / "common", list(models), optimizer, durable=False)
    _train_common(models, optimizer)
    return _prints(models, (optimizer,))


@scenario(ranks=2)
def resumed_common(place: Path) -> Any:
    models, optimizer = _common(2)
    load_state(place.parents[1] / "trained_common" / "place" / "common", list(models), optimizer)
    _train_common(models, optimizer)
    return _prints(models, (optimizer,))
