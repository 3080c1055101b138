"""Load what a merge wrote with the libraries that users load it with, compare it bit by bit, run the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

import fsdp_ckpt
from fsdp_ckpt import MergeReport


def load(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a merged folder; with an index, each from the file that the index names."""
    index = next(iter(folder.glob("*.index.json")), None)
    if index is None:
        (file,) = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
        return load_file(file)
    weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert sum(map(len, files.values())) == len(weight_map), "the files hold more than the index says"
    return {key: files[name][key] for key, name in weight_map.items()}


def load_file(file: Path) -> dict[str, Tensor]:
    """Return the tensors of one file."""
    if file.suffix != ".safetensors":
        found: dict[str, Tensor] = torch.load(file, weights_only=True)
        return found
    with safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a program sees them: row-major, lazy conj and neg bits carried out."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail unless both have the same names, dtypes, shapes and bits."""
    assert sorted(found) == sorted(expected)
    wrong = {
        name: (found[name], value)
        for name, value in expected.items()
        if found[name].dtype != value.dtype
        or found[name].shape != value.shape
        or not torch.equal(bits(found[name]), bits(value))
    }
    assert not wrong


def merge_and_load(src: Path, out: Path, **options: Any) -> tuple[MergeReport, dict[str, Tensor]]:
    """Merge, and load the result."""
    report = fsdp_ckpt.merge(src, out, **options)
    return report, load(out)


def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `fsdp-ckpt` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fsdp_ckpt", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=cwd,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "120"},
    )


def inspect_json(*arguments: str | Path) -> Any:
    """Return what `fsdp-ckpt inspect --json` prints, which has to be JSON by the standard (no NaN or Infinity)."""
    result = run("inspect", "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout, parse_constant=_refuse)


def _refuse(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")
