"""A small decoder, how it is trained on one or several ranks, and what its wrappers did, read by torch's own means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_ckpt.names import strip_wrappers

WIDTH, HIDDEN, WORDS, ROWS, LENGTH, STEPS = 6, 10, 13, 8, 5, 3


class Block(nn.Module):
    """A layer: 148 parameters; 10 rows, 6 rows and 4 ranks do not go evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.dtypes: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        self.dtypes.append(str(hidden.dtype))
        change: Tensor = self.down(torch.tanh(hidden))
        return x + change


class Angles(nn.Module):
    """A buffer that checkpoints do not hold, and its rule."""

    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.angles.copy_(torch.arange(WIDTH) * 0.125)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.angles.to(x.dtype)


class Gain(nn.Module):
    """A buffer that checkpoints do hold."""

    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.rand(WIDTH) + 0.5)

    def reset_parameters(self) -> None:
        self.gain.data.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.to(x.dtype)


class Decoder(nn.Module):
    """Embedding (78 parameters), buffers, two layers, a head (91)."""

    _no_split_modules: tuple[str, ...] = ("Block",)

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.angles = Angles()
        self.gain = Gain()
        self.layers: Any = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.gain(self.angles(self.embed(tokens)))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Layerless(Decoder):
    """Does not say what its layers are."""

    _no_split_modules = ()


def build(seed: int, *, device: str = "cpu", tied: bool = False, kind: type[Decoder] = Decoder) -> Decoder:
    torch.manual_seed(seed)
    with torch.device(device):
        return kind(tied=tied)


def batch(step: int) -> Tensor:
    return (torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * (step + 3) + step) % WORDS


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), (tokens.flatten() + 1) % WORDS)


Forward = Callable[[Tensor], Tensor]


def train(
    model: nn.Module,
    *,
    forward: Forward | None = None,
    rank: int = 0,
    size: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    steps: range = range(STEPS),
) -> list[float]:
    """Train on this rank's rows of the whole batch; return the losses of the whole batch."""
    optimizer = adamw(model) if optimizer is None else optimizer
    losses = []
    for step in steps:
        tokens = batch(step)[rank::size]
        # Not between forward and backward: FSDP1 does not see it there when parameters stay whole.
        optimizer.zero_grad()
        loss = loss_of((forward or model)(tokens), tokens)
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        if size > 1:
            dist.all_reduce(whole)
            whole /= dist.get_world_size()
        losses.append(float(whole))
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)


def reference(seed: int = 1, *, tied: bool = False) -> list[float]:
    """The losses of the unsharded model."""
    return train(build(seed, tied=tied))


def reference_bf16(seed: int = 1) -> list[float]:
    """Those of the unsharded model that computes in bfloat16 and keeps its weights in float32."""
    model = build(seed)

    def forward(tokens: Tensor) -> Tensor:
        low = {name: param.to(torch.bfloat16) for name, param in model.named_parameters()}
        found: Tensor = torch.func.functional_call(model, low, (tokens,))
        return found

    return train(model, forward=forward)


# --- what is there


def fsdp1_units(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            yield strip_wrappers(f"{name}.").rstrip("."), module


def fsdp2_units(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield strip_wrappers(f"{name}.").rstrip("."), module


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, whole, by name."""
    found = {}
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
                found[strip_wrappers(name)] = value.detach().clone()
        return found
    for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found[strip_wrappers(name)] = whole.detach().clone()
    return found
