"""Compare recorded checksums when records are read in pieces, by several threads, in any order.

A record may be copied to several places: resharding cuts it, and one storage may hold many tensors. Each reader hands
in the CRC-32 of the piece that it saw anyway; once the pieces make up the record, their combination is compared. What
is never read as a whole is read once more at the end.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from fsdp_ckpt.catalog import Chunk
from fsdp_ckpt.run.checksum import check_crc, combine_crc, verify_record
from fsdp_ckpt.store.local import LocalStore

__all__ = ["Ledger"]

_Place = tuple[LocalStore, str, int, int]
"""A record: its store, file, first byte and end."""


@dataclass(slots=True)
class _Account:
    """What was seen of a record."""

    chunk: Chunk
    key: str
    left_bytes: int
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)
    """End and CRC-32 by beginning."""


class Ledger:
    """Follows records that are read in pieces; may be used from several threads."""

    def __init__(self) -> None:
        self._open: dict[_Place, _Account] = {}
        self._settled: set[_Place] = set()
        self._lock = threading.Lock()

    def note(self, store: LocalStore, chunk: Chunk, start: int, crc: int, *, stop: int, key: str) -> int:
        """Take a piece into account.

        Args:
            store: Where the chunk's file is.
            chunk: The RAW chunk that it belongs to, with a recorded checksum.
            start: First byte of the piece in the file.
            crc: CRC-32 of it.
            stop: Its end, exclusive.
            key: The tensor's key, for messages.

        Returns:
            Bytes that were compared: all of the record's when this was its last piece, else 0.

        Raises:
            ChecksumMismatch: The record is not what was written.
        """
        first, last = chunk.crc_range or (chunk.start, chunk.stop)
        place = (store, chunk.file, first, last)
        with self._lock:
            if place in self._settled:
                return 0
            account = self._open.setdefault(place, _Account(chunk, key, last - first))
            if start in account.pieces:
                return 0
            account.pieces[start] = (stop, crc)
            account.left_bytes -= stop - start
            if account.left_bytes > 0:
                return 0
            del self._open[place]
        found = _combine(account, first, last)
        if found is None:  # pieces overlap, or no library that combines checksums
            verify_record(store, chunk, key=key)
        else:
            check_crc(chunk, found, key=key)
        with self._lock:
            self._settled.add(place)
        return last - first

    def expect(self, store: LocalStore, chunk: Chunk, *, key: str) -> None:
        """Take a record into account of which an earlier run has read a piece: ``finish`` compares it."""
        first, last = chunk.crc_range or (chunk.start, chunk.stop)
        with self._lock:
            self._open.setdefault((store, chunk.file, first, last), _Account(chunk, key, last - first))

    def verify_once(self, store: LocalStore, chunk: Chunk, *, key: str) -> int:
        """Read a record through and compare, unless that was done before.

        Returns:
            Bytes that were compared.

        Raises:
            ChecksumMismatch: The record is not what was written.
        """
        if chunk.crc32 is None:
            return 0
        place = (store, chunk.file, *(chunk.crc_range or (chunk.start, chunk.stop)))
        with self._lock:
            if place in self._settled:
                return 0
        # Whoever comes meanwhile compares it as well: nobody may take it for sound before it is known to be.
        compared_bytes = verify_record(store, chunk, key=key)
        with self._lock:
            is_first = place not in self._settled
            self._settled.add(place)
            self._open.pop(place, None)
        return compared_bytes if is_first else 0

    def finish(self) -> int:
        """Compare the records of which something is left, reading them through.

        Returns:
            Bytes that were compared.

        Raises:
            ChecksumMismatch: One is not what was written.
        """
        compared_bytes = 0
        while self._open:
            (store, *_), account = self._open.popitem()
            compared_bytes += verify_record(store, account.chunk, key=account.key)
        return compared_bytes


def _combine(account: _Account, first: int, last: int) -> int | None:
    position, found = first, 0
    for start, (stop, crc) in sorted(account.pieces.items()):
        if start != position:
            return None
        combined = combine_crc(found, crc, stop - start)
        if combined is None:
            return None
        found, position = combined, stop
    return found if position == last else None
