"""Lay out a ``torch.save`` archive of nested dictionaries and lists (an optimizer's state) before its tensors come.

As ``torchzip_writer``, which holds a flat state dict: all offsets are known beforehand, tensors can be written one by
one, and the whole is never in memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from fsdp_ckpt.codec.torchzip_writer import ArchiveTensor, ZipLayout, lay_out_records, pickle_tensor
from fsdp_ckpt.errors import Incompatible

__all__ = ["check_plain", "lay_out_nested"]

_ALIGNMENT = 4096
_MAX_DEPTH = 64


def lay_out_nested(value: Any, *, prefix: str) -> ZipLayout:
    """Return where everything goes.

    Args:
        value: Dictionaries, lists and tuples of None, booleans, numbers, texts and ``ArchiveTensor``.
        prefix: Name of the folder within the archive.

    Raises:
        Incompatible: Another value.
    """
    data = b"\x80\x02" + b"".join(_emit(value, 0)) + b"."
    sizes: dict[int, int] = {}
    for tensor in _tensors(value):
        sizes.setdefault(tensor.storage, tensor.num_bytes)
    contents: list[tuple[str, int, bytes | None]] = [("data.pkl", 0, data), ("byteorder", 0, b"little")]
    contents += [(f"data/{storage}", size, None) for storage, size in sizes.items()]
    contents.append(("version", 0, b"3\n"))
    return lay_out_records(contents, prefix=prefix, alignment=_ALIGNMENT)


def check_plain(value: Any) -> None:
    """Make sure that a value can be stored.

    Raises:
        Incompatible: It holds something else than ``lay_out_nested`` takes.
    """
    for _ in _emit(value, 0):
        pass


def _tensors(value: Any) -> Iterator[ArchiveTensor]:
    if isinstance(value, ArchiveTensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _emit(value: Any, depth: int) -> Iterator[bytes]:
    """Yield the opcodes that push a value (protocol 2, see Lib/pickletools.py)."""
    if depth > _MAX_DEPTH:
        raise Incompatible("a state dict that is nested too deep")
    match value:
        case None:
            yield b"N"
        case bool():
            yield b"\x88" if value else b"\x89"
        case int():
            yield _integer(value)
        case float():
            yield b"G" + struct.pack(">d", value)
        case str():
            text = value.encode("utf-8", "surrogatepass")
            yield b"X" + struct.pack("<I", len(text)) + text
        case ArchiveTensor():
            yield pickle_tensor(value)[2:-1]
        case dict():
            yield b"}("
            for key, item in value.items():
                yield from _emit(key, depth + 1)
                yield from _emit(item, depth + 1)
            yield b"u"
        case list() | tuple():
            yield b"](" if isinstance(value, list) else b"("
            for item in value:
                yield from _emit(item, depth + 1)
            yield b"e" if isinstance(value, list) else b"t"
        case _:
            raise Incompatible(
                f"a {type(value).__module__}.{type(value).__qualname__} in the state cannot be stored in a full state "
                "dict",
                hint="use SHARDED_STATE_DICT, or keep plain numbers, texts and tensors in it",
            )


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) > 255:
        raise Incompatible("an integer of thousands of bits in the state")
    return b"\x8a" + bytes([len(data)]) + data
