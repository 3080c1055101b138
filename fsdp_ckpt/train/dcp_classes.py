"""``.metadata`` in torch's own classes, and back: what its planners work on, from what our reader and writer know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo
from fsdp_ckpt.errors import CorruptCheckpoint, Incompatible
from fsdp_ckpt.store.memory import no_gc
from fsdp_ckpt.train.live import dtype_of

__all__ = ["from_torch", "to_torch"]


def to_torch(metadata: DcpMetadata) -> Metadata:
    """Return metadata as ``torch.distributed.checkpoint`` has them, complete with the place of every item.

    Of a tensor's properties only the dtype is kept; torch records others (whether a gradient was wanted), and never
    reads them.
    """
    size = torch.Size
    items: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    with no_gc():
        for key, tensor in metadata.tensors.items():
            items[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, tensor.dtype.name)),
                size=size(tensor.shape),
                chunks=[ChunkStorageMetadata(size(offsets), size(lengths)) for offsets, lengths in tensor.chunks],
            )
            for number, (offsets, _) in enumerate(tensor.chunks):
                info = metadata.storage.get((key, offsets))
                if info is not None:
                    places[MetadataIndex(key, offsets, number)] = _to_place(info)
        for key in metadata.objects:
            items[key] = BytesStorageMetadata()
            info = metadata.storage.get((key, None))
            if info is not None:
                places[MetadataIndex(key)] = _to_place(info)
    return Metadata(state_dict_metadata=items, planner_data=dict(metadata.paths) or None, storage_data=places)


def from_torch(metadata: Metadata, places: Mapping[MetadataIndex, Any]) -> DcpMetadata:
    """Return what torch's classes say.

    Args:
        metadata: Keys, shapes and chunks.
        places: The place of every item; those of ``metadata`` are not looked at.

    Raises:
        CorruptCheckpoint: Items without a place.
        Incompatible: A dtype that no checkpoint holds, or planner data that are no paths (a planner of your own).
    """
    tensors: dict[str, DcpTensor] = {}
    objects: list[str] = []
    storage: dict[tuple[str, Shape | None], StorageInfo] = {}
    with no_gc():
        for index, info in places.items():
            offset = None if index.offset is None else tuple(index.offset)
            storage[index.fqn, offset] = _from_place(info)
        for key, item in metadata.state_dict_metadata.items():
            if isinstance(item, BytesStorageMetadata):
                objects.append(key)
                lacks = (key, None) not in storage
            else:
                chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in item.chunks]
                dtype = dtype_of(item.properties.dtype, key)
                tensors[key] = DcpTensor(dtype=dtype, shape=tuple(item.size), chunks=chunks)
                lacks = any((key, offsets) not in storage for offsets, _ in chunks)
            if lacks:
                raise CorruptCheckpoint(f"the metadata list `{key}`, and no rank stored all of it")
    return DcpMetadata(
        tensors=tensors, objects=objects, paths=_paths(metadata.planner_data), storage=storage, writer="torch"
    )


def _from_place(info: Any) -> StorageInfo:
    transforms = tuple(getattr(info, "transform_descriptors", None) or ())
    return info.relative_path, info.offset, info.length, transforms


def _to_place(info: StorageInfo) -> _StorageInfo:
    path, offset, length, transforms = info
    if transforms:
        return _StorageInfo(path, offset, length, list(transforms))
    return _StorageInfo(path, offset, length)


def _paths(planner_data: Any) -> Mapping[str, tuple[str | int, ...]]:
    if planner_data is None:
        return {}
    is_paths = isinstance(planner_data, dict) and all(
        isinstance(key, str) and isinstance(path, tuple) and all(isinstance(step, str | int) for step in path)
        for key, path in planner_data.items()
    )
    if not is_paths:
        raise Incompatible(
            "the planner's planner_data are no paths of keys, and cannot be stored",
            hint="save with torch's FileSystemWriter when a planner of your own needs them",
        )
    return planner_data  # type: ignore[no-any-return]
