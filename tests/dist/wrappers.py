"""FSDP around a module, of either kind, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

__all__ = ["WRAPPERS", "fsdp1", "fsdp2"]

CPU = torch.device("cpu")


def fsdp1(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=CPU, use_orig_params=True, **options)


def fsdp2(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"FSDP1": fsdp1, "FSDP2": fsdp2}
