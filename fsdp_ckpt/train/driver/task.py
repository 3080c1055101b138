"""The task: ``31415926>11234569``. Every sample follows from seed, step and its place in the global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_ckpt.errors import UsageError

__all__ = ["GREATER", "VOCAB_SIZE", "decode", "encode", "held_out", "samples"]

GREATER = 10
"""Token between a number and its sorted digits; a digit's token is the digit."""
VOCAB_SIZE = 16
"""11 tokens, and some rows to spare so that a few ranks share them evenly."""

_HELD_OUT = 1 << 40


def samples(seed: int, step: int, first: int, count: int, digits: int) -> Tensor:
    """Return samples ``first`` to ``first + count`` of a step, [count, 2 * digits + 1], on the CPU.

    Args:
        seed: Of the run.
        step: From 1.
        first: Place of the first one in the global batch, from 0.
        count: Number of samples.
        digits: Length of a number.
    """
    # The whole batch up to the last one is drawn: where a rank's slice begins then changes nothing in it.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 62))
    return _finish(torch.randint(0, 10, (first + count, digits), generator=generator)[first:])


def held_out(seed: int, count: int, digits: int) -> Tensor:
    """Return samples drawn from a seed that no step of training uses."""
    generator = torch.Generator().manual_seed(_HELD_OUT + seed)
    return _finish(torch.randint(0, 10, (count, digits), generator=generator))


def _finish(numbers: Tensor) -> Tensor:
    mark = torch.full((len(numbers), 1), GREATER)
    return torch.cat((numbers, mark, numbers.sort(-1).values), -1)


def encode(text: str) -> list[int]:
    """Return the tokens of a number, and the mark after which its answer comes.

    Raises:
        UsageError: Something else than digits.
    """
    if not text or not (text.isascii() and text.isdigit()):
        raise UsageError(f"`{text}` is no prompt; allowed: digits, such as 31415926")
    return [*map(int, text), GREATER]


def decode(tokens: list[int]) -> str:
    """Return tokens as text; one without a meaning is ``?``."""
    return "".join("0123456789>"[token] if token <= GREATER else "?" for token in tokens)
