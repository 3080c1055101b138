"""Show what a checkpoint holds besides tensors, without building anything but plain values."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fsdp_ckpt.catalog import DType, ObjectEntry
from fsdp_ckpt.codec.pickles import Constructor, Opaque, Record
from fsdp_ckpt.codec.tensors import DTensorRef, ShardedTensorRef, TensorRef
from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.ops.conversion.values import load_value
from fsdp_ckpt.store.local import LocalStore

__all__ = ["read_object", "to_plain"]

_MAX_ITEMS = 64
_MAX_TEXT = 400
_MAX_DEPTH = 8
_MAX_NODES = 400
_NUMPY_FORMATS = {
    "f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "i2": "<h", "i1": "<b",
    "u8": "<Q", "u4": "<I", "u2": "<H", "u1": "<B", "b1": "<?",
}  # fmt: skip


def read_object(entry: ObjectEntry, store: LocalStore) -> Any:
    """Return an object as plain values, fit for JSON.

    Values of classes that are not on the list of harmless ones are shown as ``<opaque: needs module.Name>``; an object
    that cannot be read at all is shown as ``<unreadable: reason>``.
    """
    try:
        return to_plain(load_value(entry, store))
    except FsdpCkptError as error:
        return f"<unreadable: {error.message}>"


def to_plain(value: Any) -> Any:
    """Return numbers, texts, lists and dictionaries as they are (long ones cut), anything else as a text about it."""
    return _Shower().show(value, 0)


class _Shower:
    """Shows one value, and only so much of it: a pickle may contain itself, many times over."""

    def __init__(self) -> None:
        self._left = _MAX_NODES

    def show(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if value is None or isinstance(value, bool | float):
            return str(value) if isinstance(value, float) and not math.isfinite(value) else value
        if isinstance(value, int):  # JSON has neither infinity nor numbers of any length
            return value if abs(value) < 2**63 else _long_number(value)
        if isinstance(value, str):
            return value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT] + "…"
        if depth >= _MAX_DEPTH or self._left < 0:
            return "…"
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset):
            items = [self.show(item, depth + 1) for item in self._some(value)]
            more = len(value) - len(items)
            return [*items, f"… {more} more"] if more > 0 else items
        return self._other(value, depth)

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        shown = {}
        for key in self._some(value):
            text = self.show(key, depth + 1)
            shown[text if isinstance(text, str) else json.dumps(text)] = self.show(value[key], depth + 1)
        more = len(value) - len(shown)
        return shown | {"…": f"{more} more"} if more > 0 else shown

    def _some(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in itertools.islice(values, _MAX_ITEMS):
            if self._left < 0:
                return
            yield value

    def _other(self, value: Any, depth: int) -> Any:
        match value:
            case bytes():
                return f"<{len(value)} bytes>"
            case TensorRef():
                return _tensor_text("tensor", value.dtype, value.shape)
            case DTensorRef():
                return _tensor_text("DTensor", value.local.dtype, value.shape)
            case ShardedTensorRef():
                return _tensor_text("ShardedTensor", value.dtype, value.shape)
            case DType():
                return f"torch.{value.name}"
            case Record() if not isinstance(value, Opaque):
                return self._record(value, depth)
            case slice() | range():
                bounds = (str(self.show(bound, depth)) for bound in (value.start, value.stop, value.step))
                return f"{type(value).__name__}({', '.join(bounds)})"
            case complex() | Opaque() | Constructor():
                return repr(value)[:_MAX_TEXT]
            case _:
                return f"<{type(value).__name__}>"

    def _record(self, value: Record, depth: int) -> Any:
        number = _numpy_scalar(value)
        if number is not None:
            return self.show(number, depth)
        if value.cls.endswith("multiarray._reconstruct") and isinstance(value.state, tuple) and len(value.state) >= 3:
            shape, dtype = value.state[1], value.state[2]
            name = dtype.args[0] if isinstance(dtype, Record) and dtype.args else "?"
            plain = isinstance(shape, tuple) and all(type(n) is int and 0 <= n < 2**63 for n in shape[:_MAX_ITEMS])
            shown = str(shape[:_MAX_ITEMS]) if plain else "of an impossible shape"
            return f"<ndarray {self.show(name, depth + 1)} {shown}>"[:_MAX_TEXT]
        args = ", ".join(str(self.show(arg, depth + 1)) for arg in value.args[:4])
        return f"{value.cls}({args})"[:_MAX_TEXT]


def _long_number(value: int) -> str:
    return str(value) if value.bit_length() <= 1024 else f"<integer of {value.bit_length()} bits>"


def _tensor_text(kind: str, dtype: DType, shape: Sequence[int]) -> str:
    return f"<{kind} {dtype} {'x'.join(map(str, shape)) or 'scalar'}>"


def _numpy_scalar(value: Record) -> Any:
    """Return the number of a pickled NumPy scalar, None where it is none."""
    if not value.cls.endswith("multiarray.scalar") or len(value.args) != 2:
        return None
    dtype, data = value.args
    name = dtype.args[0] if isinstance(dtype, Record) and dtype.args else None
    form = _NUMPY_FORMATS.get(name) if isinstance(name, str) else None
    if form is None or not isinstance(data, bytes) or len(data) != struct.calcsize(form):
        return None
    return struct.unpack(form, data)[0]
