"""Saves that died between two renames, and what they left."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.errors import DestinationExists
from fsdp_ckpt.ops.repair import repair
from fsdp_ckpt.store.leftovers import LOCK, hold, set_aside, staging_name
from fsdp_ckpt.store.publish import place_identity
from tests.cli.tool import flip, snapshot
from tests.unit.ops.made_shards import A, B, shards
from tests.unit.ops.mended import copy, kinds, mend, moved_away, relist, tree
from tests.unit.ops.test_repair_boxes import loads_as, save_own


def test_a_lost_checkpoint_is_put_back(tmp_path: Path) -> None:
    path = tmp_path / "run/step-3"
    model, _ = save_own(path)
    whole = tree(path)
    old = moved_away(path)
    before = snapshot(tmp_path)
    said = repair(path)
    assert snapshot(tmp_path) == before
    assert kinds(said) == [("finish-swap", "put back", str(old))]
    done = repair(path, apply=True)
    assert done.whole
    assert tree(path) == whole
    assert os.listdir(tmp_path / "run") == ["step-3"]
    loads_as(model)(path)
    assert repair(path).actions == []


def test_a_checkpoint_that_is_put_back_is_mended_in_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "run/step-3"
    model, _ = save_own(path)
    backup = copy(path, tmp_path / "backup")
    (path / "pytorch_model_fsdp_0/__0_0.distcp").unlink()
    moved_away(path)
    done = repair(path, apply=True, replica=backup)
    assert done.whole
    assert [kind for kind, _, _ in kinds(done)] == ["finish-swap", "restore-box"]
    loads_as(model)(path)


def test_a_save_that_goes_on_is_not_disturbed(tmp_path: Path) -> None:
    path = tmp_path / "run/step-3"
    save_own(path)
    old = moved_away(path)
    lock = hold(old)
    assert lock is not None
    before = tree(tmp_path)
    said = repair(path)
    assert "another process" in said.faults[0].why
    repair(path, apply=True)
    assert tree(tmp_path) == before
    os.close(lock)
    assert repair(path, apply=True).whole


def test_two_at_one_place(tmp_path: Path) -> None:
    """A save holds the lock of the place as long as it writes."""
    path = tmp_path / "run/step-3"
    save_own(path)
    (path / "pytorch_model_fsdp_0/.metadata.tmp").write_bytes(b"x")
    staging = path.with_name(staging_name(path.name, place_identity(path)))
    staging.mkdir()
    lock = hold(staging)
    assert lock is not None
    before = tree(tmp_path)
    with pytest.raises(DestinationExists, match="another process"):
        repair(path, apply=True)
    assert tree(tmp_path) == before
    assert repair(path).actions, "looking is allowed"
    os.close(lock)
    assert repair(path, apply=True).whole
    assert os.listdir(tmp_path / "run") == ["step-3"]


def test_what_a_dead_save_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run/step-3"
    save_own(path)
    whole = tree(path)
    for identity in (place_identity(path), "00ff"):
        staging = path.with_name(staging_name(path.name, identity))
        (staging / "pytorch_model_fsdp_0").mkdir(parents=True)
        (staging / "pytorch_model_fsdp_0/__0_0.distcp").write_bytes(b"half")
        (staging / LOCK).touch()
    other = tmp_path / "run/.step-4.fsdp-ckpt-00aa"
    other.mkdir()
    before = snapshot(tmp_path)
    assert [what for _, what, _ in kinds(repair(path))] == ["remove", "remove"]
    assert snapshot(tmp_path) == before
    assert repair(path, apply=True).whole
    assert sorted(os.listdir(tmp_path / "run")) == [other.name, "step-3"], "it belongs to another place"
    assert tree(path) == whole


def test_leftovers_stay_as_long_as_the_checkpoint_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "run/step-3"
    save_own(path)
    copied = copy(path, path.with_name(staging_name(path.name, "00ff")))
    (path / "pytorch_model_fsdp_0/__0_0.distcp").unlink()
    report = repair(path, apply=True)
    assert not report.whole
    assert copied.is_dir()
    assert any("stays" in note for note in report.notes)


def test_a_newer_save_that_was_complete_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "run/step-3"
    save_own(path)
    time.sleep(1.1)  # manifests have seconds
    save_own(tmp_path / "newer")
    newer = path.with_name(staging_name(path.name, place_identity(path)))
    (tmp_path / "newer").rename(newer)
    report = repair(path, apply=True)
    assert report.actions == []
    assert newer.is_dir()
    assert any("newer" in note and "fsdp-ckpt inspect" in note for note in report.notes)


def test_an_older_one_that_was_replaced_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run/step-3"
    save_own(path)
    gone = set_aside(path, owner=path.name)
    time.sleep(1.1)
    save_own(path, step=4)  # removes what it finds: put it there again
    shutil.rmtree(gone, ignore_errors=True)
    save_own(tmp_path / "older")
    relist(tmp_path / "older", created="2020-01-01T00:00:00+00:00")
    (tmp_path / "older").rename(gone)
    assert kinds(repair(path, apply=True)) == [("finish-swap", "remove", str(gone))]
    assert not gone.exists()


def test_a_merge_that_can_be_resumed_is_kept(tmp_path: Path) -> None:
    shards(tmp_path / "out", A, B)
    staging = tmp_path / staging_name("out", "00ff")
    staging.mkdir()
    (staging / ".model.safetensors.done").touch()
    report = repair(tmp_path / "out", apply=True)
    assert report.actions == []
    assert staging.is_dir()
    assert any("--resume" in note for note in report.notes)


def test_locks_that_nobody_holds(tmp_path: Path) -> None:
    path = tmp_path / "run/step-3"
    model, _ = save_own(path)
    (path / LOCK).touch()
    fd = os.open(path / LOCK, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert repair(path).whole
    os.close(fd)
    assert kinds(mend(path, loads_as(model))) == [("drop-stale", "set aside", LOCK)]


def _replaced(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A checkpoint that replaced another one, which is still there; and a copy of it."""
    path = tmp_path / "run/step-3"
    save_own(path)
    save_own(tmp_path / "older")
    relist(tmp_path / "older", created="2020-01-01T00:00:00+00:00")
    old = path.with_name(staging_name(path.name, place_identity(path)) + ".old")
    (tmp_path / "older").rename(old)
    return path, old, copy(path, tmp_path / "backup")


def test_the_replaced_one_stays_while_the_new_one_is_damaged(tmp_path: Path) -> None:
    """Damage that only reading everything shows: sizes are as listed."""
    path, old, backup = _replaced(tmp_path)
    whole = tree(old)
    flip(path / "pytorch_model_fsdp_0/__0_0.distcp")
    report = repair(path, apply=True)
    assert not report.whole
    assert report.actions == []
    assert tree(old) == whole
    assert any(str(old) in note and "stays" in note for note in report.notes)
    done = repair(path, apply=True, replica=backup)
    assert done.whole
    assert [what for _, what, _ in kinds(done)] == ["write", "remove"], "once all was looked at again"
    assert not old.exists()


@pytest.mark.parametrize("options", [{"verify": False}, {"only": ["finish-swap"]}])
def test_nothing_is_removed_unless_everything_was_read(options: dict[str, Any], tmp_path: Path) -> None:
    path, old, _ = _replaced(tmp_path)
    flip(path / "pytorch_model_fsdp_0/__0_0.distcp")
    report = repair(path, apply=True, **options)
    assert report.actions == []
    assert old.is_dir()
    assert any("not read to the last byte" in note for note in report.notes)
