"""The model of a run, the ``config.json`` that goes with it, and the groups of its optimizer."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.names import strip_wrappers
from fsdp_ckpt.train.driver import task
from fsdp_ckpt.train.driver.decoder import Decoder, DecoderConfig
from fsdp_ckpt.train.driver.options import TrainOptions

__all__ = ["TASK_KEY", "BuiltModel", "build_model", "param_groups", "task_of"]

TASK_KEY = "fsdp_ckpt_task"
"""Key of ``config.json`` that says what the model was trained for."""

_WEIGHT_DECAY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A model that is not sharded yet.

    Attributes:
        module: On the CPU, in float32, with equal values on all ranks.
        config: Its ``config.json``.
        num_params: Parameters; tied ones count once.
        matrices: Names of the parameters with two or more dimensions. They have to be told before sharding: FSDP1
            shows every rank its part of a parameter in one dimension.
    """

    module: nn.Module
    config: dict[str, Any]
    num_params: int
    matrices: Collection[str]


def build_model(options: TrainOptions) -> BuiltModel:
    """Build the decoder, or the model that a Hugging Face ``config.json`` describes.

    Raises:
        UsageError: transformers is not there or does not know the model, or the model is too small for the task.
    """
    module, config = _own(options) if options.model is None else _from_hugging_face(options, Path(options.model))
    named = dict(module.named_parameters())
    return BuiltModel(
        module=module,
        config=config | {TASK_KEY: task_of(options)},
        num_params=sum(parameter.numel() for parameter in named.values()),
        matrices=frozenset(name for name, parameter in named.items() if parameter.dim() > 1),
    )


def task_of(options: TrainOptions) -> dict[str, Any]:
    """Return what the model is trained for, as JSON has it."""
    return {"name": "sort", "num_digits": options.digits, "seed": options.seed}


def param_groups(model: nn.Module, matrices: Collection[str]) -> list[dict[str, Any]]:
    """Return the groups of the optimizer: weight decay is for matrices. Flat parameters of FSDP1 are not told apart.

    Args:
        model: Sharded.
        matrices: ``BuiltModel.matrices``.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = strip_wrappers(name)
            groups[name in matrices or "_flat_param" in name].append(parameter)
    return [
        {"params": chosen, "weight_decay": _WEIGHT_DECAY if decays else 0.0}
        for decays, chosen in groups.items()
        if chosen
    ]


def _own(options: TrainOptions) -> tuple[nn.Module, dict[str, Any]]:
    sizes = DecoderConfig(
        vocab_size=task.VOCAB_SIZE,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=max(64, 2 * options.digits + 1),
    )
    return Decoder(sizes, seed=options.seed), sizes.to_hf()


def _from_hugging_face(options: TrainOptions, path: Path) -> tuple[nn.Module, dict[str, Any]]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"model: `{file}` cannot be read; allowed: a config.json or its folder: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"model: `{file}` is no JSON object; allowed: a config.json or its folder")
    try:
        import transformers
    except ImportError:
        raise UsageError(
            f"model: `{file}` takes transformers, which is not installed",
            hint="pip install transformers, or leave the model out to train the decoder of our own",
        ) from None
    try:
        # Without an answer for remote code transformers asks for one on the terminal.
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
        _check_sizes(file, config.get_text_config(), options)
        torch.manual_seed(options.seed)
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ImportError, KeyError, OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise UsageError(f"model: transformers makes no causal language model of `{file}`: {reason}") from error
    return module.float(), values


def _check_sizes(file: Path, config: Any, options: TrainOptions) -> None:
    wanted = {"vocab_size": task.VOCAB_SIZE, "max_position_embeddings": 2 * options.digits + 1}
    for name, least in wanted.items():
        found = getattr(config, name, None)
        if isinstance(found, int) and found < least:
            raise UsageError(f"model: `{file}` has {name} {found}; allowed for this task: {least} or more")
