"""Names and shapes by config.json: what transformers says of the model that it builds with weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from fsdp_ckpt.errors import CheckpointNotFound, UsageError
from fsdp_ckpt.ops.conversion.meta_model import meta_shapes
from fsdp_ckpt.ops.conversion.shapes_from import shapes_from

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[Any, dict[str, str]]] = {
    "LlamaForCausalLM": (transformers.LlamaConfig(**SIZES, tie_word_embeddings=False), {}),
    "Qwen3ForCausalLM": (
        transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
        {"lm_head.weight": "model.embed_tokens.weight"},
    ),
    "GPT2LMHeadModel": (
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, bos_token_id=1, eos_token_id=2),
        {"lm_head.weight": "transformer.wte.weight"},
    ),
    "ResNetForImageClassification": (
        transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic"),
        {},
    ),
}


def write(folder: Path, values: object) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, dict[str, str]]:
    config, tied = MODELS[request.param]
    model = getattr(transformers, request.param)(config)
    model.config.architectures = [request.param]
    model.config.save_pretrained(tmp_path)
    return tmp_path, model, tied


def test_as_the_model_with_weights(saved: tuple[Path, Any, dict[str, str]]) -> None:
    folder, model, tied = saved
    found = meta_shapes(folder)
    assert found is not None
    assert found.class_name == type(model).__name__
    assert [*found.parameters.items()] == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert found.tied == tied
    assert {*found.parameters, *found.buffers, *found.tied} == {*model.state_dict()}
    assert found.buffers == {
        name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in model.state_dict()
    }


def test_shapes_for_flat_parameters(saved: tuple[Path, Any, dict[str, str]]) -> None:
    """The folder is taken where nothing but the configuration is in it; buffers lie in no flat parameter."""
    folder, model, tied = saved
    for path in (folder, folder / "config.json"):
        found = shapes_from(path)
        assert found.doubt is None
        assert found.aliases == tied
        own = [name for name in found.shapes if name not in tied]
        assert own == [name for name, _ in model.named_parameters()]
        assert {name: found.shapes[name] for name in tied} == {
            name: tuple(model.state_dict()[name].shape) for name in tied
        }


def test_without_architectures_it_is_the_causal_language_model(tmp_path: Path) -> None:
    values = transformers.LlamaConfig(**SIZES).to_dict()
    found = meta_shapes(write(tmp_path, values | {"architectures": None}))
    assert found is not None
    assert found.class_name == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"model_type": "of our own"}, "transformers makes no model"),
        ({}, "transformers makes no model"),
        ({"model_type": "llama", "architectures": ["OursForCausalLM"]}, r"is of .*OursForCausalLM"),
        ({"model_type": "llama", "architectures": ["__class__"]}, "is of"),
        ({"model_type": "llama", "architectures": ["AutoModel"]}, "is of"),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, "is of"),
        ({"model_type": "llama", "num_hidden_layers": 1_000_000}, "num_hidden_layers: 1000000"),
        ({"model_type": "mixtral", "text_config": {"num_local_experts": 99_999}}, "num_local_experts: 99999"),
        ({**SIZES, "model_type": "llama", "num_attention_heads": 0}, "transformers makes no model"),
        ([1], "is no configuration"),
    ],
)
def test_other_configurations_are_refused(values: object, match: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=match):
        meta_shapes(write(tmp_path, values))


def test_no_code_of_the_model_is_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_ours.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    values = {"model_type": "ours", "auto_map": {"AutoConfig": "modeling_ours.Config"}}
    with pytest.raises(UsageError, match="transformers makes no model"):
        meta_shapes(write(tmp_path, values))
    assert not (tmp_path / "ran").exists()


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        meta_shapes(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        meta_shapes(tmp_path)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, transformers.LlamaConfig(**SIZES).to_dict())
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert meta_shapes(file) is None
    with pytest.raises(UsageError, match="takes transformers") as caught:
        shapes_from(file)
    assert "named_parameters()" in str(caught.value.hint)
