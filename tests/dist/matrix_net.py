"""The model of the matrix of training jobs: what wrappers and checkpoints find difficult, in small."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, WORDS = 8, 19


class Block(nn.Module):
    """Two linear layers; 7 rows do not share evenly among 2 or 4 ranks."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.drop(self.down(torch.relu(self.up(x))))
        return x + change


class Gain(nn.Module):
    """One element: most ranks hold nothing of it, or padding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    """Embedding, dropout, norm, buffers that change with each step, a frozen layer, and one that nothing uses."""

    def __init__(self, *, tied: bool, hidden: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(hidden), Block(hidden)])
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = Gain()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.seen: Tensor
        self.count: Tensor
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.seen.mul_(0.9).add_(torch.arange(float(WIDTH)) * self.count * 0.01)
        x = self.embed(tokens)
        x = x + self.seen.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.gain(self.norm(x + 0.1 * self.frozen(x))))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
