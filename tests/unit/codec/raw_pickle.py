"""Pickles that Python's own pickler would not write, for tests: raw opcodes in the middle of ordinary values."""

from __future__ import annotations

import io
import pickle
from typing import Any

__all__ = ["Raw", "call", "dump", "dump_storage", "global_"]


class Raw:
    """Opcodes that stand where a value would."""

    def __init__(self, program: bytes) -> None:
        self.program = program


class _Storage:
    """A persistent id: ``("storage", type, key, location, elements)``."""

    def __init__(self, pid: tuple[Any, ...]) -> None:
        self.pid = pid


class _Pickler(pickle._Pickler):
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Raw):
            self.write(obj.program)  # type: ignore[attr-defined]
        else:
            super().save(obj, save_persistent_id)  # type: ignore[misc]

    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, _Storage) else None


def dump(value: Any, protocol: int = 4) -> bytes:
    """Pickle a value in which ``Raw`` may stand anywhere."""
    file = io.BytesIO()
    _Pickler(file, protocol).dump(value)
    return file.getvalue()


def global_(module: str, name: str) -> Raw:
    """Return a reference to a global that need not exist."""
    return Raw(f"c{module}\n{name}\n".encode())


def call(module: str, name: str, *args: Any) -> Raw:
    """Return a call of a global that need not exist; the arguments may hold ``Raw``."""
    inner = dump(args, 2)[2:-1]  # without PROTO and STOP
    return Raw(global_(module, name).program + inner + b"R")


def dump_storage(key: str, kind: Any, elements: int) -> _Storage:
    """Return a storage, as torch refers to one."""
    return _Storage(("storage", kind, key, "cpu", elements))
