"""DeepSpeed folders of two small parameters, written by hand, and a plain way to read what a catalog describes.

The keys are those of DeepSpeed 0.19's files; the vectors are spelled out in the tests, so that no arithmetic of the
reader's is repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_ckpt.catalog import Checkpoint, Part, TensorEntry

__all__ = [
    "FIRST", "MODEL", "SECOND", "SHAPES", "A", "B", "faults", "numbers", "part", "read_entry", "save_model",
    "save_rank", "values", "zero2", "zero3",
]  # fmt: skip


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


A, B = numbers(1, 2, 3, 4, 5, 6).reshape(2, 3), numbers(7, 8, 9)
SHAPES = {"a": (2, 3), "b": (3,)}
MODEL, FIRST, SECOND = (
    "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
)  # fmt: skip


def save_model(
    folder: Path,
    name: str = "mp_rank_00_model_states.pt",
    *,
    module: Mapping[str, Tensor] | None,
    shapes: Sequence[Mapping[str, Sequence[int]]] | None,
    **more: Any,
) -> None:
    """Write a model file; ``shapes`` is ``param_shapes``."""
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {
        "module": module and dict(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": None
        if shapes is None
        else [{key: torch.Size(shape) for key, shape in group.items()} for group in shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "ds_version": "0.19.8",
    }
    torch.save(state | more, folder / name)


def save_rank(
    folder: Path, rank: int, world_size: int, weights: Sequence[Tensor], *, stage: int = 2, step: float = 3, **more: Any
) -> None:
    """Write a rank's file: its parts of the flat vectors, moments that are ten times the weights, one group each."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        number: {"step": torch.tensor(float(step)), "exp_avg": 10 * vector} for number, vector in enumerate(weights)
    }
    base = {"state": state, "param_groups": [{"lr": 0.1, "params": [number]} for number in state]}
    fields = {
        "zero_stage": stage,
        "partition_count": world_size if stage == 3 else [world_size] * len(weights),
        "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups": list(weights),
        "optimizer_state_dict" if stage == 3 else "base_optimizer_state": base,
    }
    state_dict = {key: value for key, value in (fields | more).items() if value is not None}
    file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": state_dict, "ds_version": "0.19.8"}, file)


def read_entry(root: Path, entry: TensorEntry) -> Tensor:
    """Read a tensor from the places that its chunks name, one after the other."""
    dtype = getattr(torch, entry.dtype.name)
    found = torch.empty(entry.shape, dtype=dtype)
    for chunk in entry.chunks:
        data = (root / chunk.file).read_bytes()[chunk.start : chunk.stop]
        strides = chunk.strides or torch.empty(chunk.lengths, device="meta").stride()
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        where = tuple(slice(start, start + n) for start, n in zip(chunk.offsets, chunk.lengths, strict=True))
        found[where] = flat.as_strided(chunk.lengths, strides)
    assert sum(math.prod(chunk.lengths) for chunk in entry.chunks) == found.numel(), entry.key
    return found


def zero2(folder: Path, **more: Any) -> Path:
    """Nine elements in parts of six; the last rank's three of padding are cut off from weights, not from moments."""
    save_model(folder, module={"a": A.bfloat16(), "b": B.bfloat16()}, shapes=[SHAPES])
    save_rank(folder, 0, 2, [numbers(1, 2, 3, 4, 5, 6)], **more)
    save_rank(folder, 1, 2, [numbers(7, 8, 9)], **more)
    return folder


def zero3(folder: Path, **more: Any) -> Path:
    """Shares of three and of two, the last of which has one element of padding."""
    empty = torch.empty(0)
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        save_model(folder, name, module={"a": empty, "b": empty}, shapes=[SHAPES], **more)
    save_rank(folder, 0, 2, [numbers(1, 2, 3, 7, 8)], stage=3)
    save_rank(folder, 1, 2, [numbers(4, 5, 6, 9, 0)], stage=3)
    return folder


def part(found: Checkpoint, name: str) -> Part:
    return next(part for part in found.parts if part.name == name)


def values(found: Checkpoint, name: str = "model") -> dict[str, Tensor]:
    return {key: read_entry(found.root, entry) for key, entry in part(found, name).tensors.items()}


def faults(problems: Any) -> list[tuple[str, str, str]]:
    return [(problem.severity.value, problem.code, problem.where) for problem in problems]
