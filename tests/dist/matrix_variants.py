"""The matrix of training jobs: every wrapper with an optimizer, a schedule and a kind of checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.dist.matrix_net import Net

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


# --- variants


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
