"""FSDP2: ``fully_shard`` on units, inner ones first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.train.sharding.precision import for_fsdp2
from fsdp_ckpt.train.sharding.tensors import Held
from fsdp_ckpt.train.sharding.units import Unit
from fsdp_ckpt.train.sharding.values import Values

__all__ = ["check_torch", "shard_fsdp2"]


def check_torch(ignored: Sequence[nn.Module]) -> None:
    """Make sure that this torch can leave modules out.

    Raises:
        Incompatible: It is older than 2.7.
    """
    if ignored and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        raise Incompatible(
            f"ignored_modules with fsdp_version 2 needs torch 2.7, this is {torch.__version__}",
            hint="update torch, or use fsdp_version 1",
        )


def shard_fsdp2(
    model: nn.Module,
    units: Sequence[Unit],
    config: FSDPConfig,
    *,
    tensors: Sequence[Held],
    values: Values,
    ignored: Sequence[nn.Module],
    device: torch.device,
    mesh: DeviceMesh,
) -> None:
    """Shard units and the model, in place. A collective.

    Where rank 0 sends values, all ranks cut tensors on the meta device, and get memory for their own part only.
    """
    whole = {id(param) for module in ignored for param in module.parameters()}
    left_whole = [held for held in tensors if id(held.tensor) in whole]
    for held in tensors:
        if held in left_whole:
            values.settle(held, device)
        elif held.is_param:
            values.hold_back(held)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": for_fsdp2(config),
        # There is nothing to pin on a machine without accelerators.
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu")
        if config.offload_params
        else OffloadPolicy(),
    }
    if left_whole:
        options["ignored_params"] = {held.tensor for held in left_whole}
    reshard = config.reshard_after_forward
    for unit in units:
        own = options | {"mp_policy": MixedPrecisionPolicy()} if unit.full_precision else options
        fully_shard(unit.module, reshard_after_forward=reshard, **own)
    # What is left outside of units is needed first in backward: torch keeps it, unless it is all that there is.
    fully_shard(model, reshard_after_forward=None if units and reshard else reshard, **options)
    shards_on = torch.device("cpu") if config.offload_params else device
    for held in tensors:
        if held not in left_whole:
            values.settle(held, shards_on if held.is_param else device)
