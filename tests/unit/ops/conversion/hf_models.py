"""Tiny models of transformers, the checkpoints of them, and what transformers loads from a folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from fsdp_ckpt.catalog import DType
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.conversion.hf_export import HfExport, prepare_export
from fsdp_ckpt.ops.side_files import SideFiles, find_side_files
from fsdp_ckpt.plan.merge import select_tensors
from fsdp_ckpt.plan.output import OutputTensor
from tests.build import rows, save_dcp
from tests.unit.carried import carry_out

KINDS: Mapping[str, Callable[..., Any]] = {
    "llama": lambda **options: transformers.LlamaConfig(
        **{
            "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
            "architectures": ["LlamaForCausalLM"],
        } | options
    ),
    "qwen2": lambda **options: transformers.Qwen2Config(
        **{
            "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
            "tie_word_embeddings": True, "architectures": ["Qwen2ForCausalLM"],
        } | options
    ),
    "gpt2": lambda **options: transformers.GPT2Config(
        **{
            "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 12, "bos_token_id": 1,
            "eos_token_id": 2, "architectures": ["GPT2LMHeadModel"],
        } | options
    ),
    "mixtral": lambda **options: transformers.MixtralConfig(
        **{
            "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "bos_token_id": 1,
            "eos_token_id": 2, "architectures": ["MixtralForCausalLM"],
        } | options
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """A model, and a folder with its configuration in which a checkpoint of it may be put."""

    model: Any
    folder: Path

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """What is stored of the model: a shared tensor under all of its names."""
        found: dict[str, torch.Tensor] = self.model.state_dict()
        return found

    def side(self) -> SideFiles:
        return find_side_files(self.folder)

    def tensors(
        self, state: Mapping[str, torch.Tensor] | None = None, dtype: DType | None = None
    ) -> list[OutputTensor]:
        """Save a state dict of two ranks, and return its tensors as commands choose them."""
        shutil.rmtree(self.folder / "sharded", ignore_errors=True)
        sharded = {name: rows(value, 2) for name, value in (state or self.state).items()}
        (part,) = read_checkpoint(save_dcp(self.folder / "sharded", {"model": sharded})).parts
        return list(select_tensors(list(part.tensors.values()), dtype=dtype).tensors)

    def export(self, state: Mapping[str, torch.Tensor] | None = None, **options: Any) -> HfExport:
        return prepare_export(self.tensors(state, options.get("dtype")), self.side(), **options)

    def write(self, found: HfExport, out: Path) -> Path:
        """Write the folder: weights by torch's safetensors, side files as they are."""
        scratch = out.parent / "scratch"
        for folder in (out, scratch):
            folder.mkdir(parents=True)
        tensors = [replace(tensor) for tensor in found.tensors]
        values, _ = carry_out(tensors, self.folder / "sharded", scratch)
        save_file(values, out / "model.safetensors", metadata={"format": "pt"})
        for name, data in found.files.items():
            (out / name).write_bytes(data.read_bytes() if isinstance(data, Path) else data)
        return out


def saved(folder: Path, kind: str, **options: Any) -> Saved:
    """Make a model with random weights, and save its configuration."""
    folder.mkdir()
    torch.manual_seed(3)
    config = KINDS[kind](**options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(folder)
    return Saved(model, folder)


def opened(folder: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> Any:
    """Load a folder; nothing may be missing, left over or of another shape."""
    transformers.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True, local_files_only=True, **options
            )
    finally:
        transformers.utils.logging.disable_propagation()
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model
