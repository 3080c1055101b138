"""Where DeepSpeed's saves are found: by their folder, through ``latest``, beside what other libraries write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_ckpt import merge
from fsdp_ckpt.catalog import Role
from fsdp_ckpt.errors import IncompleteCheckpoint
from fsdp_ckpt.layouts.registry import list_checkpoints, members_of_run, read_checkpoint
from fsdp_ckpt.layouts.runs import read_run
from fsdp_ckpt.layouts.verdict import State
from tests.build import assert_same
from tests.unit.layouts.made_deepspeed import FIRST, MODEL, SECOND, A, B, values, zero2, zero3

WHOLE = {"a": A, "b": B}


def test_latest_names_the_tag(tmp_path: Path) -> None:
    zero2(tmp_path / "global_step10")
    zero3(tmp_path / "global_step20")
    for tag, title in (
        ("global_step10", "DeepSpeed ZeRO-2 checkpoint"),
        ("global_step20\n", "DeepSpeed ZeRO-3 checkpoint"),
    ):
        (tmp_path / "latest").write_text(tag)
        found = read_checkpoint(tmp_path)
        assert (found.title, found.step, found.chosen) == (title, int(tag[11:]), str(tmp_path))
        assert found.root == tmp_path / tag.strip()
        assert_same(values(found), WHOLE)


def test_latest_names_what_is_not_there(tmp_path: Path) -> None:
    zero2(tmp_path / "global_step10")
    (tmp_path / "latest").write_text("global_step20")
    with pytest.raises(IncompleteCheckpoint, match="latest names `global_step20`, which is not there") as caught:
        read_checkpoint(tmp_path)
    assert caught.value.hint == f"fsdp-ckpt inspect {tmp_path}/global_step10"
    (tmp_path / "latest_universal").write_text("global_step10")
    assert read_checkpoint(tmp_path).step == 10


@pytest.mark.parametrize("text", [b"\xff\xfe", b"../global_step10", b"", b".", b"x" * 5000])
def test_a_file_of_that_name_that_is_no_pointer(text: bytes, tmp_path: Path) -> None:
    zero2(tmp_path / "run/global_step10")
    (tmp_path / "run/latest").write_bytes(text)
    assert_same(values(read_checkpoint(tmp_path / "run")), WHOLE)


def test_without_a_pointer_the_only_one_or_the_newest_whole_one(tmp_path: Path) -> None:
    zero2(tmp_path / "best")
    assert_same(values(read_checkpoint(tmp_path)), WHOLE)
    shutil.move(tmp_path / "best", tmp_path / "global_step10")
    assert read_checkpoint(tmp_path).step == 10
    zero2(tmp_path / "global_step20")
    (tmp_path / "global_step20" / SECOND).unlink()
    found = read_checkpoint(tmp_path)
    assert found.step == 10
    assert dict(found.facts)["passed over"] == "global_step20 (incomplete)"


def test_a_save_below_another_model_or_in_a_run_of_others_is_not_preferred(tmp_path: Path) -> None:
    zero2(tmp_path / "model/best")
    save_file({"c": A}, tmp_path / "model/model.safetensors")
    assert read_checkpoint(tmp_path / "model").layout == "hf-safetensors"
    zero2(tmp_path / "run/best")
    (tmp_path / "run/checkpoint-9").mkdir()
    save_file({"c": A}, tmp_path / "run/checkpoint-9/model.safetensors")
    assert read_checkpoint(tmp_path / "run").step == 9


def test_a_run_is_listed(tmp_path: Path) -> None:
    for step in (10, 20):
        zero2(tmp_path / f"global_step{step}")
    (tmp_path / "global_step20" / FIRST).unlink()
    (tmp_path / "latest").write_text("global_step20")
    assert list_checkpoints(tmp_path) == [(step, tmp_path / f"global_step{step}") for step in (20, 10)]
    assert members_of_run(tmp_path) == [tmp_path / f"global_step{step}" for step in (20, 10)]
    assert members_of_run(tmp_path / "global_step10") == []
    states = [(item.step, item.state, item.layout) for item in read_run(tmp_path).checkpoints]
    assert states == [(20, State.INCOMPLETE, "deepspeed"), (10, State.COMPLETE, "deepspeed")]


def test_the_trainers_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoint-7"
    zero3(folder / "global_step14")
    (folder / "latest").write_text("global_step14")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7, "epoch": 0.5, "log_history": []}))
    (folder / "config.json").write_text("{}")
    save_file({"a": A.half(), "b": B.half()}, folder / "model.safetensors")
    torch.save({"cpu": torch.zeros(1)}, folder / "rng_state_0.pth")
    found = read_checkpoint(folder)
    assert (found.layout, found.step, found.root) == ("deepspeed", 7, folder)
    assert set(found.side_files) == {"config.json", "trainer_state.json"}
    assert [part.name for part in found.parts if part.role is Role.MODEL] == ["model", "model"]
    assert any(part.role is Role.RNG for part in found.parts)
    merge(folder, tmp_path / "out")  # the fp32 weights rather than their copies in 16 bits
    assert_same(load_file(tmp_path / "out/model.safetensors"), WHOLE)
    assert [(item.step, item.state) for item in read_run(tmp_path / "run").checkpoints] == [(7, State.COMPLETE)]


def test_accelerates_folder(tmp_path: Path) -> None:
    zero2(tmp_path / "pytorch_model")
    (tmp_path / "latest").write_text("pytorch_model")
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.bin")
    torch.save({"step": 1}, tmp_path / "random_states_0.pkl")
    found = read_checkpoint(tmp_path)
    assert {part.role for part in found.parts} == {Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER, Role.RNG}
    assert_same(values(found), WHOLE)


def test_nodes_with_disks_of_their_own(tmp_path: Path) -> None:
    zero2(tmp_path / "0/global_step10")
    (tmp_path / "1/global_step10").mkdir(parents=True)
    shutil.move(tmp_path / "0/global_step10" / SECOND, tmp_path / "1/global_step10")
    folders = [tmp_path / f"{node}/global_step10" for node in range(2)]
    found = read_checkpoint(folders)
    assert found.is_complete
    merge(folders, tmp_path / "out")
    assert_same(load_file(tmp_path / "out/model.safetensors"), WHOLE)


def test_a_model_file_alone(tmp_path: Path) -> None:
    zero2(tmp_path / "tag")
    found = read_checkpoint(tmp_path / "tag" / MODEL)  # as any file of torch.save
    assert found.layout == "torch-file"
    assert next(part for part in found.parts if part.role is Role.MODEL).tensors.keys() == {"module.a", "module.b"}
