from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.validation.misplaced import check_absent_parts, check_misplaced_parts
from fsdp_ckpt.ops.validation.training_state import check_training_state
from tests.build import rows, save_dcp
from tests.compat.samples import EDGES, FIXTURES, SAMPLES, Sample, sample_id
from tests.unit.ops.validation.made import codes, found

HERE = [sample for sample in SAMPLES if sample.folder.is_relative_to(FIXTURES)]
MODEL = {"up.weight": torch.ones(4, 3), "up.bias": torch.ones(4)}
ADAM: dict[str, Any] = {
    "state": {name: {"step": torch.tensor(2.0), "exp_avg": value} for name, value in MODEL.items()},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(MODEL)}],
}


def swap(first: Path, second: Path) -> None:
    kept = first.with_name("kept")
    first.rename(kept)
    second.rename(first)
    kept.rename(second)


def accelerate(folder: Path) -> Path:
    save_dcp(folder / "pytorch_model_fsdp_0", {"model": dict(MODEL)})
    save_dcp(folder / "optimizer_0", {"optimizer": ADAM})
    return folder


@pytest.mark.parametrize("sample", HERE, ids=sample_id)
def test_what_torch_wrote_is_in_its_place(sample: Sample, tmp_path: Path) -> None:
    here = read_checkpoint(sample.copy(tmp_path / "ck"))
    assert codes([*check_misplaced_parts(here), *check_absent_parts(here)]) == []


@pytest.mark.parametrize("folder", EDGES, ids=sample_id)
def test_so_are_the_corners_of_the_format(folder: Path) -> None:
    here = read_checkpoint(folder)
    assert found([*check_misplaced_parts(here), *check_absent_parts(here)]) == []


def test_folders_that_were_swapped(tmp_path: Path) -> None:
    accelerate(tmp_path)
    swap(tmp_path / "pytorch_model_fsdp_0", tmp_path / "optimizer_0")
    problems = list(check_training_state(read_checkpoint(tmp_path)))
    assert found(problems) == [
        ("E", "misplaced-file", "pytorch_model_fsdp_0"),
        ("E", "misplaced-file", "optimizer_0"),
    ]
    assert problems[0].message == "it holds an optimizer's state, not the weights of a model"


@pytest.mark.parametrize("is_over_model", [True, False])
def test_a_file_that_was_copied_over_the_other_one(is_over_model: bool, tmp_path: Path) -> None:
    torch.save(MODEL, tmp_path / "pytorch_model_fsdp.bin")
    torch.save(ADAM, tmp_path / "optimizer.bin")
    source, target = ("optimizer", "pytorch_model_fsdp") if is_over_model else ("pytorch_model_fsdp", "optimizer")
    shutil.copy(tmp_path / f"{source}.bin", tmp_path / f"{target}.bin")
    assert found(check_training_state(read_checkpoint(tmp_path))) == [("E", "misplaced-file", f"{target}.bin")]


def test_files_of_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        for kind in ("model", "optim"):
            state = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(4, 2)}}, "param_groups": []}
            torch.save(state, tmp_path / f"{kind}_world_size_2_rank_{rank}.pt")
    problems = list(check_misplaced_parts(read_checkpoint(tmp_path)))
    assert found(problems) == [("E", "misplaced-file", "model_world_size_2_rank_0.pt")]


def test_a_model_may_have_a_module_that_is_called_state(tmp_path: Path) -> None:
    state = {"state.up.weight": torch.ones(4, 3), "state.step": torch.ones(1)}
    save_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": state})
    assert list(check_misplaced_parts(read_checkpoint(tmp_path))) == []


def test_an_optimizer_of_another_make_is_not_judged(tmp_path: Path) -> None:
    save_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": dict(MODEL)})
    save_dcp(tmp_path / "optimizer_0", {"optimizer": {"master": torch.ones(3), "count": 3}})
    assert list(check_misplaced_parts(read_checkpoint(tmp_path))) == []


def test_a_model_that_is_lost(tmp_path: Path) -> None:
    accelerate(tmp_path)
    shutil.rmtree(tmp_path / "pytorch_model_fsdp_0")
    assert found(check_absent_parts(read_checkpoint(tmp_path))) == [("E", "no-model", "")]
    # The optimizer alone may be what was meant.
    assert list(check_absent_parts(read_checkpoint(tmp_path / "optimizer_0"))) == []


def test_an_optimizer_that_is_lost(tmp_path: Path) -> None:
    accelerate(tmp_path)
    shutil.rmtree(tmp_path / "optimizer_0")
    assert found(check_absent_parts(read_checkpoint(tmp_path))) == [("N", "no-optimizer", "")]


def test_a_distributed_checkpoint_of_a_model_is_whole(tmp_path: Path) -> None:
    save_dcp(tmp_path / "ck", {"model": {"w": rows(torch.ones(4, 2), 2)}})
    assert list(check_absent_parts(read_checkpoint(tmp_path / "ck"))) == []
