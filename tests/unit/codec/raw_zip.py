"""Zip archives for tests, byte by byte: sound ones that torch reads, and others that contradict themselves."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Entry", "build_zip", "write_sparse"]


@dataclass
class Entry:
    """A record; the fields below the content can be made to lie."""

    name: str
    content: bytes
    method: int = 0
    flags: int = 0x0800
    crc: int | None = None
    size: int | None = None
    local_name: str | None = None
    header_at: int | None = None
    local_magic: bytes = b"PK\3\4"
    padding: int = 0
    comment: bytes = b""
    central_extra: bytes = field(default=b"")


def build_zip(entries: list[Entry], *, comment: bytes = b"", count: int | None = None, zip64: bool = False) -> bytes:
    """Return an archive. With ``zip64`` all sizes and positions stand in 64-bit fields."""
    out, directory = b"", b""
    for entry in entries:
        at = len(out) if entry.header_at is None else entry.header_at
        crc = zlib.crc32(entry.content) if entry.crc is None else entry.crc
        size = len(entry.content) if entry.size is None else entry.size
        out += _local(entry, crc, len(entry.content)) + entry.content
        directory += _central(entry, crc, size, at, zip64=zip64)
    return out + directory + _end(len(out), len(directory), len(entries) if count is None else count, comment, zip64)


def write_sparse(path: Path, small: list[Entry], name: str, size: int, tail: bytes) -> int:
    """Write ``small`` records and one of ``size`` bytes that are zero but for its ``tail``; return where it begins.

    Its checksum is left out (zero), so that nobody has to read it.
    """
    out, directory = b"", b""
    for entry in small:
        crc = zlib.crc32(entry.content)
        directory += _central(entry, crc, len(entry.content), len(out), zip64=True)
        out += _local(entry, crc, len(entry.content)) + entry.content
    large = Entry(name, b"")
    directory += _central(large, 0, size, len(out), zip64=True)
    out += _local(large, 0, 0)
    start = len(out)
    with open(path, "wb") as file:
        file.write(out)
        file.seek(start + size - len(tail))
        file.write(tail + directory + _end(start + size, len(directory), len(small) + 1, b"", True))
    return start


def _local(entry: Entry, crc: int, size: int) -> bytes:
    name = (entry.name if entry.local_name is None else entry.local_name).encode()
    extra = struct.pack("<2H", 0x4246, entry.padding) + b"Z" * entry.padding if entry.padding else b""
    fields = struct.pack("<5H3L2H", 20, entry.flags, entry.method, 0, 0x21, crc, size, size, len(name), len(extra))
    return entry.local_magic + fields + name + extra


def _central(entry: Entry, crc: int, size: int, at: int, *, zip64: bool) -> bytes:
    name = entry.name.encode()
    extra, short_size, short_at = entry.central_extra, size, at
    if zip64:
        extra += struct.pack("<2H3Q", 1, 24, size, size, at)
        short_size = short_at = 0xFFFFFFFF
    return (
        struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 45, 45, entry.flags, entry.method, 0, 0x21, crc, short_size, short_size,
            len(name), len(extra), len(entry.comment), 0, 0, 0, short_at,
        ) + name + extra + entry.comment
    )  # fmt: skip


def _end(at: int, size: int, count: int, comment: bytes, zip64: bool) -> bytes:
    out = b""
    if zip64:
        out += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, at)
        out += struct.pack("<4sLQL", b"PK\6\7", 0, at + size, 1)
        at = size = 0xFFFFFFFF
        count = 0xFFFF
    return out + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, at, len(comment)) + comment
