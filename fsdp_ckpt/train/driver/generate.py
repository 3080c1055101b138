"""Ask a trained model: load it into the decoder, and let it sort numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_ckpt.errors import CheckpointNotFound, Incompatible, UsageError
from fsdp_ckpt.train.driver import task
from fsdp_ckpt.train.driver.decoder import Decoder, DecoderConfig
from fsdp_ckpt.train.driver.model import TASK_KEY
from fsdp_ckpt.train.load import load_state

__all__ = ["GenerateReport", "generate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport:
    """What a model answered.

    Attributes:
        path: What was loaded.
        num_params: Its parameters.
        answers: Prompt, answer, and whether it is right.
        num_samples: Held-out samples that were asked.
        accuracy: Share of them, 0 to 1, that were answered without a fault; None when none was asked.
    """

    path: str
    num_params: int
    answers: tuple[tuple[str, str, bool], ...]
    num_samples: int
    accuracy: float | None


def generate(path: str | os.PathLike[str], prompts: Sequence[str] = (), *, num_samples: int = 0) -> GenerateReport:
    """Answer prompts greedily, and ask held-out samples.

    Args:
        path: A merged model, or a checkpoint that is still sharded; ``config.json`` lies in it or beside it, and says
            what it was trained for.
        prompts: Numbers whose digits are to be sorted, as long as those of the training: ``31415926``.
        num_samples: Held-out samples to ask besides.

    Raises:
        UsageError: A prompt that is no number, or of another length.
        CheckpointNotFound: There is no model, or no ``config.json``.
        Incompatible: It is a model of another kind, or was trained for something else.
        CorruptCheckpoint: As ``load_state``.
    """
    if num_samples < 0:
        raise UsageError(f"num_samples: {num_samples} is not possible; allowed: a whole number from 0")
    encoded = [task.encode(prompt) for prompt in prompts]
    given = Path(path)
    if not given.exists():
        raise CheckpointNotFound(f"there is no `{given}`", hint=f"fsdp-ckpt merge run/step-N {given}")
    config = (given if given.is_dir() else given.parent) / "config.json"
    values = _read(config)
    digits, seed = _task(values, config)
    for prompt in prompts:
        if len(prompt) != digits:
            raise UsageError(f"`{prompt}` has {len(prompt)} digits; this model was trained on numbers of {digits}")
    model = Decoder(_sizes(values, config))
    load_state(given, model.eval(), rng=False)
    answers = []
    for prompt, tokens in zip(prompts, encoded, strict=True):
        answer = task.decode(_greedy(model, torch.tensor([tokens]), digits)[0].tolist())
        answers.append((prompt, answer, answer == "".join(sorted(prompt))))
    accuracy = None
    if num_samples:
        batch = task.held_out(seed, num_samples, digits)
        found = _greedy(model, batch[:, : digits + 1], digits)
        accuracy = (found == batch[:, digits + 1 :]).all(-1).float().mean().item()
    return GenerateReport(
        path=str(given), num_params=sum(one.numel() for one in model.parameters()), answers=tuple(answers),
        num_samples=num_samples, accuracy=accuracy,
    )  # fmt: skip


def _read(config: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointNotFound(
            f"there is no `{config}`", hint="give a merged model, or a step-N of `fsdp-ckpt train`: they have one"
        ) from None
    except ValueError as error:
        raise Incompatible(f"`{config}` is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise Incompatible(f"`{config}` is no JSON object")
    return values


def _task(values: Mapping[str, Any], config: Path) -> tuple[int, int]:
    """Return length and seed of the numbers that a model was trained on."""
    trained = values.get(TASK_KEY)
    if not isinstance(trained, dict) or trained.get("name") != "sort":
        raise Incompatible(
            f"`{config}` does not say that this model sorts numbers", hint="give a model of `fsdp-ckpt train`"
        )
    digits, seed = trained.get("num_digits"), trained.get("seed")
    if not isinstance(digits, int) or not isinstance(seed, int) or digits < 1 or seed < 0:
        raise Incompatible(f"`{config}`: {TASK_KEY} has no `num_digits` and `seed`")
    return digits, seed


def _sizes(values: Mapping[str, Any], config: Path) -> DecoderConfig:
    if values.get("model_type") != "llama":
        raise Incompatible(
            f"`{config}` describes a {values.get('model_type')}; only the decoder of `fsdp-ckpt train` is asked",
            hint="merge it, and load it with transformers",
        )
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    odd = {
        "hidden_act": values.get("hidden_act", "silu") != "silu",
        "rope_type": isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) != "default",
        "head_dim": values.get("head_dim") not in (None, values.get("hidden_size", 0) // values["num_attention_heads"])
        if values.get("num_attention_heads")
        else False,
    }
    if any(odd.values()):
        raise Incompatible(
            f"`{config}` has a {next(name for name, is_odd in odd.items() if is_odd)} that this decoder lacks",
            hint="merge it, and load it with transformers",
        )
    try:
        sizes = DecoderConfig.from_hf(values)
    except (KeyError, TypeError) as error:
        raise Incompatible(f"`{config}` describes no decoder of Llama's shape: {error!r}") from None
    if sizes.vocab_size < task.VOCAB_SIZE:
        raise Incompatible(f"`{config}` has {sizes.vocab_size} tokens, and sorting digits takes {task.VOCAB_SIZE}")
    return sizes


@torch.no_grad()
def _greedy(model: Decoder, tokens: torch.Tensor, count: int) -> torch.Tensor:
    start = tokens.shape[1]
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), -1)
    return tokens[:, start:]
