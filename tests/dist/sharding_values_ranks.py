"""Where the first values of sharded models come from, and what is refused on all ranks."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdp_ckpt.train.sharding.wrap import wrap
from tests.dist.attempt import attempt
from tests.dist.sharding_net import Decoder, Gain, Layerless, build, train, whole_state
from tests.dist.stage import scenario
from tests.dist.wrappers import CPU

KINDS: dict[str, dict[str, Any]] = {
    "FSDP1": {"fsdp_version": 1},
    "FSDP1 flat": {"fsdp_version": 1, "use_orig_params": False},
    "FSDP2": {"fsdp_version": 2},
    "FSDP2 offload": {"fsdp_version": 2, "offload_params": True, "activation_checkpointing": True},
}
OWN: dict[str, Any] = {"cpu_ram_efficient_loading": False}


def _partly(seed: int, **options: Any) -> Decoder:
    model = build(seed, **options)
    model.layers.to("meta")
    return model


def _result(model: nn.Module) -> dict[str, Any]:
    """Whole values before and after training, and the losses between."""
    before = whole_state(model)
    losses = train(model, rank=dist.get_rank(), size=dist.get_world_size())
    return {"before": before, "losses": losses, "after": whole_state(model)}


@scenario(ranks=2)
def rank_0_has_values(place: Path) -> Any:
    """The other rank has nothing, some, or others."""
    ways: dict[str, Callable[..., nn.Module]] = {
        "nothing": lambda **options: build(5, device="meta", **options),
        "some": lambda **options: _partly(5, **options),
        "others": lambda **options: build(6, **options),
    }
    found: dict[Any, Any] = {}
    for kind, config in KINDS.items():
        for tied in (False, True):
            for way, make in ways.items():
                model = build(1, tied=tied) if dist.get_rank() == 0 else make(tied=tied)
                found[kind, way, tied] = _result(wrap(model, config))
    return found


@scenario(ranks=4)
def rank_0_of_four_has_values(place: Path) -> Any:
    """Hybrid meshes: rank 0 is the only one of its copy, too."""
    hybrids: dict[str, dict[str, Any]] = {
        "FSDP1": {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD", "dp_shard_size": 2},
        "FSDP2": {"fsdp_version": 2, "dp_replicate_size": 2},
    }
    found: dict[Any, Any] = {}
    for kind, config in hybrids.items():
        model = build(1, device="cpu" if dist.get_rank() == 0 else "meta", tied=True)
        found[kind] = _result(wrap(model, config))
    return found


@scenario(ranks=2)
def each_rank_has_values(place: Path) -> Any:
    """Nobody sends: what ranks have differs, and stays so."""
    found: dict[Any, Any] = {}
    for kind, config in KINDS.items():
        own = OWN | ({"sync_module_states": False} if config["fsdp_version"] == 1 else {})
        found[kind] = whole_state(wrap(build(dist.get_rank() + 1), {**config, **own}))
    return found


@scenario(ranks=2)
def each_rank_reads_values(place: Path) -> Any:
    """From a safetensors file, into models without or with other values."""
    if dist.get_rank() == 0:
        save_file({name: value.clone() for name, value in build(9).state_dict().items()}, place / "model.safetensors")
    dist.barrier()
    found: dict[Any, Any] = {}
    for kind, config in KINDS.items():
        for way in ("meta", "cpu"):
            found[kind, way] = _result(wrap(build(3, device=way), config, weights=place / "model.safetensors"))
        found[kind, "own"] = _result(
            wrap(build(3, device="meta"), {**config, **OWN}, weights=place / "model.safetensors")
        )
    return found


@scenario(ranks=2)
def values_are_made(place: Path) -> Any:
    """By the modules themselves, or by a function; ranks have other random states."""

    def constant(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data.fill_(0.125)

    found: dict[Any, Any] = {}
    for kind, config in KINDS.items():
        for tied in (False, True):
            model = build(0, device="meta", tied=tied)
            torch.manual_seed(3 + dist.get_rank())
            found[kind, "modules", tied] = _result(wrap(model, {**config, **OWN}))
        found[kind, "function", True] = _result(wrap(build(0, device="meta", tied=True), config, initialize=constant))
    return found


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


@scenario(ranks=2)
def memory(place: Path) -> Any:
    """How much more memory a rank took at most; the model is 64 MiB, in 16 layers."""
    found: dict[Any, Any] = {}
    for version in (1, 2):
        wrap(build(1), {"fsdp_version": version})  # what is loaded for the first one is not counted
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _peak_bytes()
        with torch.device("meta" if dist.get_rank() else "cpu"):
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
        sharded = wrap(model, {"fsdp_version": version, "transformer_layer_cls_to_wrap": "Linear"})
        found[version] = _peak_bytes() - before
        del model, sharded
    return found


@scenario(ranks=2)
def llama(place: Path) -> Any:
    """transformers' Llama: buffers that its files lack, and values that it makes by its own rules."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, initializer_range=0.125,
    )  # fmt: skip
    torch.manual_seed(4)
    whole = LlamaForCausalLM(config)
    if dist.get_rank() == 0:
        whole.save_pretrained(place / "llama")
    dist.barrier()
    tokens = torch.arange(12).reshape(2, 6)
    found: dict[Any, Any] = {"loss": float(whole(tokens, labels=tokens).loss.detach()), "state": whole_state(whole)}
    for version in (1, 2):
        with torch.device("meta"):
            empty = LlamaForCausalLM(config)
        read = wrap(empty, {"fsdp_version": version}, weights=place / "llama")
        found[version] = {"loss": float(read(tokens, labels=tokens).loss.detach()), "state": whole_state(read)}
        with torch.device("meta"):
            empty = LlamaForCausalLM(config)
        found[version, "made"] = whole_state(wrap(empty, {"fsdp_version": version, **OWN}))
    return found


class Forgetful(Gain):
    """Does not fill what it has."""

    def reset_parameters(self) -> None:
        pass


def _with_gain(kind: type[Gain], *, device: str = "meta") -> nn.Module:
    model = build(1, device=device)
    with torch.device(device):
        model.gain = kind()
    return model


class Stray(nn.Module):
    """Has no rule for its buffer."""

    angles: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(6) * 0.125, persistent=False)


def _with_stray() -> nn.Module:
    model = build(1, device="meta")
    with torch.device("meta"):
        model.angles = Stray()  # type: ignore[assignment]
    return model


def _frozen() -> nn.Module:
    model = build(1)
    model.layers[0].norm.requires_grad_(False)
    return model


def _shared(kind: type[Decoder] = Decoder) -> nn.Module:
    model = build(1, kind=kind)
    model.layers[1].up.weight = model.layers[0].up.weight
    return model


def _wrapped(version: int) -> nn.Module:
    model = build(1)
    if version == 1:
        model.layers[0] = FullyShardedDataParallel(model.layers[0], device_id=CPU)
    else:
        fully_shard(model.layers[0])
    return model


def _parallel_meta() -> nn.Module:
    model = build(1, device="meta")
    parallelize_module(model.layers[0], init_device_mesh("cpu", (2,)), {"up": ColwiseParallel()})
    return model


@scenario(ranks=2)
def refusals(place: Path) -> Any:
    rank = dist.get_rank()
    if rank == 0:
        save_file({name: value.clone() for name, value in build(9).state_dict().items()}, place / "model.safetensors")
    dist.barrier()
    weights = place / "model.safetensors"
    by_version: dict[str, Callable[[dict[str, Any]], Any]] = {
        "unknown class": lambda v: wrap(build(1), {**v, "transformer_layer_cls_to_wrap": "Block,Layer"}),
        "no classes": lambda v: wrap(build(1, kind=Layerless), v),
        "two units": lambda v: wrap(_shared(), v),
        "nothing to recompute": lambda v: wrap(
            build(1, kind=Layerless), {**v, "auto_wrap_policy": "NO_WRAP", "activation_checkpointing": True}
        ),
        "fp8": lambda v: wrap(build(1), {**v, "mixed_precision": "fp8"}),
        "wrapped 1": lambda v: wrap(_wrapped(1), v),
        "wrapped 2": lambda v: wrap(_wrapped(2), v),
        "wrapped DDP": lambda v: wrap(DistributedDataParallel(build(1)), v),
        "ignored nothing": lambda v: wrap(build(1), {**v, "ignored_modules": "layer"}),
        "ignored everything": lambda v: wrap(build(1), {**v, "ignored_modules": ".*"}),
        "rank 0 meta": lambda v: wrap(build(1, device="cpu" if rank else "meta"), v),
        "all meta": lambda v: wrap(build(1, device="meta"), v),
        "partly meta": lambda v: wrap(_partly(1), {**v, **OWN}),
        "rank 1 meta, nobody sends": lambda v: wrap(build(1, device="meta" if rank else "cpu"), {**v, **OWN}),
        "forgetful": lambda v: wrap(_with_gain(Forgetful), {**v, **OWN}),
        "forgetful function": lambda v: wrap(build(1, device="meta"), v, initialize=lambda _: None),
        "stray buffer": lambda v: wrap(_with_stray(), v, weights=weights),
        "no weights": lambda v: wrap(build(1, device="meta"), v, weights=place / "nowhere"),
        "other weights": lambda v: wrap(_shape(), v, weights=weights),
        "ranks differ": lambda v: wrap(build(1, tied=bool(rank)), v),
        "shapes differ": lambda v: wrap(_shape() if rank else build(1), v),
        "options differ": lambda v: wrap(build(1), {**v, "min_num_params": rank}),
        "sizes": lambda v: wrap(build(1), {**v, "dp_shard_size": 3}),
        "mesh dimensions": lambda v: wrap(build(1), v, mesh=init_device_mesh("cpu", (1, 1, 2))),
        "mesh device": lambda v: wrap(build(1), v, mesh=init_device_mesh("cpu", (2,)), device="meta"),
        "mesh size": lambda v: wrap(build(1), {**v, "dp_shard_size": 1}, mesh=init_device_mesh("cpu", (2,))),
        "only rank 1": lambda v: wrap(build(1), {**v, "fsdp_version": 3} if rank else v),
        "dtypes in one unit": lambda v: wrap(_mixed(), v),
        "parallel meta": lambda v: wrap(_parallel_meta(), v),
    }
    found: dict[Any, Any] = {}
    for name, call in by_version.items():
        for version in (1, 2):
            found[name, version] = attempt(lambda call=call, version=version: call({"fsdp_version": version}))  # type: ignore[misc]
    only: dict[str, Callable[[], Any]] = {
        "frozen": lambda: wrap(_frozen(), {"fsdp_version": 1, "use_orig_params": False}),
        "hybrid": lambda: wrap(
            build(1),
            {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2, "dp_shard_size": 4},
        ),
        "hybrid of one": lambda: wrap(
            build(1), {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD", "dp_shard_size": 1}
        ),
        "hybrid mesh of one": lambda: wrap(
            build(1), {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD"}, mesh=init_device_mesh("cpu", (2, 1))
        ),
        "hybrid mesh": lambda: wrap(
            build(1), {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD"}, mesh=init_device_mesh("cpu", (2,))
        ),
        "copies": lambda: wrap(build(1), {"fsdp_version": 2, "dp_replicate_size": 4}),
        "tp": lambda: wrap(build(1), {"fsdp_version": 2, "tp_size": 2}),
        "cp": lambda: wrap(build(1), {"fsdp_version": 2, "cp_size": 2}),
    }
    return found | {(name, 0): attempt(call) for name, call in only.items()}


def _shape() -> nn.Module:
    model = build(1)
    model.head = nn.Linear(6, 14)
    return model


def _mixed() -> nn.Module:
    model = build(1)
    model.layers[1].down.to(torch.bfloat16)
    return model
