"""``wrap``: shard a model as a configuration says."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.load import load_state
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.sharding.fsdp1 import shard_fsdp1
from fsdp_ckpt.train.sharding.fsdp2 import check_torch, shard_fsdp2
from fsdp_ckpt.train.sharding.mesh import check_mesh, choose_device, group_of, make_mesh, mesh_shape
from fsdp_ckpt.train.sharding.origin import Holding, Origin, choose_origin
from fsdp_ckpt.train.sharding.precision import dtypes, keep_full_precision, set_norms_apart
from fsdp_ckpt.train.sharding.recomputation import recompute
from fsdp_ckpt.train.sharding.tensors import held_tensors
from fsdp_ckpt.train.sharding.units import check_units, choose_units, ignored_modules, recomputed
from fsdp_ckpt.train.sharding.values import Values, demand_same_model, prepare_values

__all__ = ["wrap"]

_DOING = "sharding the model"
_log = logging.getLogger("fsdp_ckpt")


def wrap(
    model: nn.Module,
    config: FSDPConfig | Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    weights: str | os.PathLike[str] | None = None,
    initialize: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Shard a model over the ranks of a job. A collective: every rank has to call it, with the same arguments.

    With ``fsdp_version`` 1 the result is a ``FullyShardedDataParallel``; with 2 it is the model itself, changed in
    place by ``fully_shard``. Which modules become units is the same for both. Make the optimizer afterwards.

    First values come from one of these:

    * Each rank has them: the model is in memory everywhere, and neither ``sync_module_states`` nor
      ``cpu_ram_efficient_loading`` is set.
    * Rank 0 has them (``cpu_ram_efficient_loading``, the default, or ``sync_module_states``): it sends them, tensor by
      tensor, buffers included, whatever the other ranks have. With the former these may have the model on the meta
      device, and never hold all of it.
    * ``weights``: the model may be on the meta device on every rank. It is cut there, and each rank reads its own
      part from the checkpoint. Buffers that checkpoints do not hold are rank 0's, made there if need be.
    * ``initialize``, or, with ``cpu_ram_efficient_loading: false``, the model's own ``_init_weights`` and its modules'
      ``reset_parameters``: with the model on the meta device on rank 0, that rank makes values for whatever has none,
      whole and in CPU memory, and sends them. Thus all ranks begin alike and as an unsharded model with rank 0's
      random state would, at the price of rank 0's memory.

    A model that is tensor-parallel already keeps the values that each rank has.

    Args:
        model: The model, not sharded yet.
        config: How; a dictionary of options by name will do. None for the defaults, which need a model that names its
            layers (``_no_split_modules``).
        device: Where it is trained; by default the CUDA device of this rank's number on its node, else the CPU.
        mesh: Data-parallel ranks: one dimension, or two (copies, shards of each). By default one is made of all ranks.
        weights: A checkpoint, any that ``load_state`` reads.
        initialize: Called on rank 0 with every module that has tensors of its own on the meta device; fills these.

    Returns:
        The sharded model.

    Raises:
        UsageError: Options that contradict each other or the model; a model without values; a model that is wrapped
            already. Every rank raises, whichever rank it is about.
        Incompatible: Something that this version of torch, or of FSDP, cannot shard.

    Example:
        >>> model = wrap(model, {"mixed_precision": "bf16", "activation_checkpointing": True})  # doctest: +SKIP
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "wrap needs the ranks of a job, but torch.distributed is not initialised",
            hint="call torch.distributed.init_process_group() first, in a job started by torchrun",
        )
    with Ranks().together(_DOING):
        config = config if isinstance(config, FSDPConfig) else FSDPConfig.of(config or {})
        device = choose_device(device)
        dtypes(config)
        _refuse_wrapped(model)
        shape = mesh_shape(config, dist.get_world_size(), _ranks_of_node()) if mesh is None else ()
        if mesh is not None:
            check_mesh(mesh, config, device)
        ignored = ignored_modules(model, config.ignored_modules)
        _warn_of_trained(ignored)
        units = choose_units(model, config, ignored)
        layers = recomputed(model, units, ignored) if config.activation_checkpointing else []
        units = set_norms_apart(model, config, units, ignored)
        keep_full_precision(model, config, units, ignored)
        check_units(model, units, config, ignored)
        if config.fsdp_version == 2:
            check_torch(ignored)
    ranks = Ranks(group_of(mesh))
    tensors = held_tensors(model)
    _demand_same_config(config, ranks)
    ranks.demand_same(str(weights), "weights", _DOING)
    ranks.demand_same(initialize is not None, "whether there is an initialize", _DOING)
    demand_same_model(tensors, ranks, _DOING)
    holdings = ranks.gather_all(Holding.of(tensors), _DOING)
    origin = choose_origin(config, holdings, has_weights=weights is not None, has_initialize=initialize is not None)
    with ranks.together(_DOING):
        if ranks.is_first:
            prepare_values(model, tensors, origin, initialize)
    with ranks.together(_DOING):
        values = Values(origin=origin, ranks=ranks, device=device)
        if mesh is None and (config.fsdp_version == 2 or config.is_hybrid):
            mesh = make_mesh(shape, device)
        units = recompute(model, layers, units, offload=bool(config.activation_checkpointing_offload))
        if config.fsdp_version == 1:
            sharded = shard_fsdp1(
                model, units, config, tensors=tensors, values=values, ignored=ignored, device=device, mesh=mesh
            )
        else:
            assert mesh is not None
            sharded = model
            shard_fsdp2(model, units, config, tensors=tensors, values=values, ignored=ignored, device=device, mesh=mesh)
    if origin is Origin.FILE and weights is not None:
        load_state(weights, sharded, rng=False)
    return sharded


def _warn_of_trained(ignored: Iterable[nn.Module]) -> None:
    """Say that nobody reduces the gradients of ignored modules; ranks would drift apart in silence."""
    trained = {id(parameter) for module in ignored for parameter in module.parameters() if parameter.requires_grad}
    if trained:
        _log.warning(
            "ignored_modules: %d parameters in them are trained, and FSDP does not reduce their gradients: freeze "
            "them, or reduce these in the training loop, or ranks drift apart",
            len(trained),
        )


def _demand_same_config(config: FSDPConfig, ranks: Ranks) -> None:
    everyone = ranks.gather_all(config, _DOING)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for field in fields(FSDPConfig):
            values = getattr(first, field.name), getattr(other, field.name)
            if values[0] != values[1]:
                raise UsageError(
                    f"{field.name} differs between ranks: {values[0]} on rank 0, {values[1]} on rank {rank}",
                    hint="call wrap with the same configuration on every rank",
                )


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel | FSDPModule | DistributedDataParallel):
            kind = "FSDP2" if isinstance(module, FSDPModule) else type(module).__name__
            raise UsageError(
                (f"`{name}`, a module of the model," if name else "the model") + f" is wrapped already ({kind})",
                hint="pass the model itself, before anything has wrapped it",
            )


def _ranks_of_node() -> int | None:
    """Return how many ranks a node has, as torchrun tells; None without it."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdecimal() and int(value) else None
