"""Training jobs in every wrapper: trained and saved in one launch, resumed in processes that know nothing of the first.

``trained_X`` trains an uninterrupted control and a job that saves in the middle; ``resumed_X``, in another launch with
the same output folder, loads what it saved into new objects and trains on. ``moved_X_to_Y`` loads it on another number
of ranks, or in another wrapper. All that is compared comes from torch: local memory, ``full_tensor()``, FSDP's own
full state dicts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdp_ckpt import load_state, save_state
from fsdp_ckpt.errors import UsageError
from tests.dist.stage import main, scenario

HALF = 2
"""Steps before and after the save."""

WIDTH, WORDS = 8, 19


class Block(nn.Module):
    """Two linear layers; 7 rows do not share evenly among 2 or 4 ranks."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.drop(self.down(torch.relu(self.up(x))))
        return x + change


class Gain(nn.Module):
    """One element: most ranks hold nothing of it, or padding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    """Embedding, dropout, norm, buffers that change with each step, a frozen layer, and one that nothing uses."""

    def __init__(self, *, tied: bool, hidden: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(hidden), Block(hidden)])
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = Gain()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.seen: Tensor
        self.count: Tensor
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.seen.mul_(0.9).add_(torch.arange(float(WIDTH)) * self.count * 0.01)
        x = self.embed(tokens)
        x = x + self.seen.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.gain(self.norm(x + 0.1 * self.frozen(x))))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


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


# --- optimizers and schedules


Named = list[tuple[str, nn.Parameter]]


def adamw(params: Named) -> torch.optim.Optimizer:
    """Three groups that every wrapper can form, the last one empty."""
    groups = [
        {"params": [param for name, param in params if "blocks" in name], "lr": 0.01, "weight_decay": 0.1},
        {"params": [param for name, param in params if "blocks" not in name], "lr": 0.02, "betas": (0.8, 0.95)},
        {"params": [], "lr": 0.5},
    ]
    return torch.optim.AdamW(groups, foreach=False)


def sgd_momentum(params: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for _, param in params], lr=0.05, momentum=0.9)


def sgd(params: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for _, param in params], lr=0.05)


def adagrad(params: Named) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([param for _, param in params], lr=0.05, foreach=False)


def amsgrad(params: Named) -> torch.optim.Optimizer:
    return torch.optim.Adam([param for _, param in params], lr=0.01, amsgrad=True, foreach=False)


def lambda_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=20)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    warm = schedulers.LinearLR(optimizer, 0.2, total_iters=3)
    return schedulers.SequentialLR(optimizer, [warm, schedulers.ExponentialLR(optimizer, 0.7)], milestones=[3])


# --- wrappers


def plain(net: Net) -> nn.Module:
    return net


def ddp(net: Net) -> nn.Module:
    return DistributedDataParallel(net, find_unused_parameters=True)


def fsdp1(
    net: Net,
    *,
    strategy: str = "FULL_SHARD",
    orig: bool = False,
    mesh: bool = False,
    remat: bool = False,
    nested: bool = True,
    **options: Any,
) -> nn.Module:
    """Blocks and the frozen layer are units of their own; the unused layer is ignored where it can be."""
    if "HYBRID" in strategy:
        if mesh:
            options["device_mesh"] = init_device_mesh("cpu", (2, 2))
        else:
            inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
            between = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
            options["process_group"] = (inside, between)
    elif mesh:
        options["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    wrap: Callable[..., nn.Module] = partial(
        FullyShardedDataParallel,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
        device_id=torch.device("cpu"),
        **options,
    )
    if nested:
        for index, block in enumerate(net.blocks):
            net.blocks[index] = wrap(checkpoint_wrapper(block) if remat else block)
        net.gain = wrap(net.gain)  # type: ignore[assignment]
    net.frozen = wrap(net.frozen)  # type: ignore[assignment]
    return wrap(net, ignored_modules=[net.unused] if orig else None)


def offloaded(net: Net) -> nn.Module:
    """FSDP1 wants to pin what it offloads and to wait for a stream, which needs an accelerator; this serves as well."""
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    torch.cpu.Stream.synchronize = lambda _: None  # type: ignore[attr-defined]
    return fsdp1(net, cpu_offload=CPUOffload(offload_params=True))


def fsdp2(
    net: Net, *, mesh: tuple[int, ...] | None = None, dim: int = 0, remat: bool = False, **options: Any
) -> nn.Module:
    names = ("replicate", "shard") if mesh and len(mesh) == 2 else ("shard",)
    options["mesh"] = init_device_mesh("cpu", mesh or (dist.get_world_size(),), mesh_dim_names=names)
    if dim:
        options["shard_placement_fn"] = lambda param: Shard(1) if param.dim() == 2 and not param.shape[1] % 2 else None
    for index, block in enumerate(net.blocks):
        if remat:
            net.blocks[index] = checkpoint_wrapper(block)
        fully_shard(net.blocks[index], **options)
    fully_shard(net, **options)
    return net


def fsdp2_tp(net: Net, *, norms: bool) -> nn.Module:
    """FSDP2 over tensor parallelism: strided shards; what is not parallel has one copy for each of its ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    if norms:
        fully_shard(net, mesh=mesh["dp"])
    return net


def compiled(net: Net, inner: Callable[[Net], nn.Module]) -> nn.Module:
    """Only the names change: what runs is eager."""
    torch.compiler.set_stance("force_eager")
    found: Any = torch.compile(inner(net), backend="eager")
    assert all(name.startswith("_orig_mod.") for name, _ in found.named_parameters())
    return found  # type: ignore[no-any-return]


# --- jobs


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kind of job."""

    ranks: int
    wrap: Callable[[Net], nn.Module]
    optimizer: Callable[[Named], torch.optim.Optimizer] = adamw
    schedule: Callable[[torch.optim.Optimizer], Any] = lambda_lr
    style: Any = "SHARDED_STATE_DICT"
    tied: bool = False
    hidden: int = 7
    scaled: bool = True
    data_ranks: int | None = None


def _bf16() -> MixedPrecision:
    return MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


VARIANTS: dict[str, Variant] = {
    "plain": Variant(ranks=1, wrap=plain, tied=True),
    "plain_full": Variant(ranks=1, wrap=plain, optimizer=amsgrad, schedule=sequential, style="FULL_STATE_DICT"),
    "ddp": Variant(ranks=2, wrap=ddp, schedule=one_cycle),
    "ddp_full": Variant(ranks=2, wrap=ddp, optimizer=adagrad, style="FULL_STATE_DICT", tied=True),
    "full": Variant(ranks=2, wrap=fsdp1, schedule=one_cycle),
    "full_orig": Variant(ranks=2, wrap=partial(fsdp1, orig=True), schedule=sequential),
    "full_tied": Variant(ranks=2, wrap=fsdp1, optimizer=sgd_momentum, tied=True),
    "full_tied_orig": Variant(ranks=2, wrap=partial(fsdp1, orig=True, mesh=True), optimizer=amsgrad, tied=True),
    "grad_op": Variant(ranks=2, wrap=partial(fsdp1, strategy="SHARD_GRAD_OP"), optimizer=amsgrad, schedule=sequential),
    "grad_op_orig": Variant(
        ranks=2, wrap=partial(fsdp1, strategy="SHARD_GRAD_OP", orig=True), optimizer=adagrad, schedule=lambda_lr
    ),
    "no_shard": Variant(ranks=2, wrap=partial(fsdp1, strategy="NO_SHARD")),
    "no_shard_orig": Variant(
        ranks=2, wrap=partial(fsdp1, strategy="NO_SHARD", orig=True), optimizer=sgd_momentum, schedule=one_cycle
    ),
    "full_file": Variant(ranks=2, wrap=fsdp1, style="FULL_STATE_DICT"),
    "full_file_orig": Variant(ranks=2, wrap=partial(fsdp1, orig=True), style="FULL_STATE_DICT", tied=True),
    "local": Variant(ranks=2, wrap=fsdp1, style="LOCAL_STATE_DICT"),
    "local_orig": Variant(ranks=2, wrap=partial(fsdp1, orig=True), style="LOCAL_STATE_DICT", optimizer=amsgrad),
    "offload": Variant(ranks=2, wrap=offloaded, optimizer=sgd),
    "half": Variant(ranks=2, wrap=partial(fsdp1, mixed_precision=_bf16())),
    "half_orig": Variant(ranks=2, wrap=partial(fsdp1, orig=True, mixed_precision=_bf16(), remat=True)),
    "flat_root": Variant(ranks=2, wrap=partial(fsdp1, nested=False), optimizer=sgd_momentum),
    "hybrid": Variant(ranks=4, wrap=partial(fsdp1, strategy="HYBRID_SHARD"), schedule=one_cycle),
    "hybrid_orig": Variant(ranks=4, wrap=partial(fsdp1, strategy="HYBRID_SHARD", orig=True, mesh=True)),
    "zero2": Variant(ranks=4, wrap=partial(fsdp1, strategy="_HYBRID_SHARD_ZERO2", mesh=True), optimizer=amsgrad),
    "zero2_orig": Variant(ranks=4, wrap=partial(fsdp1, strategy="_HYBRID_SHARD_ZERO2", orig=True), optimizer=adagrad),
    "fsdp2": Variant(ranks=2, wrap=fsdp2, schedule=one_cycle),
    "fsdp2_kept": Variant(ranks=2, wrap=partial(fsdp2, reshard_after_forward=False), tied=True, schedule=sequential),
    "fsdp2_columns": Variant(ranks=2, wrap=partial(fsdp2, dim=1), optimizer=amsgrad),
    "fsdp2_half": Variant(
        ranks=2,
        wrap=partial(fsdp2, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), remat=True),
        optimizer=sgd_momentum,
    ),
    "fsdp2_offload": Variant(
        ranks=2, wrap=partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)), optimizer=adagrad
    ),
    "fsdp2_file": Variant(ranks=2, wrap=fsdp2, style="FULL_STATE_DICT"),
    "fsdp2_compiled": Variant(ranks=2, wrap=partial(compiled, inner=fsdp2), optimizer=sgd),
    "full_compiled": Variant(ranks=2, wrap=partial(compiled, inner=partial(fsdp1, orig=True)), optimizer=sgd_momentum),
    "fsdp2_wide": Variant(ranks=4, wrap=fsdp2),
    "hsdp": Variant(ranks=4, wrap=partial(fsdp2, mesh=(2, 2)), schedule=sequential),
    "tp": Variant(ranks=4, wrap=partial(fsdp2_tp, norms=True), hidden=18, scaled=False, data_ranks=2),
    "tp_file": Variant(
        ranks=4, wrap=partial(fsdp2_tp, norms=True), hidden=18, scaled=False, data_ranks=2, style="FULL_STATE_DICT"
    ),
}

MOVES = [
    ("full", "solo"), ("full", "fsdp2_wide"), ("full_orig", "solo"), ("full_tied", "full_tied_orig"),
    ("fsdp2", "solo"), ("fsdp2", "fsdp2_wide"), ("fsdp2", "full_orig"), ("fsdp2", "odd"), ("full_orig", "odd"),
    ("fsdp2_file", "hsdp"), ("ddp", "hsdp"), ("hsdp", "full"), ("hsdp", "fsdp2"), ("hybrid", "full_orig"),
    ("hybrid_orig", "fsdp2"), ("zero2", "plain_full"), ("fsdp2_columns", "zero2"), ("no_shard", "fsdp2"),
    ("full_file", "fsdp2"), ("grad_op", "fsdp2_columns"), ("plain", "fsdp2_tied"), ("hybrid", "hybrid_orig"),
    ("tp", "tp_flat"), ("fsdp2_wide", "full"),
]  # fmt: skip
"""From and to; some only load."""

TARGETS = VARIANTS | {
    "solo": Variant(ranks=1, wrap=plain),
    "odd": Variant(ranks=3, wrap=fsdp2),
    "fsdp2_tied": Variant(ranks=2, wrap=fsdp2, tied=True),
    "tp_flat": Variant(ranks=2, wrap=fsdp2, hidden=18),
}


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
            found[f"model {name}"] = _digest(tensor)
        for number, group in enumerate(self.optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                for kind, value in sorted(self.optimizer.state.get(param, {}).items()):
                    if not (isinstance(value, Tensor) and kind != "step" and not value.numel()):
                        found[f"state {number} {index} {kind}"] = _digest(value)
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
    return _digest(value) if isinstance(value, Tensor) else value


def _digest(value: Any) -> Any:
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


def _trained(variant: Variant, place: Path) -> Any:
    control = Job.build(variant, 1)
    losses = control.train(2 * HALF)
    end = control.fingerprint()  # draws from the generators
    job = Job.build(variant, 1)
    begun = job.train(HALF)
    job.evaluate()
    save_state(
        place / "step-2", **job.state(), step=2, values={"seen": [1, 2]}, state_dict_type=variant.style, durable=False
    )
    found = {
        "control": losses,
        "end": end,
        "saved": gathered(job),
        "begun": begun,
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in _groups(job)],
    }
    found["went_on"] = job.train(HALF)
    found["went_on_end"] = job.fingerprint()
    if _name_of(variant) in {old for old, _ in MOVES}:
        mover = Job.build(variant, 3)
        load_state(place / "step-2", **mover.state())
        mover.common_step()
        found["stepped"] = gathered(mover)
    return found


def _groups(job: Job) -> Iterator[dict[str, Any]]:
    yield from job.optimizer.param_groups


def _name_of(variant: Variant) -> str:
    return next(name for name, known in VARIANTS.items() if known is variant)


def _resumed(variant: Variant, place: Path) -> Any:
    """Into objects that have run already: gradients, moments and a gathered root must not survive."""
    job = Job.build(variant, 2)
    if len(_name_of(variant)) % 2:
        job.train(1)
    before = job.evaluate()
    report = load_state(place.parents[1] / f"trained_{_name_of(variant)}" / "place" / "step-2", **job.state())
    return {
        "moved": before != job.evaluate(),
        "loaded": gathered(job),
        "losses": job.train(HALF),
        "end": job.fingerprint(),
        "step": report.step,
        "values": dict(report.values),
        "fits": (list(report.missing), list(report.unexpected), dict(report.cast)),
        "rng": report.rng,
        "data": report.data,
    }


def _moved(old: str, variant: Variant, place: Path) -> Any:
    before = VARIANTS[old]
    variant = replace(variant, hidden=before.hidden, optimizer=before.optimizer, schedule=before.schedule)
    job = Job.build(variant, 4)
    source = place.parents[1] / f"trained_{old}" / "place" / "step-2"
    state = job.state()
    if not before.scaled:
        state.pop("scaler", None)
    report = load_state(source, **state, positions="fresh")
    loaded = gathered(job)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in job.optimizer.param_groups]
    job.common_step()
    return {"loaded": loaded, "stepped": gathered(job), "groups": groups, "warnings": list(report.warnings)}


# --- several models


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
    found: list[Any] = [_digest(param) for model in models for param in model.parameters()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                found.append({kind: _digest(value) for kind, value in state.items() if torch.as_tensor(value).numel()})
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


for _name, _variant in VARIANTS.items():
    for _stage, _function in (("trained", _trained), ("resumed", _resumed)):
        _play: Any = partial(_function, _variant)
        _play.__name__ = f"{_stage}_{_name}"
        scenario(ranks=_variant.ranks)(_play)
for _old, _new in MOVES:
    _play = partial(_moved, _old, TARGETS[_new])
    _play.__name__ = f"moved_{_old}_to_{_new}"
    scenario(ranks=TARGETS[_new].ranks)(_play)


if __name__ == "__main__":
    main()
