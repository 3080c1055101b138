"""Where the parts of a file lie: headers, pickles, elements, directories. Found by Python's own means, not by ours."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["NO_CRC", "Region", "regions_of"]

NO_CRC = " without CRC"
"""Ends the names of regions of archives whose writer computed no checksums."""


class Region(NamedTuple):
    """Bytes ``[start, stop)`` of a file, and what they are."""

    file: str
    name: str
    start: int
    stop: int


def regions_of(file: str, data: bytes) -> list[Region]:
    """Return the regions of a file, in no order; all bytes are in one."""
    base = file.rpartition("/")[2]
    if base.endswith(".metadata"):
        found = [("metadata", 0, len(data))]
    elif base.endswith(".safetensors"):
        found = list(_blobs(data, "safetensors"))
    elif base == "fsdp_ckpt.json":
        found = [("manifest", 0, len(data))]
    elif base.endswith(".json"):
        found = [("index", 0, len(data))]
    elif data[:2] == b"PK" or b"PK\x05\x06" in data:
        found = list(_archives(data))
        if "random_states" in base or "extra_state" in base:
            found = [(f"rng {name}", start, stop) for name, start, stop in found]
    elif data[8:9] == b"{":
        found = list(_blobs(data, "blob"))
    else:
        found = [("compressed", 0, len(data))]
    return [Region(file, name, start, stop) for name, start, stop in found if stop > start]


def _blobs(data: bytes, kind: str) -> Iterator[tuple[str, int, int]]:
    start = 0
    while start < len(data):
        (size,) = struct.unpack_from("<Q", data, start)
        header = json.loads(data[start + 8 : start + 8 + size])
        stop = start + 8 + size
        end = stop + max(item["data_offsets"][1] for name, item in header.items() if name != "__metadata__")
        yield f"{kind} header", start, stop
        yield f"{kind} data", stop, end
        start = end


def _archives(data: bytes) -> Iterator[tuple[str, int, int]]:
    start = 0
    for end in re.finditer(rb"PK\x05\x06.{18}", data, re.DOTALL):
        with zipfile.ZipFile(io.BytesIO(data[start : end.end()])) as archive:
            suffix = "" if any(info.CRC for info in archive.infolist()) else NO_CRC
            position = start
            for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
                header = start + info.header_offset
                name_bytes, extra_bytes = struct.unpack_from("<2H", data, header + 26)
                content = header + 30 + name_bytes + extra_bytes
                yield f"padding{suffix}", position, header
                yield f"local header{suffix}", header, header + 30 + name_bytes
                yield f"padding{suffix}", header + 30 + name_bytes, content
                position = content + info.file_size
                yield _record(info.filename) + suffix, content, position
            directory = start + archive.start_dir
            yield f"padding{suffix}", position, directory
            yield f"directory{suffix}", directory, end.end()
        start = end.end()
    yield "padding", start, len(data)


def _record(name: str) -> str:
    if "/data/" in name:
        return "data"
    return "data.pkl" if name.endswith("/data.pkl") else "small record"
