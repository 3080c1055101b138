"""A configuration file as it stands: values with the line that each key is on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_ckpt.errors import UsageError

__all__ = ["Document", "read_document"]

_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a file says.

    Attributes:
        name: The file, as it was named.
        values: Its top level.
        lines: Line, from 1, of every key of the two upper levels: ``mixed_precision``, ``fsdp_config.fsdp_version``.
    """

    name: str
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def place(self, key: str) -> str:
        """Return where a key stands, as ``FILE:LINE``; the file alone for a key that is not there."""
        return f"{self.name}:{self.lines[key]}" if key in self.lines else self.name

    def section(self, name: str) -> dict[str, Any]:
        """Return a section; empty when there is none.

        Raises:
            UsageError: It is no dictionary.
        """
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise UsageError(
                f"{self.place(name)}: {name}: {value!r} is not possible; allowed: keys with values below it"
            )
        return dict(value)


def read_document(path: str | os.PathLike[str]) -> Document:
    """Read a YAML or JSON file. Nothing but plain values is built, whatever tags it has.

    Raises:
        UsageError: It is not there, cannot be read, or is no YAML; a key is there twice (YAML would take the last).
    """
    import yaml

    name = os.fspath(path)
    text = _read(Path(name))
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark is not None else name
        raise UsageError(f"{place}: this is no YAML: {getattr(error, 'problem', None) or error}") from None
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{name}: this is no configuration: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{name}: this is no configuration: there are no keys in it", hint="fsdp-ckpt config init")
    return Document(name=name, values=values, lines=_lines(root, name))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
        if len(data) > _LARGEST_BYTES:
            raise UsageError(f"{path}: larger than 1 MiB; this is no configuration")
        return data.decode("utf-8-sig")
    except OSError as error:
        hint = f"fsdp-ckpt config init {path}" if isinstance(error, FileNotFoundError) else None
        raise UsageError(f"{path}: cannot be read: {error.strerror}", hint=hint) from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: this is no text in UTF-8") from None


def _lines(root: Any, name: str, prefix: str = "") -> dict[str, int]:
    """Return the line of every key of a mapping and of the mappings in it."""
    lines: dict[str, int] = {}
    for key, value in root.value:
        label = f"{prefix}{key.value}"
        line = key.start_mark.line + 1
        if label in lines:
            raise UsageError(f"{name}:{line}: {key.value} is there twice; the other one is on line {lines[label]}")
        lines[label] = line
        if not prefix and value.id == "mapping":
            lines |= _lines(value, name, f"{label}.")
    return lines
