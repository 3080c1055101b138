"""Kinds of optimizers on real ranks: those that go on as they were, and those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from fsdp_ckpt import load_state, save_state
from tests.dist.attempt import attempt, nothing_left
from tests.dist.stage import main, scenario
from tests.dist.wrappers import WRAPPERS


@scenario(ranks=2)
def refused_optimizers(place: Path) -> Any:
    """Optimizers whose state is sharded in a way that cannot be told."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    zero = cast(Any, ZeroRedundancyOptimizer)(model.parameters(), torch.optim.Adam, lr=0.1)
    result = {"ZeRO": attempt(lambda: save_state(place / "z", model, zero))}
    for name, wrap in WRAPPERS.items():
        sharded = wrap(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        for param in sharded.parameters():
            optimizer.state[param] = {"history": [torch.ones(3)]}
        result[name] = attempt(lambda name=name, m=sharded, o=optimizer: save_state(place / name, m, o))  # type: ignore[misc]
    return nothing_left(place, result)


@scenario(ranks=2)
def plain_optimizers_under_ddp(place: Path) -> Any:
    """Adafactor and LBFGS go on bit by bit; lists of tensors come back."""
    result = {}
    for kind in ("Adafactor", "LBFGS"):
        model, optimizer = _trained(kind, steps=3)
        save_state(place / kind, model, optimizer, durable=False)
        twin, fresh = _trained(kind, steps=0)
        load_state(place / kind, twin, fresh)
        _train(model, optimizer, 2)
        _train(twin, fresh, 2)
        result[kind] = all(map(torch.equal, model.parameters(), twin.parameters()))
    model, optimizer = _trained("SGD", steps=1, lr=0.1)
    for param in model.parameters():
        optimizer.state[param] = {"history": [torch.ones(3), param.detach().clone()]}
    save_state(place / "lists", model, optimizer, durable=False)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    load_state(place / "lists", model, fresh)
    found = [fresh.state[param].get("history", []) for param in model.parameters()]
    wanted = [optimizer.state[param]["history"] for param in model.parameters()]
    result["lists"] = all(
        len(one) == len(two) and all(map(torch.equal, one, two)) for one, two in zip(found, wanted, strict=True)
    )
    return result


def _trained(kind: str, *, steps: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    _train(model, optimizer, steps)
    return model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        # The same on all ranks: LBFGS decides by its loss how often it calls the model.
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch).square().mean()
            loss.backward()
            return loss.detach()

        cast(Any, optimizer).step(closure)


if __name__ == "__main__":
    main()
