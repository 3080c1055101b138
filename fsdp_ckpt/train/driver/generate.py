"""Ask a merged model: load it into the decoder, and let it sort numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_ckpt.errors import CheckpointNotFound, Incompatible, UsageError
from fsdp_ckpt.train.driver import task
from fsdp_ckpt.train.driver.decoder import Decoder, DecoderConfig

__all__ = ["GenerateReport", "generate", "load_decoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport:
    """What a model answered.

    Attributes:
        path: The file of weights.
        answers: Prompt, answer, and whether it is right.
        num_samples: Held-out samples that were asked.
        accuracy: Share of them, 0 to 1, that were answered without a fault; None when none was asked.
    """

    path: str
    answers: tuple[tuple[str, str, bool], ...]
    num_samples: int
    accuracy: float | None


def load_decoder(path: str | os.PathLike[str]) -> tuple[Decoder, Path]:
    """Load ``model.safetensors``, with ``config.json`` beside it.

    Raises:
        CheckpointNotFound: One of the files is not there.
        Incompatible: It is a model of another kind or vocabulary.
    """
    from safetensors.torch import load_file

    given = Path(path)
    file = given / "model.safetensors" if given.is_dir() else given
    config = file.parent / "config.json"
    if not file.is_file():
        raise CheckpointNotFound(f"there is no `{file}`", hint=f"fsdp-ckpt merge CHECKPOINT {file.parent}")
    if not config.is_file():
        raise CheckpointNotFound(
            f"there is no `{config}`", hint="copy config.json from the checkpoint beside the weights"
        )
    try:
        sizes = DecoderConfig.from_hf(json.loads(config.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Incompatible(f"`{config}` describes no decoder of Llama's shape: {error!r}") from None
    if sizes.vocab_size < task.VOCAB_SIZE:
        raise Incompatible(
            f"`{config}` has {sizes.vocab_size} tokens, and sorting digits takes {task.VOCAB_SIZE}",
            hint="give a model that `fsdp-ckpt train` trained",
        )
    model = Decoder(sizes)
    weights = load_file(file)
    if sizes.tie_word_embeddings and "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise Incompatible(f"`{file}` does not fit `{config}`: {error}") from None
    return model.eval(), file


def generate(path: str | os.PathLike[str], prompts: Sequence[str] = (), *, num_samples: int = 0,
             digits: int = 8, seed: int = 0) -> GenerateReport:  # fmt: skip
    """Answer prompts greedily, and ask held-out samples.

    Args:
        path: A folder with ``model.safetensors`` and ``config.json``, or that file.
        prompts: Numbers whose digits are to be sorted, such as ``31415926``.
        num_samples: Held-out samples to ask besides.
        digits: Length of those.
        seed: Of the run that trained the model.

    Raises:
        UsageError: A prompt that is no number.
        CheckpointNotFound: As ``load_decoder``.
        Incompatible: Likewise.
    """
    if num_samples < 0:
        raise UsageError(f"num_samples: {num_samples} is not possible; allowed: a whole number from 0")
    encoded = [task.encode(prompt) for prompt in prompts]
    model, file = load_decoder(path)
    answers = []
    for prompt, tokens in zip(prompts, encoded, strict=True):
        answer = task.decode(_greedy(model, torch.tensor([tokens]), len(prompt))[0].tolist())
        answers.append((prompt, answer, answer == "".join(sorted(prompt))))
    accuracy = None
    if num_samples:
        batch = task.held_out(seed, num_samples, digits)
        found = _greedy(model, batch[:, : digits + 1], digits)
        accuracy = (found == batch[:, digits + 1 :]).all(-1).float().mean().item()
    return GenerateReport(path=str(file), answers=tuple(answers), num_samples=num_samples, accuracy=accuracy)


@torch.no_grad()
def _greedy(model: Decoder, tokens: torch.Tensor, count: int) -> torch.Tensor:
    start = tokens.shape[1]
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), -1)
    return tokens[:, start:]
