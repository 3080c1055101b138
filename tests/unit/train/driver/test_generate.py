"""What a model answers is what transformers' Llama answers, and what cannot be asked is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_ckpt import merge, save_state
from fsdp_ckpt.errors import CheckpointNotFound, Incompatible, StateMismatch, UsageError
from fsdp_ckpt.train.driver.decoder import Decoder, DecoderConfig
from fsdp_ckpt.train.driver.generate import generate

TASK = {"name": "sort", "num_digits": 4, "seed": 7}
PROMPTS = ("3141", "2718", "0000")


def _sizes(*, tied: bool = False) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip


def _write(folder: Path, sizes: DecoderConfig, **changes: Any) -> Decoder:
    """Write a model of random weights as ``merge`` leaves one, by safetensors' own writer."""
    model = Decoder(sizes, seed=5)
    folder.mkdir(exist_ok=True)
    weights = dict(model.state_dict())
    if sizes.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    config = {**sizes.to_hf(), "fsdp_ckpt_task": TASK, **changes}
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return model


def _answers_of_transformers(folder: Path) -> list[str]:
    transformers = pytest.importorskip("transformers")
    judge = transformers.LlamaForCausalLM.from_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        tokens = torch.tensor([[*map(int, prompt), 10]])
        out = judge.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False,
                             eos_token_id=None, pad_token_id=15)  # fmt: skip
        found.append("".join("0123456789>?????"[token] for token in out[0, 5:].tolist()))
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_answers_are_those_of_transformers(tmp_path: Path, tied: bool) -> None:
    _write(tmp_path, _sizes(tied=tied))
    report = generate(tmp_path, PROMPTS, num_samples=20)
    assert [answer for _, answer, _ in report.answers] == _answers_of_transformers(tmp_path)
    assert [right for _, _, right in report.answers] == [
        answer == "".join(sorted(prompt)) for prompt, answer, _ in report.answers
    ]
    assert report.accuracy is not None
    assert 0 <= report.accuracy <= 1


def test_the_rotary_base_of_transformers_5_is_read(tmp_path: Path) -> None:
    _write(tmp_path, _sizes(), rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    answers = [answer for _, answer, _ in generate(tmp_path, PROMPTS).answers]
    assert answers == _answers_of_transformers(tmp_path)


def test_sharded_files_and_a_checkpoint_answer_alike(tmp_path: Path) -> None:
    model = _write(tmp_path / "merged", _sizes())
    expected = generate(tmp_path / "merged", PROMPTS).answers
    save_state(tmp_path / "step-1", model, step=1)
    config = (tmp_path / "merged" / "config.json").read_text()
    (tmp_path / "step-1" / "config.json").write_text(config)
    assert generate(tmp_path / "step-1", PROMPTS).answers == expected
    merge(tmp_path / "step-1", tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert generate(tmp_path / "shards", PROMPTS).answers == expected
    assert generate(tmp_path / "merged" / "model.safetensors", PROMPTS).answers == expected


def test_what_is_missing_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="there is no"):
        generate(tmp_path / "nothing", ["3141"])
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        generate(tmp_path, ["3141"])
    for changes in ({"fsdp_ckpt_task": None}, {"fsdp_ckpt_task": {"name": "add"}}, {"model_type": "gpt2"},
                    {"hidden_size": None}, {"vocab_size": 4}, {"hidden_act": "gelu"}, {"head_dim": 16},
                    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}):  # fmt: skip
        _write(tmp_path / "other", _sizes(), **changes)
        with pytest.raises(Incompatible):
            generate(tmp_path / "other", ["3141"])
    _write(tmp_path / "other", _sizes(), num_hidden_layers=3)
    with pytest.raises(StateMismatch, match=r"model\.layers\.2"):
        generate(tmp_path / "other", ["3141"])


@pytest.mark.parametrize("prompt", ["", "31 41", "abcd", "31415", "314"])
def test_prompts_of_another_form_are_refused(tmp_path: Path, prompt: str) -> None:
    _write(tmp_path, _sizes())
    with pytest.raises(UsageError):
        generate(tmp_path, [prompt])
