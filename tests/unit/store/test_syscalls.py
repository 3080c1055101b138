from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_ckpt.store.syscalls import clone_range, exchange, fsync_folder, read_into, start_writeback, write_all


@pytest.fixture
def fd(tmp_path: Path) -> int:
    (tmp_path / "f").write_bytes(b"0123456789")
    return os.open(tmp_path / "f", os.O_RDWR)


def test_reading_into_a_buffer(fd: int) -> None:
    buffer = bytearray(b"." * 6)
    assert read_into(fd, memoryview(buffer), 2) == 6
    assert buffer == b"234567"
    assert read_into(fd, memoryview(buffer)[:3], 8) == 2, "less at the end of the file"
    assert buffer == b"894567"
    assert read_into(fd, memoryview(buffer), 100) == 0
    assert read_into(fd, memoryview(b""), 0) == 0


def test_short_reads_and_writes_are_continued(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, memoryview(data)[:3], at))
    buffer = bytearray(8)
    assert read_into(fd, memoryview(buffer), 1) == 8
    assert buffer == b"12345678"
    write_all(fd, b"abcdefgh", 5)
    monkeypatch.undo()
    assert os.pread(fd, 20, 0) == b"01234abcdefgh"


def test_exchanging_two_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").touch()
    (tmp_path / "b").mkdir()
    if exchange(tmp_path / "a", tmp_path / "b"):
        assert os.listdir(tmp_path / "b") == ["x"]
        assert os.listdir(tmp_path / "a") == []
    else:
        assert os.listdir(tmp_path / "a") == ["x"], "where it is not possible nothing has happened"


def test_exchanging_with_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").is_dir()


def test_sharing_blocks_or_not_at_all(tmp_path: Path) -> None:
    data = os.urandom(8192)
    (tmp_path / "src").write_bytes(data)
    (tmp_path / "dst").write_bytes(b"\0" * 8192)
    src, dst = os.open(tmp_path / "src", os.O_RDONLY), os.open(tmp_path / "dst", os.O_RDWR)
    if clone_range(src, 4096, 4096, dst, 0):
        assert os.pread(dst, 8192, 0) == data[4096:] + b"\0" * 4096
    else:
        assert os.pread(dst, 8192, 0) == b"\0" * 8192
    os.close(src)
    os.close(dst)


def test_sharing_with_a_descriptor_that_is_none(fd: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        clone_range(fd, 0, 4096, 9999, 0)


def test_hints_never_fail(fd: int, tmp_path: Path) -> None:
    start_writeback(fd, 0, 10)
    start_writeback(9999, 0, 10)
    fsync_folder(tmp_path)
