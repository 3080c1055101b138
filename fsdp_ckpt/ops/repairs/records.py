"""The records of archives: what their directories say of them, and whether that is so."""

from __future__ import annotations

from fsdp_ckpt.codec import ReadAt
from fsdp_ckpt.codec.torchzip import open_archive
from fsdp_ckpt.errors import ChecksumMismatch, CorruptCheckpoint
from fsdp_ckpt.run.checksum import checksum_range
from fsdp_ckpt.store.local import LocalStore

__all__ = ["Table", "check_records", "is_zip", "table"]

Table = tuple[tuple[str, int, int, int], ...]
"""Name, place within the archive, size and CRC-32 of every record."""


def is_zip(read_at: ReadAt, start: int, stop: int) -> bool:
    """Tell whether something begins as archives do."""
    return stop - start > 4 and read_at(start, 4) == b"PK\3\4"


def table(read_at: ReadAt, start: int, stop: int, *, where: str) -> Table | None:
    """Return what an archive's directory says; None where it cannot be read, or has no checksums."""
    try:
        archive = open_archive(read_at, start, stop, where=where)
    except CorruptCheckpoint:
        return None
    if not archive.has_crc:
        return None
    return tuple(sorted((one.name, one.start - start, one.size, one.crc32) for one in archive.records.values()))


def check_records(store: LocalStore, file: str, start: int, stop: int, *, what: str) -> int:
    """Compare the checksums of all records of an archive.

    Returns:
        Bytes read.

    Raises:
        MalformedFile: It is no archive.
        ChecksumMismatch: A record is damaged.
    """
    archive = open_archive(store.reader(file), start, stop, where=f"{file} ({what})")
    done = 0
    for record in archive.records.values() if archive.has_crc else ():
        with store.opened(file) as source:
            found = checksum_range(source, record.start, record.start + record.size)
        if found != record.crc32:
            raise ChecksumMismatch(
                f"{what} is damaged: record `{record.name}` of {file} has CRC-32 {found:08x}, {record.crc32:08x} was "
                "recorded when it was written"
            )
        done += record.size
    return done
