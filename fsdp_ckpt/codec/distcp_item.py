"""Lay out one item of a ``.distcp`` file: a whole ``torch.save`` archive that holds a single bare tensor.

As in ``torchzip_writer`` all offsets are known beforehand, so tensor bytes can be copied to their places (or shared
with another file, block by block) and the rest be written around them. The storage is the archive's first record,
unlike in torch's own files: loaders find records by the directory at the end, and a reader of that end (see
``torchzip``) then has all of the small records at once.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache

from fsdp_ckpt.catalog import DType, Shape
from fsdp_ckpt.codec import ReadAt
from fsdp_ckpt.codec.torchzip_writer import ArchiveTensor, ZipLayout, lay_out_records, pickle_tensor, seal_archive

__all__ = ["ItemLayout", "lay_out_item", "recognise_item", "seal_item"]

_CRC = struct.Struct("<L")
_CRC_IN_HEAD = 14
"""Where a zip file's local headers have the checksum."""
_CRC_IN_ENTRY = 16
"""Where the entries of its directory have it; that of the elements is the first one."""
_WHOLE_BYTES = 16 << 10

_RECORD_ALIGNMENT = 64
"""Where torch puts records within an archive, so that mapped storages are aligned; loading does not ask for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLayout:
    """Places of an item's parts, in bytes from the beginning of the file; ranges are half-open.

    Attributes:
        dtype: Element type of the tensor.
        shape: Its shape: that of the chunk, not of the whole tensor.
        start: Where the item begins.
        data_start: Where the tensor's elements begin, row-major and little-endian.
        data_stop: Where they end.
        stop: Where the item ends. ``.metadata`` has ``start`` as the offset, and ``stop - start`` as the length.
    """

    dtype: DType
    shape: Shape
    start: int
    data_start: int
    data_stop: int
    stop: int


def lay_out_item(dtype: DType, shape: Shape, position: int, *, alignment: int = 4096) -> ItemLayout:
    """Return where an item goes.

    What alignment needs is left free before the item rather than padded inside of it, where readers would fetch it.

    Args:
        dtype: Element type.
        shape: Shape of the chunk.
        position: First byte of the file that is free; the item begins there or a little later.
        alignment: Bytes that ``data_start`` is a multiple of when the tensor has as many; smaller tensors begin at
            multiples of 64. Itself a multiple of 64.

    Raises:
        ValueError: An alignment that is no multiple of 64.

    Example:
        >>> from fsdp_ckpt.catalog import DTYPES
        >>> layout = lay_out_item(DTYPES["float32"], (1024, 1024), 10_000)
        >>> layout.start, layout.data_start, layout.data_stop
        (12160, 12288, 4206592)
    """
    if alignment <= 0 or alignment % _RECORD_ALIGNMENT:
        raise ValueError(f"an alignment of {alignment} bytes, which is no multiple of {_RECORD_ALIGNMENT}")
    archive = _archive(dtype, shape)
    inner_start, inner_stop = archive.storages[0]
    if inner_stop - inner_start < alignment:
        alignment = _RECORD_ALIGNMENT
    data_start = position + inner_start
    data_start += -data_start % alignment
    start = data_start - inner_start
    return ItemLayout(
        dtype=dtype,
        shape=shape,
        start=start,
        data_start=data_start,
        data_stop=start + inner_stop,
        stop=start + archive.size,
    )


def seal_item(layout: ItemLayout, crc32: int) -> tuple[bytes, bytes]:
    """Return the bytes of ``[start, data_start)`` and of ``[data_stop, stop)``.

    Args:
        layout: The places.
        crc32: CRC-32 of the bytes ``[data_start, data_stop)``.
    """
    head, tail, place = _around(layout.dtype, layout.shape)
    crc = _CRC.pack(crc32)
    return (
        head[:_CRC_IN_HEAD] + crc + head[_CRC_IN_HEAD + _CRC.size :],
        tail[:place] + crc + tail[place + _CRC.size :],
    )


def recognise_item(read_at: ReadAt, start: int, stop: int, dtype: DType, shape: Shape) -> tuple[int, int, int] | None:
    """Tell whether an item is one that ``seal_item`` made, byte by byte; that is sooner known than it is parsed.

    Args:
        read_at: Reads the file.
        start: Where the item begins, as ``.metadata`` has it.
        stop: Where it ends.
        dtype: Element type that the metadata say.
        shape: Shape of the chunk that they say.

    Returns:
        Where the elements begin and end, and their CRC-32; None for any other item, whole or damaged.
    """
    archive = _archive(dtype, shape)
    if stop - start != archive.size:
        return None
    place = _around(dtype, shape)[2]
    inner_start, inner_stop = archive.storages[0]
    if archive.size <= _WHOLE_BYTES:
        item = read_at(start, archive.size)
        found = item[:inner_start], item[inner_stop:]
    else:
        found = read_at(start, inner_start), read_at(start + inner_stop, archive.size - inner_stop)
    (crc,) = _CRC.unpack_from(found[1], place)
    layout = ItemLayout(
        dtype=dtype,
        shape=shape,
        start=start,
        data_start=start + inner_start,
        data_stop=start + inner_stop,
        stop=stop,
    )
    # No checksum of 0: that may also mean that none was computed.
    return (layout.data_start, layout.data_stop, crc) if crc and found == seal_item(layout, crc) else None


@lru_cache(maxsize=4096)
def _around(dtype: DType, shape: Shape) -> tuple[bytes, bytes, int]:
    """Return what stands before and after the elements, with 0 as their checksum, and its place in the latter."""
    archive = _archive(dtype, shape)
    (_, head), *rest = seal_archive(archive, {0: 0})
    return head, b"".join(piece for _, piece in rest), archive.directory - archive.storages[0][1] + _CRC_IN_ENTRY


@lru_cache(maxsize=4096)
def _archive(dtype: DType, shape: Shape) -> ZipLayout:
    """Return the records of an archive that begins at 0; those of one dtype and shape differ in the checksum only."""
    pickle = pickle_tensor(ArchiveTensor(name="", dtype=dtype, shape=shape, storage=0))
    contents = [
        ("data/0", math.prod(shape) * dtype.itemsize, None),
        ("data.pkl", 0, pickle),
        ("byteorder", 0, b"little"),
        ("version", 0, b"3\n"),
    ]
    return lay_out_records(contents, prefix="archive", alignment=_RECORD_ALIGNMENT)
