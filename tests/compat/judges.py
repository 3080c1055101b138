"""Other readers of distributed checkpoints: torch's own, and one for the folders that torch 2.13 cannot open."""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def read_with_torch(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a folder by its key, read by torch as `format_utils dcp_to_torch` does it."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    flat, _ = flatten_state_dict(state)
    return {key: value for key, value in flat.items() if isinstance(value, Tensor)}


class Stub:
    """Stands for a class that is not here, or that has other fields in this torch."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Unpickler(pickle.Unpickler):
    """Reads .metadata of our own samples, also where a class has changed since or was never in torch."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":
            return getattr(pathlib, name)
        if name == "TensorProperties" or module.startswith("megatron."):
            return Stub
        return super().find_class(module, name)


def items(folder: Path) -> Iterator[tuple[str, TensorStorageMetadata | None, dict[Any, bytes]]]:
    """Yield key, tensor metadata (None for a pickled object) and the bytes of every item by its offsets."""
    metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    for key, entry in metadata.state_dict_metadata.items():
        tensor = entry if isinstance(entry, TensorStorageMetadata) else None
        places = [None] if tensor is None else [chunk.offsets for chunk in tensor.chunks if 0 not in chunk.sizes]
        data = {}
        for place in places:
            info = metadata.storage_data[MetadataIndex(key, place)]
            with (folder / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                data[place] = file.read(info.length)
        yield key, tensor, data


def read_item_by_item(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a folder: `torch.load` of each item, copied to where .metadata says."""
    found = {}
    for key, entry, data in items(folder):
        if entry is None:
            continue
        pieces = {place: torch.load(io.BytesIO(raw), weights_only=True) for place, raw in data.items()}
        dtype = next(iter(pieces.values())).dtype
        whole = torch.zeros(entry.size, dtype=dtype)
        covered = torch.zeros(entry.size, dtype=torch.int64)
        for place, piece in pieces.items():
            box = tuple(slice(start, start + length) for start, length in zip(place, piece.shape, strict=True))
            whole[box] = piece
            covered[box] += 1
        assert bool((covered == 1).all()), f"{key} is not tiled by its chunks"
        found[key] = whole
    return found


def read_objects(folder: Path) -> dict[str, Any]:
    """Return the pickled objects that torch's own allow-list lets pass, by their keys."""
    found = {}
    for key, entry, data in items(folder):
        if entry is None:
            try:
                found[key] = torch.load(io.BytesIO(data[None]), weights_only=True)
            except pickle.UnpicklingError:
                continue
    return found
