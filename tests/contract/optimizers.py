"""Optimizers of a checkpoint as the layouts name them, read whole, to compare with ``expected_optim.safetensors``."""

from __future__ import annotations

from pathlib import Path

import torch

from fsdp_ckpt.catalog import Part, Role
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.view import SliceView
from fsdp_ckpt.plan.output import OutputTensor
from fsdp_ckpt.run.sources import Sources

__all__ = ["read_optimizer"]


def read_optimizer(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the one optimizer that has any, by their names within the part."""
    checkpoint = read_checkpoint(path)
    (part,) = [part for part in checkpoint.parts if part.role is Role.OPTIMIZER and part.tensors]
    with Sources(checkpoint.roots) as sources:
        return _read(part, sources)


def _read(part: Part, sources: Sources) -> dict[str, torch.Tensor]:
    found = {}
    for entry in part.tensors.values():
        assert entry.name == ".".join(map(str, entry.path or (entry.name,)))
        view = SliceView(OutputTensor(name=entry.name, dtype=entry.dtype, source=entry), sources, "pt", verify=True)
        found[entry.name] = view.read((0,) * len(view.shape), view.shape)
    return found
