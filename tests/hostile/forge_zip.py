"""Write ``torch.save`` archives by hand, wrong ones on purpose.

``PKWARE APPNOTE 6.3``: local headers and contents, the directory, its end. Every number can be lied about.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.hostile.forge_pickle import Call, Glob, Persistent, dump

PREFIX = "archive/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record, and what the directory claims about it where that is not the truth."""

    name: str
    content: bytes
    method: int = 0
    flags: int = 0
    packed: int | None = None
    size: int | None = None
    crc: int | None = None
    header: int | None = None
    local_name: str | None = None
    extra: bytes = b""


def archive(
    entries: Sequence[Entry],
    *,
    prefix: str = PREFIX,
    count: int | None = None,
    directory_offset: int | None = None,
    directory_bytes: int | None = None,
    comment: bytes = b"",
) -> bytes:
    """Return the archive; the last four parameters falsify its end record."""
    body, directory = bytearray(), bytearray()
    for entry in entries:
        start = len(body)
        crc = zlib.crc32(entry.content) if entry.crc is None else entry.crc
        name = (prefix + entry.name).encode()
        local = name if entry.local_name is None else entry.local_name.encode()
        content = entry.content
        body += struct.pack("<4s5H3L2H", b"PK\3\4", 20, entry.flags, entry.method, 0, 0, crc, 0, 0, len(local), 0)
        body += local + content
        packed = len(content) if entry.packed is None else entry.packed
        size = len(content) if entry.size is None else entry.size
        header = start if entry.header is None else entry.header
        directory += struct.pack(
            "<4s4B4H3L5H2L", b"PK\1\2", 20, 0, 20, 0, entry.flags, entry.method, 0, 0, crc, packed, size, len(name),
            len(entry.extra), 0, 0, 0, 0, header,
        )  # fmt: skip
        directory += name + entry.extra
    number = len(entries) if count is None else count
    end = struct.pack(
        "<4s4H2LH",
        b"PK\5\6",
        0,
        0,
        number,
        number,
        len(directory) if directory_bytes is None else directory_bytes,
        len(body) if directory_offset is None else directory_offset,
        len(comment),
    )
    return bytes(body + directory) + end + comment


def zip64(*values: int) -> bytes:
    """The extra field for sizes and offsets that are 0xFFFFFFFF in the entry."""
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


STORAGES = {"float32": "FloatStorage", "bfloat16": "BFloat16Storage", "int64": "LongStorage", "uint8": "ByteStorage"}
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}


def tensor_value(
    shape: Sequence[Any],
    *,
    key: Any = "0",
    dtype: str = "float32",
    offset: Any = 0,
    strides: Sequence[Any] | None = None,
    numel: Any = None,
) -> Call:
    """What ``torch.save`` writes for a tensor."""
    elements, row_major = 1, []
    for length in reversed(shape) if strides is None or numel is None else ():
        row_major.append(elements)
        elements *= length if isinstance(length, int) else 1
    kind = Glob("torch", STORAGES[dtype])
    pid = ("storage", kind, key, "cpu", elements if numel is None else numel)
    steps = tuple(reversed(row_major)) if strides is None else tuple(strides)
    hooks = Call(Glob("collections", "OrderedDict"))
    return Call(
        Glob("torch._utils", "_rebuild_tensor_v2"), (Persistent(pid), offset, tuple(shape), steps, False, hooks)
    )


def records(value: Any, storages: Sequence[bytes] = (), *, pickle: bytes | None = None) -> list[Entry]:
    """The records of an archive whose ``data.pkl`` holds a value."""
    return [
        Entry(name="data.pkl", content=dump(value) if pickle is None else pickle),
        Entry(name=".format_version", content=b"1"),
        Entry(name="byteorder", content=b"little"),
        *(Entry(name=f"data/{number}", content=data) for number, data in enumerate(storages)),
        Entry(name="version", content=b"3\n"),
    ]


def saved(value: Any, storages: Sequence[bytes] = (), *, pickle: bytes | None = None) -> bytes:
    """A sound archive."""
    return archive(records(value, storages, pickle=pickle))


def changed(entries: Sequence[Entry], name: str, **changes: Any) -> list[Entry]:
    """Return the entries with one of them changed."""
    assert any(entry.name == name for entry in entries)
    return [replace(entry, **changes) if entry.name == name else entry for entry in entries]
