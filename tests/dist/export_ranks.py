"""Models taken out of every wrapper, by get_state_dict and save_model, and the memory that it takes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp_ckpt import get_state_dict, save_model
from tests.dist.attempt import attempt, failing, only, tree
from tests.dist.matrix_net import Net
from tests.dist.matrix_variants import TARGETS
from tests.dist.stage import main, scenario

WRAPPED = [
    "plain", "ddp", "full", "full_orig", "full_tied", "full_tied_orig", "grad_op", "no_shard", "no_shard_orig",
    "half_orig", "offload", "flat_root", "hybrid", "zero2_orig", "fsdp2", "fsdp2_kept", "fsdp2_columns",
    "fsdp2_half", "fsdp2_compiled", "full_compiled", "hsdp", "tp", "odd",
]  # fmt: skip

LAYERS, SIDE = 8, 2500
ONE_BYTES = SIDE * SIDE * 4
SHARD = "60MB"


class Mixed(nn.Module):
    """Dtypes, a tensor without elements, one of one element, one without dimensions, channels last, and two ties."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, bias=False)
        self.deep = nn.Conv3d(2, 3, (3, 1, 2))
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.deep.weight.data = self.deep.weight.data.to(memory_format=torch.channels_last_3d)
        self.one = nn.Parameter(torch.tensor([3.5]))
        self.left = nn.Linear(5, 3, bias=False)
        self.right = nn.Linear(5, 3, bias=False)
        self.right.weight = self.left.weight
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("low", torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("temporary", torch.ones(2), persistent=False)


def reference(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _exported(name: str, place: Path) -> Any:
    variant = TARGETS[name]
    torch.manual_seed(11)
    net = Net(tied=variant.tied, hidden=variant.hidden)
    expected = reference(net)
    model = variant.wrap(net)
    first = get_state_dict(model)
    model.eval()
    with torch.no_grad():
        model(torch.arange(12).reshape(2, 6))  # leaves an unsharded root behind
    state = get_state_dict(model)
    tied = [first[key].data_ptr() == first["embed.weight"].data_ptr() for key in ("head.weight",) if key in first]
    save_model(model, place / "hf")
    return {"state": first, "after": state, "expected": expected, "tied": tied}


def _mixed(wrap: Callable[[nn.Module], nn.Module], place: Path) -> Any:
    torch.manual_seed(12)
    module = Mixed()
    expected = reference(module)
    model = wrap(module)
    state = get_state_dict(model)
    report = save_model(model, place / "hf")
    tied = [state["left.weight"].data_ptr() == state["right.weight"].data_ptr()] if state else []
    return {"state": state, "after": state, "expected": expected, "tied": tied, "alias": dict(report.tied)}


def _units(module: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def _rows(module: nn.Module) -> nn.Module:
    """FSDP2 takes no channels last."""
    for param in module.parameters():
        param.data = param.data.contiguous()
    fully_shard(module)
    return module


MIXED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "mixed_fsdp1": partial(_units, use_orig_params=False),
    "mixed_fsdp1_orig": partial(_units, use_orig_params=True),
    "mixed_fsdp2": _rows,
    "mixed_plain": _as_it_is,
}


# --- memory


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(field)


def peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and by how much the process grew at most while it ran."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    before = _memory("VmRSS")
    value = call()
    return value, _memory("VmHWM") - before


def _large_fsdp2() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    fully_shard(model)
    model.to_empty(device="cpu")
    return _filled(model)


def _large_fsdp1() -> nn.Module:
    """Each layer is sharded before the next one is made."""
    return _filled(nn.Sequential(*(_units(nn.Linear(SIDE, SIDE, bias=False)) for _ in range(LAYERS))))


def _filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.fill_(number + 1)
    return model


def _large(build: Callable[[], nn.Module], place: Path) -> Any:
    model = build()
    dist.barrier()
    state, grown = peak(lambda: get_state_dict(model))
    found: dict[str, Any] = {"get": grown, "names": sorted(state)}
    found["right"] = all(bool((state[f"{n}.weight"] == n + 1).all()) for n in range(LAYERS)) if state else None
    del state
    dist.barrier()
    _, found["save"] = peak(lambda: save_model(model, place / "hf", max_shard_size=SHARD))
    return found


# --- folders


def _llama(tied: bool, place: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(13)
    model = LlamaForCausalLM(config)
    expected = reference(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    report = save_model(model, place / "hf", max_shard_size="6KB")
    return {"expected": expected, "files": dict(report.files), "side": report.side_files, "tied": dict(report.tied)}


@scenario(ranks=2)
def a_folder_in_the_way(place: Path) -> Any:
    torch.manual_seed(14)
    model = nn.Linear(6, 5)
    expected = reference(model)
    fully_shard(model)
    out = place / "hf"
    if dist.get_rank() == 0:
        out.mkdir()
        (out / "model.safetensors").write_text("old")
        (out / "tokenizer.json").write_text("old")
    dist.barrier()
    before = tree(place)
    dist.barrier()
    refused = attempt(lambda: save_model(model, out))
    dist.barrier()
    untouched = tree(place) == before
    dist.barrier()
    report = save_model(model, out, overwrite=True)
    (place / "empty").mkdir(exist_ok=True)
    save_model(model, place / "empty")
    dist.barrier()
    found = {"refused": refused, "untouched": untouched, "expected": expected, "destination": report.destination}
    return found | {"left": sorted(path.name for path in place.iterdir())}


@scenario(ranks=2)
def a_disk_that_fills_up(place: Path) -> Any:
    """The second rank fails to write; the first one has more to send it."""
    model = nn.Sequential(*(nn.Linear(6, 5) for _ in range(6)))
    fully_shard(model)
    breaking = failing("fsdp_ckpt.train.full.write_all", OSError(28, "No space left on device"), after=1)
    with only(1, breaking):
        found = attempt(lambda: save_model(model, place / "hf", max_shard_size=200))
    dist.barrier()
    left = sorted(path.name for path in place.iterdir())
    dist.barrier()
    save_model(model, place / "hf", max_shard_size=200)
    return found | {"left": left}


@scenario(ranks=4)
def of_one_group(place: Path) -> Any:
    """Two ranks export what they hold; the others are not asked."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = dist.device_mesh.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("copies", "shard"))
    torch.manual_seed(15)
    model = nn.Linear(6, 5)
    expected = reference(model)
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=mesh["shard"])
    group = groups[dist.get_rank() // 2]
    state = get_state_dict(sharded, process_group=group) if dist.get_rank() > 1 else {}
    return {"state": state, "expected": expected}


for _name in WRAPPED:
    _play: Any = partial(_exported, _name)
    _play.__name__ = f"exported_{_name}"
    scenario(ranks=TARGETS[_name].ranks)(_play)
for _name, _wrap in MIXED.items():
    _play = partial(_mixed, _wrap)
    _play.__name__ = _name
    scenario(ranks=2)(_play)
for _name, _build in (("large_fsdp2", _large_fsdp2), ("large_fsdp1", _large_fsdp1)):
    _play = partial(_large, _build)
    _play.__name__ = _name
    scenario(ranks=2)(_play)
for _name, _tied in (("llama", False), ("llama_tied", True)):
    _play = partial(_llama, _tied)
    _play.__name__ = _name
    scenario(ranks=2)(_play)


if __name__ == "__main__":
    main(limit_s=80)
