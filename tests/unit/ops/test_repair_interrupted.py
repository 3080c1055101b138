"""Repairs that were killed between taking the manifest away and putting the new one in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_ckpt import latest_complete
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.ops.repair import repair
from fsdp_ckpt.ops.validate import validate
from tests.cli.tool import flip
from tests.unit.ops.mended import copy, killed, kinds, mend, tree, unchanged
from tests.unit.ops.test_repair_boxes import loads_as, save_own
from tests.unit.ops.test_repair_folder import with_path_of_python_313

METADATA, DATA = "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint whose metadata, and so the manifest, change for torch 2.9; beside it a copy."""
    path = tmp_path / "run/step-3"
    save_own(path)
    with_path_of_python_313(path)
    copy(path, tmp_path / "backup")
    return path


def test_a_damaged_file_is_never_believed(path: Path, tmp_path: Path) -> None:
    """It was to be replaced, has a second name in the backup already, and was not reached."""
    flip(path / DATA)
    bad = (path / DATA).read_bytes()
    killed(path, after=1, for_torch="2.9", replica=tmp_path / "backup")
    assert not (path / MANIFEST).exists()
    assert (path / DATA).read_bytes() == bad
    report = repair(path, apply=True)
    assert [fault.where for fault in report.faults] == [DATA]
    assert [action.file for action in report.actions if action.what == "write"] == [MANIFEST]
    assert not validate(path, level="deep").ok
    assert repair(path, apply=True, replica=tmp_path / "backup").whole
    assert validate(path, level="deep").ok
    assert (path / DATA).read_bytes() == (tmp_path / "backup" / DATA).read_bytes()


def test_what_was_written_is_listed(path: Path, tmp_path: Path) -> None:
    model, _ = save_own(tmp_path / "same")
    before = (path / METADATA).read_bytes()
    killed(path, after=1, for_torch="2.9")
    assert (path / METADATA).read_bytes() != before
    said = mend(path, loads_as(model))
    assert kinds(said)[0][1:] == ("write", MANIFEST)
    assert latest_complete(tmp_path / "run") == path
    assert validate(path, level="deep").ok


def test_a_file_that_is_neither_old_nor_new(path: Path) -> None:
    """It was written, and then damaged."""
    killed(path, after=1, for_torch="2.9")
    data = bytearray((path / METADATA).read_bytes())
    data[-9] ^= 1
    (path / METADATA).write_bytes(data)
    report = repair(path, apply=True)
    assert {fault.where for fault in report.faults} == {METADATA}
    assert (path / MANIFEST).exists()
    assert not validate(path).ok


@pytest.mark.parametrize("after", [1, 2])
def test_lost_metadata(path: Path, tmp_path: Path, after: int) -> None:
    """They come back, and are then made fit for another torch: there is no copy of them in the backup."""
    model, _ = save_own(tmp_path / "same")
    (path / METADATA).unlink()
    killed(path, after=after, for_torch="2.9", replica=tmp_path / "backup")
    assert (path / MANIFEST).exists() is (after == 1)
    done = repair(path, apply=True, for_torch="2.9", replica=tmp_path / "backup")
    assert done.whole, done.faults
    assert (path / MANIFEST).exists()
    assert validate(path, level="deep").ok
    loads_as(model)(path)


def test_nothing_else_comes_first(path: Path) -> None:
    killed(path, after=1, for_torch="2.9")
    (fault,) = unchanged(path, only=["drop-stale"]).faults
    assert fault.where == MANIFEST
    assert fault.hint == f"fsdp-ckpt repair {path} --apply"


def test_a_later_backup_does_not_hide_it(path: Path) -> None:
    killed(path, after=1, for_torch="2.9")
    (path / ".before-repair-7").mkdir()
    (path / ".before-repair-7/x").write_bytes(b"x")
    assert repair(path, apply=True).whole
    assert (path / MANIFEST).exists()


def test_what_was_written_down_is_broken(path: Path) -> None:
    killed(path, after=1, for_torch="2.9")
    (path / ".before-repair-1/.new" / MANIFEST).write_text("{")
    (fault,) = unchanged(path).faults
    assert "cannot be finished" in fault.why


@pytest.mark.parametrize("after", [1, 2])
def test_killed_before_the_manifest_goes(path: Path, after: int) -> None:
    """Nothing has changed yet."""
    good = tree(path)
    killed(path, after=after, within_backup=True, for_torch="2.9")
    assert repair(path, apply=True).whole
    assert {file: item for file, item in tree(path).items() if not file.startswith(".before-repair-")} == good
    assert repair(path, apply=True, for_torch="2.9").whole
    assert not [name for name in tree(path) if "/.new/" in name or "/.was/" in name]


def test_a_whole_repair_leaves_nothing_that_is_owed(path: Path) -> None:
    assert repair(path, apply=True, for_torch="2.9").whole
    assert sorted(os.listdir(path / ".before-repair-1")) == [MANIFEST, "pytorch_model_fsdp_0"]
