"""Nested state dicts to flat keys, as torch.distributed.checkpoint flattens them (``_nested_dict.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdp_ckpt.codec.pickles import Record
from fsdp_ckpt.codec.tensors import DTensorRef, ShardedTensorRef, TensorRef
from fsdp_ckpt.errors import MalformedFile
from fsdp_ckpt.layouts.roles import KeyPath

__all__ = ["flatten"]

_DEPTH = 32
_KEY_TEXT = 200
_LIMIT = 5_000_000
_TENSORS = (TensorRef, DTensorRef, ShardedTensorRef)


def flatten(value: Any, *, where: str) -> list[tuple[KeyPath, Any]]:
    """Return the leaves of nested dictionaries, and of lists that hold tensors or dictionaries, with their paths.

    Raises:
        MalformedFile: The nesting is too deep or too wide to be a state dict.
    """
    found: list[tuple[KeyPath, Any]] = []
    for leaf in _walk(value, (), where):
        found.append(leaf)
        if len(found) > _LIMIT:
            raise MalformedFile(f"{where}: more than {_LIMIT} values")
    return found


def _walk(value: Any, path: KeyPath, where: str) -> Iterator[tuple[KeyPath, Any]]:
    if len(path) > _DEPTH:
        raise MalformedFile(f"{where}: nested more than {_DEPTH} deep")
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _walk(item, (*path, _step(key, where)), where)
    elif isinstance(value, list) and any(isinstance(item, (dict, *_TENSORS)) for item in value):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index), where)
    elif isinstance(value, Record) and isinstance(value.state, dict) and _holds_tensors(value.state):
        yield from _walk(value.state, path, where)
    else:
        yield path, value


def _step(key: Any, where: str) -> str | int:
    if isinstance(key, str) or (isinstance(key, int) and abs(key) < 2**63):
        return key
    if isinstance(key, float | tuple | bytes) or key is None:
        try:
            return ascii(key)[:_KEY_TEXT]
        except ValueError:  # a number with too many digits to show
            pass
    raise MalformedFile(f"{where}: a key that is neither a text nor a number")


def _holds_tensors(state: dict[Any, Any]) -> bool:
    return any(isinstance(item, _TENSORS) for item in state.values())
