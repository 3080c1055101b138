"""Read distributed checkpoints with torch alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def stock(folder: Path) -> dict[str, Any]:
    """Return a distributed checkpoint as torch reads it, nested."""
    state: dict[str, Any] = {}
    reader = FileSystemReader(folder)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def payload_bytes(folder: Path) -> int:
    """Return the bytes of all tensors stored in a folder; the files must hold nothing but them."""
    metadata = FileSystemReader(folder).read_metadata()
    places = {(info.relative_path, info.offset, info.length) for info in metadata.storage_data.values()}
    found = 0
    for name, start, length in places:
        with open(folder / name, "rb") as file:
            file.seek(start)
            item = io.BytesIO(file.read(length))
        found += torch.load(item, weights_only=True).untyped_storage().nbytes()
    sizes = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    assert sizes - sum(length for _, _, length in places) < 64 * len(places), "bytes that nothing refers to"
    return found
