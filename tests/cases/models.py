"""The modules of ../shared/cases.md, unsharded: what a merge must give back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

X_VALUES = (1.0, 1.00390625, 1.01171875, 3.0e38, 1e-40, float("nan"), float("inf"), -0.0)
"""P17: values that show how fp32 is rounded to bf16."""


class Mlp(nn.Module):
    """MLP(h, f): parameter i holds arange + 1000 * i. MLP(6, 8) has 488 bytes."""

    def __init__(self, h: int = 6, f: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(h, f)
        self.down = nn.Linear(f, h)
        self.norm = nn.LayerNorm(h)
        number(self)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return x + change


class Buffers(nn.Module):
    """P01 and P56: buffers that every rank holds whole, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("layer_scalar", torch.tensor([2.5]))
        self.register_buffer("scale0d", torch.tensor(7, dtype=torch.int64))
        self.register_buffer("std", torch.arange(8, dtype=torch.float32))
        self.register_buffer("np_buf", torch.ones(3), persistent=False)
        number(self)


class Odd(nn.Module):
    """P05: dimensions that four ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(6))
        self.c = nn.Parameter(torch.zeros(10, 3))
        self.d = nn.Parameter(torch.zeros(7, 1))
        number(self)


class Block(nn.Module):
    """P09: a block that is compiled and checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.mlp(self.attn(x))
        return x + change


class Layered(nn.Module):
    """P09: blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])
        number(self)


class Tied(nn.Module):
    """P14: the output head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.mid = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 16, bias=False)
        self.lm_head.weight = self.embed.weight
        number(self)


class Lora(nn.Module):
    """P49: the two halves of an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.Linear(8, 4, bias=False)
        self.lora_B = nn.Linear(4, 8, bias=False)


class Embed(nn.Module):
    """P52: a vocabulary of 12."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        number(self)


def number(module: nn.Module) -> None:
    """Fill parameter i with arange + 1000 * i."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_((torch.arange(parameter.numel()) + 1000 * i).reshape(parameter.shape))


def reference(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a module that no rank has touched."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def mixed() -> dict[str, Tensor]:
    """P17: three dtypes."""
    return {
        "x": torch.tensor(X_VALUES),
        "y": torch.tensor([0.5, -1.0, 3.25, 1e-3], dtype=torch.bfloat16),
        "z": torch.tensor([1.0, 1.0009765625, 65504.0, -6e-8], dtype=torch.float16),
    }


def adapted() -> dict[str, Tensor]:
    """P51: the keys of a model wrapped by PEFT."""
    base = "base_model.model."
    return {
        f"{base}layers.0.q_proj.base_layer.weight": torch.arange(48.0).reshape(8, 6),
        f"{base}layers.0.q_proj.lora_A.default.weight": torch.arange(12.0).reshape(2, 6) + 100,
        f"{base}layers.0.q_proj.lora_B.default.weight": torch.arange(16.0).reshape(8, 2) + 200,
        f"{base}score.original_module.weight": torch.zeros(3, 6),
        f"{base}score.modules_to_save.default.weight": torch.ones(3, 6),
        f"{base}norm.weight": torch.arange(6.0) + 300,
    }


def oddly_named() -> dict[str, Tensor]:
    """P54: a name with a slash and a space in it."""
    return {"layers.0.a/b c.weight": torch.arange(12.0).reshape(4, 3), "plain.weight": torch.arange(6.0) + 50}


def layers(count: int, shape: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """P23: names and shapes of `count` equal tensors; l{i} holds i everywhere."""
    return {f"l{i}.weight": shape for i in range(count)}
