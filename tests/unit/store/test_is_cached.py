"""What lies in memory, as the kernel says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_ckpt.store.syscalls import is_cached


def test_what_was_just_written_is_cached_and_what_is_not_there_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    fd = os.open(path, os.O_RDONLY)
    try:
        if not is_cached(fd, 0):
            pytest.skip("this system or file system (tmpfs) does not tell")
        assert not is_cached(fd, 20_000)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert not is_cached(fd, 5000)
    finally:
        os.close(fd)
