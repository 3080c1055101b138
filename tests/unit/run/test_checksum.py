from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from fsdp_ckpt.catalog import Chunk
from fsdp_ckpt.errors import ChecksumMismatch
from fsdp_ckpt.run.checksum import BLOCK_BYTES, check_crc, combine_crc, crc32, verify_record
from fsdp_ckpt.store.local import LocalStore

DATA = bytes(range(256)) * 20


@pytest.mark.parametrize("size", [0, 1, 15, 4096, 5000])
def test_it_is_the_crc_of_zlib(size: int) -> None:
    assert crc32(DATA[:size], 0) == zlib.crc32(DATA[:size])
    assert crc32(memoryview(DATA)[size:], crc32(DATA[:size], 0)) == zlib.crc32(DATA)


@pytest.mark.parametrize("cut", [0, 1, 777, len(DATA) - 1, len(DATA)])
def test_two_pieces_in_a_row(cut: int) -> None:
    first, second = zlib.crc32(DATA[:cut]), zlib.crc32(DATA[cut:])
    assert combine_crc(first, second, len(DATA) - cut) in (zlib.crc32(DATA), None)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "f").write_bytes(DATA)
    return LocalStore(tmp_path)


def chunk(start: int, stop: int, crc: int | None, crc_range: tuple[int, int] | None = None) -> Chunk:
    return Chunk((0,), (stop - start,), "f", start, stop, crc32=crc, crc_range=crc_range)


@pytest.mark.parametrize("span", [(0, len(DATA)), (7, 1000), (5, 5)])
def test_sound_records(span: tuple[int, int], store: LocalStore) -> None:
    start, stop = span
    assert verify_record(store, chunk(start, stop, zlib.crc32(DATA[start:stop])), key="w") == stop - start


def test_the_range_that_the_checksum_covers_is_read(store: LocalStore) -> None:
    assert verify_record(store, chunk(10, 20, zlib.crc32(DATA[5:50]), (5, 50)), key="w") == 45


def test_nothing_is_read_where_nothing_was_recorded(tmp_path: Path) -> None:
    assert verify_record(LocalStore(tmp_path), chunk(0, 10, None), key="w") == 0, "there is not even a file"


@pytest.mark.parametrize("crc", [0, 1, 0xFFFFFFFF])
def test_another_checksum(crc: int, store: LocalStore) -> None:
    with pytest.raises(ChecksumMismatch, match=r"`w` is damaged: bytes 0-10 of f"):
        verify_record(store, chunk(0, 10, crc), key="w")
    with pytest.raises(ChecksumMismatch):
        check_crc(chunk(0, 10, crc), zlib.crc32(DATA[:10]), key="w")
    check_crc(chunk(0, 10, None), 5, key="w")


@pytest.mark.parametrize("position", [0, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_any_bit_of_several_blocks(position: int, tmp_path: Path) -> None:
    data = bytearray(os.urandom(3 * BLOCK_BYTES + 1))
    crc = zlib.crc32(data)
    (tmp_path / "f").write_bytes(data)
    store = LocalStore(tmp_path)
    assert verify_record(store, chunk(0, len(data), crc), key="w") == len(data)
    data[position] ^= 0x10
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(ChecksumMismatch):
        verify_record(store, chunk(0, len(data), crc), key="w")
    store.close()


def test_a_file_that_became_shorter(store: LocalStore) -> None:
    with pytest.raises(ChecksumMismatch):
        verify_record(store, chunk(0, 2 * len(DATA), zlib.crc32(DATA * 2)), key="w")
