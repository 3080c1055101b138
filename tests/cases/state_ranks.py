"""Play the save_state and load_state halves of ../shared/cases.md: `python -m tests.cases.state_ranks OUT`.

What a later job loads stays in the `place` of the scenario that saved it; `AFTER` names those that are played by new
processes, when the ones of the first round are gone.
"""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # what every forked rank would import anew
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing import start_processes
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_ckpt
from fsdp_ckpt import LoadReport, SaveReport  # noqa: F401 - lazy: imported before the ranks are forked
from fsdp_ckpt.train.model_plan import Resize
from fsdp_ckpt.train.shards import ShardWriter
from tests.cases import models
from tests.cases import recipes as r
from tests.dist import stage
from tests.dist.stage import Raised, scenario

M = TypeVar("M", bound=nn.Module)

AFTER = (
    "p28_after", "p33_resume", "p34_resume", "p39_three", "p39_four", "p40_two", "p40_four", "p40_six", "p41_two",
    "p41_four",
)  # fmt: skip
"""Scenarios that load what an earlier one saved."""


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


# Two ranks ------------------------------------------------------------------------------------------------------------


@scenario(ranks=2)
def p17(place: Path) -> tuple[LoadReport, dict[str, Tensor]]:
    """A bf16 checkpoint into an fp32 model."""
    saved = shard(seeded(1).bfloat16())
    fsdp_ckpt.save_state(place / "ck", saved, rng=False)
    model = shard(blank(models.Mlp()))
    report = fsdp_ckpt.load_state(place / "ck", model)
    return report, state_of(model)


@scenario(ranks=2)
def p25(place: Path) -> tuple[LoadReport, dict[str, Tensor], Raised | None]:
    """A run whose newest checkpoints are not whole."""
    for step in (100, 200, 400):
        model = models.Mlp()
        with torch.no_grad():
            model.up.weight.add_(step)
        dcp.save({"model": shard(model).state_dict()}, checkpoint_id=place / f"step-{step}")
    if dist.get_rank() == 0:
        (place / "step-200/.metadata").rename(place / "step-200/.metadata.tmp")
        (place / "step-300").mkdir()
        for file in (place / "step-400").glob("*.distcp"):
            file.unlink()
    dist.barrier()
    model = shard(blank(models.Mlp()))
    asked = caught(lambda: fsdp_ckpt.load_state(place / "step-200", model))
    assert all(bool((value == -1).all()) for value in state_of(model).values()), "changed by a load that was refused"
    report = fsdp_ckpt.load_state(place, model)
    return report, state_of(model), asked


@scenario(ranks=2)
def p32_full_disk(place: Path) -> dict[str, Any]:
    """The disk is full for rank 1, once over a good checkpoint and once at a new place."""
    model = shard(models.Mlp())
    fsdp_ckpt.save_state(place / "ck", model, AdamW(model.parameters()), step=1)
    with torch.no_grad():
        model.up.weight.add_(1)
    found: dict[str, Any] = {}
    for name in ("ck", "new"):
        begun = time.monotonic()
        with _full_disk() if dist.get_rank() == 1 else mock.MagicMock():
            found[name] = caught(lambda name=name: fsdp_ckpt.save_state(place / name, model, step=2))  # type: ignore[misc]
        found[f"{name} took"] = time.monotonic() - begun
    dist.barrier()
    found["there"] = sorted(path.name for path in place.iterdir())
    again = shard(blank(models.Mlp()))
    found["step"] = fsdp_ckpt.load_state(place / "ck", again).step
    found["state"] = state_of(again)
    fsdp_ckpt.save_state(place / "new", model, step=2)  # all ranks are still in step with each other
    return found


@contextmanager
def _full_disk() -> Iterator[None]:
    """Let this process write nothing."""

    def refuse(*_: Any) -> int:
        raise OSError(28, os.strerror(28))

    with mock.patch("os.pwrite", refuse), mock.patch("os.write", refuse):
        yield


class Traffic(TorchDispatchMode):
    """Counts the bytes of tensors that collectives and sends of this rank touch, whatever calls them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensor_bytes = 0
        self.object_bytes = 0
        self._in_object = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"):
            num_bytes = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            if self._in_object:
                self.object_bytes += num_bytes
            else:
                self.tensor_bytes += num_bytes
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count; what is pickled into tensors (statuses, places of boxes) is kept apart."""
        with ExitStack() as stack:
            for name in ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"):
                stack.enter_context(mock.patch.object(dist, name, self._marked(getattr(dist, name))))
            stack.enter_context(self)
            yield

    def _marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._in_object = True
            try:
                return function(*args, **kwargs)
            finally:
                self._in_object = False

        return run


@scenario(ranks=2)
def p32_traffic(place: Path) -> dict[str, int]:
    """What travels between ranks, and what a save needs of memory beyond the shards that are there anyway."""
    rows, grid = 4096 // 2, mesh()
    large = nn.ParameterDict(
        {name: nn.Parameter(DTensor.from_local(torch.full((rows, 4096), 1.0), grid, [Shard(0)])) for name in "ab"}
    )
    fsdp_ckpt.save_state(place / "warm", shard(models.Mlp()))
    sharded, whole = Traffic(), Traffic()
    before = _memory("VmRSS", reset_peak=True)
    fsdp_ckpt.save_state(place / "large", large, rng=False)
    extra = _memory("VmHWM") - before
    before = _memory("VmRSS", reset_peak=True)
    assert torch.full((2 * rows, 4096), 2.0).sum() > 0  # as large as this rank's shard
    extra_of_copy = _memory("VmHWM") - before
    with sharded.counting():
        fsdp_ckpt.save_state(place / "large", large, rng=False, durable=False)
    model = shard(models.Mlp())
    with whole.counting():
        fsdp_ckpt.save_state(place / "full", model, rng=False, state_dict_type="FULL_STATE_DICT")
    size = sum(file.stat().st_size for file in (place / "large").rglob("*.distcp"))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place / "large")
    return {
        "tensor bytes": sharded.tensor_bytes,
        "object bytes": sharded.object_bytes,
        "tensor bytes of a full save": whole.tensor_bytes,
        "extra memory": extra,
        "extra memory of a copy": extra_of_copy,
        "size": size,
    }


def _memory(field: str, *, reset_peak: bool = False) -> int:
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


@scenario(ranks=2)
def p33_save(place: Path) -> dict[str, Any]:
    """Two steps and a save; and a control of four steps."""
    model = shard(seeded(1))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for number in (1, 2):
        train(model, optimizer, number)
    fsdp_ckpt.save_state(place / "ck", model, optimizer, step=2)
    found = {"moments": moments_of(model, optimizer), "state": state_of(model)}
    for number in (3, 4):  # saving has changed nothing
        train(model, optimizer, number)
    control = shard(seeded(1))
    optimizer = AdamW(control.parameters(), lr=1e-3)
    for number in (1, 2, 3, 4):
        train(control, optimizer, number)
    return {**found, "went on": state_of(model), "control": state_of(control)}


@scenario(ranks=2)
def p33_resume(place: Path) -> dict[str, Any]:
    """New processes, fresh model, fresh optimizer."""
    model = shard(seeded(2))
    optimizer = AdamW(model.parameters(), lr=0.5)
    report = fsdp_ckpt.load_state(of(place, "p33_save") / "ck", model, optimizer)
    found = {"moments": moments_of(model, optimizer), "state": state_of(model), "step": report.step}
    for number in (3, 4):
        train(model, optimizer, number)
    return {**found, "end": state_of(model), "fresh": list(report.optimizer_fresh)}


@scenario(ranks=2)
def p34_save(place: Path) -> None:
    """Three groups with a scheduler, so that lr and initial_lr differ; by us and by stock torch."""
    model = shard(seeded(1))
    optimizer = three_groups(model, fresh=False)
    scheduler = LambdaLR(optimizer, halved())
    train(model, optimizer, 1)
    scheduler.step()
    fsdp_ckpt.save_state(place / "ours", model, optimizer)
    r.p34(place / "stock", mesh())


@scenario(ranks=2)
def p34_resume(place: Path) -> dict[str, list[dict[str, Any]]]:
    """The same number of ranks; a step works afterwards."""
    found = {}
    for kind in ("ours", "stock"):
        model = shard(seeded(2))
        optimizer = three_groups(model, fresh=True)
        fsdp_ckpt.load_state(of(place, "p34_save") / kind, model, optimizer)
        found[kind] = groups_of(model, optimizer)
        train(model, optimizer, 2)
    return found


class Partly(nn.Module):
    """P36: a layer that is used and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.inactive = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.a(x)
        return found


@scenario(ranks=2)
def p36_inactive(place: Path) -> dict[str, Any]:
    """(a) A parameter without a gradient."""
    model = shard(Partly())
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    fsdp_ckpt.save_state(place / "ck", model, optimizer)
    saved = moments_of(model, optimizer)
    model = shard(Partly())
    optimizer = AdamW(model.parameters())
    report = fsdp_ckpt.load_state(place / "ck", model, optimizer)
    loaded = moments_of(model, optimizer)
    train(model, optimizer, 2)
    return {"saved": saved, "loaded": loaded, "fresh": list(report.optimizer_fresh)}


@scenario(ranks=2)
def p36_frozen(place: Path) -> dict[str, Any]:
    """(b) A parameter that is frozen later: still with the optimizer, or left out of it."""
    model = shard(seeded(1))
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    fsdp_ckpt.save_state(place / "ck", model, optimizer)
    found: dict[str, Any] = {"saved": moments_of(model, optimizer)}
    for kind in ("kept", "left out"):
        model = seeded(2)
        model.up.weight.requires_grad_(False)
        shard(model)
        optimizer = AdamW([value for value in model.parameters() if kind == "kept" or value.requires_grad])
        report = fsdp_ckpt.load_state(place / "ck", model, optimizer)
        found[kind] = moments_of(model, optimizer)
        found[f"{kind} report"] = report
        train(model, optimizer, 2)
    return found


@scenario(ranks=2)
def p36_gradients(place: Path) -> dict[str, Any]:
    """(c) A fresh optimizer whose parameters have gradients."""
    model = shard(seeded(1))
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    fsdp_ckpt.save_state(place / "ck", model, optimizer)
    saved = moments_of(model, optimizer)
    model = shard(seeded(2))
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    before = {name: full(value.grad) for name, value in model.named_parameters()}
    fsdp_ckpt.load_state(place / "ck", model, optimizer)
    after = {name: full(value.grad) for name, value in model.named_parameters()}
    return {"saved": saved, "loaded": moments_of(model, optimizer), "before": before, "after": after}


@scenario(ranks=2)
def p36_stateless(place: Path) -> dict[str, Any]:
    """(d) An optimizer without state; and one that has taken no step yet."""
    model = shard(seeded(1))
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    fsdp_ckpt.save_state(place / "sgd", model, optimizer)
    found: dict[str, Any] = {"saved": optimizer.state_dict()["state"]}
    fresh = SGD(model.parameters(), lr=9.0)
    fsdp_ckpt.load_state(place / "sgd", model, fresh)
    found |= {"loaded": fresh.state_dict()["state"], "lr": fresh.param_groups[0]["lr"]}
    adam = AdamW(model.parameters(), lr=0.25)
    fsdp_ckpt.save_state(place / "adam", model, adam)
    found["saved before a step"] = adam.state_dict()["state"]
    stepped = AdamW(model.parameters(), lr=9.0)
    train(model, stepped, 2)
    fsdp_ckpt.load_state(place / "adam", model, stepped)
    return {**found, "loaded from before a step": stepped.state_dict()["state"]}


@scenario(ranks=2)
def p37(place: Path) -> dict[str, Any]:
    """Three layouts of one optimizer, none of them with a model."""
    r.p37(place, mesh())
    found: dict[str, Any] = {}
    for layout in ("index", "name", "flat"):
        model = shard(models.Mlp())
        optimizer = two_groups(model, (9.0, 8.0))
        found[f"{layout}, strict"] = caught(lambda: fsdp_ckpt.load_state(place / layout, model, optimizer))  # noqa: B023
        fsdp_ckpt.load_state(place / layout, model, optimizer, exclude=["*"])
        found[layout] = moments_of(model, optimizer), groups_of(model, optimizer)
        found[f"{layout}, model"] = state_of(model)
        r.step(model, optimizer)
    return found


@scenario(ranks=2)
def p39_save(place: Path) -> dict[str, Any]:
    """Two ranks save after two steps and take a third."""
    model = shard(seeded(1, 5, 7))
    optimizer = two_groups(model)
    for number in (1, 2):
        train(model, optimizer, number, 5)
    fsdp_ckpt.save_state(place / "ck", model, optimizer, step=2)
    return resumed(model, optimizer)


def resumed(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return everything about P39's training after step 2, and its parameters after one more."""
    found = {"state": state_of(model), "moments": moments_of(model, optimizer), "groups": groups_of(model, optimizer)}
    train(model, optimizer, 3, 5)
    return {**found, "third": state_of(model)}


def p39_resume(place: Path) -> dict[str, Any]:
    """Resume on any number of ranks, whose model and optimizer are fresh."""
    model = shard(seeded(2, 5, 7))
    optimizer = two_groups(model, (9.0, 8.0))
    fsdp_ckpt.load_state(of(place, "p39_save") / "ck", model, optimizer)
    return resumed(model, optimizer)


@scenario(ranks=2)
def p43(place: Path) -> dict[str, Any]:
    """Restore a schedule in two orders; the scheduler may be built anew or as one that goes on."""
    model = shard(seeded(1))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, halved())
    for number in (1, 2, 3):
        train(model, optimizer, number)
        scheduler.step()
    fsdp_ckpt.save_state(place / "ck", model, optimizer, scheduler, step=3)
    found: dict[str, Any] = {"saved": optimizer.param_groups[0]["lr"]}
    for order in ("before, goes on", "before, anew", "after"):
        model = shard(seeded(2))
        optimizer = AdamW(model.parameters(), lr=1e-3)
        if order == "after":
            scheduler = LambdaLR(optimizer, halved())
            fsdp_ckpt.load_state(place / "ck", model, optimizer, scheduler)
        else:
            fsdp_ckpt.load_state(place / "ck", model, optimizer)
            found[f"{order}: loaded"] = [optimizer.param_groups[0][name] for name in ("lr", "initial_lr")]
            if order == "before, goes on":
                scheduler = LambdaLR(optimizer, halved(), last_epoch=2)
            else:
                scheduler = LambdaLR(optimizer, halved())
                fsdp_ckpt.load_state(place / "ck", scheduler=scheduler)
        group = optimizer.param_groups[0]
        found[order] = [group["lr"], group["initial_lr"], list(scheduler.base_lrs)]
        train(model, optimizer, 4)
        scheduler.step()
        found[order].append(group["lr"])
    return found


@scenario(ranks=2)
def p44(place: Path) -> dict[str, Any]:
    """Containers as one blob and flattened."""
    r.p44(place, mesh())
    found: dict[str, Any] = {}
    for layout in ("old", "new"):
        model, extra = shard(blank(models.Mlp())), Position()
        optimizer = AdamW(model.parameters(), lr=9.0, betas=(0.1, 0.2), weight_decay=0.9)
        fsdp_ckpt.load_state(place / layout, model, optimizer, objects={"extra": extra})
        found[layout] = (
            state_of(model), moments_of(model, optimizer), groups_of(model, optimizer), extra.state
        )  # fmt: skip
    return found


class Words(nn.Module):
    """P52: an embedding with another number of rows, filled with -1."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        nn.init.constant_(self.embed.weight, -1)


@scenario(ranks=2)
def p52(place: Path) -> dict[str, Any]:
    """A vocabulary of 12 into 10 and 16 rows, with optimizer state."""
    r.p52(place / "stock", mesh())
    model = shard(models.Embed())
    optimizer = AdamW(model.parameters())
    model.embed.weight.grad = model.embed.weight.detach() / 100 - 0.1
    optimizer.step()
    fsdp_ckpt.save_state(place / "ck", model, optimizer)
    found: dict[str, Any] = {"saved": (state_of(model), moments_of(model, optimizer))}
    resizes: tuple[Resize, ...] = (None, "grow", "truncate")
    for rows in (10, 16):
        for resize in resizes:
            words = shard(Words(rows))
            fresh = AdamW(words.parameters(), lr=9.0)
            error = caught(lambda: fsdp_ckpt.load_state(place / "ck", words, fresh, resize=resize))  # noqa: B023
            report = None if error else fsdp_ckpt.load_state(place / "stock", shard(Words(rows)), resize=resize)
            found[f"{rows} {resize}"] = error, state_of(words), moments_of(words, fresh), report
    return found


def layers(count: int) -> nn.Sequential:
    """Return P55's layers, sharded and filled with -1."""
    return shard(blank(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))))


@scenario(ranks=2)
def p55(place: Path) -> dict[str, Any]:
    """A checkpoint of two layers into three and into one."""
    saved = {f"{number}.weight": torch.arange(16.0).reshape(4, 4) + 100 * number for number in range(2)}
    dcp.save({"model": r.spread(saved, mesh())}, checkpoint_id=place / "ck")
    found: dict[str, Any] = {}
    for count in (3, 1):
        model = layers(count)
        refused = caught(lambda: fsdp_ckpt.load_state(place / "ck", model))  # noqa: B023
        found[f"{count} strict"] = refused, state_of(model)
        report = fsdp_ckpt.load_state(place / "ck", model, strict=False)
        found[str(count)] = report, state_of(model)
    return found


@scenario(ranks=2)
def p56(place: Path) -> dict[str, Any]:
    """A buffer that is in no checkpoint: garbage after to_empty, or as the module made it."""
    fsdp_ckpt.save_state(place / "ck", shard(models.Buffers()), rng=False)
    with torch.device("meta"):
        empty = models.Buffers()
    shard(empty)
    on_meta = caught(lambda: fsdp_ckpt.load_state(place / "ck", empty))
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for value in (*empty.parameters(), *empty.buffers()):
            value.fill_(float("nan") if value.is_floating_point() else -1)
    first = fsdp_ckpt.load_state(place / "ck", empty)
    normal = shard(blank(models.Buffers()))
    second = fsdp_ckpt.load_state(place / "ck", normal)
    return {
        "on meta": on_meta,
        "empty": (first, state_of(empty)),
        "normal": (second, state_of(normal), full(dict(normal.named_buffers())["np_buf"])),
    }


# Four ranks -----------------------------------------------------------------------------------------------------------


@scenario(ranks=4)
def p05(place: Path) -> dict[str, dict[str, Tensor]]:
    """Fewer rows than ranks, from both forms."""
    r.p05(place, mesh())
    found = {}
    for form in ("fsdp2", "fsdp1"):
        model = shard(blank(models.Odd()))
        fsdp_ckpt.load_state(place / form, model)
        found[form] = state_of(model)
    fsdp_ckpt.save_state(place / "ours", shard(models.Odd()))
    model = shard(blank(models.Odd()))
    fsdp_ckpt.load_state(place / "ours", model)
    return {**found, "ours": state_of(model)}


@scenario(ranks=4)
def p06(place: Path) -> dict[str, Any]:
    """One row for four ranks, from a full file."""
    value = torch.arange(17.0).view(1, 17)
    if dist.get_rank() == 0:
        torch.save({"weight": value}, place / "model.pt")
        save_file({"weight": value}, place / "model.safetensors")
    dist.barrier()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = {}
    for file in ("model.pt", "model.safetensors"):
        for target in ("1-D", "2-D"):
            model = nn.Module()
            model.weight = nn.Parameter(torch.full((1, 17), -1.0))
            if target == "2-D":
                model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), grid["tp"], [Replicate()]))
                fully_shard(model, mesh=grid["dp"])
            else:
                shard(model)
            fsdp_ckpt.load_state(place / file, model)
            weight: Any = model.weight
            found[f"{file} {target}"] = (
                str(weight.placements), tuple(weight.to_local().shape), full(weight)
            )  # fmt: skip
    return found


@scenario(ranks=4)
def p08(place: Path) -> dict[str, Any]:
    """Two replicas of two shards are saved as one copy."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "sh"))
    model = models.Mlp()
    fully_shard(model, mesh=grid)
    weight: Any = model.up.weight
    fsdp_ckpt.save_state(place / "ck", model, rng=False)
    again = models.Mlp()
    fully_shard(blank(again), mesh=grid)
    fsdp_ckpt.load_state(place / "ck", again)
    return {"local": tuple(weight.to_local().shape), "loaded": state_of(again)}


@scenario(ranks=4)
def p28_first(place: Path) -> None:
    """The first save, by four ranks."""
    fsdp_ckpt.save_state(place / "D", shard(models.Mlp()), step=1)


@scenario(ranks=4)
def p40_save(place: Path) -> None:
    """Each rank's position in its data."""
    position = Position({"pos": 10 * (dist.get_rank() + 1)})
    model = shard(seeded(1))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 1)
    fsdp_ckpt.save_state(place / "ours", model, optimizer, dataloader=position)
    r.p40(place / "stock", mesh())


def p40_load(place: Path) -> dict[str, Any]:
    """Load the positions on any number of ranks; where that is refused, again without them."""
    found: dict[str, Any] = {}
    for kind in ("ours", "stock"):
        folder = of(place, "p40_save") / kind
        model, position = shard(blank(models.Mlp())), Position()
        optimizer = AdamW(model.parameters(), lr=9.0) if kind == "ours" else None
        found[f"{kind} refused"] = caught(lambda: fsdp_ckpt.load_state(folder, model, optimizer, dataloader=position))  # noqa: B023
        found[f"{kind} after that"] = state_of(model), len(optimizer.state) if optimizer else 0, position.state
        report = fsdp_ckpt.load_state(folder, model, optimizer, dataloader=position, positions="fresh")
        found[kind] = report, state_of(model), len(optimizer.state) if optimizer else 6, position.state
    return found


def draw() -> list[list[float]]:
    """Draw three numbers of each kind."""
    return [[random.random() for _ in range(3)], list(np.random.rand(3)), torch.rand(3).tolist()]


@scenario(ranks=4)
def p41_save(place: Path) -> list[list[float]]:
    """Each rank has its own streams; return what it draws next."""
    rank, model = dist.get_rank(), shard(seeded(1))
    random.seed(100 + rank)
    np.random.seed(200 + rank)
    torch.manual_seed(300 + rank)
    fsdp_ckpt.save_state(place / "ck", model)
    return draw()


def p41_load(place: Path) -> tuple[LoadReport, list[list[float]]]:
    """Other seeds, then those of the checkpoint."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    model = shard(seeded(2))
    report = fsdp_ckpt.load_state(of(place, "p41_save") / "ck", model, rng=True)
    return report, draw()


@scenario(ranks=4)
def p39_four(place: Path) -> dict[str, Any]:
    """From two ranks to four."""
    return p39_resume(place)


@scenario(ranks=3)
def p39_three(place: Path) -> dict[str, Any]:
    """From two ranks to three."""
    return p39_resume(place)


@scenario(ranks=2)
def p40_two(place: Path) -> dict[str, Any]:
    """From four ranks to two."""
    return p40_load(place)


@scenario(ranks=4)
def p40_four(place: Path) -> dict[str, Any]:
    """Four ranks again."""
    return p40_load(place)


@scenario(ranks=6)
def p40_six(place: Path) -> dict[str, Any]:
    """From four ranks to six."""
    return p40_load(place)


@scenario(ranks=2)
def p41_two(place: Path) -> tuple[LoadReport, list[list[float]]]:
    """From four ranks to two."""
    return p41_load(place)


@scenario(ranks=4)
def p41_four(place: Path) -> tuple[LoadReport, list[list[float]]]:
    """Four ranks again."""
    return p41_load(place)


# Ranks that die -------------------------------------------------------------------------------------------------------


def p28_crash(place: Path, dying: Sequence[int]) -> Any:
    """The second save, of other values: some ranks exit after their data files are written."""
    model = models.Mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    shard(model)
    close = ShardWriter.close

    def die(writer: ShardWriter) -> Any:
        share = close(writer)
        if share.file is not None and dist.get_rank() in dying:
            assert share.size == writer._path.stat().st_size > 0
            (place / str(dist.get_rank())).touch()
            while len(os.listdir(place)) < len(dying):  # nobody may notice that another one is gone
                time.sleep(0.01)
            os._exit(9)
        return share

    with mock.patch.object(ShardWriter, "close", die):
        return caught(lambda: fsdp_ckpt.save_state(of(place, "p28_first") / "D", model, step=2))


def p28_crash_one(place: Path) -> Any:
    """Rank 1 dies."""
    return p28_crash(place, [1])


def p28_crash_all(place: Path) -> Any:
    """All ranks die."""
    return p28_crash(place, [0, 1])


def p32_absent(place: Path) -> Any:
    """Rank 1 raises before it saves, and its process ends."""
    model = shard(models.Mlp())
    if dist.get_rank() == 1:
        raise ValueError("out of data")
    begun = time.monotonic()
    error = caught(lambda: fsdp_ckpt.save_state(place / "ck", model))
    return error, time.monotonic() - begun, sorted(path.name for path in place.iterdir())


@scenario(ranks=2)
def p28_after(place: Path) -> dict[str, Any]:
    """What the crashes left; then a good save, by fewer ranks than the first one."""
    folder = of(place, "p28_first") / "D"
    model = shard(blank(models.Mlp()))
    report = fsdp_ckpt.load_state(folder, model)
    found: dict[str, Any] = {"loaded": state_of(model), "step": report.step}
    found["left"] = sorted(path.name for path in folder.parent.iterdir())
    dist.barrier()
    model = models.Mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    fsdp_ckpt.save_state(folder, shard(model), step=2)
    again = shard(blank(models.Mlp()))
    found["step again"] = fsdp_ckpt.load_state(folder, again).step
    return {**found, "again": state_of(again)}


MORTAL = (p28_crash_one, p28_crash_all, p32_absent)


def play_alone(out: Path, play: Callable[[Path], Any], *, limit_s: float = 40) -> None:
    """Play a scenario in which ranks die, on two ranks that are waited for one by one."""
    folder = out / play.__name__
    (folder / "place").mkdir(parents=True)
    context = start_processes(_mortal, (folder, play), nprocs=2, join=False, start_method="fork")
    end = time.monotonic() + limit_s
    for process in context.processes:
        process.join(max(end - time.monotonic(), 0))
        if process.is_alive():  # a hang: its outcome is missing, which fails the test
            process.kill()
            process.join()


def _mortal(rank: int, folder: Path, play: Callable[[Path], Any]) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(35, exit=True)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        value = play(folder / "place")
    except Exception as error:  # noqa: BLE001 - the scenario's outcome
        value = Raised(type(error).__name__, str(error), traceback.format_exc())
    torch.save(value, folder / f"rank_{rank}.pt")
    os._exit(0 if value is None else 1)  # without leaving the process group, as a job that ends by an exception


def main() -> None:
    """Play everything: a first round, the deaths, and what new processes load then."""
    out, everything = sys.argv[1], list(stage._SCENARIOS)
    sys.argv[1:] = [out, *(name for name in everything if name not in AFTER)]
    stage.main()
    for play in MORTAL:
        play_alone(Path(out), play)
    sys.argv[1:] = [out, *AFTER]
    stage.main()


if __name__ == "__main__":
    main()
