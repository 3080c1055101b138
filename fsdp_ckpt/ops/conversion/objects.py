"""Turn values that are no tensors into the archives that a checkpoint stores, copied as they are where that can be."""

from __future__ import annotations

from typing import Any

from fsdp_ckpt.catalog import Encoding, ObjectEntry
from fsdp_ckpt.codec.tensors import TORCH
from fsdp_ckpt.codec.torchzip import open_archive
from fsdp_ckpt.codec.value_writer import encode_object
from fsdp_ckpt.errors import NotEnoughSpace
from fsdp_ckpt.ops.conversion.values import expand, load_value
from fsdp_ckpt.plan.output import OutputObject
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.units import format_size

__all__ = ["MAX_VALUE_BYTES", "archive_of", "value_of"]

MAX_VALUE_BYTES = 1 << 30
"""Values are in memory while a folder is written: one of them, and all of them together."""


def archive_of(value: OutputObject, store: LocalStore) -> bytes:
    """Return the ``torch.save`` archive of a value.

    A record that is an archive is copied byte by byte, after a look whether it can be read.

    Args:
        value: The value.
        store: Where its source is.

    Raises:
        Incompatible: It holds something that is never written: a tensor, an instance of an unknown class.
        CorruptCheckpoint: Its source is damaged.
        NotEnoughSpace: It is too large to be held in memory.
    """
    entry, what = value.source, ".".join(map(str, value.path))
    if entry is None or entry.decoded or not _is_record(entry, store):
        return encode_object(value_of(value, store), what=f"`{what}`")
    if entry.stop - entry.start > MAX_VALUE_BYTES:
        raise NotEnoughSpace(f"`{what}` takes {format_size(entry.stop - entry.start)}, more than is held in memory")
    where = f"{entry.file} (`{entry.key}`)"
    data = store.reader(entry.file)(entry.start, entry.stop - entry.start)
    if entry.encoding is Encoding.ZSTD_TORCH_ZIP:
        data = expand(data, where)
    archive = open_archive(lambda start, num: data[start : start + num], 0, len(data), where=where)
    archive.load(TORCH, allow_unknown=True)
    return data


def value_of(value: OutputObject, store: LocalStore) -> Any:
    """Return a value as ``codec.pickles`` decodes it.

    Raises:
        CorruptCheckpoint: Its source is damaged.
    """
    return value.value if value.source is None else load_value(value.source, store)


def _is_record(entry: ObjectEntry, store: LocalStore) -> bool:
    """Whether an object is an archive: not a whole file of another kind, or a bare pickle."""
    return entry.encoding is not Encoding.RAW and store.reader(entry.file)(entry.start, 2) != b"\x80\x02"
