"""FSDP1: ``FullyShardedDataParallel`` around units, inner ones first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    ShardingStrategy,
)

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.train.sharding.precision import for_fsdp1
from fsdp_ckpt.train.sharding.recomputation import replace_module
from fsdp_ckpt.train.sharding.tensors import Held
from fsdp_ckpt.train.sharding.units import Unit, unit_of_modules
from fsdp_ckpt.train.sharding.values import Values

__all__ = ["shard_fsdp1"]

_log = logging.getLogger("fsdp_ckpt")

_STRATEGIES = {
    "FULL_SHARD": ShardingStrategy.FULL_SHARD,
    "SHARD_GRAD_OP": ShardingStrategy.SHARD_GRAD_OP,
    "NO_SHARD": ShardingStrategy.NO_SHARD,
    "HYBRID_SHARD": ShardingStrategy.HYBRID_SHARD,
    "HYBRID_SHARD_ZERO2": ShardingStrategy._HYBRID_SHARD_ZERO2,
}
_PREFETCHES = {
    "BACKWARD_PRE": BackwardPrefetch.BACKWARD_PRE,
    "BACKWARD_POST": BackwardPrefetch.BACKWARD_POST,
    "NO_PREFETCH": None,
}


def shard_fsdp1(
    model: nn.Module,
    units: Sequence[Unit],
    config: FSDPConfig,
    *,
    tensors: Sequence[Held],
    values: Values,
    ignored: Sequence[nn.Module],
    device: torch.device,
    mesh: DeviceMesh | None,
) -> nn.Module:
    """Wrap units and the model. A collective.

    A unit gets its memory and its values right before it is cut, so that one unit at a time is whole. That is done
    here, and torch's ``sync_module_states`` stays off: it refuses the CPU, and is about the ranks that share one copy.
    """
    options = _options(config, ignored=ignored, device=device, mesh=mesh)
    owner = unit_of_modules(model, units)
    by_unit: dict[nn.Module, list[Held]] = {}
    for held in tensors:
        by_unit.setdefault(owner[held.places[0][0]].module, []).append(held)
    for unit in units:
        for held in by_unit.get(unit.module, ()):
            values.settle(held, device)
        own = options | {"mixed_precision": None} if unit.full_precision else options
        replace_module(model, unit.module, FullyShardedDataParallel(unit.module, **own))
    for held in by_unit.get(model, ()):
        values.settle(held, device)
    return FullyShardedDataParallel(model, **options)


def _options(
    config: FSDPConfig, *, ignored: Sequence[nn.Module], device: torch.device, mesh: DeviceMesh | None
) -> dict[str, Any]:
    assert config.sharding_strategy is not None
    assert config.backward_prefetch is not None
    if config.offload_params and device.type == "cpu":
        _log.info("offload_params: the model is on the CPU already, there is nothing to offload")
    return {
        "sharding_strategy": _STRATEGIES[config.sharding_strategy],
        "cpu_offload": CPUOffload(offload_params=True) if config.offload_params and device.type != "cpu" else None,
        "backward_prefetch": _PREFETCHES[config.backward_prefetch],
        "forward_prefetch": bool(config.forward_prefetch),
        "mixed_precision": for_fsdp1(config),
        "use_orig_params": bool(config.use_orig_params),
        "limit_all_gathers": bool(config.limit_all_gathers),
        "ignored_modules": list(ignored) or None,
        "device_id": device,
        "device_mesh": mesh,
    }
