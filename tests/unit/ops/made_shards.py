"""Sets of safetensors files with an index, for the tests of repairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.build import assert_same


def shards(folder: Path, *contents: dict[str, Tensor], total: int | None = None, index: bool = True) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(contents, 1):
        name = f"model-{number:05}-of-{total or len(contents):05}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    size = sum(tensor.nbytes for tensors in contents for tensor in tensors.values())
    if index:
        data = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(data))
    return weight_map


A, B, C = {"a": torch.arange(4.0)}, {"b": torch.arange(5.0)}, {"c": torch.arange(6.0)}


def loads_by_index(folder: Path, expected: dict[str, Tensor]) -> None:
    """What transformers does: the index says which file to open for which name, and nothing else is opened."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for file in set(index["weight_map"].values()):
        loaded = load_file(folder / file)
        found |= {name: loaded[name] for name, home in index["weight_map"].items() if home == file}
    assert_same(found, expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
