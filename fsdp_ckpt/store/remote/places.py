"""From what a user typed to a local path: a path, a ``file://`` URL, or a URL, of which a mirror is made."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.store.remote.mirrors import has_mirrors, with_urls
from fsdp_ckpt.store.remote.urls import is_url, local_path

__all__ = ["place_of", "speaks_urls"]

P = ParamSpec("P")
R = TypeVar("R")


def place_of(text: str | os.PathLike[str]) -> Path:
    """Return where to read what a user named.

    Raises:
        UsageError: A URL of an unknown scheme, or one whose package is not installed.
        Unreachable: A URL behind which nothing is, or that cannot be listed.
    """
    name = os.fspath(text)
    if is_url(name):
        from fsdp_ckpt.store.remote.mirror import mirror  # the network is seldom needed

        return mirror(name).path
    return Path(local_path(name))


def speaks_urls(call: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that its report and its errors name URLs rather than the mirrors of what lies there."""

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = call(*args, **kwargs)
        except FsdpCkptError as error:
            if has_mirrors():
                error.message = with_urls(error.message)
                error.hint = with_urls(error.hint) if error.hint is not None else None
                error.args = (error.message, *error.args[1:])
            raise
        return _translated(result) if has_mirrors() else result

    return run


def _translated(value: Any) -> Any:
    if isinstance(value, str):
        return with_urls(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = _translated(old)
            if new is not old:
                changes[field.name] = new
        return dataclasses.replace(value, **changes) if changes else value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [_translated(item) for item in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, Mapping) and type(value) is dict:
        done = {_translated(key): _translated(item) for key, item in value.items()}
        same = all(a is b and done[a] is value[b] for a, b in zip(done, value, strict=False))
        return value if same and len(done) == len(value) else done
    return value
