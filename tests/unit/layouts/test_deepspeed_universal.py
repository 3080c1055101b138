"""DeepSpeed's universal checkpoints: its own, damaged, and small ones written by hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.registry import read_checkpoint
from tests.build import assert_same
from tests.unit.layouts.made_deepspeed import SHAPES, A, B, faults, part, save_model, values

FIXTURES = Path(__file__).parents[3] / "fixtures/deepspeed"
OPTIMIZER = {"param_groups": [{"lr": 0.1, "params": [0]}]}


def universal(folder: Path, *, flat: bool = False, optimizer: Any = OPTIMIZER, **more: Any) -> Path:
    """Two parameters; from ZeRO-3 they are flat and bare, else of their shape and in a dictionary."""
    module = {"a": A.bfloat16(), "b": B.bfloat16(), "b2": B.bfloat16(), "f": B.half()}
    save_model(folder, module=module, shapes=[SHAPES], shared_params={"b2": "b"}, **more)
    for name, tensor in {"a": A, "b": B}.items():
        (folder / "zero" / name).mkdir(parents=True)
        for field, value in {"fp32": tensor, "exp_avg": 10 * tensor}.items():
            torch.save(
                value.flatten() if flat else {"param": value, "cat_dim": 0}, folder / "zero" / name / f"{field}.pt"
            )
        torch.save(3 if flat else torch.tensor(3.0), folder / "zero" / name / "step.pt")
    torch.save(optimizer, folder / "zero/optimizer_state.pt")
    return folder


@pytest.mark.parametrize("flat", [False, True])
def test_weights_moments_and_groups(flat: bool, tmp_path: Path) -> None:
    found = read_checkpoint(universal(tmp_path / "global_step12_universal", flat=flat))
    assert_same(values(found), {"a": A, "b": B, "b2": B, "f": B.half()})
    moments = {"state.a.exp_avg": 10 * A, "state.b.exp_avg": 10 * B}
    steps = {} if flat else {f"state.{name}.step": torch.tensor(3.0) for name in "ab"}
    assert_same(values(found, "optimizer"), moments | steps)
    objects = {entry.path: entry.value for entry in part(found, "optimizer").objects.values()}
    assert objects == {("param_groups", 0, "lr"): 0.1, ("param_groups", 0, "params"): ["a", "b"]} | (
        {("state", name, "step"): 3 for name in "ab"} if flat else {}
    )
    assert (found.step, found.is_complete) == (12, True)


def test_steps_of_zero3_are_those_of_its_vectors(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "universal3_w2/global_step3_universal", tmp_path / "u")
    entries = part(read_checkpoint(tmp_path / "u"), "optimizer").tensors
    assert {entry.chunks[0].file for key, entry in entries.items() if key.endswith(".step")} == {
        "zero/optimizer_state.pt"
    }


@pytest.mark.parametrize(("gone", "name"), [("zero/b/fp32.pt", "model"), ("zero/b/exp_avg.pt", "optimizer")])
def test_a_missing_file(gone: str, name: str, tmp_path: Path) -> None:
    universal(tmp_path)
    (tmp_path / gone).unlink()
    found = read_checkpoint(tmp_path)
    if name == "optimizer":  # b still has a number of steps, but no moment: it was perhaps never trained
        assert part(found, "model").is_complete
        torch.save({"param": B}, tmp_path / "zero/b/exp_avg_sq.pt")
        found = read_checkpoint(tmp_path)
    assert ("error", "missing-file", gone) in faults(part(found, name).problems)


def test_a_missing_folder(tmp_path: Path) -> None:
    universal(tmp_path)
    shutil.rmtree(tmp_path / "zero/a")
    found = part(read_checkpoint(tmp_path), "model")
    assert ("error", "missing-file", "zero/a/fp32.pt") in faults(found.problems)
    assert ("error", "missing-shard", "a") in faults(found.problems)
    assert found.tensors["a"].shape == (2, 3)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"param": torch.zeros(3, 2)}, r"a tensor of shape \(3, 2\), the model file says \(2, 3\)"),
        (torch.zeros(5), r"a tensor of shape \(5,\), the model file says \(2, 3\)"),
        (torch.zeros(12)[::2], "a tensor of shape"),
        ({"weights": A}, "it holds no tensor"),
        (7, "it holds no tensor"),
    ],
)
def test_a_file_that_does_not_hold_the_parameter(value: Any, says: str, tmp_path: Path) -> None:
    universal(tmp_path)
    torch.save(value, tmp_path / "zero/a/fp32.pt")
    with pytest.raises(MalformedFile, match=says):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "groups",
    [None, [7], [{}], [{"params": [0]}, {"params": [0]}], [{"params": [1]}], [{"params": ["a"]}], [{"params": []}]],
)
def test_groups_that_are_none(groups: Any, tmp_path: Path) -> None:
    with pytest.raises(MalformedFile, match=r"optimizer_state.pt: .*(param_groups|params|group)"):
        read_checkpoint(universal(tmp_path, optimizer={"param_groups": groups}))


def test_parameters_that_deepspeed_takes_for_each_other(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    with pytest.raises(Incompatible, match="round_robin_gradients") as caught:
        read_checkpoint(universal(tmp_path / "two", ds_config=config, dp_world_size=2))
    assert caught.value.hint
    assert read_checkpoint(universal(tmp_path / "one", ds_config=config, dp_world_size=1)).is_complete
