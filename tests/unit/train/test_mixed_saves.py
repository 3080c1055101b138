"""Files of another save, or of another rank, in a checkpoint of ours: alike in size and heads, and never loaded."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_ckpt import Checkpointer, latest_complete, load_state, merge, save_state, validate
from fsdp_ckpt.errors import IncompleteCheckpoint
from fsdp_ckpt.layouts.verdict import State, judge

FILE = "pytorch_model_fsdp_0/__0_0.distcp"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of one run; the later one has the earlier one's model file, of the same size."""
    model = nn.Linear(7, 5)
    saver = Checkpointer(tmp_path, model, durable=False)
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)
            model.bias.fill_(-step)
        saver.save(step)
    old, new = tmp_path / "step-1" / FILE, tmp_path / "step-2" / FILE
    assert old.stat().st_size == new.stat().st_size
    assert old.read_bytes()[:64] != new.read_bytes()[:64]
    shutil.copy(old, new)
    return tmp_path


def test_a_file_of_an_earlier_step_is_refused_and_passed_over(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(7, 5)
    before = model.weight.detach().clone()
    with pytest.raises(IncompleteCheckpoint, match=f"{FILE} is of another save") as caught:
        load_state(run / "step-2", model)
    assert f"fsdp-ckpt validate {run / 'step-2'}" in str(caught.value.hint)
    assert torch.equal(model.weight, before)
    with caplog.at_level(logging.WARNING, "fsdp_ckpt"):
        report = Checkpointer(run, model).resume()
    assert report is not None
    assert report.step == 1
    assert torch.equal(model.weight, torch.full((5, 7), 1.0))
    assert "another save" in caplog.text


def test_nobody_takes_it_for_whole(run: Path, tmp_path: Path) -> None:
    assert latest_complete(run) == run / "step-1"
    assert judge(run / "step-2").state is State.DAMAGED
    name = FILE.rpartition("/")[2]
    for below, file in (("", FILE), ("pytorch_model_fsdp_0", name), (FILE, name)):
        found = [(one.name, one.where) for one in validate(run / "step-2" / below).findings if one.severity == "error"]
        assert found == [("mixed-saves", file)]
    for path in (run / "step-2", run / "step-2/pytorch_model_fsdp_0"):
        with pytest.raises(IncompleteCheckpoint, match="another save"):
            merge(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_the_manifest_files_still_have_to_be_of_one_save(tmp_path: Path) -> None:
    """Accelerate's loader would take them; a model and an optimizer of two steps are told by their stamps."""
    model = nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(7)).sum().backward()
    optimizer.step()
    for step in (1, 2):
        save_state(tmp_path / f"step-{step}", model, optimizer, durable=False, rng=False)
        (tmp_path / f"step-{step}" / "fsdp_ckpt.json").unlink()
    shutil.copy(tmp_path / "step-1/optimizer_0/__0_0.distcp", tmp_path / "step-2/optimizer_0/__0_0.distcp")
    with pytest.raises(IncompleteCheckpoint, match=r"is of another save .*, others are of"):
        load_state(tmp_path / "step-2", model, optimizer)
    assert "mixed-saves" in {one.name for one in validate(tmp_path / "step-2").findings if one.severity == "error"}
    load_state(tmp_path / "step-1", model, optimizer)


def test_a_file_of_another_rank_is_told_by_its_name(tmp_path: Path) -> None:
    save_state(tmp_path / "step-1", nn.Linear(3, 2), durable=False)
    data = bytearray((tmp_path / "step-1" / FILE).read_bytes())
    place = data.index(b" rank=0\n") + 6
    data[place : place + 1] = b"1"
    (tmp_path / "step-1" / FILE).write_bytes(data)
    with pytest.raises(IncompleteCheckpoint, match="rank 1 saved it, its name says rank 0"):
        load_state(tmp_path / "step-1", nn.Linear(3, 2))


def test_files_without_a_stamp_are_taken_as_they_are(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_state(tmp_path / "step-1", model, durable=False)
    path = tmp_path / "step-1" / FILE
    data = path.read_bytes()
    path.write_bytes(bytes(64) + data[64:])
    other = nn.Linear(3, 2)
    load_state(tmp_path / "step-1", other)
    assert torch.equal(other.weight, model.weight)
