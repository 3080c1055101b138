"""Bytes to records and back: pickles without running them, torch's zip archives, safetensors headers.

Nothing here knows paths or policy; sources are byte strings or a ``ReadAt`` callable.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["ReadAt"]


class ReadAt(Protocol):
    """Read bytes of one file."""

    def __call__(self, start: int, num_bytes: int, /) -> bytes:
        """Return exactly ``num_bytes`` bytes from offset ``start``; raise MalformedFile where the file is shorter."""
        ...
