"""Checksums of records that are read in pieces. Judge: zlib's CRC-32 of the whole record."""

from __future__ import annotations

import itertools
import random
import threading
import zlib
from pathlib import Path

import pytest

from fsdp_ckpt.catalog import Chunk
from fsdp_ckpt.errors import ChecksumMismatch
from fsdp_ckpt.run import checksum, ledger
from fsdp_ckpt.run.ledger import Ledger
from fsdp_ckpt.store.local import LocalStore

DATA = bytes((7 * i + i // 250) % 256 for i in range(1000))
FIRST, LAST = 100, 900
KEY = "model.w"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "f").write_bytes(DATA)
    return LocalStore(tmp_path)


def record(data: bytes = DATA) -> Chunk:
    return Chunk((0,), (800,), "f", FIRST, LAST, crc32=zlib.crc32(data[FIRST:LAST]))


def damaged() -> Chunk:
    """Return the record as it was before somebody changed a byte of the file."""
    return record(DATA[:500] + bytes([DATA[500] ^ 1]) + DATA[501:])


def note(books: Ledger, store: LocalStore, chunk: Chunk, start: int, stop: int) -> int:
    return books.note(store, chunk, start, zlib.crc32(DATA[start:stop]), stop=stop, key=KEY)


def cut_at(*cuts: int) -> list[tuple[int, int]]:
    edges = [FIRST, *cuts, LAST]
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize("seed", range(4))
def test_the_last_piece_settles_the_record_in_any_order(store: LocalStore, seed: int) -> None:
    pieces = cut_at(101, 350, 351, 600, 899)
    random.Random(seed).shuffle(pieces)
    books = Ledger()
    found = [note(books, store, record(), *piece) for piece in pieces]
    assert found == [0] * 5 + [800]
    assert books.finish() == 0


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_noticed_with_the_last_piece(store: LocalStore, seed: int) -> None:
    pieces = cut_at(101, 350, 351, 600, 899)
    random.Random(seed).shuffle(pieces)
    books = Ledger()
    for piece in pieces[:-1]:
        assert note(books, store, damaged(), *piece) == 0
    with pytest.raises(ChecksumMismatch, match=r"`model.w` is damaged: bytes 100-900 of f"):
        note(books, store, damaged(), *pieces[-1])


def test_a_damaged_piece_is_noticed_though_the_file_is_sound_by_now(store: LocalStore) -> None:
    """What counts is what was copied, not what the file holds when it is read again."""
    books = Ledger()
    note(books, store, record(), 100, 500)
    wrong = zlib.crc32(DATA[500:899] + b"?")
    with pytest.raises(ChecksumMismatch):
        books.note(store, record(), 500, wrong, stop=900, key=KEY)


def test_pieces_that_overlap(store: LocalStore) -> None:
    """Two tensors share a storage: some bytes are read twice, and none may be left out of the comparison."""
    for chunk, damage in ((record(), False), (damaged(), True)):
        books = Ledger()
        assert note(books, store, chunk, 100, 550) == 0
        if damage:
            with pytest.raises(ChecksumMismatch):
                note(books, store, chunk, 450, 900)
        else:
            assert note(books, store, chunk, 450, 900) == 800


@pytest.mark.parametrize("pieces", [[(100, 500)], [(100, 500), (100, 700)], [(300, 900)], [(100, 500), (500, 899)]])
def test_what_is_never_read_as_a_whole_is_read_at_the_end(store: LocalStore, pieces: list[tuple[int, int]]) -> None:
    for chunk, damage in ((record(), False), (damaged(), True)):
        books = Ledger()
        for piece in pieces:
            assert note(books, store, chunk, *piece) == 0
        if damage:
            with pytest.raises(ChecksumMismatch):
                books.finish()
        else:
            assert books.finish() == 800
            assert books.finish() == 0


def test_bytes_beyond_the_chunk_belong_to_the_record_as_well(store: LocalStore) -> None:
    """Two chunks of one storage: its checksum covers both."""
    crc = zlib.crc32(DATA[FIRST:LAST])
    left = Chunk((0,), (400,), "f", 100, 500, crc32=crc, crc_range=(FIRST, LAST))
    right = Chunk((0,), (400,), "f", 500, 900, crc32=crc, crc_range=(FIRST, LAST))
    books = Ledger()
    assert note(books, store, left, 100, 500) == 0
    assert note(books, store, right, 500, 900) == 800


def test_records_of_two_stores_are_two(tmp_path: Path) -> None:
    stores = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(DATA)
        stores.append(LocalStore(tmp_path / name))
    books = Ledger()
    assert note(books, stores[0], record(), 100, 500) == 0
    assert note(books, stores[1], record(), 500, 900) == 0
    assert books.finish() == 1600


def test_a_record_is_read_through_once(store: LocalStore) -> None:
    books = Ledger()
    assert books.verify_once(store, record(), key=KEY) == 800
    assert books.verify_once(store, record(), key=KEY) == 0
    assert note(books, store, record(), 100, 900) == 0
    assert books.finish() == 0
    assert books.verify_once(store, record()._replace(crc32=None), key=KEY) == 0


def test_a_damaged_record_is_refused_every_time(store: LocalStore) -> None:
    """The first reader takes a replica instead; those who come later must not take the record for sound."""
    books = Ledger()
    for _ in range(3):
        with pytest.raises(ChecksumMismatch):
            books.verify_once(store, damaged(), key=KEY)


def test_nobody_takes_a_record_for_sound_while_it_is_being_read(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(*arguments: object, **options: object) -> int:
        if threading.current_thread() is first:
            reading.set()
            assert go_on.wait(10)
        return checksum.verify_record(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger, "verify_record", slow)
    books, raised = Ledger(), []

    def work() -> None:
        try:
            books.verify_once(store, damaged(), key=KEY)
        except ChecksumMismatch as error:
            raised.append(error)

    first = threading.Thread(target=work)
    first.start()
    assert reading.wait(10)
    with pytest.raises(ChecksumMismatch):
        books.verify_once(store, damaged(), key=KEY)
    go_on.set()
    first.join(10)
    assert len(raised) == 1


def test_where_no_library_combines_checksums(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_combine", None)
    books = Ledger()
    assert note(books, store, record(), 100, 500) == 0
    assert note(books, store, record(), 500, 900) == 800
    books = Ledger()
    assert note(books, store, damaged(), 100, 500) == 0
    with pytest.raises(ChecksumMismatch):
        note(books, store, damaged(), 500, 900)


def test_many_threads(store: LocalStore) -> None:
    books, pieces = Ledger(), cut_at(*range(110, 900, 10))
    totals: list[int] = []

    def work(mine: list[tuple[int, int]]) -> None:
        totals.extend(note(books, store, record(), *piece) for piece in mine)

    threads = [threading.Thread(target=work, args=(pieces[number::4],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(totals) == [0] * (len(pieces) - 1) + [800]
    assert books.finish() == 0
