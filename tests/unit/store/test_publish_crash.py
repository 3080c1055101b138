"""Runs that die, and runs that meet."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fsdp_ckpt.errors import DestinationExists
from fsdp_ckpt.store import publish
from fsdp_ckpt.store.leftovers import leftovers
from fsdp_ckpt.store.publish import Staging
from tests.unit.store.folders import content, in_child, names, write


def test_a_failure_between_the_two_renames_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems that cannot exchange names need two steps; what was there must survive the first alone."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("0")
    staging = Staging(out, "ab12", overwrite=True)
    write(staging, a="1")
    rename = os.rename

    def fail(src: Path, dst: Path) -> None:
        if Path(src) == staging.path and not out.exists():
            raise OSError(5, "Input/output error")
        rename(src, dst)

    monkeypatch.setattr(publish, "exchange", lambda _a, _b: False)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        staging.publish()
    monkeypatch.undo()
    staging.discard()
    assert out.exists()
    assert content(out) == {"old": "0"}


def test_a_crash_between_the_two_renames_loses_nothing_to_the_next_run(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("0")

    def crash() -> None:
        staging = Staging(out, "ab12", overwrite=True)
        write(staging, a="1")
        rename = os.rename

        def kill(src: Path, dst: Path) -> None:
            if Path(src) == staging.path and not out.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            rename(src, dst)

        vars(publish)["exchange"] = lambda _a, _b: False
        vars(os)["rename"] = kill
        staging.publish()

    assert os.WIFSIGNALED(in_child(crash))
    assert not out.exists()
    Staging(out, "cd34", overwrite=True).discard()
    kept = [path for path in tmp_path.rglob("*") if path.name in ("old", "a")]
    assert kept, "neither the old content nor the new one is anywhere"


def test_a_crash_leaves_the_destination_and_a_known_leftover(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("0")

    def crash() -> None:
        staging = Staging(out, "ab12", overwrite=True)
        write(staging, a="1")
        staging.file("b.part").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WIFSIGNALED(in_child(crash))
    assert content(out) == {"old": "0"}
    (left,) = leftovers(out)
    assert left.name in names(tmp_path)

    staging = Staging(out, "ab12", overwrite=True)  # the next run starts afresh
    assert [name for name in names(staging.path) if not name.startswith(".")] == []
    write(staging, c="3")
    staging.publish()
    assert content(out) == {"c": "3"}
    assert names(tmp_path) == ["out"]


def test_the_next_run_cleans_up_after_other_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def crash() -> None:
        write(Staging(out, "ab12"), a="1")
        os.kill(os.getpid(), signal.SIGKILL)

    in_child(crash)
    staging = Staging(out, "cd34")
    staging.publish()
    assert names(tmp_path) == ["out"]


def test_resuming_keeps_what_was_finished(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def crash() -> None:
        staging = Staging(out, "ab12")
        write(staging, a="1")
        staging.file("b.part").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    in_child(crash)
    staging = Staging(out, "ab12", resume=True)
    assert staging.finished("a", 1) == "note on a"
    assert staging.finished("a", 2) is None, "of another size"
    assert staging.finished("b", 4) is None
    write(staging, b="2")
    staging.publish()
    assert content(out) == {"a": "1", "b": "2"}, "no .part, no lock"


def test_suspending_keeps_only_finished_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    staging = Staging(out, "ab12")
    write(staging, a="1")
    staging.file("b.part").write_text("half")
    staging.suspend()
    (left,) = leftovers(out)
    assert [name for name in names(left) if not name.startswith(".")] == ["a"]
    assert Staging(out, "ab12", resume=True).finished("a", 1)


@pytest.mark.parametrize("resume", [False, True])
def test_two_writers(resume: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = Staging(out, "ab12")
    write(first, a="1")
    with pytest.raises(DestinationExists, match="another process is writing"):
        Staging(out, "ab12", resume=resume)
    second = Staging(out, "cd34")  # other bytes for the same place
    write(second, b="2")
    assert first.finished("a", 1), "nobody clears the folder of a run that is alive"
    first.publish()
    with pytest.raises(DestinationExists):
        second.publish()
    second.discard()
    assert content(out) == {"a": "1"}


def test_a_writer_in_another_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ready, done = os.pipe(), os.pipe()

    def other() -> None:
        staging = Staging(out, "ab12")
        write(staging, a="1")
        os.write(ready[1], b"x")
        os.close(done[1])
        os.read(done[0], 1)  # until the parent closes its end
        staging.publish()

    child = os.fork()
    if not child:
        try:
            other()
            os._exit(0)
        finally:
            os._exit(1)
    os.close(ready[1])
    assert os.read(ready[0], 1) == b"x"
    with pytest.raises(DestinationExists, match="another process"):
        Staging(out, "ab12")
    os.close(done[1])
    assert os.waitpid(child, 0)[1] == 0
    assert content(out) == {"a": "1"}
    for fd in (ready[0], done[0]):
        os.close(fd)


def test_sharers_fill_one_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second = (Staging(out, "ab12", shared=True) for _ in range(2))
    write(first, a="1")
    write(second, b="2")
    first.suspend()
    second.publish()
    assert content(out) == {"a": "1", "b": "2"}
