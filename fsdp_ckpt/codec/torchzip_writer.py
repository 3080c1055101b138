"""Lay out a ``torch.save`` archive before its tensors are known, so that their bytes can be written in any order.

All offsets follow from names and sizes. Tensor bytes go straight to their places; headers and directory are written
at the end, when the checksums are known. The result is what torch 2.x writes: stored records, ``data.pkl`` in
protocol 2, each storage aligned (here to 4096 bytes), 64-bit records throughout.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_ckpt.catalog import DType, Shape, contiguous_strides
from fsdp_ckpt.codec.tensors import STORAGE_NAMES

__all__ = ["ArchiveTensor", "ZipLayout", "lay_out_archive", "lay_out_records", "pickle_tensor", "seal_archive"]

_ALIGNMENT = 4096
_LOCAL_BYTES = 30
_ZIP64 = struct.Struct("<2H2Q")
_TYPED = {dtype: name for name, dtype in STORAGE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveTensor:
    """A tensor to write: its name, dtype and shape, and the storage that it uses (tied tensors share one)."""

    name: str
    dtype: DType
    shape: Shape
    storage: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its storage."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    name: str
    header: int
    start: int
    size: int
    content: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipLayout:
    """Places of all records.

    Attributes:
        records: In the order of the file.
        storages: Byte range of each storage in the file.
        directory: Where the directory begins.
        size: Bytes of the whole file.
    """

    records: Sequence[_Record]
    storages: Mapping[int, tuple[int, int]]
    directory: int
    size: int


def lay_out_archive(tensors: Sequence[ArchiveTensor], *, prefix: str) -> ZipLayout:
    """Return where everything goes.

    Args:
        tensors: In the order of the state dict.
        prefix: Name of the folder within the archive; torch uses the file's stem.
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        sizes.setdefault(tensor.storage, tensor.num_bytes)
    contents: list[tuple[str, int, bytes | None]] = [("data.pkl", 0, _pickle(tensors)), ("byteorder", 0, b"little")]
    contents += [(f"data/{storage}", size, None) for storage, size in sizes.items()]
    contents.append(("version", 0, b"3\n"))
    return lay_out_records(contents, prefix=prefix, alignment=_ALIGNMENT)


def lay_out_records(contents: Sequence[tuple[str, int, bytes | None]], *, prefix: str, alignment: int) -> ZipLayout:
    """Return where records go that follow each other in one archive.

    Args:
        contents: Name without prefix, size in bytes and content of each; storages (``data/N``) have no content yet,
            for others the content says the size.
        prefix: Name of the folder within the archive.
        alignment: Bytes that the places of storages are multiples of, counted from the archive's beginning; those of
            other records are multiples of 64, as torch has it.
    """
    position = 0
    records = []
    for name, size, content in contents:
        size = len(content) if content is not None else size
        full = f"{prefix}/{name}"
        start = position + _LOCAL_BYTES + len(full.encode()) + _ZIP64.size + 4
        start += -start % (alignment if content is None else 64)
        records.append(_Record(name=full, header=position, start=start, size=size, content=content))
        position = start + size
    storages = {
        int(record.name.rpartition("/")[2]): (record.start, record.start + record.size)
        for record in records
        if record.content is None
    }
    directory_bytes = sum(46 + len(record.name.encode()) + _ZIP64.size + 8 for record in records)
    return ZipLayout(
        records=records, storages=storages, directory=position, size=position + directory_bytes + 56 + 20 + 22
    )


def seal_archive(layout: ZipLayout, crcs: Mapping[int, int]) -> list[tuple[int, bytes]]:
    """Return what remains to be written once the storages are: (position, bytes) of headers, small records, directory.

    Args:
        layout: The places.
        crcs: CRC-32 of each storage.
    """
    pieces: list[tuple[int, bytes]] = []
    directory = bytearray()
    for record in layout.records:
        name = record.name.encode()
        crc = zlib.crc32(record.content) if record.content is not None else crcs[int(record.name.rpartition("/")[2])]
        padding = record.start - record.header - _LOCAL_BYTES - len(name) - _ZIP64.size - 4
        extra = _ZIP64.pack(1, 16, record.size, record.size) + struct.pack("<2H", 0x4246, padding) + b"Z" * padding
        local = struct.pack(
            "<4s5H3L2H", b"PK\3\4", 45, 0x0800, 0, 0, 0x21, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra)
        )
        pieces.append((record.header, local + name + extra + (record.content or b"")))
        extra = struct.pack("<2H3Q", 1, 24, record.size, record.size, record.header)
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 45, 45, 0x0800, 0, 0, 0x21, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra),
            0, 0, 0, 0, 0xFFFFFFFF,
        ) + name + extra  # fmt: skip
    count, end = len(layout.records), layout.directory + len(directory)
    directory += struct.pack(
        "<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, end - layout.directory, layout.directory
    )
    directory += struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    directory += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    pieces.append((layout.directory, bytes(directory)))
    return pieces


def pickle_tensor(tensor: ArchiveTensor) -> bytes:
    """Return the ``data.pkl`` of an archive that holds one tensor and nothing around it; its name is not used."""
    return b"\x80\x02" + _tensor(tensor) + b"."


def _pickle(tensors: Sequence[ArchiveTensor]) -> bytes:
    """Return the pickle of ``OrderedDict(name -> tensor)`` in protocol 2."""
    items = b"".join(_text(tensor.name) + _tensor(tensor) for tensor in tensors)
    return b"\x80\x02ccollections\nOrderedDict\n)R(" + items + b"u."


def _tensor(tensor: ArchiveTensor) -> bytes:
    typed = _TYPED.get(tensor.dtype.name)
    rebuild = b"_rebuild_tensor_v2" if typed else b"_rebuild_tensor_v3"
    storage = f"torch\n{typed}Storage".encode() if typed else b"torch.storage\nUntypedStorage"
    elements = math.prod(tensor.shape) if typed else tensor.num_bytes
    out = [
        b"ctorch._utils\n", rebuild, b"\n((", _text("storage"), b"c", storage, b"\n",
        _text(str(tensor.storage)), _text("cpu"), _int(elements), b"tQ", _int(0), _sizes(tensor.shape),
        _sizes(contiguous_strides(tensor.shape)), b"\x89ccollections\nOrderedDict\n)R",
    ]  # fmt: skip
    if not typed:
        out.append(b"ctorch\n" + tensor.dtype.name.encode() + b"\n")
    out.append(b"tR")
    return b"".join(out)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _int(number: int) -> bytes:
    if 0 <= number < 2**31:
        return b"J" + struct.pack("<i", number)
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _sizes(sizes: Shape) -> bytes:
    return b"(" + b"".join(map(_int, sizes)) + b"t"
