"""A training job in miniature: sharded models, optimizers and steps, and the state that they are in."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from tests.cases import models
from tests.dist.stage import Raised

M = TypeVar("M", bound=nn.Module)


def mesh() -> DeviceMesh:
    """Return all ranks in a row."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(module: M) -> M:
    """Shard a module over all ranks, with FSDP2."""
    fully_shard(module, mesh=mesh())
    return module


def of(place: Path, name: str) -> Path:
    """Return the place of another scenario."""
    return place.parents[1] / name / "place"


def blank(module: M) -> M:
    """Fill parameters and persistent buffers with -1, so that nothing is right by chance."""
    with torch.no_grad():
        for value in module.state_dict().values():
            value.fill_(-1)
    return module


def seeded(seed: int, h: int = 6, f: int = 8) -> models.Mlp:
    """Return an MLP with small random weights, whose gradients are no rounding noise."""
    model, generator = models.Mlp(h, f), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def full(value: Any) -> Any:
    """Return a tensor as it is on all ranks together."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, gathered by torch."""
    return {name: full(value) for name, value in module.state_dict().items()}


def moments_of(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state by parameter name, gathered by torch."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: {
            kind: full(value) if isinstance(value, Tensor) else value for kind, value in state.items()
        }
        for parameter, state in optimizer.state.items()
    }


def groups_of(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups, parameters by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]


def train(model: nn.Module, optimizer: Optimizer, number: int, h: int = 6) -> None:
    """Train step `number`, with data that depend on it and are the same on every rank."""
    generator = torch.Generator().manual_seed(number)
    inputs, targets = (torch.randn(4, h, generator=generator) for _ in range(2))
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()


def two_groups(model: nn.Module, lrs: tuple[float, float] = (1e-3, 2e-3)) -> AdamW:
    """Return AdamW with the weights of the linear layers in one group and the rest in another, as r.p37."""
    named = dict(model.named_parameters())
    weights = [named.pop("up.weight"), named.pop("down.weight")]
    return AdamW([{"params": weights, "lr": lrs[0]}, {"params": list(named.values()), "lr": lrs[1]}])


def three_groups(model: nn.Module, *, fresh: bool) -> AdamW:
    """Return the optimizer of P34, or one with the same parameters and no options of its own."""
    named = dict(model.named_parameters())
    weights = [named.pop("up.weight"), named.pop("down.weight")]
    options: list[dict[str, Any]] = [
        {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.95)},
        {"lr": 2e-3, "weight_decay": 0.0},
        {"lr": 5e-4, "eps": 1e-6},
    ]
    members: list[list[Any]] = [weights, list(named.values()), []]
    chosen: list[dict[str, Any]] = [{}, {}, {}] if fresh else options
    return AdamW([{"params": params, **more} for params, more in zip(members, chosen, strict=True)], lr=7.0)


def halved(_: Optimizer | None = None) -> Callable[[int], float]:
    """Return P43's schedule."""
    return lambda step: 0.5**step


class Position:
    """A data loader, or any object, that remembers one dictionary."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.state = dict(state or {"pos": -1})

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


def caught(call: Callable[[], Any]) -> Raised | None:
    """Return what a call raises, None when it does not."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the scenario's outcome
        return Raised(type(error).__name__, str(error), traceback.format_exc())
    return None
