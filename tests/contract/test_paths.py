"""What is no checkpoint is refused; any path into one leads to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsdp_ckpt import inspect, merge
from fsdp_ckpt.errors import CheckpointNotFound, FlatParameters, UnknownLayout
from tests.build import rows, save_dcp
from tests.contract.suite import FIXTURES


def test_flat_parameters_are_explained_and_refused(tmp_path: Path) -> None:
    path = FIXTURES / "torch-2.13.0" / "local_state_dict_w2" / "pytorch_model_fsdp_rank0.bin"
    for file in path.parent.glob("*.bin"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (part,) = inspect(tmp_path).parts
    assert part.flat is not None
    with pytest.raises(FlatParameters):
        merge(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("names", [[], ["notes.txt"], ["a.csv", "events.out"], ["x.json", "y.py"], [".hidden"]])
def test_an_unknown_folder_is_refused(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for name in names:
        (tmp_path / "x" / name).write_text("x")
    for use in (inspect, lambda path: merge(path, tmp_path / "out")):
        with pytest.raises(UnknownLayout, match="not a checkpoint") as caught:
            use(tmp_path / "x")
        assert caught.value.exit_code == 3
        assert not names or names[0] in str(caught.value), "says what is there"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "x", "PK\3\4", "\x80\x02.", "{}"])
def test_an_unknown_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_text(text)
    with pytest.raises((UnknownLayout, ValueError)) as caught:
        inspect(path)
    assert getattr(caught.value, "exit_code", None) in (3, 4)


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-10").mkdir()
    with pytest.raises(CheckpointNotFound, match="does not exist") as caught:
        inspect(tmp_path / "checkpoint-11")
    assert "checkpoint-10" in str(caught.value.hint), "says what is there instead"


PART = "checkpoint-20/pytorch_model_fsdp_0"


@pytest.mark.parametrize("below", ["checkpoint-20", PART, f"{PART}/.metadata", f"{PART}/__0_0.distcp", "."])
def test_any_path_into_a_checkpoint_leads_to_it(below: str, tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(4, 3)
    save_dcp(tmp_path / "run" / "checkpoint-20" / "pytorch_model_fsdp_0", {"model": {"w": rows(weight, 2)}})
    save_dcp(tmp_path / "run" / "checkpoint-10" / "pytorch_model_fsdp_0", {"model": {"w": rows(weight + 1, 2)}})
    report = inspect(tmp_path / "run" / below)
    assert report.parts[0].name == "pytorch_model_fsdp_0"
    assert report.step == 20
    merge(tmp_path / "run" / below, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], weight)
