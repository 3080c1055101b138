"""Read the ``.metadata`` of torch.distributed.checkpoint without torch.

Classes and fields are those of ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` from torch 2.1 to
2.15, and of their kin in Megatron-core, OLMo-core and ByteCheckpoint.

Long runs of chunks are read in bulk, see ``dcp_bulk``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.catalog import MAX_DIMS, DType, Shape
from fsdp_ckpt.codec.dcp_bulk import BulkMachine, BulkReader, NeedsPlainRunError
from fsdp_ckpt.codec.known import PLAIN, record, records
from fsdp_ckpt.codec.pickles import Constructor, Global, Machine, Record
from fsdp_ckpt.errors import MalformedFile

__all__ = ["DcpMetadata", "DcpTensor", "StorageInfo", "read_metadata", "unpickle_metadata"]

_BULK_BYTES = 1 << 18
"""Below this the ordinary machine is done before the patterns are compiled."""

StorageInfo = tuple[str, int, int, tuple[str, ...]]
"""relative_path, offset, length in bytes, transforms in the order of decoding (``stream.zstd/1``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpTensor:
    """A tensor: dtype, whole shape, and boxes as (offsets, lengths)."""

    dtype: DType
    shape: Shape
    chunks: list[tuple[Shape, Shape]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """What a ``.metadata`` file says.

    Attributes:
        tensors: By key.
        objects: Keys of items that are no tensors.
        paths: Where a key stood in the nested state dict: strings are dictionary keys, integers list indices. None
            or without the key where the writer recorded nothing.
        storage: Place of each item: by key and offsets of the chunk, None for objects. ``read_metadata`` leaves its
            keys as the pickle has them.
        writer: The oldest torch that writes these fields.
    """

    tensors: dict[str, DcpTensor]
    objects: list[str]
    paths: Mapping[str, tuple[str | int, ...]]
    storage: dict[tuple[str, Shape | None], StorageInfo]
    writer: str


def read_metadata(data: bytes, *, where: str) -> DcpMetadata:
    """Parse a ``.metadata`` file.

    Args:
        data: Its bytes.
        where: Its name, for messages.

    Raises:
        UnsafePickle: It refers to a global that no known writer uses.
        MalformedFile: It is broken, or it is a pickle of something else.
    """
    root = unpickle_metadata(data, where=where)
    try:
        return _convert(root, where)
    except (AttributeError, TypeError, KeyError, ValueError, IndexError, RecursionError) as error:
        if isinstance(error, MalformedFile):
            raise
        raise MalformedFile(f"{where}: unexpected structure: {error}") from error


def unpickle_metadata(
    data: bytes, *, where: str, watch: Callable[[dict[str, Global]], dict[str, Global]] = lambda known: known
) -> Record:
    """Return what a ``.metadata`` file holds as it was pickled.

    Args:
        data: Its bytes.
        where: Its name, for messages.
        watch: Given the globals that may occur, returns what they are looked up in; for each attempt anew.

    Raises:
        As ``read_metadata``.
    """
    if not data:
        raise MalformedFile(f"{where}: the file is empty")
    try:
        root = BulkMachine(data, watch(_known(bulk=len(data) > _BULK_BYTES)), where=where).run()
    except NeedsPlainRunError:
        root = Machine(data, watch(_known(bulk=False)), where=where).run()
    if not isinstance(root, Record) or not root.cls.endswith("Metadata"):
        raise MalformedFile(f"{where}: not the metadata of a distributed checkpoint")
    return root


def _convert(root: Record, where: str) -> DcpMetadata:
    items = root.get("state_dict_metadata")
    storage_records = root.get("storage_data")
    if not isinstance(items, dict) or not isinstance(storage_records, dict):
        raise MalformedFile(f"{where}: neither tensors nor storage are listed")
    tensors: dict[str, DcpTensor] = {}
    objects: list[str] = []
    fields, module = 5, ""
    for key, item in items.items():
        if type(key) is not str:
            raise MalformedFile(f"{where}: an item's key is no text")
        if item.cls.endswith("BytesStorageMetadata"):
            objects.append(key)
            continue
        properties = _of_class(item, "TensorStorageMetadata", where).get("properties")
        _of_class(properties, "TensorProperties", where)
        if len(properties.state) == 5 and not _is_memory_format(properties.state[3]):
            raise MalformedFile(f"{where}: `{key}` has no memory format")
        fields, module = len(properties.state), properties.cls
        dtype = properties.state[0]
        if not isinstance(dtype, DType):
            raise MalformedFile(f"{where}: `{key}` has no dtype")
        chunks = [_box(chunk, where) for chunk in item.get("chunks")]
        tensors[key] = DcpTensor(dtype=dtype, shape=_sizes(item.get("size"), where), chunks=chunks)
    # Records that bulk reading made are final already; the few others are put beside them.
    storage: dict[tuple[str, Shape | None], StorageInfo] = storage_records
    for index in [index for index in storage_records if type(index) is not tuple]:
        info = storage_records.pop(index)
        _of_class(index, "MetadataIndex", where)
        _of_class(info, "_StorageInfo", where)
        if type(index.get("fqn")) is not str:
            raise MalformedFile(f"{where}: a storage index without a key")
        offset = index.get("offset")
        storage[index.get("fqn"), None if offset is None else _sizes(offset, where)] = _info(info, where)
    planner = root.get("planner_data")
    return DcpMetadata(
        tensors=tensors,
        objects=objects,
        paths=_paths(planner, where) if isinstance(planner, dict) else {},
        storage=storage,
        writer=_writer(root, fields, module),
    )


def _of_class(value: Any, name: str, where: str) -> Record:
    """Return a record if it is one of a class; writers have classes of their own, but call them the same."""
    if not isinstance(value, Record) or not value.cls.endswith(f".{name}"):
        raise MalformedFile(f"{where}: a {type(value).__name__} where a {name} is expected")
    return value


def _is_memory_format(value: Any) -> bool:
    """Tell whether it is a member of ``_MEM_FORMAT_ENCODING``, by value or, as Python 3.11 pickled it, by name."""
    if isinstance(value, Record):
        return value.cls.endswith("MEM_FORMAT_ENCODING") and value.args in ((0,), (1,), (2,))
    return isinstance(value, Constructor) and "MEM_FORMAT_ENCODING." in value.name


def _paths(planner: dict[Any, Any], where: str) -> dict[str, tuple[str | int, ...]]:
    for path in planner.values():
        if type(path) is not tuple or not all(_is_step(step) for step in path):
            raise MalformedFile(f"{where}: a path of something that is no text or index")
    return planner


def _is_step(step: Any) -> bool:
    return type(step) is str or (type(step) is int and abs(step) < 2**63)


def _sizes(value: Any, where: str) -> Shape:
    if (
        type(value) is not tuple
        or len(value) > MAX_DIMS
        or any(type(n) is not int or not 0 <= n < 2**63 for n in value)
    ):
        raise MalformedFile(f"{where}: {type(value).__name__} where a shape is expected, or one with impossible sizes")
    return value


def _box(chunk: Any, where: str) -> tuple[Shape, Shape]:
    if type(chunk) is tuple:
        return chunk
    _of_class(chunk, "ChunkStorageMetadata", where)
    return _sizes(chunk.get("offsets"), where), _sizes(chunk.get("sizes"), where)


def _info(info: Record, where: str) -> StorageInfo:
    path, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
    transforms = info.get("transform_descriptors") or ()
    if type(path) is not str or not _is_extent(offset, length):
        raise MalformedFile(f"{where}: a storage record without path, or with an impossible offset or length")
    if not isinstance(transforms, list | tuple) or not all(
        type(name) is str and len(name) < 200 for name in transforms
    ):
        raise MalformedFile(f"{where}: a storage record with impossible transforms")
    return path, offset, length, tuple(transforms)


def _is_extent(offset: Any, length: Any) -> bool:
    return type(offset) is int and type(length) is int and offset >= 0 and length >= 0 and offset + length < 2**62


def _writer(root: Record, fields: int, module: str) -> str:
    if root.cls.startswith("megatron."):
        return "Megatron-core"
    if root.cls.startswith("bytecheckpoint."):
        return "ByteCheckpoint"
    if fields >= 6:
        return "torch >= 2.15"
    if root.get("version") is not None:
        return "torch 2.9-2.14"
    meta = root.get("storage_meta")
    if isinstance(meta, Record):
        return "torch 2.7-2.8" if meta.get("modules") is not None else "torch 2.4-2.6"
    return "torch 2.1-2.2" if module.startswith("torch.distributed._shard.") else "torch 2.3"


_DCP = "torch.distributed.checkpoint"
_CLASSES: dict[str, Global] = {
    **PLAIN,
    **records(
        f"{_DCP}.metadata",
        "Metadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "MetadataIndex",
        "StorageMeta",
    ),
    **records("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties", "MEM_FORMAT_ENCODING"),
    **records(f"{_DCP}.filesystem", "_StorageInfo"),
    **records(
        f"{_DCP}.planner",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "SavePlan",
        "ReadItem",
        "LoadItemType",
        "BytesIOWriteData",
    ),
    **records("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata", "MCoreSavePlan"),
    **records("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"),
    **records("bytecheckpoint.checkpointer.meta_type", "Metadata", "_StorageInfo"),
}


def _known(*, bulk: bool) -> dict[str, Global]:
    if not bulk:
        return _CLASSES
    matcher = BulkReader()

    def with_bulk(name: str, run: Callable[[Machine, int], None]) -> Constructor:
        return Constructor(name, record(name).call, run)

    chunk, index = f"{_DCP}.metadata.ChunkStorageMetadata", f"{_DCP}.metadata.MetadataIndex"
    return _CLASSES | {chunk: with_bulk(chunk, matcher.chunks), index: with_bulk(index, matcher.storage)}
