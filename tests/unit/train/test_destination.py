from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp_ckpt import save_state
from fsdp_ckpt.errors import DestinationExists, MalformedFile
from fsdp_ckpt.train.destination import check_replaceable


def _ours(folder: Path) -> Path:
    save_state(folder, torch.nn.Linear(2, 2), durable=False)
    return folder


def _accelerate(folder: Path) -> Path:
    folder.mkdir()
    for name in (
        "pytorch_model.bin",
        "optimizer.bin",
        "scheduler.bin",
        "random_states_0.pkl",
        "custom_checkpoint_0.pkl",
    ):
        torch.save({"w": torch.zeros(1)}, folder / name)
    return folder


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_what_is_not_there_or_empty_may_be_written(tmp_path: Path) -> None:
    for overwrite in (True, False):
        check_replaceable(tmp_path / "new", overwrite=overwrite)
        check_replaceable(tmp_path / "no" / "parent", overwrite=overwrite)
    check_replaceable(_empty(tmp_path / "empty"), overwrite=False)


@pytest.mark.parametrize("make", [_ours, _accelerate])
def test_what_a_repair_has_kept_does_not_stand_in_the_way(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    kept = make(tmp_path / "old") / ".before-repair-1"
    kept.mkdir()
    (kept / ".metadata").write_bytes(b"as it was")
    check_replaceable(tmp_path / "old", overwrite=True)
    kept.rename(tmp_path / "old" / ".before-repair-mine")
    with pytest.raises(DestinationExists, match=r"holds `.before-repair-mine`"):
        check_replaceable(tmp_path / "old", overwrite=True)


@pytest.mark.parametrize("make", [_ours, _accelerate])
def test_a_checkpoint_may_be_replaced_when_asked(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "old")
    check_replaceable(folder, overwrite=True)
    with pytest.raises(DestinationExists, match="exists") as caught:
        check_replaceable(folder, overwrite=False)
    assert "overwrite=True" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0/notes.txt", "pytorch_model_fsdp_0/sub"])
def test_nor_one_with_something_in_a_part(tmp_path: Path, name: str) -> None:
    folder = _ours(tmp_path / "old")
    if name.endswith("sub"):
        (folder / name).mkdir()
    else:
        (folder / name).write_text("mine")
    with pytest.raises(DestinationExists, match=f"holds `{name}`"):
        check_replaceable(folder, overwrite=True)


@pytest.mark.parametrize("make", [_ours, _accelerate, _empty])
@pytest.mark.parametrize("stranger", ["notes.txt", ".git", "step-1", "train.py", "pytorch", "fsdp_ckpt.json.bak"])
def test_a_folder_with_anything_else_is_never_replaced(
    tmp_path: Path, make: Callable[[Path], Path], stranger: str
) -> None:
    folder = make(tmp_path / "old")
    if stranger in (".git", "step-1"):
        (folder / stranger).mkdir()
    else:
        (folder / stranger).write_text("mine")
    with pytest.raises(DestinationExists, match=f"holds `{stranger}`") as caught:
        check_replaceable(folder, overwrite=True)
    assert "step-1" in str(caught.value.hint)


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DestinationExists, match="is a file"):
        check_replaceable(tmp_path / "file", overwrite=True)


def test_a_dangling_link_and_a_socket_are_never_replaced(tmp_path: Path) -> None:
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(DestinationExists):
            check_replaceable(tmp_path / name, overwrite=True)


def test_a_special_file_within_is_a_stranger(tmp_path: Path) -> None:
    folder = _ours(tmp_path / "old")
    os.symlink(tmp_path / "nowhere", folder / "link")
    with pytest.raises(DestinationExists, match="holds `link`"):
        check_replaceable(folder, overwrite=True)
    lone = _empty(tmp_path / "lone")
    os.mkfifo(lone / "pipe")
    with pytest.raises(DestinationExists, match="holds `pipe`"):
        check_replaceable(lone, overwrite=True)


def test_a_folder_with_a_foreign_manifest_is_not_replaced(tmp_path: Path) -> None:
    folder = _ours(tmp_path / "old")
    manifest = json.loads((folder / "fsdp_ckpt.json").read_text())
    (folder / "fsdp_ckpt.json").write_text(json.dumps(manifest | {"format": "fsdp-ckpt/checkpoint/9"}))
    with pytest.raises((MalformedFile, DestinationExists)):
        check_replaceable(folder, overwrite=True)
