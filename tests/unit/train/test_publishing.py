"""A checkpoint in its place counts as saved, whatever cannot be removed; and what is not ours is never touched."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ckpt import Checkpointer, Hooks, load_state, save_model, save_state
from fsdp_ckpt.errors import (
    CheckpointNotFound,
    DestinationExists,
    IncompleteCheckpoint,
    UnsafePickle,
    UsageError,
)


class Counter:
    """An object with a number for a state."""

    def __init__(self, value: int = 0) -> None:
        self.value: Any = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def _busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be removed, as where another process has files open on NFS."""
    real = shutil.rmtree

    def rmtree(path: Any, ignore_errors: bool = False, **options: Any) -> None:
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert shutil.rmtree is not real


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_old_checkpoint_that_cannot_be_removed_is_swept_by_the_next_save(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_state(tmp_path / "run", model, step=1)
    with pytest.MonkeyPatch.context() as patch:
        _busy(patch)
        assert save_state(tmp_path / "run", model, step=2).step == 2
    assert json.loads((tmp_path / "run" / "fsdp_ckpt.json").read_text())["step"] == 2
    assert len(_names(tmp_path)) == 2
    assert load_state(tmp_path / "run", model).step == 2
    save_state(tmp_path / "run", model, step=3)
    assert _names(tmp_path) == ["run"]


def test_a_pruned_checkpoint_that_cannot_be_removed_is_swept_by_the_next_one(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, nn.Linear(2, 2), keep=1)
    checkpointer.save(1)
    with pytest.MonkeyPatch.context() as patch:
        _busy(patch)
        assert checkpointer.save(2).step == 2
    assert [name for name in _names(tmp_path) if not name.startswith(".")] == ["step-2"]
    assert len(_names(tmp_path)) == 2
    checkpointer.save(3)
    assert _names(tmp_path) == ["step-3"]


def test_a_checkpoint_that_cannot_be_moved_away_stays_until_the_next_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, nn.Linear(2, 2), keep=1)
    checkpointer.save(1)
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if Path(source).name == "step-1":
            raise PermissionError(errno.EACCES, "Permission denied", str(source))
        real(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", rename)
        assert checkpointer.save(2).step == 2
    assert _names(tmp_path) == ["step-1", "step-2"]
    assert "could not remove old checkpoints" in caplog.text
    checkpointer.save(3)
    assert _names(tmp_path) == ["step-3"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_saving_works_on_file_systems_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    model = nn.Linear(2, 2)
    checkpointer = Checkpointer(tmp_path, model, keep=1)
    for step in (1, 2):
        checkpointer.save(step)
    assert _names(tmp_path) == ["step-2"]
    assert load_state(tmp_path / "step-2", model).step == 2


def _pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _exchange(checkpoint: Path, file: str, data: bytes) -> None:
    """Put other bytes into a file, and say so in the manifest, as somebody would who means harm."""
    (checkpoint / file).write_bytes(data)
    manifest = checkpoint / "fsdp_ckpt.json"
    content = json.loads(manifest.read_text())
    content["files"][file]["bytes"] = len(data)
    manifest.write_text(json.dumps(content))


def _three(folder: Path) -> tuple[Checkpointer, Counter]:
    own = Counter()
    checkpointer = Checkpointer(folder, nn.Linear(2, 2), objects={"own": own})
    for own.value in (1, 2, 3):
        checkpointer.save(own.value)
    own.value = 0
    return checkpointer, own


def test_resume_does_not_pass_over_a_checkpoint_that_asks_for_code(tmp_path: Path) -> None:
    checkpointer, own = _three(tmp_path)
    _exchange(tmp_path / "step-3", "custom_checkpoint_0.pkl", _pickle({"value": uuid.UUID(int=1)}))
    with pytest.raises(UnsafePickle, match=r"uuid\.UUID"):
        checkpointer.resume()
    assert own.value == 0


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = bytes(data).find(b"value")
    data[at] ^= 1
    path.write_bytes(data)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "gone": Path.unlink,
    "cut off": _cut,
    "a bit flipped": _flip,
    "zeros": _zero,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_resume_passes_over_a_damaged_checkpoint_and_says_so(tmp_path: Path, name: str) -> None:
    checkpointer, own = _three(tmp_path)
    DAMAGE[name](tmp_path / "step-3" / "custom_checkpoint_0.pkl")
    report = checkpointer.resume()
    assert report is not None
    assert (report.step, own.value) == (2, 2)
    assert [text for text in report.warnings if "step-3" in text]


def test_resume_without_any_usable_checkpoint_is_an_error(tmp_path: Path) -> None:
    checkpointer, _ = _three(tmp_path)
    for step in (1, 2, 3):
        _cut(tmp_path / f"step-{step}" / "custom_checkpoint_0.pkl")
    with pytest.raises(IncompleteCheckpoint, match="step-3"):
        checkpointer.resume()


def test_resume_does_not_go_back_for_an_optimizer_that_the_newest_lacks(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    Checkpointer(tmp_path, model, optimizer).save(1)
    Checkpointer(tmp_path, model).save(2)
    with pytest.raises(CheckpointNotFound, match="optimizer"):
        Checkpointer(tmp_path, model, optimizer).resume()


REFUSED = [
    "x.part", "fsdp_ckpt.json", "scheduler.bin", "scheduler_1.bin", "optimizer.bin", "pytorch_model_fsdp.bin",
    "pytorch_model_fsdp_0", "random_states_7.pkl", "dl_states_0.pkl", "custom_checkpoint_3.pkl", "scaler.pt",
    "model.safetensors", "../x", "a/b", ".hidden", "", ".", "..",
]  # fmt: skip


class Adds(Hooks):
    """Adds a file."""

    def __init__(self, name: str) -> None:
        self.name = name

    def before_save(self, event: Any) -> None:
        event.add_file(self.name, b"text")


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_would_be_read_as_something_else_cannot_be_added(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="name"):
        save_state(tmp_path / "run", nn.Linear(2, 2), hooks=[Adds(name)])
    assert _names(tmp_path) == []


@pytest.mark.parametrize("name", ["notes.txt", "model_card.md", "vocabulary.pkl", "é b.json"])
def test_other_files_can_be_added(tmp_path: Path, name: str) -> None:
    model = nn.Linear(2, 2)
    for _ in range(2):  # the second one replaces the first
        save_state(tmp_path / "run", model, hooks=[Adds(name)])
    assert (tmp_path / "run" / name).read_bytes() == b"text"
    load_state(tmp_path / "run", model)


@pytest.mark.parametrize("name", ["thesis.tex", "model.py", ".git", "sub/model.safetensors", "notes.bin"])
def test_a_folder_that_is_no_model_folder_is_never_replaced_by_a_model(tmp_path: Path, name: str) -> None:
    model = nn.Linear(2, 2)
    save_model(model, tmp_path / "out")
    path = tmp_path / "out" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(DestinationExists, match=name.partition("/")[0]):
        save_model(model, tmp_path / "out", overwrite=True)
    assert path.read_text() == "mine"
    assert _names(tmp_path) == ["out"]


def test_a_link_in_a_model_folder_is_not_replaced(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "other").write_text("mine")
    save_model(model, tmp_path / "out")
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "other")
    with pytest.raises(DestinationExists, match=r"config\.json"):
        save_model(model, tmp_path / "out", overwrite=True)


def test_a_model_folder_is_replaced_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    save_model(model, tmp_path / "out", max_shard_size=2000)
    assert "model.safetensors.index.json" in _names(tmp_path / "out")
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin", "adapter_model.safetensors", "vocab.txt"):
        (tmp_path / "out" / name).write_text("old")
    with pytest.raises(DestinationExists, match="not empty"):
        save_model(model, tmp_path / "out")
    save_model(model, tmp_path / "out", overwrite=True)
    assert _names(tmp_path / "out") == ["model.safetensors"]
