"""CRC-32 at the speed of memory, with Intel's ISA-L where there is a wheel, with zlib elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_ckpt.catalog import Chunk
from fsdp_ckpt.errors import ChecksumMismatch
from fsdp_ckpt.store.local import LocalStore, OpenFile

_combine: Callable[[int, int, int], int] | None = None
try:
    from isal.isal_zlib import crc32 as _crc32
    from isal.isal_zlib import crc32_combine

    _combine = crc32_combine
except ImportError:  # platforms without a wheel
    from zlib import crc32 as _crc32

__all__ = ["BLOCK_BYTES", "check_crc", "checksum_range", "combine_crc", "crc32", "verify_record"]

BLOCK_BYTES = 1 << 20
"""Bytes moved at a time. Larger blocks leave the processor's cache: 8 MiB was ten times slower."""

crc32: Callable[[bytes | memoryview, int], int] = _crc32


def combine_crc(first: int, second: int, second_bytes: int) -> int | None:
    """Return the CRC-32 of two pieces in a row from those of each; None where the library cannot."""
    return None if _combine is None else _combine(first, second, second_bytes)


def check_crc(chunk: Chunk, found: int, *, key: str) -> None:
    """Compare a checksum with the recorded one.

    Raises:
        ChecksumMismatch: They differ.
    """
    if chunk.crc32 is not None and found != chunk.crc32:
        raise ChecksumMismatch(
            f"`{key}` is damaged: bytes {chunk.start}-{chunk.stop} of {chunk.file} have CRC-32 {found:08x}, "
            f"{chunk.crc32:08x} was recorded when they were written"
        )


def verify_record(store: LocalStore, chunk: Chunk, *, key: str) -> int:
    """Read the whole record that a chunk's checksum covers, and compare.

    Returns:
        Bytes read; 0 when there is no checksum.

    Raises:
        ChecksumMismatch: The bytes are not those that were written.
    """
    if chunk.crc32 is None:
        return 0
    start, stop = chunk.crc_range or (chunk.start, chunk.stop)
    with store.opened(chunk.file) as source:
        check_crc(chunk, checksum_range(source, start, stop), key=key)
    return stop - start


def checksum_range(source: OpenFile, start: int, stop: int) -> int:
    """Return the CRC-32 of a range of an open file; what lies beyond the file's end does not count."""
    buffer = memoryview(bytearray(min(BLOCK_BYTES, max(stop - start, 1))))
    found = 0
    for position in range(start, stop, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, stop - position)]
        found = crc32(block[: source.read_into(block, position)], found)
    return found
