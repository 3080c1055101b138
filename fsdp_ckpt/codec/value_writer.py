"""Write values as ``torch.save`` does, without torch: what ``codec.pickles`` decoded goes into a pickle again.

Only plain values and records of harmless classes (``codec.known.PLAIN``) are written, so that nothing that was merely
shown, or that a tensor's bytes belong to, slips into a file. Protocol 2, and only opcodes that
``torch.load(weights_only=True)`` knows; a value that stands in several places is written once and referred to.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_ckpt.catalog import DType
from fsdp_ckpt.codec.known import PLAIN
from fsdp_ckpt.codec.pickles import Constructor, Opaque, Record
from fsdp_ckpt.codec.torchzip_writer import ArchiveTensor, ZipLayout, lay_out_records, pickle_tensor, seal_archive
from fsdp_ckpt.errors import Incompatible

__all__ = ["encode_object", "encode_pickle", "lay_out_state"]

_ALIGNMENT = 4096
_MAX_DEPTH = 100
_MAX_SHOWN = 200
_INT4, _UINT4, _UINT2 = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<H")
_FLOAT8 = struct.Struct(">d")
_FUNCTIONS = frozenset({"builtins.getattr", "_codecs.encode"})
"""Globals that are no classes: a reference to one has no business among values."""


def encode_pickle(value: Any, *, what: str = "the value") -> bytes:
    """Return a value as one pickle (protocol 2), without an archive around it.

    Args:
        value: See ``encode_object``.
        what: Its name, for messages.

    Raises:
        Incompatible: It holds something that cannot be written.
    """
    return _Emitter(what, {}).whole(value)


def encode_object(value: Any, *, what: str = "the value", prefix: str = "archive") -> bytes:
    """Return a whole ``torch.save`` archive that holds one value.

    Args:
        value: What ``codec.pickles`` decodes: None, numbers, texts, bytes, containers, dtypes, and records of classes
            in ``codec.known.PLAIN``.
        what: Its name, for messages.
        prefix: Folder within the archive; ``torch.save`` takes the stem of the file that it writes.

    Raises:
        Incompatible: It holds a tensor, an instance of another class, or itself, or is nested too deep; the message
            names the place.

    Example:
        >>> encode_object({"lr": 0.1}).startswith(b"PK")
        True
    """
    contents = _around(encode_pickle(value, what=what), {})
    layout = lay_out_records(contents, prefix=prefix, alignment=_ALIGNMENT)
    data = bytearray(layout.size)
    for position, piece in seal_archive(layout, {}):
        data[position : position + len(piece)] = piece
    return bytes(data)


def lay_out_state(value: Any, *, prefix: str, what: str = "the state") -> ZipLayout:
    """Return where everything goes in an archive of a nested state dict whose tensors are written later.

    As ``torchzip_writer.lay_out_archive``, which holds a flat state dict: ``seal_archive`` gives what remains to be
    written once the storages are.

    Args:
        value: As for ``encode_object``; ``ArchiveTensor`` stands for a tensor, anywhere but within records and sets.
        prefix: Name of the folder within the archive; torch uses the file's stem.
        what: Its name, for messages.

    Raises:
        Incompatible: It holds something that cannot be written.
    """
    sizes: dict[int, int] = {}
    return lay_out_records(
        _around(_Emitter(what, sizes, tensors=True).whole(value), sizes), prefix=prefix, alignment=_ALIGNMENT
    )


def _around(data: bytes, sizes: Mapping[int, int]) -> list[tuple[str, int, bytes | None]]:
    contents: list[tuple[str, int, bytes | None]] = [("data.pkl", 0, data), ("byteorder", 0, b"little")]
    contents += [(f"data/{storage}", size, None) for storage, size in sizes.items()]
    contents.append(("version", 0, b"3\n"))
    return contents


class _Emitter:
    """Writes one pickle.

    Args:
        what: Name of the value, for messages.
        sizes: Filled with the bytes of each storage, in order.
        tensors: Whether ``ArchiveTensor`` is allowed.
    """

    def __init__(self, what: str, sizes: dict[int, int], *, tensors: bool = False) -> None:
        self._what = what
        self._sizes = sizes
        self._tensors = tensors
        self._out = bytearray(b"\x80\x02")
        self._place: list[Any] = []
        self._open: set[int] = set()
        self._memo: dict[int | str | tuple[str], int] = {}
        """Memo index by identity of a container, by text, and by name of a global, as a tuple of one."""

    def whole(self, value: Any) -> bytes:
        self._emit(value)
        return bytes(self._out) + b"."

    def _emit(self, value: Any) -> None:
        out = self._out
        match value:
            case None:
                out += b"N"
            case bool():
                out += b"\x88" if value else b"\x89"
            case int():
                out += _integer(value)
            case float():
                out += b"G" + _FLOAT8.pack(value)
            case str():
                if not self._recall(value):
                    self._text(value)
                    self._remember(value)
            case DType():
                self._global(f"torch.{value.name}")
            case Constructor():
                self._class(value.name)
            case complex():
                self._call("builtins.complex", (value.real, value.imag))
            case range() | slice():
                self._call(f"builtins.{type(value).__name__}", (value.start, value.stop, value.step))
            case ArchiveTensor() if self._tensors:
                self._sizes.setdefault(value.storage, value.num_bytes)
                out += pickle_tensor(value)[2:-1]
            case _:
                self._container(value)

    def _container(self, value: Any) -> None:
        """Emit what may hold other values, once; the caller keeps it alive, so that its identity stays its own."""
        if value == () and isinstance(value, tuple):
            self._out += b")"
            return
        if self._recall(id(value)):
            return
        if id(value) in self._open:
            raise self._refusal("contains itself")
        if len(self._open) >= _MAX_DEPTH:
            raise self._refusal("is nested too deep")
        self._open.add(id(value))
        self._fill(value)
        self._open.remove(id(value))
        self._remember(id(value))

    def _fill(self, value: Any) -> None:
        out = self._out
        match value:
            case dict():
                out += b"}("
                for key, item in value.items():
                    self._within(key, key)
                    self._within(key, item)
                out += b"u"
            case list():
                out += b"]("
                self._items(value)
                out += b"e"
            case tuple():
                out += b"("
                self._items(value)
                out += b"t"
            case bytes():
                # As Python does it in protocol 2, which has no opcode for bytes.
                self._call("_codecs.encode", (value.decode("latin-1"), "latin1"), remembered=False)
            case bytearray():
                self._call("builtins.bytearray", (bytes(value),))
            case set() | frozenset():
                self._tensors, allowed = False, self._tensors
                self._call(f"builtins.{type(value).__name__}", (_in_order(value),))
                self._tensors = allowed
            case Record() if not isinstance(value, Opaque):
                self._tensors, allowed = False, self._tensors
                self._class(value.cls)
                self._within("args", value.args)
                out += b"R"
                if value.state is not None:
                    self._within("state", value.state)
                    out += b"b"
                self._tensors = allowed
            case _:
                raise self._refusal(f"is {_shown(value)}, which cannot be written")

    def _items(self, values: Iterable[Any]) -> None:
        for index, item in enumerate(values):
            self._within(index, item)

    def _within(self, step: Any, value: Any) -> None:
        self._place.append(step)
        self._emit(value)
        self._place.pop()

    def _call(self, name: str, args: tuple[Any, ...], *, remembered: bool = True) -> None:
        """Emit a call; the arguments are made for it, so that no memo may refer to them by identity."""
        self._global(name)
        self._out += b"("
        for arg in args:
            if isinstance(arg, str) and not remembered:
                self._text(arg)
            elif isinstance(arg, list):
                self._out += b"]("
                self._items(arg)
                self._out += b"e"
            elif isinstance(arg, bytes):
                self._fill(arg)
            else:
                self._emit(arg)
        self._out += b"tR"

    def _text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        if len(data) >= 2**32:
            raise self._refusal("is a text of more than 4 GiB")
        self._out += b"X" + _UINT4.pack(len(data)) + data

    def _class(self, name: str) -> None:
        if name not in PLAIN or name in _FUNCTIONS:
            raise self._refusal(f"is of `{name[:_MAX_SHOWN]}`, a class that is not written")
        self._global(name)

    def _global(self, name: str) -> None:
        if self._recall((name,)):
            return
        module, _, qualname = name.rpartition(".")
        self._out += f"c{module}\n{qualname}\n".encode()
        self._remember((name,))

    def _recall(self, key: int | str | tuple[str]) -> bool:
        index = self._memo.get(key)
        if index is None:
            return False
        self._out += b"h" + bytes([index]) if index < 256 else b"j" + _UINT4.pack(index)
        return True

    def _remember(self, key: int | str | tuple[str]) -> None:
        index = self._memo[key] = len(self._memo)
        self._out += b"q" + bytes([index]) if index < 256 else b"r" + _UINT4.pack(index)

    def _refusal(self, reason: str) -> Incompatible:
        place = "".join(f"[{_key(step)}]" for step in self._place)[:_MAX_SHOWN]
        return Incompatible(
            f"{self._what}: {f'what stands at {place}' if place else 'it'} {reason}",
            hint="leave it out of the result, or let torch itself load and save it",
        )


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        if 0 <= value < 2**16:
            return b"K" + bytes([value]) if value < 256 else b"M" + _UINT2.pack(value)
        return b"J" + _INT4.pack(value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    # Beyond 255 bytes Python can read it back, but torch.load needs weights_only=False, as for what torch.save writes.
    return b"\x8a" + bytes([len(data)]) + data if len(data) < 256 else b"\x8b" + _INT4.pack(len(data)) + data


def _in_order(values: Iterable[Any]) -> list[Any]:
    """Return a set's items, where possible in an order that is the same in every run."""
    items = list(values)
    kinds = set(map(type, items))
    return sorted(items) if kinds in ({str}, {int}, {bytes}) else items


def _key(step: Any) -> str:
    if isinstance(step, str):
        return repr(step[:_MAX_SHOWN])
    return str(step) if type(step) is int and abs(step) < 2**63 else type(step).__name__


def _shown(value: Any) -> str:
    if isinstance(value, Opaque):
        return f"an instance of `{value.cls[:_MAX_SHOWN]}`"
    if isinstance(value, ArchiveTensor) or re.search("Tensor(Ref)?$", type(value).__name__):
        return "a tensor"
    return f"a {type(value).__name__}"
