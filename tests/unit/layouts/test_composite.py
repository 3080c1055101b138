"""Folders of several parts: what belongs to what, and what damage in one part means for the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp_ckpt import merge
from fsdp_ckpt.catalog import Role
from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.layouts.composite import step_of
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.store.local import Folder, LocalStore
from tests.build import assert_same, read_safetensors, rows, save_dcp

WEIGHT = torch.arange(30.0).reshape(10, 3)


@pytest.fixture
def accelerate(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-2000"
    save_dcp(folder / "pytorch_model_fsdp_0", {"model": {"w": rows(WEIGHT, 2)}})
    moments = {"state": {"w": {"exp_avg": rows(WEIGHT, 2), "step": torch.tensor(7.0)}}, "param_groups": [{"lr": 0.1}]}
    save_dcp(folder / "optimizer_0", {"optimizer": moments})
    torch.save({"last_epoch": 5}, folder / "scheduler.bin")
    for rank in range(2):
        torch.save({"torch": torch.zeros(4, dtype=torch.uint8)}, folder / f"random_states_{rank}.pkl")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2000, "epoch": 1.5}))
    (folder / "config.json").write_text("{}")
    return folder


def test_parts_and_roles(accelerate: Path) -> None:
    found = read_checkpoint(accelerate)
    assert [(part.name, part.role, part.is_complete) for part in found.parts] == [
        ("pytorch_model_fsdp_0", Role.MODEL, True), ("optimizer_0", Role.OPTIMIZER, True),
        ("scheduler", Role.SCHEDULER, True), ("random_states_0", Role.RNG, True), ("random_states_1", Role.RNG, True),
    ]  # fmt: skip
    assert (found.step, found.world_size, dict(found.facts)) == (2000, 2, {"epoch": "1.5"})
    assert set(found.side_files) == {"config.json", "trainer_state.json"}
    sizes = {path.name: path.stat().st_size for path in (accelerate / "optimizer_0").iterdir()}
    assert {file.rpartition("/")[2]: size for file, size in found.parts[1].files.items()} == sizes


def cut_metadata(folder: Path) -> None:
    path = folder / "optimizer_0" / ".metadata"
    path.write_bytes(path.read_bytes()[:-10])


def no_metadata(folder: Path) -> None:
    (folder / "optimizer_0" / ".metadata").unlink()


def no_data(folder: Path) -> None:
    (folder / "optimizer_0" / "__1_0.distcp").unlink()


def broken_scheduler(folder: Path) -> None:
    (folder / "scheduler.bin").write_bytes(b"PK\3\4 broken")


def broken_states(folder: Path) -> None:
    (folder / "random_states_0.pkl").write_bytes(b"")


def broken_trainer_state(folder: Path) -> None:
    (folder / "trainer_state.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    "damage",
    [cut_metadata, no_metadata, no_data, broken_scheduler, broken_states, broken_trainer_state],
)
def test_damage_beside_the_model_does_not_matter_to_it(
    damage: Callable[[Path], None], accelerate: Path, tmp_path: Path
) -> None:
    damage(accelerate)
    assert read_checkpoint(accelerate).parts[0].is_complete
    merge(accelerate, tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), {"w": WEIGHT})


def test_a_broken_full_optimizer_is_reported(tmp_path: Path) -> None:
    torch.save({"w": WEIGHT}, tmp_path / "pytorch_model_fsdp.bin")
    (tmp_path / "optimizer.bin").write_bytes(b"PK\3\4 broken")
    found = read_checkpoint(tmp_path)
    assert [(part.name, part.is_complete) for part in found.parts] == [
        ("pytorch_model_fsdp", True), ("optimizer", False),
    ]  # fmt: skip
    assert found.parts[1].problems[0].code == "unreadable"


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    src = tmp_path / "src"
    for number in range(2):
        save_dcp(src / f"pytorch_model_fsdp_{number}", {"model": {"w": WEIGHT + number}}, ranks=1)
    with pytest.raises(FsdpCkptError, match="holds 2 models"):
        merge(src, tmp_path / "out")
    merge(src, tmp_path / "out", part="pytorch_model_fsdp_1")
    assert_same(read_safetensors(tmp_path / "out"), {"w": WEIGHT + 1})


@pytest.mark.parametrize(
    ("name", "step"),
    [("checkpoint-2000", 2000), ("step-10", 10), ("step_000010", 10), ("global_step_7", 7), ("iter_0000010", 10),
     ("ep0-ba10", 10), ("epoch_3", 3), ("epoch=0-step=3.ckpt", 3), ("step5", 5), ("model", None),
     ("timestep-5x", None), ("checkpoint", None)],
)  # fmt: skip
def test_the_step_that_a_name_tells(name: str, step: int | None, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    assert step_of(Folder(LocalStore(tmp_path / name))) == step


def test_the_newest_complete_checkpoint_of_a_run(tmp_path: Path) -> None:
    # Case P25: step-200 has no .metadata, step-300 is empty, step-400 has only .metadata.
    for step in (20, 100, 200, 400):
        save_dcp(tmp_path / f"step-{step}", {"w": rows(WEIGHT + step, 2)})
    (tmp_path / "step-200" / ".metadata").rename(tmp_path / "step-200" / ".metadata.tmp")
    (tmp_path / "step-300").mkdir()
    for file in (tmp_path / "step-400").glob("*.distcp"):
        file.unlink()
    found = read_checkpoint(tmp_path)
    assert (found.step, found.root.name) == (100, "step-100")
    passed = dict(found.facts)["passed over"]
    assert all(name in passed for name in ("step-200", "step-300", "step-400"))
    merge(tmp_path, tmp_path.parent / f"{tmp_path.name}-out")
    assert_same(read_safetensors(tmp_path.parent / f"{tmp_path.name}-out"), {"w": WEIGHT + 100})
    with pytest.raises(FsdpCkptError):
        merge(tmp_path / "step-200", tmp_path / "out")


def test_a_broken_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        save_dcp(tmp_path / f"step-{step}", {"w": rows(WEIGHT + step, 2)})
    data = (tmp_path / "step-2" / ".metadata").read_bytes()
    (tmp_path / "step-2" / ".metadata").write_bytes(data[:-10])
    assert read_checkpoint(tmp_path).step == 1
