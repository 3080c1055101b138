"""Where FastFileSystemWriter writes, what it replaces in one step, and what it leaves alone, come what may."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from fsdp_ckpt import FastFileSystemWriter, save_state
from fsdp_ckpt.errors import DestinationExists, NotEnoughSpace, UsageError
from fsdp_ckpt.store.leftovers import is_staging
from fsdp_ckpt.store.publish import Staging
from fsdp_ckpt.train.dcp_staging import begin_save, staging_candidates
from tests.cases.launch import REPOSITORY
from tests.unit.child import outcome
from tests.unit.train.dcp_loads import load_all, save, save_error


def file_in(folder: Path, name: str) -> None:
    save({"w": torch.ones(3)}, folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")


STRANGERS: dict[str, Callable[[Path], Any]] = {
    "notes.txt": lambda folder: file_in(folder, "notes.txt"),
    "sub": lambda folder: file_in(folder, "sub/x.distcp"),
    ".hidden": lambda folder: file_in(folder, ".hidden"),
    "fsdp_ckpt.json": lambda folder: save_state(folder, torch.nn.Linear(2, 2), durable=False),
    "__0_0.distcp": lambda folder: (folder / "__0_0.distcp").mkdir(parents=True),
    "model.safetensors": lambda folder: file_in(folder, "model.safetensors"),
}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", STRANGERS)
def test_other_folders_are_never_replaced(tmp_path: Path, name: str) -> None:
    STRANGERS[name](tmp_path / "run")
    before = tree(tmp_path)
    error = save_error(lambda: save({"w": torch.zeros(3)}, tmp_path / "run"))
    assert isinstance(error, DestinationExists)
    assert f"holds `{name}`" in error.message
    assert tree(tmp_path) == before
    assert os.listdir(tmp_path) == ["run"]


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    assert isinstance(save_error(lambda: save({"w": torch.zeros(3)}, tmp_path / "run")), DestinationExists)
    assert (tmp_path / "run").read_text() == "mine"


def test_without_overwrite(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "run", overwrite=False)
    error = save_error(lambda: save({"w": torch.zeros(3)}, tmp_path / "run", overwrite=False))
    assert isinstance(error, DestinationExists)
    assert error.hint is not None
    assert load_all(dcp.FileSystemReader(tmp_path / "run"))["w"].tolist() == [1] * 3


def test_what_a_save_replaces(tmp_path: Path) -> None:
    """An empty folder, a checkpoint with more files, what torch left when it was killed, and behind a link."""
    (tmp_path / "empty").mkdir()
    dcp.save(
        {"w": torch.zeros(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "more", thread_count=3), no_dist=True
    )
    dcp.save({"w": torch.zeros(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "cut"), no_dist=True)
    (tmp_path / "cut" / ".metadata").rename(tmp_path / "cut" / ".metadata.tmp")
    (tmp_path / "link").symlink_to("empty")
    for name in ("empty", "more", "cut", "link"):
        save({"w": torch.ones(3)}, tmp_path / name)
        assert sorted(os.listdir(tmp_path / name)) == [".metadata", "__0_0.distcp"]
        assert load_all(dcp.FileSystemReader(tmp_path / name))["w"].tolist() == [1] * 3
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["cut", "empty", "link", "more"]


def test_a_link_in_the_old_checkpoint_is_not_written_through(tmp_path: Path) -> None:
    """torch overwrites what it points at (limits.md B3)."""
    save({"w": torch.ones(3)}, tmp_path / "run")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run" / "__0_0.distcp").unlink()
    (tmp_path / "run" / "__0_0.distcp").symlink_to(tmp_path / "victim")
    save({"w": torch.full((3,), 2.0)}, tmp_path / "run")
    assert (tmp_path / "victim").read_text() == "mine"
    assert load_all(dcp.FileSystemReader(tmp_path / "run"))["w"].tolist() == [2] * 3


@pytest.mark.timeout(170)
def test_killed_at_every_step_of_an_overwriting_save(tmp_path: Path) -> None:
    """The old checkpoint or the new one, whole; torch leaves neither from its first step to its last but one."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.unit.train.dcp_killed", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("ours", "several"):
        assert len(found[name]["found"]) > 10
        assert set(found[name]["found"]) == {"old", "new"}
        assert found[name]["found"] == sorted(found[name]["found"], reverse=True), "a save went back"
        assert all(found[name]["next"])
    assert found["torch"]["found"].count("destroyed") >= 5


def test_two_writers_to_one_place(tmp_path: Path) -> None:
    """The second one is refused, whichever of our savers the first one is."""
    save({"w": torch.ones(3)}, tmp_path / "run")
    place = staging_candidates(tmp_path / "run")[0]
    other = Staging(tmp_path / "run", place.name.rpartition("-")[2], overwrite=True)
    error = save_error(lambda: save({"w": torch.zeros(3)}, tmp_path / "run"))
    assert isinstance(error, DestinationExists)
    assert "another process is writing" in error.message
    other.discard()
    save({"w": torch.zeros(3)}, tmp_path / "run")


@pytest.mark.parametrize("inside", [False, True])
def test_where_the_hidden_folder_is(tmp_path: Path, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compute the place that Staging chooses; also within a mount point, which is filled file by file."""
    folder = tmp_path / "run"
    if inside:
        folder.mkdir()
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder)
    one = begin_save(folder, overwrite=True)
    assert one.folder == staging_candidates(folder)[inside]
    assert is_staging(one.folder.name)
    one.discard()
    save({"w": torch.ones(3)}, folder)
    assert load_all(dcp.FileSystemReader(folder))["w"].tolist() == [1] * 3
    assert sorted(os.listdir(folder)) == [".metadata", "__0_0.distcp"]


def test_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": torch.ones(3)}, tmp_path / "run")
    writer = FastFileSystemWriter(tmp_path / "run")

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        error = save_error(lambda: dcp.save({"w": torch.zeros(3)}, storage_writer=writer, no_dist=True))
    assert isinstance(error, NotEnoughSpace)
    assert load_all(dcp.FileSystemReader(tmp_path / "run"))["w"].tolist() == [1] * 3
    assert len(os.listdir(tmp_path)) == 2
    assert outcome(writer.close) == "ok"  # in a forked child, whose end is not that of the save
    assert len(os.listdir(tmp_path)) == 2
    writer.close()
    assert os.listdir(tmp_path) == ["run"]


class Slow(DefaultSavePlanner):
    """Waits before it hands out the first value."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.begun.set()
        assert self.go.wait(60)
        return super().resolve_data(write_item)


@pytest.mark.parametrize("same", [True, False], ids=["same writer", "another one"])
def test_a_save_is_not_disturbed_by_the_next_one(tmp_path: Path, same: bool) -> None:
    """async_save before the last one is done."""
    slow, folder = Slow(), tmp_path / "run"
    writer = FastFileSystemWriter(folder)
    first: Any = dcp.async_save({"w": torch.ones(3)}, storage_writer=writer, planner=slow, no_dist=True)
    assert slow.begun.wait(60)
    other = writer if same else FastFileSystemWriter(folder)
    for place in (None, tmp_path / "other" if same else folder):
        second: Any = dcp.async_save({"w": torch.zeros(3)}, checkpoint_id=place, storage_writer=other, no_dist=True)
        with pytest.raises(CheckpointException) as caught:
            second.result(timeout=60)
        error = caught.value.failures[0][0]
        assert isinstance(error, DestinationExists | UsageError)
        assert "another thread" in str(error)
    slow.go.set()
    first.result(timeout=60)
    assert load_all(dcp.FileSystemReader(folder))["w"].tolist() == [1] * 3
    third: Any = dcp.async_save({"w": torch.full((3,), 3.0)}, storage_writer=other, no_dist=True)
    third.result(timeout=60)
    assert load_all(dcp.FileSystemReader(Path(other.checkpoint_id)))["w"].tolist() == [3] * 3
    assert os.listdir(tmp_path) == ["run"]


def test_a_file_that_went_missing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Say, because another rank wrote to another place: nothing is published."""
    save({"w": torch.ones(3)}, tmp_path / "run")
    real = FastFileSystemWriter.write_data

    def lose(self: FastFileSystemWriter, plan: SavePlan, planner: Any) -> Any:
        done = real(self, plan, planner)
        (staging_candidates(tmp_path / "run")[0] / "__0_0.distcp").unlink()
        return done

    monkeypatch.setattr(FastFileSystemWriter, "write_data", lose)
    error = save_error(lambda: save({"w": torch.zeros(3)}, tmp_path / "run"))
    assert "is not what a rank has written there" in error.message
    assert load_all(dcp.FileSystemReader(tmp_path / "run"))["w"].tolist() == [1] * 3
    assert os.listdir(tmp_path) == ["run"]
