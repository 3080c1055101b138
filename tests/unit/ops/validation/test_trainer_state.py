from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.validation.trainer_state import check_trainer_state
from tests.unit.ops.validation.made import checkpoint, found


def told(folder: Path, text: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text(text)
    problems = list(check_trainer_state(checkpoint(folder, side_files=["trainer_state.json"])))
    assert found(problems) in ([], [("W", "bad-trainer-state", "trainer_state.json")])
    return [problem.message for problem in problems]


def test_a_state_of_this_step(tmp_path: Path) -> None:
    assert told(tmp_path / "checkpoint-50", json.dumps({"global_step": 50})) == []


@pytest.mark.parametrize("name", ["best", "checkpoint-best", "step_7"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    assert told(tmp_path / name, json.dumps({"global_step": 50})) == []


def test_a_state_of_another_step(tmp_path: Path) -> None:
    assert told(tmp_path / "checkpoint-5", json.dumps({"global_step": 50})) == [
        "global_step is 50, its folder's name says 5"
    ]


@pytest.mark.parametrize("text", ['{"global_step": 5', "", "[" * 100_000])
def test_no_json(text: str, tmp_path: Path) -> None:
    (message,) = told(tmp_path / "checkpoint-5", text)
    assert message.startswith("it is no JSON: ")


@pytest.mark.parametrize("text", ["[]", "{}", '{"global_step": "5"}', '{"global_step": true}'])
def test_no_step(text: str, tmp_path: Path) -> None:
    assert told(tmp_path / "checkpoint-5", text) == ["it tells no global_step"]


def test_it_is_found_where_the_trainer_puts_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text("{")
    assert [code for _, code, _ in found(check_trainer_state(read_checkpoint(folder)))] == ["bad-trainer-state"]
    (folder / "trainer_state.json").unlink()
    assert list(check_trainer_state(read_checkpoint(folder))) == []


def test_a_link_out_of_the_checkpoint_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    (tmp_path / "elsewhere.json").write_text("{")
    (folder / "trainer_state.json").symlink_to(tmp_path / "elsewhere.json")
    assert list(check_trainer_state(checkpoint(folder, side_files=["trainer_state.json"]))) == []
