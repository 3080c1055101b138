"""Let errors about damaged sources say what to type next, whichever reader noticed the damage."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from fsdp_ckpt.errors import ChecksumMismatch, CorruptCheckpoint
from fsdp_ckpt.layouts.registry import given_paths

__all__ = ["names_next_step"]

P = ParamSpec("P")
R = TypeVar("R")


def names_next_step(call: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function that reads ``src``, its first argument, and writes something made of it.

    What it raises about damage, and without a hint, gets one, and says that nothing was written: what was begun is
    removed before the error comes here.
    """

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except CorruptCheckpoint as error:
            if error.hint is None:
                source: Any = args[0] if args else kwargs["src"]
                deep = " --deep" if isinstance(error, ChecksumMismatch) else ""  # nothing less reads the bytes
                error.hint = f"fsdp-ckpt validate {shlex.join(given_paths(source))}{deep}"
                error.add_note(f"hint: {error.hint}")
                if "nothing was written" not in error.message:
                    error.message += "; nothing was written"
                    error.args = (error.message, *error.args[1:])
            raise

    return run
