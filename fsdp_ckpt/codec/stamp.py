"""The first bytes of a data file of ours: which save it is of, and which rank wrote it.

Shards of one model are alike: files of two ranks, or of two steps, can have the same size and the same heads, and every
checksum in a file that was put in another one's place is right. The stamp tells them apart for the price of 64 bytes.
Items of distributed checkpoints are found by their offsets, so that what lies before the first one is nobody's.
"""

from __future__ import annotations

import re

__all__ = ["STAMP_BYTES", "is_free", "make_stamp", "read_stamp"]

STAMP_BYTES = 64
_STAMP = re.compile(rb"fsdp-ckpt/data/1 save=([0-9a-f]{1,32}) rank=([0-9]{1,7})\n\0*")


def make_stamp(save_id: str, rank: int) -> bytes:
    """Return the stamp of a file.

    Args:
        save_id: Of the save, hexadecimal; the manifest has the same.
        rank: Who writes.

    Example:
        >>> read_stamp(make_stamp("00ff", 3))
        ('00ff', 3)
    """
    return f"fsdp-ckpt/data/1 save={save_id} rank={rank}\n".encode().ljust(STAMP_BYTES, b"\0")


def read_stamp(data: bytes) -> tuple[str, int] | None:
    """Return the save and the rank of a file's first bytes; None where they are no stamp."""
    match = _STAMP.fullmatch(data[:STAMP_BYTES])
    return (match[1].decode(), int(match[2])) if match else None


def is_free(data: bytes, start: int) -> bool:
    """Tell whether bytes between items hold nothing: zeros, and at the beginning of a file perhaps a stamp.

    Args:
        data: The bytes.
        start: Where they begin in the file.
    """
    if start == 0 and read_stamp(data) is not None:
        data = data[STAMP_BYTES:]
    return not any(data)
