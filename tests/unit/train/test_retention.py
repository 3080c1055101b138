"""What a Checkpointer removes after a save, and what it never touches."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fsdp_ckpt import Checkpointer, latest_complete, load_state
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.store.leftovers import remove_folder
from tests.unit.layouts.made_runs import DATA, MANIFEST, own, trainer


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def _run(folder: Path, values: dict[int, Any], **rule: Any) -> Checkpointer:
    checkpointer = Checkpointer(folder, nn.Linear(2, 2), durable=False, **rule)
    for step, loss in values.items():
        checkpointer.save(step, values={"loss": loss} if loss is not None else None)
    return checkpointer


def test_the_last_the_round_and_the_best_stay(tmp_path: Path) -> None:
    values = {0: 9.0, 100: 0.5, 200: 0.2, 300: 0.4, 400: 0.3, 500: float("nan"), 600: None, 1000: 0.9, 1100: 0.8}
    _run(tmp_path, values, keep=2, keep_every=500, keep_best="loss:min=2")
    assert _names(tmp_path) == ["step-0", "step-1000", "step-1100", "step-200", "step-400", "step-500"]
    assert load_state(tmp_path / "step-200", nn.Linear(2, 2)).step == 200


def test_a_better_one_takes_the_place_of_the_best(tmp_path: Path) -> None:
    checkpointer = _run(tmp_path, {1: 0.5, 2: 0.7}, keep=1, keep_best="loss")
    assert _names(tmp_path) == ["step-1", "step-2"]
    checkpointer.save(3, values={"loss": 0.6})
    assert _names(tmp_path) == ["step-1", "step-3"]
    checkpointer.save(4, values={"loss": 0.4})
    assert _names(tmp_path) == ["step-4"]


def test_a_new_process_knows_what_an_earlier_one_saved(tmp_path: Path) -> None:
    _run(tmp_path, {1: 0.5, 2: 0.1, 3: 0.6}, keep=5, keep_best="loss")
    again = Checkpointer(tmp_path, nn.Linear(2, 2), keep=1, keep_best="loss")
    assert again.resume() is not None
    again.save(4, values={"loss": 0.2})
    assert _names(tmp_path) == ["step-2", "step-4"]


def test_a_step_that_is_saved_again_counts_with_its_new_value(tmp_path: Path) -> None:
    checkpointer = _run(tmp_path, {1: 0.1, 2: 0.2}, keep=1, keep_best="loss")
    assert _names(tmp_path) == ["step-1", "step-2"]
    checkpointer.save(1, values={"loss": 0.9})
    checkpointer.save(3, values={"loss": 0.5})
    assert _names(tmp_path) == ["step-2", "step-3"]


def test_after_a_rollback_newer_ones_stay_and_do_not_count(tmp_path: Path) -> None:
    _run(tmp_path, {10: 0.5, 20: 0.1, 30: 0.6}, keep=9)
    _run(tmp_path, {11: 0.9, 12: 0.8}, keep=1, keep_best="loss")
    assert _names(tmp_path) == ["step-10", "step-12", "step-20", "step-30"]


def test_steps_go_by_number_and_not_by_time(tmp_path: Path) -> None:
    checkpointer = _run(tmp_path, {9: None, 10: None}, keep=2)
    os.utime(tmp_path / "step-9" / MANIFEST)
    os.utime(tmp_path / "step-9")
    checkpointer.save(100)
    assert _names(tmp_path) == ["step-10", "step-100"]


def test_what_is_not_ours_does_not_matter_and_stays(tmp_path: Path) -> None:
    precious = own(tmp_path / "archive", 1)
    folder = tmp_path / "run"
    trainer(folder, 1)
    trainer(folder, 9999)
    own(folder, 2, name="step-02")
    own(folder, 3, name="step-3-kept")
    (folder / "step-4").mkdir()
    (folder / "step-4" / "thesis.tex").write_text("mine")
    (folder / "step-1").symlink_to(precious)
    (folder / "step-5").write_text("a file")
    (folder / "step-6").mkdir()
    (folder / "step-6" / MANIFEST).symlink_to(precious / MANIFEST)
    (folder / "step-7").symlink_to("nowhere")
    before = _names(folder)
    _run(folder, {100: None, 101: None}, keep=1)
    assert _names(folder) == sorted([*before, "step-101"])
    assert (folder / "step-4" / "thesis.tex").read_text() == "mine"
    assert _names(precious) == _names(own(tmp_path / "other", 1))


def test_what_is_not_whole_neither_counts_nor_goes(tmp_path: Path) -> None:
    checkpointer = _run(tmp_path, {1: None, 2: None, 3: None}, keep=9)
    (tmp_path / "step-2" / DATA).unlink()
    (tmp_path / "step-3" / MANIFEST).write_text("{")
    Checkpointer(tmp_path, nn.Linear(2, 2), keep=2).save(4)
    assert _names(tmp_path) == ["step-1", "step-2", "step-3", "step-4"]
    Checkpointer(tmp_path, nn.Linear(2, 2), keep=1).save(5)
    assert _names(tmp_path) == ["step-2", "step-3", "step-5"]
    assert checkpointer.resume() is not None
    assert latest_complete(tmp_path) == tmp_path / "step-5"


def test_nothing_goes_when_the_save_fails(tmp_path: Path) -> None:
    _run(tmp_path, {1: None, 2: None}, keep=2)
    checkpointer = Checkpointer(tmp_path, nn.Linear(2, 2), keep=1)
    with pytest.raises(Exception, match="Object of type"):
        checkpointer.save(3, values={"loss": object()})
    assert _names(tmp_path) == ["step-1", "step-2"]


def test_one_that_cannot_be_moved_away_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = _run(tmp_path, {1: None, 2: None, 3: None}, keep=3)
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if Path(source).name == "step-1":
            raise PermissionError(13, "Permission denied", str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with caplog.at_level(logging.WARNING, "fsdp_ckpt"):
        _run(tmp_path, {4: None}, keep=1)
    assert _names(tmp_path) == ["step-1", "step-4"]
    assert "could not remove old checkpoints" in caplog.text
    assert checkpointer.resume() is not None


@pytest.mark.parametrize(
    "rule",
    [
        {"keep": 0}, {"keep": 1, "keep_every": 0}, {"keep_every": 100}, {"keep_best": "loss"},
        {"keep": 1, "keep_best": "bleu"}, {"keep": 1, "keep_best": ("loss", 2)}, {"keep": 1.5},
    ],
)  # fmt: skip
def test_rules_that_make_no_sense_are_refused_at_once(tmp_path: Path, rule: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Checkpointer(tmp_path / "run", nn.Linear(2, 2), **rule)
    assert caught.value.hint
    assert not list(tmp_path.iterdir())


def test_without_a_rule_everything_stays(tmp_path: Path) -> None:
    _run(tmp_path, dict.fromkeys(range(5), 1.0))
    assert _names(tmp_path) == [f"step-{step}" for step in range(5)]


def test_removing_takes_a_folder_and_never_a_link(tmp_path: Path) -> None:
    precious = own(tmp_path, 1)
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "file").write_text("mine")
    for name in ("link", "file"):
        with pytest.raises(NotADirectoryError):
            remove_folder(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        remove_folder(tmp_path / "missing")
    assert _names(tmp_path) == ["file", "link", "step-1"]
    shutil.rmtree(tmp_path / "step-1")
    (tmp_path / "link").unlink()
    own(tmp_path, 2)
    (tmp_path / "step-2" / "away").symlink_to(tmp_path)
    assert remove_folder(tmp_path / "step-2") is True
    assert _names(tmp_path) == ["file"]
