"""What the opcodes of pickle protocols 2 to 5 do; see ``pickles.Machine``."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.errors import UnsafePickle

if TYPE_CHECKING:
    from fsdp_ckpt.codec.pickles import Machine

__all__ = ["OPCODES", "STOP"]

STOP = ord(".")
_MAX_PROTOCOL = 5
_AFTER_FRAME = frozenset(b"\x95XB\x8d\x8e\x96")
"""FRAME, and the texts and bytes that may be large."""
_INT4 = struct.Struct("<i")
_UINT4 = struct.Struct("<I")
_UINT8 = struct.Struct("<Q")
_FLOAT8 = struct.Struct(">d")


def _size4(m: Machine) -> int:
    return int(_UINT4.unpack(m.take(4))[0])


def _size8(m: Machine) -> int:
    return int(_UINT8.unpack(m.take(8))[0])


def _line(m: Machine) -> str:
    end = m.data.index(b"\n", m.position)
    line = m.data[m.position : end].decode()
    m.position = end + 1
    return line


def _op_global(m: Machine) -> None:
    module = _line(m)
    m.stack.append(m.find(module, _line(m)))


def _op_inst(m: Machine) -> None:
    module = _line(m)
    name = _line(m)
    args = tuple(m.pop_mark())
    m.stack.append(m.reduce(m.find(module, name), args))


def _op_stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise m.malformed("a global's name is no string")
    m.stack.append(m.find(module, name))


def _op_reduce(m: Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.reduce(m.stack[-1], args)


def _op_newobj_ex(m: Machine) -> None:
    kwargs, args = m.stack.pop(), m.stack.pop()
    if kwargs:
        raise m.malformed("keyword arguments")
    m.stack[-1] = m.reduce(m.stack[-1], args)


def _op_build(m: Machine) -> None:
    state = m.stack.pop()
    m.build(m.stack[-1], state)


def _op_obj(m: Machine) -> None:
    function, *args = m.pop_mark()
    m.stack.append(m.reduce(function, tuple(args)))


def _op_tuple(count: int) -> Callable[[Machine], None]:
    def op(m: Machine) -> None:
        items = tuple(m.stack[-count:])
        if len(items) != count:
            raise m.malformed("stack underflow")
        del m.stack[-count:]
        m.stack.append(items)

    return op


def _op_appends(m: Machine) -> None:
    items = m.pop_mark()
    m.append(items)


def _op_append(m: Machine) -> None:
    item = m.stack.pop()
    m.append([item])


def _op_setitems(m: Machine) -> None:
    items = m.pop_mark()
    m.set_items(items)


def _op_setitem(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items([key, value])


def _op_dict(m: Machine) -> None:
    items = m.pop_mark()
    m.stack.append({})
    m.set_items(items)


def _op_additems(m: Machine) -> None:
    items = m.pop_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        raise m.malformed(f"items for {type(target).__name__}")
    target.update(m.as_key(item) for item in items)


def _op_persid(m: Machine) -> None:
    pid = m.stack.pop()
    if m.persistent is None:
        raise m.malformed("a persistent id where none is expected")
    m.stack.append(m.persistent(pid))


def _op_extension(m: Machine) -> None:
    raise UnsafePickle("copyreg extension", where=m.where)


def _op_proto(m: Machine) -> None:
    number = m.take(1)[0]
    if number > _MAX_PROTOCOL:
        raise m.malformed(f"protocol {number}")


def _op_frame(m: Machine) -> None:
    """Only a hint for buffering, but Python refuses one that ends elsewhere than before an operation.

    Picklers end frames before the next one, and before large texts and bytes, which they put in none.
    """
    (size,) = _UINT8.unpack(m.take(8))
    end = m.position + size
    if end > len(m.data) or (end < len(m.data) and m.data[end] not in _AFTER_FRAME and m.data[end - 1] != STOP):
        raise m.malformed(f"a frame of {size} bytes")


def _push(read: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    def op(m: Machine) -> None:
        value = read(m)  # first: it may replace the stack
        m.stack.append(value)

    return op


def _table() -> list[Callable[[Machine], Any] | None]:
    def long(size: Callable[[Machine], int]) -> Callable[[Machine], int]:
        return lambda m: int.from_bytes(m.take(size(m)), "little", signed=True)

    def byte(m: Machine) -> int:
        return m.take(1)[0]

    def text(size: Callable[[Machine], int]) -> Callable[[Machine], str]:
        return lambda m: m.take(size(m)).decode("utf-8", "surrogatepass")

    def raw(size: Callable[[Machine], int]) -> Callable[[Machine], bytes]:
        return lambda m: m.take(size(m))

    by_code: dict[bytes, Callable[[Machine], Any]] = {
        b"\x80": _op_proto,
        b"\x95": _op_frame,
        b"(": lambda m: m.push_mark(),
        b"0": lambda m: m.stack.pop(),
        b"1": lambda m: m.pop_mark(),
        b"2": lambda m: m.stack.append(m.stack[-1]),
        b"N": _push(lambda _: None),
        b"\x88": _push(lambda _: True),
        b"\x89": _push(lambda _: False),
        b"J": _push(lambda m: _INT4.unpack(m.take(4))[0]),
        b"K": _push(byte),
        b"M": _push(lambda m: int.from_bytes(m.take(2), "little")),
        b"\x8a": _push(long(byte)),
        b"\x8b": _push(long(_size4)),
        b"G": _push(lambda m: _FLOAT8.unpack(m.take(8))[0]),
        b"X": _push(text(_size4)),
        b"\x8c": _push(text(byte)),
        b"\x8d": _push(text(_size8)),
        b"B": _push(raw(_size4)),
        b"C": _push(raw(byte)),
        b"\x8e": _push(raw(_size8)),
        b"\x96": _push(raw(_size8)),  # BYTEARRAY8: kept as bytes
        b"T": _push(lambda m: m.take(_size4(m)).decode("latin-1")),
        b"U": _push(lambda m: m.take(byte(m)).decode("latin-1")),
        b")": _push(lambda _: ()),
        b"t": _push(lambda m: tuple(m.pop_mark())),
        b"\x85": _op_tuple(1),
        b"\x86": _op_tuple(2),
        b"\x87": _op_tuple(3),
        b"]": _push(lambda _: []),
        b"l": _push(lambda m: m.pop_mark()),
        b"a": _op_append,
        b"e": _op_appends,
        b"}": _push(lambda _: {}),
        b"d": _op_dict,
        b"s": _op_setitem,
        b"u": _op_setitems,
        b"\x8f": _push(lambda _: set()),
        b"\x90": _op_additems,
        b"\x91": _push(lambda m: frozenset(m.as_key(item) for item in m.pop_mark())),
        b"h": lambda m: m.get(byte(m), 2),
        b"j": lambda m: m.get(_size4(m), 5),
        b"q": lambda m: m.put(byte(m), m.stack[-1]),
        b"r": lambda m: m.put(_size4(m), m.stack[-1]),
        b"\x94": lambda m: m.memo.append(m.stack[-1]),
        b"c": _op_global,
        b"\x93": _op_stack_global,
        b"i": _op_inst,
        b"o": _op_obj,
        b"R": _op_reduce,
        b"\x81": _op_reduce,  # NEWOBJ
        b"\x92": _op_newobj_ex,
        b"b": _op_build,
        b"Q": _op_persid,
        b"\x82": _op_extension,
        b"\x83": _op_extension,
        b"\x84": _op_extension,
    }
    table: list[Callable[[Machine], Any] | None] = [None] * 256
    for code, function in by_code.items():
        table[code[0]] = function
    return table


OPCODES = _table()
"""What each opcode does to a machine, by its byte; None where torch never writes it."""
