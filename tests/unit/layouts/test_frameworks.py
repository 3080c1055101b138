"""What lies beside the weights; how real frameworks lay it out is in tests/contract/test_frameworks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_ckpt import merge
from fsdp_ckpt.catalog import Role, Severity
from fsdp_ckpt.errors import IncompleteCheckpoint
from fsdp_ckpt.layouts.registry import read_checkpoint
from tests.build import assert_same, read_safetensors, rows, save_dcp

WEIGHT = torch.arange(30.0).reshape(10, 3)
MODEL = {"w": rows(WEIGHT, 2)}
MOMENTS = {"state": {"w": {"exp_avg": rows(WEIGHT, 2)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_dcp(tmp_path / "step_7" / "model", MODEL)
    save_dcp(tmp_path / "step_7" / "optim", MOMENTS)
    return tmp_path / "step_7"


def found(path: Path) -> list[tuple[str, Role, bool]]:
    return [(part.name, part.role, part.is_complete) for part in read_checkpoint(path).parts]


def test_model_and_optimizer_in_folders_of_their_own(folder: Path) -> None:
    (folder / "rng").mkdir()
    torch.save({"torch": torch.zeros(4)}, folder / "rng" / "rng_0.pt")
    (folder / "rng" / "notes.txt").write_text("no state")
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.root, checkpoint.chosen, checkpoint.step) == (folder, None, 7)
    assert (checkpoint.layout, checkpoint.world_size) == ("dcp", 2)
    assert found(folder) == [
        ("model", Role.MODEL, True), ("optim", Role.OPTIMIZER, True), ("rng", Role.RNG, True),
    ]  # fmt: skip
    assert list(checkpoint.parts[2].files) == ["rng/rng_0.pt"]
    assert [entry.name for entry in checkpoint.parts[1].tensors.values()] == ["state.w.exp_avg"]


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_a_damaged_optimizer_does_not_keep_the_model(name: str, folder: Path, tmp_path: Path) -> None:
    damaged = folder / "optim" / name
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert found(folder) == [("model", Role.MODEL, True), ("optim", Role.OPTIMIZER, False)]
    merge(folder, tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), {"w": WEIGHT})


def test_a_folder_that_only_happens_to_have_such_a_name(folder: Path, tmp_path: Path) -> None:
    save_dcp(tmp_path / "other" / "model", MODEL)
    (tmp_path / "other" / "train").mkdir()
    (tmp_path / "other" / "train" / "log.txt").write_text("loss 0.1")
    checkpoint = read_checkpoint(tmp_path / "other")
    assert checkpoint.root == tmp_path / "other" / "model"
    assert [part.name for part in checkpoint.parts] == ["model"]


def test_small_files_beside_a_distributed_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "epoch=1-step=30.ckpt"
    save_dcp(path, {"model": MODEL, "optimizer_0": MOMENTS})
    torch.save({"epoch": 1}, path / "meta.pt")
    assert found(path) == [
        ("model", Role.MODEL, True), ("optimizer_0", Role.OPTIMIZER, True), ("meta", Role.OTHER, True),
    ]  # fmt: skip
    assert (read_checkpoint(path).layout, read_checkpoint(path).step) == ("lightning", 30)


def test_a_folder_named_like_a_part_is_told_from_it(tmp_path: Path) -> None:
    save_dcp(tmp_path / "ck", {"model": MODEL, "extra_state": {"epoch": 3}})
    (tmp_path / "ck" / "extra_state").mkdir()
    torch.save({"epoch": 3}, tmp_path / "ck" / "extra_state" / "extra_state_rank_0.pt")
    parts = read_checkpoint(tmp_path / "ck").parts
    assert [part.name for part in parts] == ["model", "extra_state", "extra_state_files"]
    assert list(parts[1].objects) == ["extra_state.epoch"]
    assert list(parts[2].files) == ["extra_state/extra_state_rank_0.pt"]


def test_a_model_that_is_shorter_than_its_optimizer_was(tmp_path: Path) -> None:
    """torch's Hugging Face writer: without the last rank's file every tensor ends earlier, and nothing else says so."""
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "ck"), save_distributed=True)
    dcp.save({"w": WEIGHT}, storage_writer=writer, no_dist=True)  # the file of one rank
    save_dcp(tmp_path / "ck" / "optimizer", {"optimizer": MOMENTS})  # of two
    (model, optimizer) = read_checkpoint(tmp_path / "ck").parts
    assert [(p.code, p.severity, p.where) for p in model.problems] == [
        ("missing-rank", Severity.ERROR, "shard-00002-model-00001-of-00001.safetensors")
    ]
    assert optimizer.is_complete
    with pytest.raises(IncompleteCheckpoint):
        merge(tmp_path / "ck", tmp_path / "out")


def test_optimizer_and_rank_shards_in_one_folder(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "ck"), save_distributed=True)
    dcp.save({"w": WEIGHT}, storage_writer=writer, no_dist=True)
    dcp.save({"optimizer": {"state": {"w": {"exp_avg": WEIGHT}}}}, checkpoint_id=str(tmp_path / "ck"), no_dist=True)
    assert found(tmp_path / "ck") == [("model", Role.MODEL, True), ("optimizer", Role.OPTIMIZER, True)]
    merge(tmp_path / "ck", tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), {"w": WEIGHT})


def test_a_file_is_of_one_part_only(tmp_path: Path) -> None:
    save_dcp(tmp_path / "ck", {"model": MODEL})
    torch.save({"epoch": 1}, tmp_path / "ck" / "recipe_state.pt")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "ck" / "optimizer.pt")
    files = [file for part in read_checkpoint(tmp_path / "ck").parts for file in part.files]
    assert files.count("recipe_state.pt") == 1
