"""Tiny models that PEFT wrapped, saved by torch as FSDP saves them, and what PEFT makes of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from fsdp_ckpt.catalog import DType
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.plan.merge import select_tensors
from fsdp_ckpt.plan.output import OutputTensor
from tests.build import rows, save_dcp
from tests.unit.carried import carry_out

LLAMA = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 12, "bos_token_id": 1, "eos_token_id": 2
}  # fmt: skip


def llama(**options: Any) -> Any:
    """Return a Llama with random weights."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | options)))


def gpt2(**options: Any) -> Any:
    """Return a GPT-2, whose matrices are (in, out)."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(GPT2 | options)))


def untied_gpt2() -> Any:
    """Return one whose head is a matrix of its own."""
    return gpt2(tie_word_embeddings=False)


def wrap(model: Any, **options: Any) -> Any:
    """Put an adapter on a model, none of whose matrices is zero."""
    return shake(get_peft_model(model, LoraConfig(**({"r": 3, "lora_alpha": 8} | options))))


def shake(wrapped: Any) -> Any:
    """Give random values to what PEFT begins with zeros or copies."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return wrapped


def save(wrapped: Any, folder: Path, *, ranks: int = 2) -> Path:
    """Save all tensors, by rows, and the adapter's configuration beside them."""
    wrapped.peft_config["default"].save_pretrained(folder)
    state = {name: rows(tensor, ranks) for name, tensor in wrapped.state_dict().items()}
    return save_dcp(folder / "pytorch_model_fsdp_0", {"model": state}, ranks=ranks)


def tensors_of(folder: Path, *, dtype: DType | None = None) -> list[OutputTensor]:
    """Return a checkpoint's tensors as commands choose them."""
    (part,) = read_checkpoint(folder).parts
    return list(select_tensors(list(part.tensors.values()), dtype=dtype).tensors)


def written(tensors: Sequence[OutputTensor], folder: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Return the values that would be written."""
    scratch.mkdir(exist_ok=True)
    return carry_out([replace(tensor) for tensor in tensors], folder, scratch)[0]


def merged(wrapped: Any) -> dict[str, torch.Tensor]:
    """Return what PEFT's own folding makes, from a copy."""
    found: dict[str, torch.Tensor] = copy.deepcopy(wrapped).merge_and_unload().state_dict()
    return found


def loaded_by_peft(base: Any, tensors: dict[str, torch.Tensor], config: bytes, folder: Path) -> Any:
    """Write an adapter's folder, and let PEFT load it; it warns of keys that are missing, which is an error here."""
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(config)
    return PeftModel.from_pretrained(base, str(folder))
