"""Models of a run: which descriptions are refused, and which parameters decay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.driver.model import build_model, param_groups
from fsdp_ckpt.train.driver.options import TrainOptions

LLAMA = {
    "model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "torch_dtype": "bfloat16",
}  # fmt: skip


def write(folder: Path, **changes: object) -> TrainOptions:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return TrainOptions(folder="run", model=str(folder))


def test_only_matrices_decay() -> None:
    built = build_model(TrainOptions(folder="run", hidden=16, layers=1))
    decaying, others = param_groups(built.module, built.matrices)
    assert {one.dim() for one in decaying["params"]} == {2}
    assert [tuple(one.shape) for one in others["params"]] == [(16,)] * 3
    assert (decaying["weight_decay"] > 0, others["weight_decay"]) == (True, 0.0)


def test_a_description_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    built = build_model(write(tmp_path))
    assert type(built.module).__name__ == "LlamaForCausalLM"
    assert {str(one.dtype) for one in built.module.parameters()} == {"torch.float32"}
    assert built.config == LLAMA | {"fsdp_ckpt_task": {"name": "sort", "num_digits": 8, "seed": 0}}
    assert built.num_params == 2 * 16 * 8 + 4 * 8 * 8 + 3 * 8 * 8 + 3 * 8


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vocab_size": 10}, "has vocab_size 10; allowed for this task: 16 or more"),
        ({"max_position_embeddings": 16}, "has max_position_embeddings 16; allowed for this task: 17 or more"),
        ({"model_type": "nobody"}, "transformers makes no causal language model of"),
        ({"model_type": "vit"}, "transformers makes no causal language model of"),
        ({"model_type": "nobody", "auto_map": {"AutoConfig": "x.Y"}}, "transformers makes no causal language model of"),
    ],
)
def test_a_description_that_will_not_do(tmp_path: Path, changes: dict[str, object], text: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match="model: ") as caught:
        build_model(write(tmp_path, **changes))
    assert text in str(caught.value)


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_no_description(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "sizes.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=r"allowed: a config\.json or its folder"):
        build_model(TrainOptions(folder="run", model=str(file)))
