"""Kinds of models, optimizers and failures on real ranks: what each rank gets back, or what all of them raise."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_ckpt.train.save as save_module
from fsdp_ckpt import Checkpointer, Hooks, get_state_dict, load_state, save_model, save_state
from tests.dist.stage import main, scenario

CPU = torch.device("cpu")


def fsdp1(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=CPU, use_orig_params=True, **options)


def fsdp2(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"FSDP1": fsdp1, "FSDP2": fsdp2}


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call raised, and after how many seconds."""
    begun = time.monotonic()
    kind, message, hint = "nothing", "", None
    try:
        call()
    except Exception as error:  # noqa: BLE001 - this is what is looked at
        kind, message, hint = type(error).__name__, str(error), getattr(error, "hint", None)
    return {"kind": kind, "message": message, "hint": hint, "seconds": time.monotonic() - begun}


def nothing_left(place: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Add what is in the folder when all ranks are done."""
    dist.barrier()
    return found | {"left": sorted(path.name for path in place.iterdir())}


def local(value: Any) -> Tensor:
    """This rank's elements."""
    held: Any = value.detach()
    return cast(Tensor, held.to_local() if isinstance(held, DTensor) else held).clone()


class Plain:
    """An object with a state."""

    def __init__(self, state: Any) -> None:
        self.state: Any = state

    def state_dict(self) -> Any:
        return self.state() if callable(self.state) else self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


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
def sharded_objects(place: Path) -> Any:
    """Shards among the objects, of which one rank's state is stored."""
    result = {}
    for name, wrap in WRAPPERS.items():
        model = wrap(nn.Linear(4, 4))
        result[name] = attempt(lambda model=model: save_state(place / name, objects={"ema": model}))  # type: ignore[misc]
        within = nn.Sequential(nn.Linear(4, 4), wrap(nn.Linear(4, 4)))
        result[f"{name} within"] = attempt(lambda model=within: save_state(place / name, objects={"ema": model}))  # type: ignore[misc]
    model = fsdp2(nn.Linear(4, 4))
    state: Any = {"list": [{"weight": model.weight}]}
    result["DTensor"] = attempt(lambda: save_state(place / "d", objects={"own": Plain(state)}))
    flat = fsdp1(nn.Linear(4, 4))
    with FullyShardedDataParallel.state_dict_type(flat, StateDictType.SHARDED_STATE_DICT):
        shards = flat.state_dict()
    result["ShardedTensor"] = attempt(lambda: save_state(place / "s", objects={"own": Plain(shards)}))
    return nothing_left(place, result)


@scenario(ranks=2)
def a_collective_state_dict(place: Path) -> Any:
    """An object whose state_dict gathers."""

    def gathered() -> dict[str, list[int]]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, dist.get_rank() * 10)
        return {"all": found}

    save_state(place / "run", objects={"own": Plain(gathered)}, durable=False)
    own = Plain(None)
    load_state(place / "run", objects={"own": own})
    return own.state


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
        result[name] = attempt(lambda m=sharded, o=optimizer: save_state(place / name, m, o))  # type: ignore[misc]
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


class Raises(Hooks):
    """Raises on one rank when all is done."""

    def after_save(self, report: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("upload failed")

    def after_load(self, report: Any) -> None:
        if dist.get_rank() == 0:
            raise KeyError("lost")


@scenario(ranks=2)
def failures_beside_the_data(place: Path) -> Any:
    """Errors of hooks, of what becomes of gathered tensors, and of pickling."""
    model = fsdp2(nn.Linear(4, 4))
    run = Checkpointer(place / "hooks", model, keep=1, hooks=[Raises()])
    result = {"after_save": attempt(lambda: run.save(1)), "after_load": attempt(run.resume)}

    def full() -> None:
        save_state(place / "full", model, state_dict_type="FULL_STATE_DICT")

    def broken(*arguments: Any, **options: Any) -> Any:
        raise OSError(5, "Input/output error")

    with mock.patch("fsdp_ckpt.train.full.write_tensor", broken):
        result["writing a full file"] = attempt(full)
    with mock.patch("fsdp_ckpt.train.export.write_tensor", broken):
        result["writing a model"] = attempt(lambda: save_model(model, place / "model"))
    real = torch.empty

    def empty(*arguments: Any, **options: Any) -> Any:
        if arguments[0] == (4, 4) and dist.get_rank() == 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*arguments, **options)

    with mock.patch("torch.empty", empty):
        result["no memory"] = attempt(lambda: get_state_dict(model))
    odd = torch.optim.SGD([{"params": model.parameters(), "option": lambda: None}], lr=0.1)
    for style in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        result[f"option {style}"] = attempt(
            lambda style=style: save_state(place / "odd", model, odd, state_dict_type=style)  # type: ignore[misc]
        )
    own = Plain({"function": lambda: None} if dist.get_rank() == 0 else {})
    result["object"] = attempt(lambda: save_state(place / "object", objects={"own": own}))
    feed = Plain({"function": lambda: None} if dist.get_rank() == 1 else {})
    result["data loader"] = attempt(lambda: save_state(place / "feed", dataloader=feed))
    return nothing_left(place, result)


class Skips(Hooks):
    """Leaves parts out."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def before_save(self, event: Any) -> None:
        for part in self.parts:
            event.skip(part)

    before_load = before_save


@scenario(ranks=2)
def skipping(place: Path) -> Any:
    """Parts left out by hooks on every rank, also where the world has grown."""
    model = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    skips = [Skips("scaler", "random_states")]
    report = save_state(place / "less", model, scaler=scaler, hooks=skips, durable=False)
    result: dict[str, Any] = {"files": sorted(report.files)}
    save_state(place / "all", model, scaler=scaler, durable=False)
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        save_state(place / "one", model, scaler=scaler, process_group=group, durable=False)
    dist.barrier()
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    other.scale(torch.ones(()))
    torch.manual_seed(77)
    before = torch.get_rng_state()
    for name in ("all", "one"):
        load_state(place / name, model, scaler=other, rng=True, hooks=skips)
        result[name] = (other.get_scale(), torch.equal(torch.get_rng_state(), before))
    load_state(place / "one", model, scaler=other, rng=True)
    result["loaded"] = (other.get_scale(), torch.equal(torch.get_rng_state(), before))
    return result


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


@scenario(ranks=2)
def two_processes_at_one_path(place: Path) -> Any:
    """The second one comes while the first is writing."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    begun, ended = place / "begun", place / "ended"

    def wait(path: Path) -> None:
        limit = time.monotonic() + 10
        while not path.exists():
            assert time.monotonic() < limit
            time.sleep(0.005)

    def save() -> None:
        save_state(place / "run", model, step=rank, process_group=groups[rank], durable=False)

    if rank == 0:
        real = save_module._write

        def slow(*arguments: Any, **options: Any) -> Any:
            begun.touch()
            wait(ended)
            return real(*arguments, **options)

        with mock.patch.object(save_module, "_write", slow):
            result = attempt(save)
    else:
        wait(begun)
        result = attempt(save)
        ended.touch()
    dist.barrier()
    return result | {"step": load_state(place / "run", model, process_group=groups[rank]).step}


if __name__ == "__main__":
    main()
