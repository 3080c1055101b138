"""Catalogs without files, and findings in short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fsdp_ckpt.catalog import DTYPES, Checkpoint, Part, Problem, Role, Severity, Shape, TensorEntry

LETTERS = {Severity.ERROR: "E", Severity.WARNING: "W", Severity.NOTE: "N"}


def model(shapes: Mapping[str, Shape], *, dtype: str = "float32", **fields: Any) -> Part:
    """Return a part whose tensors have no chunks."""
    tensors = {
        key: TensorEntry(key=key, name=key, dtype=DTYPES[dtype], shape=shape, chunks=())
        for key, shape in shapes.items()
    }
    given: dict[str, Any] = {"name": "model", "role": Role.MODEL, "dialect": "safetensors"}
    return Part(tensors=tensors, **given | fields)


def checkpoint(root: Path, *parts: Part, **fields: Any) -> Checkpoint:
    """Return a checkpoint of parts."""
    given: dict[str, Any] = {"layout": "dcp", "title": ""}
    return Checkpoint(root=root, parts=parts, **given | fields)


def full(file: Path, shapes: Mapping[str, Shape], *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a safetensors file of zeros; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}, file)
    return file


def found(problems: Iterable[Problem]) -> list[tuple[str, str, str]]:
    """Return letter, kind and place of each finding."""
    return [(LETTERS[problem.severity], problem.code, problem.where) for problem in problems]


def codes(problems: Iterable[Problem]) -> list[str]:
    """Return the kinds of errors and warnings."""
    return [problem.code for problem in problems if problem.severity is not Severity.NOTE]
