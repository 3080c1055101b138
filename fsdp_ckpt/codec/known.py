"""The globals that may stand in a checkpoint's pickles, and the plain values they turn into.

Collected from the writers: torch 2.1 to 2.15 (``torch/_utils.py``, ``torch/serialization.py``), NumPy 1 and 2 random
states, DeepSpeed 0.3 to 0.19, Python's containers. A name that is not here is refused by ``codec.pickles``.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from fsdp_ckpt.catalog import DTYPES
from fsdp_ckpt.codec.pickles import Constructor, Global, Machine, Record
from fsdp_ckpt.errors import UnsafePickle

__all__ = ["PLAIN", "record", "records"]


def record(name: str) -> Constructor:
    """Return a constructor that builds a ``Record`` and keeps its arguments."""
    return Constructor(name, lambda _, args: Record(name, args))


def records(module: str, *names: str) -> dict[str, Global]:
    """Return record constructors for several classes of one module, by full name."""
    return {f"{module}.{name}": record(f"{module}.{name}") for name in names}


_ZERO_STAGES = ("disabled", "optimizer_states", "gradients", "weights")


def _getattr(machine: Machine, args: tuple[Any, ...]) -> Constructor:
    # Early CPython 3.11 pickles an enum member as getattr(EnumClass, "MEMBER"), and nested classes likewise.
    owner, name = args if len(args) == 2 else (None, None)
    if type(owner) is not Constructor or type(name) is not str:
        raise machine.malformed("getattr of something that is no known class")
    is_member = (owner.name.endswith("MEM_FORMAT_ENCODING") and name.isupper()) or (
        owner.name.endswith(".ZeroStageEnum") and name in _ZERO_STAGES
    )
    if not is_member and name != "ProcessGroupState":
        raise UnsafePickle(f"{owner.name}.{name[:80]}", where=machine.where)
    return record(f"{owner.name}.{name}")


def _size(machine: Machine, args: tuple[Any, ...]) -> tuple[int, ...]:
    if len(args) != 1 or type(args[0]) not in (tuple, list) or any(type(item) is not int for item in args[0]):
        raise machine.malformed("torch.Size of something that is no tuple of integers")
    if type(args[0]) is list:
        machine.spend(len(args[0]))
    return tuple(args[0])


def _copy(kind: Callable[..., Any]) -> Callable[[Machine, tuple[Any, ...]], Any]:
    def call(machine: Machine, args: tuple[Any, ...]) -> Any:
        if not args:
            return kind()
        items = args[0]
        if len(args) > 2 or not isinstance(items, list | tuple | set | dict | bytes | str):
            raise machine.malformed(f"{kind.__name__} of {type(items).__name__}")
        machine.spend(len(items))
        if kind in (set, frozenset):
            return kind(machine.as_key(item) for item in items)
        return kind(items)

    return call


def _ordered_dict(machine: Machine, args: tuple[Any, ...]) -> dict[Any, Any]:
    pairs = args[0] if args and isinstance(args[0], list) else []
    machine.spend(len(pairs))
    return {machine.as_key(key): value for key, value in pairs}


def _encode(machine: Machine, args: tuple[Any, ...]) -> bytes:
    text, codec = args if len(args) == 2 else (args[0], "utf-8")
    if type(text) is not str or codec not in ("latin1", "latin-1", "utf-8"):
        raise machine.malformed("_codecs.encode with an unexpected codec")
    machine.spend(len(text))
    return text.encode(codec)


def _path(machine: Machine, args: tuple[Any, ...]) -> str:
    if any(type(part) is not str for part in args):
        raise machine.malformed("a path of something that is no string")
    machine.spend(sum(map(len, args)))
    return posixpath.join(*args) if args else "."


_LAYOUTS = tuple(
    f"torch.{name}" for name in ("strided", "_mkldnn", "jagged", "sparse_bsc", "sparse_bsr", "sparse_coo", "sparse_csc",
    "sparse_csr")
)  # fmt: skip


def _layout(machine: Machine, args: tuple[Any, ...]) -> str:
    if len(args) != 1 or args[0] not in _LAYOUTS:
        raise machine.malformed("an unknown torch layout")
    return str(args[0])


def _plain_values(name: str, kind: Callable[..., Any], types: tuple[type, ...]) -> Constructor:
    def call(machine: Machine, args: tuple[Any, ...]) -> Any:
        if any(type(arg) not in types for arg in args):
            raise machine.malformed(f"{name} with unexpected arguments")
        return kind(*args)

    return Constructor(name, call)


def _empty_array(name: str) -> Constructor:
    # NumPy begins every array as an empty one, and gives it its shape and bytes by its state.
    def call(machine: Machine, args: tuple[Any, ...]) -> Record:
        if len(args) != 3 or args[1] != (0,):
            raise machine.malformed("an array that begins with a size")
        return Record(name, args)

    return Constructor(name, call)


def _no_array(machine: Machine, _: tuple[Any, ...]) -> Record:
    raise machine.malformed("a call of numpy.ndarray, which would take memory for nothing")


def _table() -> dict[str, Global]:
    table: dict[str, Global] = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
    table |= {
        "torch.Size": Constructor("torch.Size", _size),
        "torch.device": record("torch.device"),
        "torch.serialization._get_layout": Constructor("torch.serialization._get_layout", _layout),
        "torch._utils._get_layout": Constructor("torch._utils._get_layout", _layout),
        "collections.OrderedDict": Constructor("collections.OrderedDict", _ordered_dict),
        "collections.defaultdict": Constructor("collections.defaultdict", lambda _machine, _args: {}),
        "collections.deque": Constructor("collections.deque", _copy(list)),
        "collections.Counter": Constructor("collections.Counter", _copy(dict)),
        "_codecs.encode": Constructor("_codecs.encode", _encode),
    }
    for module in ("builtins", "__builtin__"):
        table |= {
            f"{module}.getattr": Constructor("builtins.getattr", _getattr),
            f"{module}.complex": _plain_values("builtins.complex", complex, (int, float)),
            f"{module}.slice": _plain_values("builtins.slice", slice, (int, type(None))),
            f"{module}.range": _plain_values("builtins.range", range, (int,)),
            f"{module}.xrange": _plain_values("builtins.range", range, (int,)),
        }
        for kind in (set, frozenset, list, tuple, dict, bytes, bytearray):
            table[f"{module}.{kind.__name__}"] = Constructor(f"builtins.{kind.__name__}", _copy(kind))
        for name in ("int", "float", "str", "bool", "object"):
            table[f"{module}.{name}"] = record(f"builtins.{name}")
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"):
            table[f"{module}.{name}"] = Constructor(f"pathlib.{name}", _path)
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        table |= records(module, "scalar")
        table[f"{module}._reconstruct"] = _empty_array(f"{module}._reconstruct")
    table |= records("numpy.core.numeric", "_frombuffer") | records("numpy._core.numeric", "_frombuffer")
    table["numpy.ndarray"] = Constructor("numpy.ndarray", _no_array)
    table |= records("numpy", "dtype", "float64", "float32", "int64", "int32", "bool_", "uint32")
    table |= records("numpy.dtypes", *(f"{name}DType" for name in ("UInt32", "Int64", "Int32", "Float64", "Float32")))
    table |= records("deepspeed.runtime.zero.config", "ZeroStageEnum")
    table |= records("deepspeed.runtime.fp16.loss_scaler", "LossScaler", "DynamicLossScaler")
    table |= records("deepspeed.utils.tensor_fragment", "fragment_address")
    table |= records("datetime", "datetime", "date", "time", "timedelta", "timezone")
    return table


PLAIN: Mapping[str, Global] = _table()
"""Containers, numbers, paths, dtypes, NumPy arrays: what may stand in any pickle of a checkpoint."""
