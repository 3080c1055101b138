"""Sharded models on real ranks: their losses, and what torch says of how they are sharded.

Plays its sibling as well: where first values come from, and what is refused.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tests.dist.sharding_values_ranks  # noqa: F401 - registers its scenarios
from fsdp_ckpt import load_state, save_state
from fsdp_ckpt.names import strip_wrappers
from fsdp_ckpt.train.sharding.wrap import wrap
from tests.dist.sharding_net import Block, adamw, batch, build, fsdp1_units, fsdp2_units, loss_of, train, whole_state
from tests.dist.stage import main, scenario

POLICIES: dict[str, dict[str, Any]] = {
    "layers": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "size": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 68},
    "none": {"auto_wrap_policy": "NO_WRAP"},
}
FSDP1: dict[str, dict[str, Any]] = {
    "flat": {"use_orig_params": False},
    "post": {"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True, "limit_all_gathers": False},
    "no_prefetch": {"backward_prefetch": "NO_PREFETCH"},
    "remat": {"activation_checkpointing": True},
    "remat_flat": {"activation_checkpointing": True, "use_orig_params": False},
    "remat_none": {"activation_checkpointing": True, "auto_wrap_policy": "NO_WRAP"},
    "offload": {"offload_params": True},
    "bf16": {"mixed_precision": "bf16"},
    "bf16_remat": {"mixed_precision": "bf16", "activation_checkpointing": True, "use_orig_params": False},
    "policy": {"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
    "named": {"transformer_layer_cls_to_wrap": "Linear"},
}
FSDP2: dict[str, dict[str, Any]] = {
    "remat": {"activation_checkpointing": True},
    "remat_offload": {"activation_checkpointing": True, "activation_checkpointing_offload": True},
    "remat_none": {"activation_checkpointing": True, "auto_wrap_policy": "NO_WRAP"},
    "offload": {"offload_params": True},
    "offload_bf16": {"offload_params": True, "mixed_precision": "bf16"},
    "bf16": {"mixed_precision": "bf16"},
    "policy": {"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
    "named": {"transformer_layer_cls_to_wrap": "Linear"},
}


def _play(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Shard, train, and look."""
    model = wrap(build(1), config, **options)
    layers = [module for module in model.modules() if isinstance(module, Block)]
    found: dict[str, Any] = {"kind": type(model).__name__}
    found |= _fsdp1_facts(model) if config["fsdp_version"] == 1 else _fsdp2_facts(model)
    found["kept"] = _kept_after_forward(model)
    for layer in layers:
        layer.dtypes.clear()
    found["losses"] = train(model, rank=dist.get_rank(), size=dist.get_world_size())
    found["layer dtypes"] = layers[0].dtypes
    found["param dtypes"] = sorted({str(param.dtype) for param in model.parameters()})
    for kind in (CheckpointWrapper, OffloadWrapper):
        names = [
            strip_wrappers(f"{name}.").rstrip(".") for name, module in model.named_modules() if type(module) is kind
        ]
        names += [
            strip_wrappers(f"{name}.").rstrip(".")
            for name, module in model.named_modules()
            if isinstance(module, kind) and type(module) is not kind  # FSDP2 derives a class from it
        ]
        found[kind.__name__] = names
    return found


def _fsdp1_facts(model: nn.Module) -> dict[str, Any]:
    units = dict(fsdp1_units(model))
    root = units[""]
    return {
        "units": list(units),
        "strategies": sorted({unit.sharding_strategy.name for unit in units.values()}),
        "prefetch": str(root.backward_prefetch),
        "forward_prefetch": root.forward_prefetch,
        "limit_all_gathers": root.limit_all_gathers,
        "use_orig_params": root._use_orig_params,
        "precision": [str(getattr(root.mixed_precision, f"{kind}_dtype")) for kind in ("param", "reduce", "buffer")],
        "local": {name: unit._handle.flat_param.numel() for name, unit in units.items() if unit._handle},
        "groups": {name: unit.process_group.size() for name, unit in units.items()},
    }


def _fsdp2_facts(model: nn.Module) -> dict[str, Any]:
    groups = [unit._get_fsdp_state()._fsdp_param_group for _, unit in fsdp2_units(model)]
    group = next(group for group in groups if group is not None)
    policy = group.mp_policy
    return {
        "units": [name for name, _ in fsdp2_units(model)],
        "placements": sorted({str(param.placements) for param in model.parameters() if isinstance(param, DTensor)}),
        "mesh": sorted({tuple(param.device_mesh.shape) for param in model.parameters() if isinstance(param, DTensor)}),
        "plain": [name for name, param in model.named_parameters() if not isinstance(param, DTensor)],
        "precision": [str(getattr(policy, f"{kind}_dtype")) for kind in ("param", "reduce", "output")],
        "offload": type(group.offload_policy).__name__,
    }


def _kept_after_forward(model: nn.Module) -> dict[str, bool]:
    """Which units hold whole parameters between forward and backward."""
    tokens = batch(0)[:2]
    loss = loss_of(model(tokens), tokens)
    found: dict[Any, Any] = {}
    for name, unit in fsdp1_units(model):
        if unit._handle is not None:
            whole = getattr(unit._handle.flat_param, "_full_param_padded", None)
            found[name] = whole is None or whole.untyped_storage().size() > 0
    for name, unit in fsdp2_units(model):
        mine = _params_of(unit)
        if mine:
            found[name] = not isinstance(mine[0], DTensor)
    loss.backward()
    model.zero_grad()
    return found


def _params_of(unit: nn.Module) -> list[nn.Parameter]:
    """Parameters of an FSDP2 unit, without those of units in it."""
    inner = {param for name, module in fsdp2_units(unit) if name for param in module.parameters()}
    return [param for param in unit.parameters() if param not in inner]


@scenario(ranks=2)
def strategies(place: Path) -> Any:
    """FSDP1, every strategy for ranks of one node with every policy."""
    found: dict[Any, Any] = {}
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for policy, options in POLICIES.items():
            found[strategy, policy] = _play({"fsdp_version": 1, "sharding_strategy": strategy, **options})
    return found


@scenario(ranks=4)
def hybrids(place: Path) -> Any:
    """FSDP1, two nodes of two ranks: as the launcher tells, or as the configuration does."""
    found: dict[Any, Any] = {}
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        for strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
            for policy, options in POLICIES.items():
                found[strategy, policy] = _play({"fsdp_version": 1, "sharding_strategy": strategy, **options})
    sizes = {"dp_replicate_size": 1, "dp_shard_size": 4}
    found["sizes"] = _play({"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD", **sizes})
    found["one node"] = _play({"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD"})
    mesh = init_device_mesh("cpu", (1, 4))
    found["mesh"] = _play({"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD"}, mesh=mesh)
    return found


@scenario(ranks=2)
def reshards(place: Path) -> Any:
    """FSDP2, both kinds with every policy."""
    found: dict[Any, Any] = {}
    for reshard in (True, False):
        for policy, options in POLICIES.items():
            found[reshard, policy] = _play({"fsdp_version": 2, "reshard_after_forward": reshard, **options})
    return found


@scenario(ranks=4)
def copies(place: Path) -> Any:
    """FSDP2, several copies."""
    found: dict[Any, Any] = {}
    for reshard in (True, False):
        for policy, options in POLICIES.items():
            config = {"fsdp_version": 2, "dp_replicate_size": 2, "reshard_after_forward": reshard, **options}
            found[reshard, policy] = _play(config)
    found["whole copies"] = _play({"fsdp_version": 2, "dp_replicate_size": 4})
    found["tensor-parallel"] = _tensor_parallel((2, 2), ("shard", "tp"), "shard")
    found["tensor-parallel, two dimensions"] = _tensor_parallel((1, 2, 2), ("copy", "shard", "tp"), ("copy", "shard"))
    return found


def _tensor_parallel(shape: tuple[int, ...], names: tuple[str, ...], data: Any) -> dict[str, Any]:
    """Two ranks of tensor parallelism in each of two parts of the batch."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = build(1)
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    sharded = wrap(model, {"fsdp_version": 2}, mesh=mesh[data])
    return {"losses": train(sharded, rank=mesh["shard"].get_local_rank(), size=2)}


@scenario(ranks=4)
def stages(place: Path) -> Any:
    """Pairs of ranks with models of their own, as in a pipeline; the first rank of a pair has the values."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage, place_in_stage = mesh.get_local_rank("stage"), mesh.get_local_rank("shard")
    found: dict[Any, Any] = {}
    for version in (1, 2):
        model = build(stage + 1, device="meta" if place_in_stage else "cpu", tied=bool(stage))
        found[version] = whole_state(wrap(model, {"fsdp_version": version}, mesh=mesh["shard"]))
    return found


@scenario(ranks=2)
def options_of_fsdp1(place: Path) -> Any:
    with _Messages() as messages:
        return {name: _play({"fsdp_version": 1, **options}) for name, options in FSDP1.items()} | {
            "log": messages.found
        }


@scenario(ranks=2)
def options_of_fsdp2(place: Path) -> Any:
    return {name: _play({"fsdp_version": 2, **options}) for name, options in FSDP2.items()}


@scenario(ranks=2)
def left_whole(place: Path) -> Any:
    """A layer that is ignored: every rank keeps it, and no gradients are exchanged."""
    found: dict[Any, Any] = {}
    for version in (1, 2):
        model = build(dist.get_rank() + 1)
        held = model.layers[1].up.weight
        sharded = wrap(model, {"fsdp_version": version, "ignored_modules": r"layers\.1|gain"})
        units = fsdp1_units(sharded) if version == 1 else fsdp2_units(sharded)
        inner: Any = sharded.module if isinstance(sharded, FullyShardedDataParallel) else sharded
        now = inner.layers[1].up.weight
        found[version] = {
            "units": [name for name, _ in units],
            "whole": not isinstance(now, DTensor) and tuple(now.shape) == tuple(held.shape),
            "values": now.detach().clone(),
        }
    return found


@scenario(ranks=2)
def low_precision(place: Path) -> Any:
    """Weights in bfloat16: which dtypes are kept with mixed precision, and without."""
    found: dict[Any, Any] = {}
    for version in (1, 2):
        for precision in ("no", "bf16"):
            model = build(1).to(torch.bfloat16)
            model.embed.requires_grad_(precision == "no" or version == 1)
            with _Messages() as messages:
                sharded = wrap(model, {"fsdp_version": version, "mixed_precision": precision})
            dtypes = {strip_wrappers(name): str(param.dtype) for name, param in sharded.named_parameters()}
            found[version, precision] = {"dtypes": dtypes, "log": messages.found}
    return found


def _note_dtype(seen: dict[str, str], name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
    seen[name] = str(args[0].dtype)


@scenario(ranks=2)
def batch_norms(place: Path) -> Any:
    """Mixed precision around a norm whose statistics need more."""
    found: dict[Any, Any] = {}
    for version in (1, 2):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        config = {"fsdp_version": version, "auto_wrap_policy": "NO_WRAP", "mixed_precision": "bf16"}
        sharded = wrap(model, config)
        seen: dict[str, str] = {}
        for name, module in sharded.named_modules():
            if isinstance(module, nn.BatchNorm1d | nn.Linear):
                module.register_forward_pre_hook(partial(_note_dtype, seen, name))
        output = sharded(torch.arange(24.0).reshape(4, 6) + dist.get_rank())
        output.float().sum().backward()
        units = fsdp1_units(sharded) if version == 1 else fsdp2_units(sharded)
        found[version] = {
            "units": [name for name, _ in units],
            "inputs": {strip_wrappers(f"{name}.").rstrip("."): dtype for name, dtype in seen.items()},
            "output": str(output.dtype),
            "buffers": {strip_wrappers(name): str(buffer.dtype) for name, buffer in sharded.named_buffers()},
        }
    return found


@scenario(ranks=2)
def round_trip(place: Path) -> Any:
    """Two steps, a save, a fresh model of other values, a load, the third step."""
    found: dict[Any, Any] = {}
    rank, size = dist.get_rank(), dist.get_world_size()
    for version in (1, 2):
        config = {"fsdp_version": version, "activation_checkpointing": True}
        model = wrap(build(1), config)
        optimizer = adamw(model)
        losses = train(model, rank=rank, size=size, optimizer=optimizer, steps=range(2))
        save_state(place / f"v{version}", model, optimizer, step=2, durable=False)
        fresh = wrap(build(7), config)
        other = adamw(fresh)
        report = load_state(place / f"v{version}", fresh, other)
        losses += train(fresh, rank=rank, size=size, optimizer=other, steps=range(2, 3))
        found[version] = {"losses": losses, "missing": report.missing, "step": report.step}
    return found


class _Messages(logging.Handler):
    """What the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []
        self.log = logging.getLogger("fsdp_ckpt")

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def __enter__(self) -> Self:
        self.log.addHandler(self)
        self.log.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self.log.removeHandler(self)


if __name__ == "__main__":
    main()
