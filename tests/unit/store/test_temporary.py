"""Temporary folders of processes that were killed go; those of live ones, of others and other things stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_ckpt.store import temporary
from fsdp_ckpt.store.temporary import make_temporary, remove_temporary

_PROGRAM = """
import sys
from fsdp_ckpt.store.temporary import make_temporary
folder = make_temporary("save")
(folder / "large").write_bytes(b"x" * 1000)
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    temporary._remove_old.cache_clear()
    yield tmp_path
    temporary._remove_old.cache_clear()


def _other(place: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(place)},
    )


def test_what_a_killed_process_has_left_is_removed(place: Path) -> None:
    process = _other(place)
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    assert (left / "large").is_file()
    mine = make_temporary("mirror")
    assert not left.exists()
    remove_temporary(mine)
    assert list(place.iterdir()) == []


def test_what_a_live_process_has_stays(place: Path) -> None:
    process = _other(place)
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    remove_temporary(make_temporary("save"))
    assert (theirs / "large").is_file()
    process.communicate(timeout=20)


def test_what_is_not_ours_stays(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").touch()
    (place / "fsdp-ckpt-save-link").symlink_to(elsewhere)
    (place / "fsdp-ckpt-other").mkdir()
    (place / "fsdp-ckpt-save-file").touch()
    (place / "fsdp-ckpt-mirror-old").mkdir()
    remove_temporary(make_temporary("save"))
    left = ["fsdp-ckpt-other", "fsdp-ckpt-save-file", "fsdp-ckpt-save-link"]
    assert sorted(path.name for path in place.iterdir()) == left
    assert [path.name for path in elsewhere.iterdir()] == ["file"]


def test_several_in_one_process(place: Path) -> None:
    folders = [make_temporary("save") for _ in range(3)]
    assert all(folder.is_dir() and folder.parent == place for folder in folders)
    for folder in folders:
        remove_temporary(folder)
        remove_temporary(folder)
    assert list(place.iterdir()) == []
