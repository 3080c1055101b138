"""Over which ranks a model is sharded, and of which device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import UsageError

__all__ = ["check_mesh", "choose_device", "group_of", "make_mesh", "mesh_shape", "uses_cuda"]


def uses_cuda() -> bool:
    """Tell whether to train on CUDA: it is there, and ``ACCELERATE_USE_CPU``, as ``launch --cpu`` sets it, is not."""
    asks_for_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() not in ("", "0", "false")
    return torch.cuda.is_available() and not asks_for_cpu


def choose_device(device: torch.device | str | None) -> torch.device:
    """Return this rank's device: what is given, else the CUDA device of its number on the node, else the CPU."""
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if uses_cuda() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        index: Any = chosen.index  # None for plain "cuda"
        if index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(chosen)  # where FSDP2 puts shards
    return chosen


def mesh_shape(config: FSDPConfig, world_size: int, local_world_size: int | None = None) -> tuple[int, ...]:
    """Return the sizes of a mesh: (ranks that shard,), or (copies, ranks that shard one of them).

    Args:
        config: The configuration.
        world_size: Number of all ranks.
        local_world_size: Ranks of a node, None if not known: what FSDP1's hybrid strategies shard over by default.

    Raises:
        UsageError: Sizes that do not multiply to the number of ranks, or parallelism that ``wrap`` does not apply.
    """
    beside = {name: getattr(config, name) or 1 for name in ("tp_size", "cp_size")}
    if any(size > 1 for size in beside.values()):
        sizes = ", ".join(f"{name}: {size}" for name, size in beside.items() if size > 1)
        raise UsageError(
            f"{sizes} needs a mesh: wrap only shards over data-parallel ranks",
            hint="apply that parallelism to the model first, then pass mesh= with the data-parallel dimensions",
        )
    copies, shard = config.dp_replicate_size, config.dp_shard_size
    if not config.is_hybrid:
        _check_product(1, shard or world_size, world_size)
        return (world_size,)
    if shard is None:
        if copies > 1 or config.fsdp_version == 2:
            shard = max(world_size // copies, 1)
        else:
            shard = local_world_size or world_size
    if copies == 1:
        copies = max(world_size // shard, 1)
    _check_product(copies, shard, world_size)
    _check_shards(config, copies, shard)
    return copies, shard


def _check_shards(config: FSDPConfig, copies: int, shard: int) -> None:
    """FSDP1 takes ranks that shard with nobody for ranks that exchange nothing: copies would go apart in silence."""
    if config.fsdp_version == 1 and shard == 1 and copies > 1:
        raise UsageError(
            f"sharding_strategy: {config.sharding_strategy} with {copies} copies of 1 rank each shards nothing",
            hint="use sharding_strategy: NO_SHARD, or set dp_shard_size to the number of ranks that share a copy",
        )


def _check_product(copies: int, shard: int, world_size: int) -> None:
    if copies * shard != world_size:
        raise UsageError(
            f"dp_replicate_size x dp_shard_size is {copies} x {shard} = {copies * shard}, but there are {world_size} "
            f"ranks",
            hint="start as many ranks as the sizes multiply to, or leave dp_shard_size out",
        )


def make_mesh(shape: Sequence[int], device: torch.device) -> DeviceMesh:
    """Make a mesh over all ranks. A collective."""
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh(device.type, tuple(shape), mesh_dim_names=names)


def check_mesh(mesh: DeviceMesh, config: FSDPConfig, device: torch.device) -> None:
    """Make sure that a mesh that was given is one for this configuration.

    Raises:
        UsageError: It is not.
    """
    sizes = " x ".join(map(str, mesh.shape))
    if mesh.device_type != device.type:
        raise UsageError(f"the mesh is of {mesh.device_type} devices, the model goes to {device}")
    if mesh.ndim not in (1, 2):
        raise UsageError(
            f"the mesh has {mesh.ndim} dimensions ({sizes}); wrap takes one (shard) or two (replicate, shard)",
            hint="pass the data-parallel dimensions only, as mesh['shard'] or mesh['replicate', 'shard']",
        )
    wants = 2 if config.is_hybrid else 1
    if mesh.ndim != wants and (config.fsdp_version == 1 or wants == 2):
        what = config.sharding_strategy or f"dp_replicate_size: {config.dp_replicate_size}"
        raise UsageError(f"the mesh has {mesh.ndim} dimensions ({sizes}), but {what} needs {wants}")
    if mesh.ndim == 2:
        _check_shards(config, mesh.shape[0], mesh.shape[1])
    given = {"dp_shard_size": config.dp_shard_size, "dp_replicate_size": config.dp_replicate_size}
    if given["dp_replicate_size"] == 1:
        given["dp_replicate_size"] = None
    for (name, wanted), size in zip(given.items(), (mesh.shape[-1], mesh.shape[0]), strict=True):
        if wanted is not None and wanted != size:
            raise UsageError(f"{name}: {wanted} contradicts the mesh, which is {sizes}")


def group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the ranks that have one model among them; None for all ranks. A collective where there are others."""
    if mesh is None or mesh.size() == dist.get_world_size():
        return None
    return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
