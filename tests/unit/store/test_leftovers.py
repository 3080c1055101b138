"""Old folders that are set aside: who may remove them, when, and what a dead run's are good for."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from pathlib import Path

import pytest

from fsdp_ckpt.errors import DestinationExists
from fsdp_ckpt.store import leftovers, publish, syscalls
from fsdp_ckpt.store.leftovers import LOCK, recover_replaced, remove_folder_soon, remove_leftovers
from fsdp_ckpt.store.publish import Staging
from tests.unit.store.folders import content, names, write


def old(folder: Path, name: str = "old") -> Path:
    folder.mkdir()
    (folder / name).write_text("0")
    return folder


def test_much_is_removed_in_a_thread_which_nobody_disturbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, rmtree = threading.Event(), shutil.rmtree
    before = set(threading.enumerate())

    def wait(*arguments: object, **options: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(20)
        rmtree(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(leftovers, "_MUCH_BYTES", 1)
    monkeypatch.setattr(shutil, "rmtree", wait)
    old(tmp_path / "out")
    staging = Staging(tmp_path / "out", "ab12", overwrite=True)
    write(staging, new="1")
    staging.publish()
    assert content(tmp_path / "out") == {"new": "1"}, "it does not wait"
    (gone,) = [path for path in tmp_path.iterdir() if path.name != "out"]
    assert content(gone) == {"old": "0", LOCK: ""}
    remove_leftovers(tmp_path)
    assert gone.exists(), "somebody is at it"
    again = Staging(tmp_path / "out", "ab12", overwrite=True)
    write(again, new="2")
    again.publish()
    assert gone.exists()
    go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert names(tmp_path) == ["out"]
    assert content(tmp_path / "out") == {"new": "2"}


def test_little_is_removed_at_once(tmp_path: Path) -> None:
    remove_folder_soon(old(tmp_path / "step-1"))
    assert names(tmp_path) == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = old(tmp_path / "precious")
    (tmp_path / "step-1").symlink_to(precious)
    with pytest.raises(NotADirectoryError):
        remove_folder_soon(tmp_path / "step-1")
    assert content(precious) == {"old": "0"}


def test_what_is_being_exchanged_is_locked_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the exchange on the staging folder's name belongs to the old content."""
    out = old(tmp_path / "out")
    exchange, seen = syscalls.exchange, []

    def look(a: Path, b: Path) -> bool:
        done = exchange(a, b)
        with pytest.raises(DestinationExists, match="another process is writing"):
            Staging(out, "ab12", overwrite=True)
        seen.append(content(a))
        return done

    staging = Staging(out, "ab12", overwrite=True)
    write(staging, new="1")
    monkeypatch.setattr(publish, "exchange", look)
    staging.publish()
    assert seen == [{"old": "0", LOCK: ""}]
    assert content(out) == {"new": "1"}
    assert names(tmp_path) == ["out"]


def test_discarding_after_publishing_removes_nothing_of_others(tmp_path: Path) -> None:
    first = Staging(tmp_path / "out", "ab12", overwrite=True)
    write(first, new="1")
    first.publish()
    second = Staging(tmp_path / "out", "ab12", overwrite=True)
    write(second, new="2")
    first.discard()
    second.publish()
    assert content(tmp_path / "out") == {"new": "2"}


def test_what_a_dead_run_moved_away_is_put_back(tmp_path: Path) -> None:
    old(tmp_path / ".step-5.fsdp-ckpt-ab12.old")
    old(tmp_path / ".step-5.fsdp-ckpt-ab12", "unfinished")
    recover_replaced(tmp_path)
    assert content(tmp_path / "step-5") == {"old": "0"}
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-5"]


@pytest.mark.parametrize("why", ["there is a new one", "somebody is at it", "it is a link", "it is a file"])
def test_what_is_not_put_back(why: str, tmp_path: Path) -> None:
    moved = tmp_path / ".step-5.fsdp-ckpt-ab12.old"
    if why == "it is a link":
        moved.symlink_to(old(tmp_path / "precious"))
    elif why == "it is a file":
        moved.write_text("x")
    else:
        old(moved)
    if why == "there is a new one":
        old(tmp_path / "step-5", "new")
    lock = -1
    if why == "somebody is at it":
        lock = os.open(moved / LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
    recover_replaced(tmp_path)
    assert moved.exists()
    assert (tmp_path / "step-5").exists() == (why == "there is a new one")
    if lock >= 0:
        os.close(lock)
        recover_replaced(tmp_path)
        assert content(tmp_path / "step-5") == {"old": "0"}


def test_an_error_while_room_is_made_gives_the_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Staging) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "_clear", fail)
        with pytest.raises(OSError, match="No space left"):
            Staging(tmp_path / "out", "ab12")
    assert names(tmp_path) == []
    staging = Staging(tmp_path / "out", "ab12")
    write(staging, new="1")
    staging.publish()
    assert content(tmp_path / "out") == {"new": "1"}
