"""What people type by mistake, and what they are told."""

from __future__ import annotations

import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fsdp_ckpt import Checkpointer, Hooks, get_state_dict, load_state, save_model, save_state
from fsdp_ckpt.errors import ChecksumMismatch, IncompleteCheckpoint, UsageError


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def job() -> tuple[Net, torch.optim.AdamW]:
    """Return a model and its optimizer after a step."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


def test_an_uncaught_error_ends_with_what_to_do() -> None:
    error = UsageError("it is so", hint="do that")
    assert str(error) == "it is so"
    assert traceback.format_exception(error)[-2:] == ["fsdp_ckpt.errors.UsageError: it is so\n", "hint: do that\n"]


def test_a_process_that_does_not_know_the_others_does_not_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for save in (save_state, lambda path, model: save_model(model, path)):
        with pytest.raises(UsageError, match="started as one of 2") as caught:
            save(tmp_path / "x", Net())
        assert "init_process_group" in str(caught.value.hint)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["5", 7.0, torch.tensor(1.5)])
def test_a_step_is_a_whole_number(step: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="step must be a whole number"):
        save_state(tmp_path / "x", Net(), step=step)
    with pytest.raises(UsageError, match="step must be a whole number"):
        Checkpointer(tmp_path, Net()).save(step)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), True + 6])
def test_integers_of_other_libraries_are_steps(step: Any, tmp_path: Path) -> None:
    Checkpointer(tmp_path, Net()).save(step)
    assert load_state(tmp_path / "step-7", Net()).step == 7


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_a_part_that_was_deleted_is_incomplete_and_passed_over(part: str, tmp_path: Path) -> None:
    model, optimizer = job()
    checkpointer = Checkpointer(tmp_path, model, optimizer)
    checkpointer.save(1)
    checkpointer.save(2)
    shutil.rmtree(tmp_path / "step-2" / part)
    with pytest.raises(IncompleteCheckpoint, match=f"{part}/.*listed in the manifest, but not there"):
        load_state(tmp_path / "step-2", model, optimizer)
    report = checkpointer.resume()
    assert report is not None
    assert report.step == 1
    assert "step-2" in report.warnings[0]


def test_one_file_of_our_own_checkpoint_loads(tmp_path: Path) -> None:
    model, _ = job()
    save_state(tmp_path / "full", model, state_dict_type="FULL_STATE_DICT")
    other = Net()
    report = load_state(tmp_path / "full" / "pytorch_model_fsdp.bin", other)
    assert report.path == str(tmp_path / "full" / "pytorch_model_fsdp.bin")
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_is_not_the_folder_of_a_run(tmp_path: Path) -> None:
    Checkpointer(tmp_path, Net()).save(1)
    with pytest.raises(UsageError, match="is a checkpoint, not the folder of a run") as caught:
        Checkpointer(tmp_path / "step-1", Net()).resume()
    assert repr(str(tmp_path)) in str(caught.value.hint)
    assert Checkpointer(tmp_path / "new", Net()).resume() is None
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")  # the Trainer puts its last model above them
    report = Checkpointer(tmp_path, Net()).resume()
    assert report is not None
    assert report.step == 1


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_a_slip(option: str, tmp_path: Path) -> None:
    save_state(tmp_path / "x", Net())
    with pytest.raises(UsageError, match=rf"{option} `layer\.\*` matches no name") as caught:
        load_state(tmp_path / "x", Net(), include=["layer.*"] if option == "include" else (), exclude=["layer.*"])
    assert "layers." in str(caught.value.hint)


def test_another_class_of_scheduler_is_named(tmp_path: Path) -> None:
    model, optimizer = job()
    save_state(tmp_path / "x", model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    report = load_state(tmp_path / "x", model, optimizer, scheduler)
    assert any("a CosineAnnealingLR, this one a StepLR" in warning for warning in report.warnings)


def test_a_scheduler_that_nobody_asks_for_is_named(tmp_path: Path) -> None:
    model, optimizer = job()
    save_state(tmp_path / "x", model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert "saved, but not asked for: scheduler=" in load_state(tmp_path / "x", model, optimizer).warnings
    assert not load_state(tmp_path / "x", model).warnings


def test_things_in_the_place_of_others(tmp_path: Path) -> None:
    model, optimizer = job()
    state, optimizer_state = model.state_dict(), optimizer.state_dict()
    for call, text in (
        (lambda: save_state(tmp_path / "x", state), "model= is a state dict"),
        (lambda: save_state(tmp_path / "x", model, optimizer_state), "optimizer= is a state dict"),
        (lambda: save_state(tmp_path / "x", optimizer, model), "model= is an optimizer"),
        (lambda: save_state(tmp_path / "x", model, model), "optimizer= is a module"),
        (lambda: save_state("", model), "the path is empty"),
        (lambda: get_state_dict(state), "model= is a state dict"),  # type: ignore[arg-type]
        (lambda: save_model(state, tmp_path / "x"), "model= is a state dict"),  # type: ignore[arg-type]
        (lambda: save_state(tmp_path / "x", model, hooks=[Hooks]), "instances of Hooks, not Hooks"),  # type: ignore[list-item]
        (lambda: save_state(tmp_path / "x", model, hooks=Hooks()), "takes a list"),  # type: ignore[call-overload]
    ):
        with pytest.raises(UsageError, match=text):
            call()
    assert not list(tmp_path.iterdir())


def test_damaged_metadata_is_damage_whatever_it_looks_like(tmp_path: Path) -> None:
    """Every flip of a byte is told as a wrong checksum; none reaches the reader of pickles."""
    model, _ = job()
    save_state(tmp_path / "x", model)
    path = tmp_path / "x" / "pytorch_model_fsdp_0" / ".metadata"
    data = path.read_bytes()
    for position in range(0, len(data), 37):
        path.write_bytes(data[:position] + bytes([data[position] ^ 255]) + data[position + 1 :])
        with pytest.raises(ChecksumMismatch, match=r"\.metadata is damaged"):
            load_state(tmp_path / "x", model)


def test_a_report_reads_well(tmp_path: Path) -> None:
    model, optimizer = job()
    save_state(tmp_path / "x", model, optimizer, step=3)
    text = str(load_state(tmp_path / "x", model, optimizer))
    what = "optimizer_0, pytorch_model_fsdp_0, random_states; 144 B in"  # 12 parameters and their two moments
    assert text.startswith(f"loaded {tmp_path / 'x'} (step 3): {what}")
    assert "\n" not in text
    assert repr(Checkpointer(tmp_path / "run", model, keep=2)).endswith("/run', empty, keep=2)")


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import fsdp_ckpt, sys; fsdp_ckpt.inspect; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
