"""Lay out a full state dict of a live job (an optimizer's state) before its tensors come.

Stricter than ``value_writer``, which lays it out: only what any ``torch.load(weights_only=True)`` gives back.
"""

from __future__ import annotations

from typing import Any

from fsdp_ckpt.codec.torchzip_writer import ArchiveTensor, ZipLayout
from fsdp_ckpt.codec.value_writer import lay_out_state
from fsdp_ckpt.errors import Incompatible

__all__ = ["check_plain", "lay_out_nested"]

_MAX_DEPTH = 64
_MAX_INTEGER_BYTES = 255


def lay_out_nested(value: Any, *, prefix: str) -> ZipLayout:
    """Return where everything goes.

    Args:
        value: Dictionaries, lists and tuples of None, booleans, numbers, texts and ``ArchiveTensor``.
        prefix: Name of the folder within the archive.

    Raises:
        Incompatible: Another value.
    """
    check_plain(value)
    return lay_out_state(value, prefix=prefix)


def check_plain(value: Any) -> None:
    """Make sure that a value can be stored.

    Raises:
        Incompatible: It holds something else than ``lay_out_nested`` takes.
    """
    _check(value, 0)


def _check(value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise Incompatible("a state dict that is nested too deep")
    match value:
        case None | bool() | float() | str() | ArchiveTensor():
            pass
        case int():
            if value.bit_length() // 8 + 1 > _MAX_INTEGER_BYTES:
                raise Incompatible("an integer of thousands of bits in the state")
        case dict():
            for key, item in value.items():
                _check(key, depth + 1)
                _check(item, depth + 1)
        case list() | tuple():
            for item in value:
                _check(item, depth + 1)
        case _:
            raise Incompatible(
                f"a {type(value).__module__}.{type(value).__qualname__} in the state cannot be stored in a full state "
                "dict",
                hint="use SHARDED_STATE_DICT, or keep plain numbers, texts and tensors in it",
            )
