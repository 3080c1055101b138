from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_ckpt.errors import IncompleteCheckpoint
from fsdp_ckpt.run import verify
from fsdp_ckpt.run.progress import Meter, Progress
from fsdp_ckpt.run.verify import Record, verify_records
from fsdp_ckpt.store.local import LocalStore

DATA = bytes(range(256)) * 40


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "f").write_bytes(DATA)
    return LocalStore(tmp_path)


def record(store: LocalStore, start: int, stop: int, *, wrong: int = 0, file: str = "f") -> Record:
    return Record(store, file, start, stop, zlib.crc32(DATA[start:stop]) ^ wrong, f"{start}-{stop}", "a record")


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_sound_records(jobs: int, store: LocalStore) -> None:
    records = [record(store, start, stop) for start, stop in ((0, len(DATA)), (5, 5), (7, 1000), (9, 10))]
    assert verify_records(iter(records), jobs=jobs, meter=Meter(1, None)) == (len(DATA) + 993 + 1, [])


@pytest.mark.parametrize("jobs", [1, 2, 4])
@pytest.mark.parametrize("piece", [1 << 20, 1000, 7])
def test_wrong_ones_in_their_order(jobs: int, piece: int, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long records are cut, so that several threads have work; the pieces' checksums are put together."""
    monkeypatch.setattr(verify, "_PIECE_BYTES", piece)
    records = [record(store, start, start + 2000, wrong=start % 3) for start in range(0, 8000, 500)]
    checked, wrong = verify_records(iter(records), jobs=jobs, meter=Meter(1, None))
    assert checked == 2000 * 16
    assert [one.owner for one, _ in wrong] == [one.owner for one in records if one.start % 3]
    assert all(found == zlib.crc32(DATA[one.start : one.stop]) for one, found in wrong)


def test_an_empty_record_has_a_checksum_too(store: LocalStore) -> None:
    assert verify_records(iter([record(store, 3, 3)]), jobs=1, meter=Meter(1, None)) == (0, [])
    _, wrong = verify_records(iter([record(store, 3, 3, wrong=1)]), jobs=1, meter=Meter(1, None))
    assert [found for _, found in wrong] == [0]


def test_a_file_that_ends_too_soon_is_wrong(store: LocalStore) -> None:
    long = record(store, 0, len(DATA))._replace(stop=len(DATA) + 10, crc32=zlib.crc32(DATA + bytes(10)))
    _, wrong = verify_records(iter([long]), jobs=2, meter=Meter(1, None))
    assert len(wrong) == 1


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_missing_file_is_raised_once(jobs: int, store: LocalStore) -> None:
    records = [record(store, 0, 100), record(store, 0, 100, file="gone"), record(store, 0, 100)]
    with pytest.raises(IncompleteCheckpoint, match="gone"):
        verify_records(iter(records), jobs=jobs, meter=Meter(1, None))


@pytest.mark.parametrize("jobs", [1, 4])
def test_what_the_records_raise_is_raised(jobs: int, store: LocalStore) -> None:
    def records() -> Iterator[Record]:
        yield record(store, 0, 10)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        verify_records(records(), jobs=jobs, meter=Meter(1, None))


def test_records_are_taken_one_by_one(store: LocalStore) -> None:
    """There may be millions."""
    taken: list[int] = []
    heard: list[Progress] = []

    def records() -> Iterator[Record]:
        for start in range(0, 1000, 100):
            taken.append(start)
            yield record(store, start, start + 100)

    verify_records(records(), jobs=1, meter=Meter(1000, heard.append))
    assert taken == list(range(0, 1000, 100))
    assert heard[-1].done_bytes == 1000
