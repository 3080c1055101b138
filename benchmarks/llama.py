"""Say which tensors a Llama-shaped model has: names and shapes, no values, no torch."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Self

_LAYER_NAMES = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


def names(num_tensors: int) -> Iterator[str]:
    """Yield `num_tensors` names of a Llama state dict; the last layer is cut short where the count demands it."""
    layers = (f"model.layers.{layer}.{name}" for layer in itertools.count() for name in _LAYER_NAMES)
    every = itertools.chain(["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"], layers)
    return itertools.islice(every, num_tensors)


def is_vector(name: str) -> bool:
    """Tell whether the tensor of this name has one dimension (the norms) and not two."""
    return name.endswith("norm.weight")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """The dimensions of a Llama-shaped model, all even so that two ranks hold equal halves.

    Attributes:
        hidden: Width of the residual stream, elements.
        num_layers: Number of decoder layers.
        vocab: Rows of the embedding and of the head, elements.
    """

    hidden: int
    num_layers: int
    vocab: int

    @classmethod
    def fit(cls, num_elements: int) -> Self:
        """Choose dimensions whose tensors hold about `num_elements` elements (within 1 % from 10 million up)."""
        hidden = next(width for width in (2048, 1024, 512, 128, 32) if num_elements >= 60 * width**2 or width == 32)
        vocab = 4 * hidden
        layer = cls(hidden=hidden, num_layers=1, vocab=0).num_elements
        num_layers = max(1, (num_elements - 2 * vocab * hidden) // layer)
        spare = max(0, num_elements - 2 * vocab * hidden - num_layers * layer)
        return cls(hidden=hidden, num_layers=num_layers, vocab=vocab + 2 * (spare // (4 * hidden)))

    @property
    def num_tensors(self) -> int:
        """Number of tensors in the state dict."""
        return 3 + len(_LAYER_NAMES) * self.num_layers

    @property
    def num_elements(self) -> int:
        """Elements of all tensors together."""
        sizes = (shape[0] if len(shape) == 1 else shape[0] * shape[1] for shape in self.shapes().values())
        return sum(sizes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> global shape, in state dict order, as Hugging Face's `LlamaForCausalLM` names them."""
        wide, narrow = 4 * self.hidden, self.hidden // 4
        kinds = {
            "k_proj": (narrow, self.hidden),
            "v_proj": (narrow, self.hidden),
            "gate_proj": (wide, self.hidden),
            "up_proj": (wide, self.hidden),
            "down_proj": (self.hidden, wide),
            "embed_tokens": (self.vocab, self.hidden),
            "lm_head": (self.vocab, self.hidden),
        }
        square = (self.hidden, self.hidden)
        return {
            name: (self.hidden,) if is_vector(name) else kinds.get(name.split(".")[-2], square)
            for name in names(self.num_tensors)
        }
