"""Values that are no tensors, in and out of ``torch.save`` archives, without ever running what a file asks for.

What is read passes two gates: our own pickle machine, which knows all names that may occur and refuses others by
name, and then ``torch.load(weights_only=True)``, which builds the values. What is written passes the first gate, too,
so that nothing is stored which could not be loaded again.
"""

from __future__ import annotations

import collections
import datetime as dt
import io
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from fsdp_ckpt.codec.legacy import is_legacy, load_legacy
from fsdp_ckpt.codec.pickles import PicklingError, Record, UnpicklingError
from fsdp_ckpt.codec.torchzip import open_archive
from fsdp_ckpt.errors import Incompatible, MalformedFile, UnsafePickle

__all__ = ["decode", "encode", "plain_value"]


def encode(value: Any, what: str) -> bytes:
    """Return a value as a torch.save archive.

    Args:
        value: Numbers, texts, containers, tensors, NumPy arrays.
        what: Whose value it is, for messages.

    Raises:
        Incompatible: It holds an instance of a class that loading would refuse.
    """
    _refuse_shards(value, what)
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (PicklingError, TypeError, AttributeError) as error:
        raise Incompatible(f"the state of {what} cannot be pickled: {error}", hint=_PLAIN_HINT) from error
    data = buffer.getvalue()
    try:
        decode(data, what)
    except UnsafePickle as error:
        raise Incompatible(
            f"the state of {what} refers to `{error.name}`, which loading would refuse", hint=_PLAIN_HINT
        ) from None
    except MalformedFile as error:
        raise Incompatible(f"the state of {what} could not be loaded again: {error}", hint=_PLAIN_HINT) from None
    return data


def _refuse_shards(value: Any, what: str) -> None:
    if isinstance(value, Mapping):
        for item in value.values():
            _refuse_shards(item, what)
    elif isinstance(value, list | tuple | set):
        for item in value:
            _refuse_shards(item, what)
    elif isinstance(value, DTensor | ShardedTensor):
        raise Incompatible(
            f"the state of {what} holds a {type(value).__name__}, of which each rank has a shard",
            hint="pass sharded modules as models: model={...: module}",
        )


_PLAIN_HINT = "let state_dict() return numbers, texts, lists, dictionaries, tensors and NumPy arrays only"


def decode(data: bytes, where: str) -> Any:
    """Return the value of a torch.save archive or file, tensors on the CPU.

    Args:
        data: Its bytes.
        where: The file, and the object in it, for messages.

    Raises:
        UnsafePickle: It refers to a name that is not allowed; nothing was run.
        MalformedFile: It is damaged.
    """
    _check(data, where)
    try:
        with torch.serialization.safe_globals(_allowed()):
            # The names have passed our own reader; classes of Python and NumPy are built by theirs.
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)  # noqa: TID251
    except UnpicklingError as error:
        found = re.search(r"(?:Unsupported global: GLOBAL|Unsupported class|got) ([\w.]+)", str(error))
        reason = f"it needs `{found[1]}`, which torch does not load" if found else "torch cannot unpickle it"
        raise MalformedFile(f"{where}: {reason}") from None
    except (RuntimeError, ValueError, EOFError) as error:
        raise MalformedFile(f"{where}: {error}") from None


def _check(data: bytes, where: str) -> None:
    if is_legacy(data[:16]):
        load_legacy(lambda start, num: data[start : start + num], len(data), where=where, allow_unknown=False)
    else:
        archive = open_archive(lambda start, num: data[start : start + num], 0, len(data), where=where)
        archive.load()
        for name in archive.records if archive.has_crc else ():
            archive.read(name)


def plain_value(value: Any, where: str) -> Any:
    """Return a value that the safe reader has decoded already.

    Raises:
        Incompatible: It holds an instance of a class.
    """
    if isinstance(value, dict):
        return {key: plain_value(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(plain_value(item, where) for item in value)
    if isinstance(value, Record):
        raise Incompatible(f"{where}: holds a {value.cls}, which cannot be restored from there")
    return value


def _allowed() -> list[Any]:
    """What may be built besides torch's own list; the NumPy names are those of versions 1 and 2."""
    rebuild, scalar = np._core.multiarray._reconstruct, np._core.multiarray.scalar  # type: ignore[attr-defined]
    frombuffer = np._core.numeric._frombuffer  # type: ignore[attr-defined]
    numpy_names: list[Any] = [np.ndarray, np.dtype]
    for core in ("numpy.core", "numpy._core"):
        numpy_names += [
            (rebuild, f"{core}.multiarray._reconstruct"),
            (scalar, f"{core}.multiarray.scalar"),
            (frombuffer, f"{core}.numeric._frombuffer"),
        ]
    numpy_names += [kind for name in np.dtypes.__all__ if name.endswith("DType") for kind in [getattr(np.dtypes, name)]]
    return [
        *numpy_names, collections.deque, collections.defaultdict, collections.Counter, slice, range, complex, frozenset,
        bytes, bytearray, list, tuple, dict, dt.datetime, dt.date, dt.time, dt.timedelta,
        dt.timezone, pathlib.PosixPath, pathlib.PurePosixPath,
    ]  # fmt: skip
