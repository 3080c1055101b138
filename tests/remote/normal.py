"""What two reports, or two errors, say when one is about a folder and the other one about a copy of it elsewhere."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdp_ckpt.errors import FsdpCkptError

__all__ = ["outcome"]

_TRAFFIC = ("fetched_bytes", "requests")
_DURATIONS = ("age_s",)


def outcome(call: Callable[[], Any], place: str, mirrors: str = "") -> Any:
    """Call something and return its report, or its error, as plain values in which the place is called PLACE.

    Args:
        call: What to do.
        place: The folder or the URL that it is about.
        mirrors: What must not occur in the result.
    """
    try:
        found = _plain(call())
    except FsdpCkptError as error:
        found = [type(error).__name__, error.message, error.hint]
    if mirrors:
        assert mirrors not in repr(found), "a temporary folder is shown"
    return _renamed(found, place)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.name not in (*_TRAFFIC, *_DURATIONS)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    return str(value) if isinstance(value, Path) else value


def _renamed(value: Any, place: str) -> Any:
    if isinstance(value, str):
        return value.replace(place, "PLACE")
    if isinstance(value, dict):
        return {_renamed(key, place): _renamed(item, place) for key, item in value.items()}
    return [_renamed(item, place) for item in value] if isinstance(value, list) else value
