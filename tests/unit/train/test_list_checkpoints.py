from __future__ import annotations

import os
from pathlib import Path

from fsdp_ckpt.layouts.registry import list_checkpoints


def test_folders_with_a_step_come_by_falling_step(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-100", "checkpoint-2"):
        (tmp_path / name).mkdir()
    assert [(step, path.name) for step, path in list_checkpoints(tmp_path)] == [
        (100, "step-100"), (10, "step-10"), (9, "step-9"), (2, "checkpoint-2"),
    ]  # fmt: skip


def test_other_names_are_left_out(tmp_path: Path) -> None:
    for name in ("step-x", "logs", ".step-3", ".step-4.fsdp-ckpt-0123456789abcdef", "step-5.tmp", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-7").write_text("a file")
    assert list_checkpoints(tmp_path) == []


def test_a_link_to_one_of_them_is_not_counted_twice(tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    os.symlink(tmp_path / "step-3", tmp_path / "latest")
    os.symlink("step-3", tmp_path / "step-3-link")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [3]


def test_an_empty_run_has_none(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
