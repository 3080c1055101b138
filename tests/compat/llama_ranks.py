"""Save a tiny random Llama with FSDP1, FSDP2 and Accelerate's own functions: `python -m tests.compat.llama_ranks OUT`.

Accelerate's plugin needs a GPU to be switched on; the functions that `save_state` calls do not. They ask an Accelerator
for a few facts, so something that knows these facts will do.
"""

from __future__ import annotations

import faulthandler
import functools
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import fsdp_utils
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.multiprocessing import start_processes
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

WORLD_SIZE = 2


@dataclass(frozen=True)
class Recipe:
    """How to save: FSDP version, kind of state dict, dtype, whether the output head is the embedding."""

    version: int
    kind: str = "SHARDED_STATE_DICT"
    dtype: torch.dtype = torch.float32
    tie: bool = False


RECIPES = {
    "fsdp1": Recipe(1),
    "fsdp2": Recipe(2),
    "fsdp2_full": Recipe(2, kind="FULL_STATE_DICT"),
    "fsdp2_tied": Recipe(2, dtype=torch.bfloat16, tie=True),
}


@dataclass(frozen=True)
class Facts:
    """What Accelerate's functions want to know of an Accelerator."""

    num_processes: int
    process_index: int
    is_main_process: bool
    is_fsdp2: bool

    def wait_for_everyone(self) -> None:
        """Meet the other ranks."""
        dist.barrier()


def make(recipe: Recipe) -> Any:
    """Return the model as it is before it is wrapped; the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        tie_word_embeddings=recipe.tie,
    )
    return LlamaForCausalLM(config).to(recipe.dtype)


def wrap(model: Any, version: int) -> Any:
    """Shard a model over all ranks."""
    if version == 1:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def save(recipe: Recipe, out: Path) -> None:
    """Save the model, train one step, save the optimizer."""
    rank = dist.get_rank()
    model = make(recipe)
    if rank == 0:
        out.mkdir()
        whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
        save_file(whole, out.parent / f"{out.name}.safetensors")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(out)
    dist.barrier()
    model = wrap(model, recipe.version)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=recipe.version, state_dict_type=recipe.kind)
    facts = Facts(WORLD_SIZE, rank, rank == 0, recipe.version == 2)
    fsdp_utils.save_fsdp_model(plugin, facts, model, str(out))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.5, 0.75), weight_decay=0.125)
    tokens = torch.arange(8).reshape(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    fsdp_utils.save_fsdp_optimizer(plugin, facts, optimizer, model, str(out))


def build(rank: int, out: Path) -> None:
    """Be one rank."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(80, exit=True)
    store = f"file://{out}/.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60))
    PartialState(cpu=True)
    for name, recipe in RECIPES.items():
        save(recipe, out / name)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    start_processes(build, (Path(sys.argv[1]),), nprocs=WORLD_SIZE, start_method="fork")
