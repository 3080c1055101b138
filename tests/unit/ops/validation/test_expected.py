from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.ops.validation.against_config import check_model_config
from fsdp_ckpt.ops.validation.expected import expect_model
from tests.unit.ops.validation.made import codes, model

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LIKE_LLAMA = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "smollm3"]
OTHERS = ["phi3", "mixtral", "olmo2", "gpt_neox", "starcoder2", "stablelm", "cohere", "bloom", "opt", "deepseek_v3"]


@cache
def built(kind: str, **extra: Any) -> tuple[Mapping[str, Any], dict[str, Shape]]:
    """Return what transformers itself says: config.json, and names and shapes that save_pretrained would write."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SMALL | extra
    if kind == "bloom":
        sizes |= {"n_layer": 2, "n_head": 4}
    if kind == "opt":
        sizes |= {"word_embed_proj_dim": 8, "ffn_dim": 24}
    config = AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config)
    net.config.architectures = [type(net).__name__]  # as save_pretrained does
    tied = config.get_text_config().tie_word_embeddings
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    if tied:
        shapes.pop("lm_head.weight", None)
    return json.loads(json.dumps(net.config.to_dict(), default=str)), shapes


def check(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[str]:
    return codes(check_model_config(model(shapes), config, "config.json"))


@pytest.mark.parametrize("kind", [*LIKE_LLAMA, "gpt2", *OTHERS])
def test_models_of_transformers_fit_their_own_configuration(kind: str) -> None:
    config, shapes = built(kind)
    assert check(config, shapes) == []


@pytest.mark.parametrize("kind", [*LIKE_LLAMA, "gpt2"])
def test_every_weight_of_these_is_expected(kind: str) -> None:
    config, shapes = built(kind)
    for name in shapes:
        if not name.endswith("proj.bias"):
            rest = {other: shape for other, shape in shapes.items() if other != name}
            assert check(config, rest) == ["missing-key"], name


@pytest.mark.parametrize("kind", [*LIKE_LLAMA, "gpt2"])
def test_every_shape_of_these_is_known(kind: str) -> None:
    config, shapes = built(kind)
    for name, shape in shapes.items():
        longer: dict[str, Shape] = {name: (*shape[:-1], shape[-1] + 1)}
        assert check(config, shapes | longer) == ["shape-differs"], name


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_heads_that_do_not_add_up_to_the_width(kind: str) -> None:
    config, shapes = built(kind, head_dim=6)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (24, 16)
    assert check(config, shapes) == []


def test_biases_are_known_where_they_are() -> None:
    config, shapes = built("llama", attention_bias=True)
    assert check(config, shapes) == []
    other: dict[str, Shape] = {"model.layers.1.self_attn.k_proj.bias": (9,)}
    assert check(config, shapes | other) == ["shape-differs"]


@pytest.mark.parametrize("kind", [*OTHERS, "llama"])
def test_of_any_model_the_layers_are_counted(kind: str) -> None:
    config, shapes = built(kind)
    rest = {name: shape for name, shape in shapes.items() if ".1." not in name}
    assert check(config, rest) == ["missing-key"]


@pytest.mark.parametrize(
    "config",
    [
        {"is_encoder_decoder": True, "vocab_size": 8, "hidden_size": 4},
        {"text_config": {"vocab_size": 8}, "vocab_size": 8, "hidden_size": 4},
        {"quantization_config": {}, "vocab_size": 8, "hidden_size": 4},
    ],
)
def test_models_of_several_parts_and_quantized_ones_are_left_alone(config: dict[str, Any]) -> None:
    assert expect_model(config) is None


@pytest.mark.parametrize("value", [0, -1, 2.0, "16", None, True, 2**80])
def test_sizes_that_are_none_are_not_believed(value: Any) -> None:
    found = expect_model({"vocab_size": value, "hidden_size": 4, "num_hidden_layers": value})
    assert found is not None
    assert not found.tells_something
