"""A decoder of Llama's shape whose parameters are called as transformers' ``LlamaForCausalLM`` calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Decoder", "DecoderConfig", "DecoderLayer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder; names as in Hugging Face's ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False

    def to_hf(self) -> dict[str, Any]:
        """Return a ``config.json`` that ``LlamaForCausalLM`` takes."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "head_dim": self.hidden_size // self.num_attention_heads, "attention_bias": False, "mlp_bias": False,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "torch_dtype": "float32",
        }  # fmt: skip

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Self:
        """Read such a file's content; names that it does not need are left.

        Raises:
            KeyError: A size is missing.
        """
        rope = values.get("rope_parameters")  # where transformers 5 keeps it
        if isinstance(rope, dict) and "rope_theta" in rope:
            values = {**values, "rope_theta": rope["rope_theta"]}
        optional = ("rms_norm_eps", "rope_theta", "tie_word_embeddings")
        return cls(**{name: values[name] for name in cls.__slots__ if name in values or name not in optional})


class RMSNorm(nn.Module):
    """Scale to a root mean square of 1, then by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [..., size] to the same shape."""
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.size = config.hidden_size // config.num_attention_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.theta = config.rope_theta
        narrow = config.num_key_value_heads * self.size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        batch, length, _ = hidden.shape
        q, k, v = (
            project(hidden).view(batch, length, -1, self.size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Made here rather than kept as buffers, which a model on the meta device would lose.
        steps = torch.arange(0, self.size, 2, device=hidden.device, dtype=torch.float32) / self.size
        angles = torch.arange(length, device=hidden.device, dtype=torch.float32)[:, None] / self.theta**steps
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        q, k = (one * cos + _turn(one) * sin for one in (q, k))
        k, v = (one.repeat_interleave(self.groups, 1) for one in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def _turn(values: Tensor) -> Tensor:
    low, high = values.chunk(2, -1)
    return torch.cat((-high, low), -1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [..., hidden] to the same shape."""
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class _Body(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The whole model; equal seeds give equal weights.

    Args:
        config: Sizes.
        seed: Of the first values; the process's random state is left as it was.
    """

    _no_split_modules: ClassVar[list[str]] = ["DecoderLayer"]

    def __init__(self, config: DecoderConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.sizes = config
        self.model = _Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1 and not parameter.is_meta:
                    parameter.normal_(0.0, 0.02 if parameter.shape[0] == config.vocab_size else
                                      parameter.shape[1] ** -0.5, generator=generator)  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, length] to logits [batch, length, vocabulary]."""
        return self.lm_head(self.model(tokens))  # type: ignore[no-any-return]
