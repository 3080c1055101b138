"""Read records through and compare their checksums, with several threads and nothing in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

from fsdp_ckpt.run.checksum import BLOCK_BYTES, combine_crc, crc32
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.store.local import LocalStore

__all__ = ["Record", "verify_records"]

_PIECE_BYTES = 32 << 20
"""Longer records are cut, so that all threads have work."""


class Record(NamedTuple):
    """Bytes ``[start, stop)`` of a file and the CRC-32 that was recorded for them.

    ``owner`` is what a finding is about, ``what`` says it in a sentence.
    """

    store: LocalStore
    file: str
    start: int
    stop: int
    crc32: int
    owner: str
    what: str


class _Piece(NamedTuple):
    record: Record
    number: int
    start: int
    stop: int


def verify_records(records: Iterator[Record], *, jobs: int, meter: Meter) -> tuple[int, list[tuple[Record, int]]]:
    """Compare the checksum of each record.

    Args:
        records: In any order; taken one by one, by whichever thread has nothing to do.
        jobs: Threads, this one among them.
        meter: Counts bytes.

    Returns:
        Bytes that were compared, and the records whose checksum is wrong, with the one that they have, in their order.

    Raises:
        Whatever reading raises first.
    """
    run = _Run(records, meter)
    threads = [threading.Thread(target=run.work, name=f"fsdp-ckpt-{n}", daemon=True) for n in range(1, jobs)]
    for thread in threads:
        thread.start()
    try:
        run.work()
    finally:
        run.stop.set()
        for thread in threads:
            thread.join()
    if run.error is not None:
        raise run.error
    return run.verified_bytes, [(record, crc) for _, record, crc in sorted(run.wrong)]


class _Run:
    def __init__(self, records: Iterator[Record], meter: Meter) -> None:
        self.verified_bytes = 0
        self.wrong: list[tuple[int, Record, int]] = []
        self.error: BaseException | None = None
        self.stop = threading.Event()
        self._todo = _cut(records)
        self._meter = meter
        self._lock = threading.Lock()
        self._found: dict[int, list[tuple[int, int, int]]] = {}

    def work(self) -> None:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        try:
            while not self.stop.is_set():
                with self._lock:
                    piece = next(self._todo, None)
                if piece is None:
                    return
                crc = _checksum(piece, buffer)
                with self._lock:
                    self._settle(piece, crc)
                self._meter.add(piece.stop - piece.start)
        except Exception as error:  # noqa: BLE001  # raised again in the thread that waits
            self.error = self.error or error
            self.stop.set()

    def _settle(self, piece: _Piece, crc: int) -> None:
        """Take a piece into account; with the last one of a record, compare."""
        record, pieces = piece.record, self._found.setdefault(piece.number, [])
        pieces.append((piece.start, piece.stop, crc))
        num_bytes = record.stop - record.start
        if sum(stop - start for start, stop, _ in pieces) < num_bytes:
            return
        whole: int | None = None
        for start, stop, part in sorted(self._found.pop(piece.number)):
            whole = part if whole is None else combine_crc(whole, part, stop - start)
        self.verified_bytes += num_bytes
        if whole is not None and whole != record.crc32:
            self.wrong.append((piece.number, record, whole))


def _cut(records: Iterator[Record]) -> Iterator[_Piece]:
    step = _PIECE_BYTES if combine_crc(0, 0, 0) is not None else 1 << 62
    for number, record in enumerate(records):
        for start in range(record.start, max(record.stop, record.start + 1), step):
            yield _Piece(record, number, start, min(start + step, record.stop))


def _checksum(piece: _Piece, buffer: memoryview) -> int:
    found = 0
    with piece.record.store.opened(piece.record.file) as source:
        for position in range(piece.start, piece.stop, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, piece.stop - position)]
            found = crc32(block[: source.read_into(block, position)], found)
    return found
