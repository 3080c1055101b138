"""Read the ``.metadata`` of torch.distributed.checkpoint without torch.

Classes and fields are those of ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` from torch 2.1 to
2.15, and of their kin in Megatron-core, OLMo-core and ByteCheckpoint.

A checkpoint of thousands of ranks has millions of chunks, and their records are alike to the byte but for the
numbers. So the pickle machine hands runs of them to ``_Bulk``, which matches a whole record at once; what does not
match (the first record, the edge of a pickle frame) takes the ordinary way. The result is the same, only sooner.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.catalog import DType, Shape
from fsdp_ckpt.codec.known import PLAIN, record, records
from fsdp_ckpt.codec.pickles import Constructor, Global, Machine, Record
from fsdp_ckpt.errors import MalformedFile

__all__ = ["DcpMetadata", "DcpTensor", "StorageInfo", "read_metadata"]

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
        save_id: Random id of the save, the same in all parts of it; None before torch 2.4.
    """

    tensors: dict[str, DcpTensor]
    objects: list[str]
    paths: Mapping[str, tuple[str | int, ...]]
    storage: dict[tuple[str, Shape | None], StorageInfo]
    writer: str
    save_id: str | None


class _Skipped:
    """Fills memo slots of records that were matched in bulk."""


_SKIPPED = _Skipped()


class _NeedsPlainRunError(Exception):
    """A later opcode refers to a memo slot that bulk matching left empty."""


class _MetadataMachine(Machine):
    def get(self, index: int, width: int) -> None:
        if self.memo[index] is _SKIPPED:
            raise _NeedsPlainRunError
        super().get(index, width)


def read_metadata(data: bytes, *, where: str) -> DcpMetadata:
    """Parse a ``.metadata`` file.

    Args:
        data: Its bytes.
        where: Its name, for messages.

    Raises:
        UnsafePickle: It refers to a global that no known writer uses.
        MalformedFile: It is broken, or it is a pickle of something else.
    """
    try:
        root = _MetadataMachine(data, _known(bulk=True), where=where).run()
    except _NeedsPlainRunError:
        root = Machine(data, _known(bulk=False), where=where).run()
    if not isinstance(root, Record) or not root.cls.endswith("Metadata"):
        raise MalformedFile(f"{where}: not the metadata of a distributed checkpoint")
    try:
        return _convert(root, where)
    except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
        if isinstance(error, MalformedFile):
            raise
        raise MalformedFile(f"{where}: unexpected structure: {error}") from error


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
        properties = item.get("properties")
        fields, module = len(properties.state), properties.cls
        dtype = properties.state[0]
        if not isinstance(dtype, DType):
            raise MalformedFile(f"{where}: `{key}` has no dtype")
        chunks = [_box(chunk, where) for chunk in item.get("chunks")]
        tensors[key] = DcpTensor(dtype=dtype, shape=_sizes(item.get("size"), where), chunks=chunks)
    storage: dict[tuple[str, Shape | None], StorageInfo] = {}
    for index, info in storage_records.items():
        place = index if type(index) is tuple else (index.get("fqn"), index.get("offset"))
        if type(place[0]) is not str:
            raise MalformedFile(f"{where}: a storage index without a key")
        storage[place] = info if type(info) is tuple else _info(info, where)
    planner = root.get("planner_data")
    meta = root.get("storage_meta")
    return DcpMetadata(
        tensors=tensors,
        objects=objects,
        paths={k: v for k, v in planner.items() if type(v) is tuple} if isinstance(planner, dict) else {},
        storage=storage,
        writer=_writer(root, fields, module),
        save_id=meta.get("save_id") if isinstance(meta, Record) else None,
    )


def _sizes(value: Any, where: str) -> Shape:
    if type(value) is not tuple or any(type(n) is not int or not 0 <= n < 2**63 for n in value):
        raise MalformedFile(f"{where}: {value!r:.60} is no shape")
    return value


def _box(chunk: Any, where: str) -> tuple[Shape, Shape]:
    if type(chunk) is tuple:
        return chunk
    return _sizes(chunk.get("offsets"), where), _sizes(chunk.get("sizes"), where)


def _info(info: Record, where: str) -> StorageInfo:
    path, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
    transforms = info.get("transform_descriptors") or ()
    if type(path) is not str or type(offset) is not int or type(length) is not int:
        raise MalformedFile(f"{where}: a storage record without path, offset or length")
    return path, offset, length, tuple(transforms)


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


_NEW = rb"\)\x81\x94\}\x94\("
_LONG = rb"\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8}"
_UNMATCHED = re.compile(rb"(?!)")
_INT_WIDTHS = {ord("K"): 2, ord("M"): 3, ord("J"): 5}


def _get(name: str, fixed: Mapping[str, bytes]) -> bytes:
    """Return the pattern of a BINGET or LONG_BINGET: any one as a group, or those bytes where they are known."""
    return re.escape(fixed[name]) if name in fixed else rb"(?P<%s>h.|j.{4})" % name.encode()


def _size_pattern(name: str, fixed: Mapping[str, bytes]) -> bytes:
    dims = rb"(?P<%s>(?:K.|M..|J.{4}|%s)+)" % (name.encode(), _LONG)
    return _get(f"{name}_class", fixed) + dims + rb"[\x85\x86\x87]\x94\x85\x94R\x94"


def _text_pattern(name: str) -> bytes:
    return rb"(?:(?P<%s_get>h.|j.{4})|\x8c(?P<%s_size>.)(?P<%s>[^\x94]*)\x94)" % ((name.encode(),) * 3)


def _chunk_pattern(fixed: Mapping[str, bytes]) -> re.Pattern[bytes]:
    parts = (
        _get("cls", fixed) + _NEW,
        _get("key_offsets", fixed) + _size_pattern("offsets", fixed),
        _get("key_sizes", fixed) + _size_pattern("sizes", fixed) + rb"ub",
    )
    return re.compile(b"".join(parts), re.DOTALL)


def _storage_pattern(fixed: Mapping[str, bytes]) -> re.Pattern[bytes]:
    place = rb"(?:(?P<place_get>h.|j.{4})|" + _size_pattern("place", fixed) + rb")ub"
    integer = rb"(?P<%s>K.|M..|J.{4}|" + _LONG + rb")"
    parts = (
        _get("cls", fixed) + _NEW,
        _get("key_fqn", fixed) + _text_pattern("fqn"),
        _get("key_index", fixed) + rb"(?:K.|M..|J.{4}|N)",
        _get("key_offset", fixed) + place,
        _get("info_cls", fixed) + _NEW,
        _get("key_path", fixed) + _text_pattern("path"),
        _get("key_start", fixed) + integer % b"start",
        _get("key_length", fixed) + integer % b"length" + rb"ub",
    )
    return re.compile(b"".join(parts), re.DOTALL)


_CHUNK_NAMES = {"key_offsets": "offsets", "key_sizes": "sizes"}
_STORAGE_NAMES = {
    "key_fqn": "fqn",
    "key_index": "index",
    "key_offset": "offset",
    "key_path": "relative_path",
    "key_start": "offset",
    "key_length": "length",
}


class _Bulk:
    """Matches whole records of one kind, once a first match has shown which memo slots they refer to."""

    def __init__(self) -> None:
        self._dims: dict[bytes, Shape] = {}
        self._ints: dict[bytes, int] = {}
        self._any_chunk, self._any_storage = _chunk_pattern({}), _storage_pattern({})
        self._chunk = self._storage = _UNMATCHED

    def chunks(self, m: Machine, position: int) -> None:
        """Replace the ChunkStorageMetadata class on top of the stack by as many (offsets, lengths) as follow."""
        match = self._chunk.match(m.data, position)
        if match is None:
            fixed = self._learn(m, self._any_chunk.match(m.data, position), _CHUNK_NAMES)
            if fixed is None:
                return
            self._chunk = _chunk_pattern(fixed)
            match = self._chunk.match(m.data, position)
        dims, pattern, skip, found = self._dims, self._chunk, _SKIPPED, []
        while match is not None:
            first, second = match.groups()
            offsets = dims.get(first) or self._parse_dims(first)
            lengths = dims.get(second) or self._parse_dims(second)
            found.append((offsets, lengths))
            m.memo += (skip, skip, skip, skip, offsets, skip, skip, lengths)
            position = match.end()
            match = pattern.match(m.data, position)
        self._accept(m, found, position)

    def storage(self, m: Machine, position: int) -> None:
        """Replace the MetadataIndex class on top of the stack by as many (index, info) pairs as follow."""
        match = self._storage.match(m.data, position)
        if match is None:
            fixed = self._learn(m, self._any_storage.match(m.data, position), _STORAGE_NAMES)
            if fixed is None:
                return
            self._storage = _storage_pattern(fixed)
            match = self._storage.match(m.data, position)
        dims, pattern, skip, memo, ints = self._dims, self._storage, _SKIPPED, m.memo, self._ints
        found: list[tuple[Any, ...]] = []
        while match is not None:
            fqn_get, fqn_size, fqn_text, place_get, *place_dims, path_get, path_size, path_text, start, length = (
                match.groups()
            )
            if (fqn_size and len(fqn_text) != fqn_size[0]) or (path_size and len(path_text) != path_size[0]):
                break  # a text that contains the byte of MEMOIZE: the ordinary way knows better
            dim_bytes = place_dims[-1]
            fqn = _fetch(m, fqn_get) if fqn_get else fqn_text.decode()
            place = _fetch(m, place_get) if place_get else dims.get(dim_bytes) or self._parse_dims(dim_bytes)
            path = _fetch(m, path_get) if path_get else path_text.decode()
            if type(fqn) is not str or type(place) is not tuple or type(path) is not str:
                break
            num_bytes = ints.get(length)
            if num_bytes is None:
                ints[length] = num_bytes = _integer(length)
            found += ((fqn, place), (path, _integer(start), num_bytes, ()))
            memo += (skip, skip) if fqn_get else (skip, skip, fqn)
            memo += (skip, skip) if place_get else (skip, skip, place, skip, skip)
            if not path_get:
                memo.append(path)
            position = match.end()
            match = pattern.match(m.data, position)
        self._accept(m, found, position)

    @staticmethod
    def _accept(m: Machine, found: list[Any], position: int) -> None:
        if found:
            m.stack[-1:] = found
            m.position = position

    @staticmethod
    def _learn(m: Machine, match: re.Match[bytes] | None, names: Mapping[str, str]) -> dict[str, bytes] | None:
        """Return the GETs that are the same in every record, or None when this is not the expected record."""
        if match is None or any(_fetch(m, match[group]) != text for group, text in names.items()):
            return None
        fixed = {group: match[group] for group in (*names, "cls")}
        for group, name in {
            "info_cls": _INFO,
            "offsets_class": _SIZE,
            "sizes_class": _SIZE,
            "place_class": _SIZE,
        }.items():
            get = match.groupdict().get(group)
            if get is None:
                continue
            if getattr(_fetch(m, get), "name", None) != name:
                return None
            fixed[group] = get
        return fixed

    def _parse_dims(self, text: bytes) -> Shape:
        sizes, position = [], 0
        while position < len(text):
            width = _INT_WIDTHS.get(text[position]) or 2 + text[position + 1]
            sizes.append(_integer(text[position : position + width]))
            position += width
        if min(sizes) < 0:
            raise ValueError("a negative size")
        shape = tuple(sizes)
        if len(self._dims) < 1 << 20:
            self._dims[text] = shape
        return shape


def _fetch(m: Machine, get: bytes) -> Any:
    value = m.memo[int.from_bytes(get[1:], "little")]
    if value is _SKIPPED:
        raise _NeedsPlainRunError
    return value


def _integer(text: bytes) -> int:
    """Return the number of a BININT1, BININT2, BININT or LONG1 opcode; only the last two have a sign."""
    code = text[0]
    if code == 0x8A:
        return int.from_bytes(text[2:], "little", signed=True)
    return int.from_bytes(text[1:], "little", signed=code == 0x4A)


_SIZE = "torch.Size"
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"

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
    matcher = _Bulk()

    def with_bulk(name: str, run: Callable[[Machine, int], None]) -> Constructor:
        return Constructor(name, record(name).call, run)

    chunk, index = f"{_DCP}.metadata.ChunkStorageMetadata", f"{_DCP}.metadata.MetadataIndex"
    return _CLASSES | {chunk: with_bulk(chunk, matcher.chunks), index: with_bulk(index, matcher.storage)}
