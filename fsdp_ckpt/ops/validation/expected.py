"""What a model's ``config.json`` tells of its tensors, without the model's code.

Names and shapes of whole layers are known for models that are built like Llama, and for GPT-2; of all others only the
embedding, the output head and the number of layers. Where a configuration leaves something open, nothing is expected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.catalog import Checkpoint, Shape
from fsdp_ckpt.store.local import LocalStore

__all__ = ["HEAD", "ExpectedModel", "expect_model", "expected_beside"]

HEAD = "lm_head.weight"
"""The output head, which stands beside the base model rather than in it."""

_LIMIT_BYTES = 4 << 20
_PLACES = ("config.json", "huggingface/config.json")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in")
_OTHER_WIDTHS = ("embedding_size", "embedding_dim", "word_embed_proj_dim", "emb_dim")
_SEVERAL_MODELS = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "thinker_config")
# Their default of head_dim is hidden_size / num_attention_heads; that of the others is a number of their own.
_DERIVED_HEADS = ("llama", "mistral", "qwen2", "granite", "smollm3")
_LIKE_LLAMA = (*_DERIVED_HEADS, "qwen3", "gemma", "gemma2", "gemma3_text")
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h)\.\d+\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedModel:
    """Tensors that a model has, by its configuration.

    Attributes:
        stack: What its layers stand under (``layers``, ``h``); None where that is not known.
        num_layers: How many there are; None where the configuration does not say.
        outside: Shapes of tensors outside of the layers, by name in the base model; None where it cannot be told.
        layer: Shapes of the tensors of each layer, likewise.
        optional: Shapes of tensors that may be missing, in layers or outside of them.
        is_tied: Whether there may be no output head of its own.
        is_certain: Whether all sizes that such a model has are known.
        num_experts: Experts in every layer; 0 where there are none, or only in some layers.
    """

    stack: str | None = None
    num_layers: int | None = None
    outside: Mapping[str, Shape | None] = field(default_factory=dict)
    layer: Mapping[str, Shape | None] = field(default_factory=dict)
    optional: Mapping[str, Shape | None] = field(default_factory=dict)
    is_tied: bool = True
    is_certain: bool = False
    num_experts: int = 0

    @property
    def tells_something(self) -> bool:
        """Whether there is anything to compare with."""
        return bool(self.num_layers or self.outside or self.optional)

    def shape_of(self, name: str) -> Shape | None:
        """Return the shape of a tensor by its name in the whole model, None where it is not known."""
        match = _LAYER.fullmatch(name)
        if match is not None:
            return self.layer.get(match[1]) or self.optional.get(match[1])
        tail = ".".join(name.split(".")[-2:])
        if tail.startswith(("norm.", "ln_f.")) and len(name.split(".")) > 3:
            return None
        return self.outside.get(tail) or self.optional.get(tail)


def expected_beside(checkpoint: Checkpoint) -> tuple[str, ExpectedModel] | None:
    """Return name and content of the ``config.json`` beside the weights, None where none tells anything."""
    store = LocalStore(checkpoint.roots)
    listed = [file for file in checkpoint.side_files if file.rpartition("/")[2] == "config.json"]
    for file in (*listed, *_PLACES):
        try:
            config = json.loads(store.read(file, limit_bytes=_LIMIT_BYTES))
        except (ValueError, RecursionError):  # not there, a link out of the folder, or no JSON
            continue
        found = expect_model(config) if isinstance(config, dict) else None
        if found is not None and found.tells_something:
            return file, found
    return None


def expect_model(config: Mapping[str, Any]) -> ExpectedModel | None:
    """Return what a configuration tells; None for models of several parts, and for quantized ones."""
    if config.get("is_encoder_decoder") is True or "quantization_config" in config:
        return None
    if any(isinstance(config.get(name), dict) for name in _SEVERAL_MODELS):
        return None
    is_tied = config.get("tie_word_embeddings") is not False or not _has_head(config)
    if config.get("model_type") in _LIKE_LLAMA:
        return _like_llama(config, is_tied=is_tied)
    if config.get("model_type") == "gpt2":
        return _gpt2(config)
    embedding = _embedding(config)
    names = [f"{name}.weight" for name in _EMBEDDINGS] if embedding else []
    return ExpectedModel(
        num_layers=_number(config, "num_hidden_layers", "n_layer", "num_layers"),
        optional=dict.fromkeys([*names, HEAD], embedding) if embedding else {},
        is_tied=is_tied,
        num_experts=_number(config, "num_local_experts") or 0,
    )


def _has_head(config: Mapping[str, Any]) -> bool:
    classes = config.get("architectures")
    return isinstance(classes, list) and any("CausalLM" in str(name) or "LMHead" in str(name) for name in classes)


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if type(value) is int and 0 < value < 2**40:
            return value
    return None


def _shape(*sizes: int | None) -> Shape | None:
    known = [size for size in sizes if size is not None]
    return tuple(known) if len(known) == len(sizes) else None


def _embedding(config: Mapping[str, Any]) -> Shape | None:
    if any(name in config for name in _OTHER_WIDTHS) or any("pad" in name and "vocab" in name for name in config):
        return None
    return _shape(_number(config, "vocab_size"), _number(config, "hidden_size", "n_embd", "d_model"))


def _like_llama(config: Mapping[str, Any], *, is_tied: bool) -> ExpectedModel:
    kind = config["model_type"]
    hidden, inner = _number(config, "hidden_size"), _number(config, "intermediate_size")
    heads, groups = _number(config, "num_attention_heads"), _number(config, "num_key_value_heads")
    head = _number(config, "head_dim")
    if head is None and kind in _DERIVED_HEADS and heads and hidden and hidden % heads == 0:
        head = hidden // heads
    queries, keys = (number * head if number and head else None for number in (heads, groups))
    norm = _shape(hidden)
    layer = {
        "self_attn.q_proj.weight": _shape(queries, hidden),
        "self_attn.k_proj.weight": _shape(keys, hidden),
        "self_attn.v_proj.weight": _shape(keys, hidden),
        "self_attn.o_proj.weight": _shape(hidden, queries),
        "mlp.gate_proj.weight": _shape(inner, hidden),
        "mlp.up_proj.weight": _shape(inner, hidden),
        "mlp.down_proj.weight": _shape(hidden, inner),
        "input_layernorm.weight": norm,
        "post_attention_layernorm.weight": norm,
    }
    if kind in ("gemma2", "gemma3_text"):
        layer |= {f"{place}_feedforward_layernorm.weight": norm for place in ("pre", "post")}
    if kind in ("qwen3", "gemma3_text"):
        layer |= {f"self_attn.{name}_norm.weight": _shape(head) for name in "qk"}
    biases = {"q": queries, "k": keys, "v": keys, "o": hidden}
    embedding = _embedding(config)
    return ExpectedModel(
        stack="layers",
        num_layers=_number(config, "num_hidden_layers"),
        outside={"embed_tokens.weight": embedding, "norm.weight": norm},
        layer=layer,
        optional={HEAD: embedding, **{f"self_attn.{name}_proj.bias": _shape(n) for name, n in biases.items()}},
        is_tied=is_tied,
        is_certain=embedding is not None and None not in layer.values(),
    )


def _gpt2(config: Mapping[str, Any]) -> ExpectedModel:
    """GPT-2's matrices are those of Conv1D: (in, out)."""
    width = _number(config, "n_embd", "hidden_size")
    inner = _number(config, "n_inner") or (4 * width if width else None)
    matrices = {
        "attn.c_attn": (width, 3 * width if width else None),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    layer = {f"{name}.weight": _shape(*sizes) for name, sizes in matrices.items()}
    layer |= {f"{name}.bias": _shape(sizes[1]) for name, sizes in matrices.items()}
    layer |= {f"{norm}.{kind}": _shape(width) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
    positions = _number(config, "n_positions", "n_ctx", "max_position_embeddings")
    return ExpectedModel(
        stack="h",
        num_layers=_number(config, "n_layer", "num_hidden_layers"),
        outside={
            "wte.weight": _embedding(config),
            "wpe.weight": _shape(positions, width),
            "ln_f.weight": _shape(width),
            "ln_f.bias": _shape(width),
        },
        layer=layer,
        optional={HEAD: _embedding(config)},
    )
