"""Write pickles opcode by opcode, so that they can say what no pickler would.

Opcodes are those of ``Lib/pickletools.py``. No memo is used; ``Ops`` puts in anything by hand.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STOP = b"."
PROTO2 = b"\x80\x02"


@dataclass(frozen=True, slots=True)
class Glob:
    """A class or function by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """``function(*args)`` (REDUCE)."""

    function: Any
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class New:
    """``cls.__new__(cls)`` with a state (NEWOBJ, BUILD)."""

    cls: Glob
    state: Any = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Persistent:
    """A persistent id (BINPERSID)."""

    pid: Any


@dataclass(frozen=True, slots=True)
class Ops:
    """Opcodes that leave one value on the stack."""

    code: bytes


def text(value: str) -> bytes:
    """BINUNICODE; lone surrogates are written as Python's pickler writes them."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    """The shortest of BININT1, LONG1 and LONG4."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data if len(data) < 256 else b"\x8b" + struct.pack("<I", len(data)) + data


def emit(value: Any) -> bytes:
    """Return the opcodes that build a value."""
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return integer(value)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return text(value)
        case bytes():
            return b"B" + struct.pack("<I", len(value)) + value
        case tuple():
            return b"(" + b"".join(map(emit, value)) + b"t"
        case list():
            return b"](" + b"".join(map(emit, value)) + b"e"
        case Mapping():
            return b"}(" + b"".join(emit(key) + emit(item) for key, item in value.items()) + b"u"
        case _:
            return _emit_special(value)


def _emit_special(value: Any) -> bytes:
    match value:
        case Glob():
            return f"c{value.module}\n{value.name}\n".encode()
        case Call():
            return emit(value.function) + emit(value.args) + b"R"
        case New():
            return emit(value.cls) + b")\x81" + emit(value.state) + b"b"
        case Persistent():
            return emit(value.pid) + b"Q"
        case Ops():
            return value.code
        case _:
            raise TypeError(type(value))


def dump(value: Any) -> bytes:
    """Return a whole pickle."""
    return PROTO2 + emit(value) + STOP


def bomb(levels: int = 64, leaf: Any = 0) -> Ops:
    """A tuple that holds the same tuple twice, and so on: a few hundred bytes, 2^levels leaves when walked."""
    return Ops(emit(leaf) + b"2\x86" * levels)


def nested(levels: int, leaf: Any = 0) -> Ops:
    """A tuple in a tuple, and so on."""
    return Ops(emit(leaf) + b"\x85" * levels)
