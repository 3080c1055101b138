"""What the corruption sweep does to files: small operations that travel as JSON."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

__all__ = ["Tree", "apply"]

Tree = dict[str, bytes]
"""Content by path, below the checkpoint's folder."""


def apply(before: Tree, operations: Sequence[Sequence[Any]]) -> Tree:
    """Return the files after some operations, each a name and its arguments."""
    after = dict(before)
    for name, file, *arguments in operations:
        content = after.get(file, b"")
        match name, *arguments:
            case "flip", int(at), int(bits):
                after[file] = content[:at] + bytes([content[at] ^ bits]) + content[at + 1 :]
            case "cut", int(size):
                after[file] = content[:size]
            case "append", str(text):
                after[file] = content + base64.b64decode(text)
            case "write", str(text):
                after[file] = base64.b64decode(text)
            case "zero", int(at), int(size):
                after[file] = content[:at] + bytes(len(content[at : at + size])) + content[at + size :]
            case ("delete",):
                del after[file]
            case "copy", str(other):
                after[file] = after[other]
            case "swap", str(other):
                after[file], after[other] = after[other], content
            case _:
                raise ValueError(name)
    return after
