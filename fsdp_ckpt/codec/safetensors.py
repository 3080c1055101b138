"""Read and plan safetensors files: eight bytes of length, a JSON header, the tensors back to back.

Rules and limits follow the Rust implementation (``safetensors/src/tensor.rs``): at most 100 MB of header, no
duplicate names, ranges that cover the data exactly, sizes that fit dtype and shape.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.catalog import DTYPES, MAX_DIMS, DType, Shape
from fsdp_ckpt.codec import ReadAt
from fsdp_ckpt.errors import Incompatible, MalformedFile

__all__ = ["ALIGNMENT", "HEADER_LIMIT", "LFS_POINTER", "Header", "HeaderTensor", "plan_header", "read_header"]

LFS_POINTER = b"version https://git-lfs"
"""What git checks out in the place of a large file that was not fetched."""

HEADER_LIMIT = 100_000_000
"""Longest header, in bytes, that the safetensors library accepts."""

ALIGNMENT = 4096
"""Our data sections begin on a multiple of this, so that file systems can share blocks."""

_BY_CODE = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors}
_KNOWN_UNUSED = frozenset({"F6_E2M3", "F6_E3M2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderTensor:
    """A tensor in a header.

    Attributes:
        name: Its name.
        dtype: Element type.
        shape: In torch's elements (two float4 values are one).
        start: First byte in the file, inclusive.
        stop: Exclusive.
    """

    name: str
    dtype: DType
    shape: Shape
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A parsed header: tensors in the order of their bytes, and the free-form metadata."""

    tensors: Sequence[HeaderTensor]
    metadata: Mapping[str, str]
    data_start: int


def read_header(read_at: ReadAt, start: int, stop: int, *, where: str) -> Header:
    """Parse the header of the safetensors data at ``[start, stop)`` of a file.

    Raises:
        MalformedFile: The data break a rule of the format.
        Incompatible: A dtype that torch has not.
    """
    if stop - start < 8:
        raise MalformedFile(f"{where}: {stop - start} bytes are too few for a safetensors file")
    first = read_at(start, 8)
    if first == LFS_POINTER[:8] and read_at(start, min(len(LFS_POINTER), stop - start)) == LFS_POINTER:
        raise MalformedFile(f"{where}: a pointer of git-lfs, not the file that it stands for", hint="git lfs pull")
    (length,) = struct.unpack("<Q", first)
    if length > HEADER_LIMIT or 8 + length > stop - start:
        raise MalformedFile(f"{where}: a header of {length} bytes in a file of {stop - start}")
    try:
        text = read_at(start + 8, length).decode()
        raw = json.loads(text, object_pairs_hook=_no_duplicates)
        if "\\u" in text:
            json.dumps(raw, ensure_ascii=False).encode()  # escapes may stand for what is no Unicode
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{where}: the header is no JSON: {error}") from None
    if not isinstance(raw, dict):
        raise MalformedFile(f"{where}: the header is no JSON object")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedFile(f"{where}: the header's metadata are not texts")
    data_start = start + 8 + length
    tensors = sorted((_tensor(name, item, data_start, where) for name, item in raw.items()), key=_order)
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            raise MalformedFile(f"{where}: tensor `{tensor.name}` begins at {tensor.start}, not at {position}")
        position = tensor.stop
    if position != stop:
        raise MalformedFile(f"{where}: the tensors end at byte {position}, the file at {stop}")
    return Header(tensors=tensors, metadata=metadata, data_start=data_start)


def _order(tensor: HeaderTensor) -> tuple[int, int]:
    return tensor.start, tensor.stop


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def _tensor(name: str, item: Any, data_start: int, where: str) -> HeaderTensor:
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise MalformedFile(f"{where}: the entry of `{name}` lacks dtype, shape or data_offsets, or has more")
    code, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    dtype = _BY_CODE.get(code) if isinstance(code, str) else None
    if dtype is None:
        if isinstance(code, str) and code in _KNOWN_UNUSED:
            raise Incompatible(f"{where}: `{name}` has dtype {code}, which torch does not have")
        raise MalformedFile(f"{where}: `{name}` has the unknown dtype {code!r:.40}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise MalformedFile(f"{where}: `{name}` has an impossible shape or range")
    if dtype.pack > 1:
        if not shape or shape[-1] % dtype.pack:
            raise MalformedFile(f"{where}: `{name}` has half a byte in its last dimension")
        shape = [*shape[:-1], shape[-1] // dtype.pack]
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise MalformedFile(f"{where}: `{name}` has {offsets[1] - offsets[0]} bytes, not those of its dtype and shape")
    return HeaderTensor(
        name=name, dtype=dtype, shape=tuple(shape), start=data_start + offsets[0], stop=data_start + offsets[1]
    )


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_DIMS and all(type(n) is int and 0 <= n < 2**63 for n in value)


def plan_header(
    tensors: Iterable[tuple[str, DType, Shape]], metadata: Mapping[str, str], *, otherwise: str = "--format bin"
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Lay out a file.

    The header is padded with spaces so that the data begin on a multiple of ``ALIGNMENT``. Tensors whose size is a
    multiple of it come first, then the rest by falling element size: the format allows no gaps, and so nearly all
    tensors begin on a block and all of them on a multiple of their element size.

    Args:
        tensors: Name, dtype and shape.
        metadata: For the header's ``__metadata__``.
        otherwise: The option that makes a file which has all dtypes, for messages.

    Returns:
        The file's first bytes, up to the data, and the range of each tensor in the file.

    Raises:
        Incompatible: A dtype that safetensors does not have.
    """
    sized = [(name, dtype, shape, math.prod(shape) * dtype.itemsize) for name, dtype, shape in tensors]
    sized.sort(key=lambda item: (item[3] % ALIGNMENT != 0, -item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position, relative = 0, {}
    for name, dtype, shape, size in sized:
        if dtype.safetensors is None:
            raise Incompatible(f"`{name}` is {dtype}, which safetensors cannot hold", hint=f"use {otherwise}")
        if dtype.pack > 1:
            if not shape:
                raise Incompatible(f"`{name}` is a {dtype} without dimensions", hint=f"use {otherwise}")
            shape = (*shape[:-1], shape[-1] * dtype.pack)
        header[name] = {"dtype": dtype.safetensors, "shape": list(shape), "data_offsets": [position, position + size]}
        relative[name] = (position, position + size)
        position += size
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        name = ascii(error.object[max(error.start - 40, 0) : error.end])
        raise Incompatible(f"a name that is no Unicode text: {name}", hint="rename it with --rename") from None
    data_start = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    first = struct.pack("<Q", data_start - 8) + text.ljust(data_start - 8)
    return first, {name: (data_start + start, data_start + stop) for name, (start, stop) in relative.items()}
