"""Small distributed checkpoints to be broken, and what validate says of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp_ckpt.ops.validate import validate
from tests.build import rows, save_dcp


def model(folder: Path, *, ranks: int = 2, extra: Any = None) -> Path:
    """Write a model of two tensors with different values everywhere, as so many ranks."""
    first, second = torch.arange(48.0).reshape(8, 6), torch.arange(32, dtype=torch.int64) + 100
    state: dict[str, Any] = {"model": {"a.weight": rows(first, ranks), "b": rows(second, ranks)}}
    if extra is not None:
        state["extra"] = extra
    return save_dcp(folder, state, ranks=ranks)


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    """Change what ``.metadata`` says."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def place(metadata: Any, key: str, number: int = 0) -> Any:
    """Return where the n-th item of a key lies."""
    return [info for index, info in metadata.storage_data.items() if index.fqn == key][number]


def item(folder: Path, key: str, number: int = 0) -> tuple[Path, int, int]:
    """Return file and bytes of the n-th item of a key."""
    found = place(pickle.loads((folder / ".metadata").read_bytes()), key, number)
    return folder / found.relative_path, found.offset, found.offset + found.length


def patch(file: Path, at: int, bits: int = 1) -> None:
    """Change a byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= bits
    file.write_bytes(data)


def faults(path: Path, level: str = "headers", **options: Any) -> list[tuple[str, str]]:
    """Return code and place of errors and warnings."""
    report = validate(path, level=level, **options)
    return [(one.code, one.where) for one in report.findings if one.severity != "note"]


def message(path: Path, code: str, level: str = "headers") -> str:
    """Return the sentence of the only finding of a kind."""
    (one,) = [one for one in validate(path, level=level).findings if one.code == code]
    return one.message
