"""Kinds of models on real ranks: what each rank gets back, or what all of them raise.

Plays its siblings as well: kinds of optimizers, and what is beside a model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import tests.dist.beside_ranks
import tests.dist.optimizers_ranks  # noqa: F401 - both register their scenarios
from fsdp_ckpt import get_state_dict, load_state, save_model, save_state
from tests.dist.attempt import attempt, nothing_left
from tests.dist.stage import main, scenario
from tests.dist.wrappers import WRAPPERS, fsdp1, fsdp2


def local(value: Any) -> Tensor:
    """This rank's elements."""
    held: Any = value.detach()
    return cast(Tensor, held.to_local() if isinstance(held, DTensor) else held).clone()


class WithExtra(nn.Linear):
    """A module with extra state."""

    extra: Any = None
    found: Any = "nothing"

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.found = state


@scenario(ranks=2)
def buffers_differ(place: Path) -> Any:
    """Batch statistics are each rank's own; what comes back, and what each rank had."""
    result = {}
    rank = dist.get_rank()
    wrappers = WRAPPERS | {"DDP": DistributedDataParallel}
    for name, wrap in wrappers.items():
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4)))))
        torch.manual_seed(rank)
        with torch.no_grad():
            for _ in range(rank + 1):  # the counts differ, too
                model(torch.randn(8, 4) * (rank + 1) + rank)
        mine = [local(buffer) for buffer in model.buffers()]
        save_state(place / name, model, durable=False)
        for buffer in model.buffers():
            buffer.zero_()
        load_state(place / name, model)
        result[name] = {"had": mine, "got": [local(buffer) for buffer in model.buffers()]}
    return result


@scenario(ranks=2)
def compiled(place: Path) -> Any:
    """Names, with torch.compile inside and outside of DDP."""
    result = {"plain": sorted(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict())}

    def compile_it(module: nn.Module) -> nn.Module:
        return cast(nn.Module, torch.compile(module, backend="eager"))

    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "compile(DDP)": lambda module: compile_it(DistributedDataParallel(module)),
        "DDP(compile)": lambda module: DistributedDataParallel(compile_it(module)),
        "compile(FSDP2)": lambda module: compile_it(fsdp2(module)),
        "FSDP1(compile)": lambda module: fsdp1(compile_it(module)),
        "compile(FSDP1)": lambda module: compile_it(fsdp1(module)),
    }
    for name, wrap in ways.items():
        model = wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        result[name] = sorted(get_state_dict(model))
        save_state(place / name, model, durable=False)
        report = load_state(place / name, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        result[f"{name}: saved"] = [*report.missing, *report.unexpected, *report.renamed]
    return result


@scenario(ranks=2)
def experts_of_one_name(place: Path) -> Any:
    """Experts on a sub-mesh for each rank: equal or different values under one name."""
    meshes = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])]
    result = {}
    for name, value in {"equal": 3.0, "different": float(dist.get_rank())}.items():
        model = nn.Module()
        held = DTensor.from_local(torch.full((2, 2), value), meshes[dist.get_rank()], [Shard(0)])
        model.expert = nn.Parameter(held)
        for style in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            path = place / f"{name}-{style}"
            result[f"{name} {style}"] = attempt(
                lambda path=path, model=model, style=style: save_state(path, model, state_dict_type=style)  # type: ignore[misc]
            )
        result[f"{name} whole"] = attempt(lambda model=model: get_state_dict(model))  # type: ignore[misc]
        result[f"{name} export"] = attempt(lambda name=name, model=model: save_model(model, place / f"{name}-export"))  # type: ignore[misc]
    return nothing_left(place, result)


@scenario(ranks=2)
def extra_state(place: Path) -> Any:
    """Extra state under wrappers of all kinds."""
    result = {}
    for style in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        for name, wrap in WRAPPERS.items():
            for inside in ("", " with checkpoint_wrapper"):
                inner, found = WithExtra(4, 4), WithExtra(4, 4)
                inner.extra = {"scale": 3, "by": {"a": [1, 2]}}
                inner.register_buffer("my_extra_state", torch.tensor([4.0]))
                model = wrap(nn.Sequential(checkpoint_wrapper(inner) if inside else inner, nn.Linear(4, 4)))
                path = place / f"{name}{inside} {style}"
                save_state(path, model, state_dict_type=cast(Any, style), durable=False)
                inner.get_buffer("my_extra_state").zero_()
                load_state(path, model)
                bare = nn.Sequential(found, nn.Linear(4, 4))
                found.register_buffer("my_extra_state", torch.zeros(1))
                report = load_state(path, bare)
                buffers = [inner.get_buffer("my_extra_state").item(), found.get_buffer("my_extra_state").item()]
                row: tuple[Any, ...] = (inner.found, found.found, buffers, [*report.missing, *report.unexpected])
                whole = get_state_dict(model)
                if whole:
                    bare.load_state_dict(whole, strict=True)
                    row += (found.found,)
                result[path.name] = row
    return result


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = wrap(nn.Linear(4, 4))
        self.b = self.a

    def forward(self, batch: Tensor) -> Tensor:
        return cast(Tensor, self.b(self.a(batch)))


@scenario(ranks=2)
def odd_fsdp1_models(place: Path) -> Any:
    """A wrapped module under two names, and parameters without elements."""
    shared = fsdp1(Shared(fsdp1))
    plain = Shared(lambda module: module)
    whole = get_state_dict(shared)
    result: dict[str, Any] = {"names": sorted(whole), "plain names": sorted(plain.state_dict())}
    save_state(place / "shared", shared, durable=False)
    save_state(place / "plain", plain, process_group=None, durable=False)
    weight = plain.a.get_parameter("weight")
    wanted = weight.detach().clone()
    nn.init.zeros_(weight)
    load_state(place / "shared", plain)
    result["shared into plain"] = torch.equal(weight, wanted)
    with torch.no_grad():
        for param in shared.parameters():
            param.zero_()
    load_state(place / "plain", shared)
    found = get_state_dict(shared)
    result["plain into shared"] = torch.equal(found["b.weight"], wanted) if found else True
    empty = nn.Linear(2, 2)
    empty.none = nn.Parameter(torch.zeros(0, 3))
    model = fsdp1(empty)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = get_state_dict(model)
    save_state(place / "empty", model, optimizer, durable=False)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_state(place / "empty", model, optimizer)
    after = get_state_dict(model)
    result["empty"] = {name: (tuple(after[name].shape), torch.equal(after[name], before[name])) for name in before}
    return result


@scenario(ranks=2)
def choosing_from_flat_parameters(place: Path) -> Any:
    """Options that flat parameters have no names for."""
    model = fsdp1(nn.Sequential(fsdp1(nn.Linear(2, 2)), fsdp1(nn.Linear(2, 2))))
    save_state(place / "run", model, state_dict_type="LOCAL_STATE_DICT", durable=False)
    before = [local(param) for param in model.parameters()]
    choices: dict[str, dict[str, Any]] = {
        "include": {"include": ["1.*"]}, "exclude": {"exclude": ["1.*"]}, "resize": {"resize": "grow"},
    }  # fmt: skip
    result: dict[str, Any] = {
        name: attempt(lambda options=options: load_state(place / "run", model, **options))  # type: ignore[misc]
        for name, options in choices.items()
    }
    result["same"] = all(torch.equal(local(now), then) for now, then in zip(model.parameters(), before, strict=True))
    load_state(place / "run", model)
    return result


@scenario(ranks=2)
def pipeline(place: Path) -> Any:
    """Each rank has layers of its own."""
    rank = dist.get_rank()
    result = {}
    for style in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        torch.manual_seed(rank)
        model = nn.ModuleDict({f"layer{rank}": nn.Linear(2 + rank, 2 + rank)})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model[f"layer{rank}"](torch.randn(1, 2 + rank)).sum().backward()
        optimizer.step()
        saved = [param.detach().clone() for param in model.parameters()]
        moments = [{kind: value.clone() for kind, value in optimizer.state[p].items()} for p in model.parameters()]
        save_state(place / style, model, optimizer, state_dict_type=cast(Any, style), durable=False)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        fresh = torch.optim.Adam(model.parameters())
        report = load_state(place / style, model, fresh)
        found = [fresh.state[param] for param in model.parameters()]
        both = nn.ModuleDict({f"layer{number}": nn.Linear(2 + number, 2 + number) for number in range(2)})
        whole = load_state(place / style, both, torch.optim.Adam(both.parameters()))
        result[style] = {
            "model": all(map(torch.equal, model.parameters(), saved)),
            "moments": all(
                set(now) == set(then) and all(torch.equal(now[kind], then[kind]) for kind in then)
                for now, then in zip(found, moments, strict=True)
            ),
            "lr": fresh.param_groups[0]["lr"],
            "fresh": [*report.optimizer_fresh, *report.warnings],
            "whole": [*whole.missing, *whole.unexpected, *whole.optimizer_fresh],
            "into one": torch.equal(both[f"layer{rank}"].weight, saved[0]),  # type: ignore[arg-type]
        }
    return result


if __name__ == "__main__":
    main()
