"""Cases of themes 7 and 8 that inspect shows: optimizers, data loaders, random states, old layouts.

The load_state halves are in test_state_resume; those of convert (P34, P37, P44) belong to that command.
"""

from __future__ import annotations

import os
import pickletools
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fsdp_ckpt
from fsdp_ckpt import InspectReport
from fsdp_ckpt.errors import UnsafePickle
from fsdp_ckpt.ops.inspect import PartReport
from tests.cases.check import assert_same, inspect_json, merge_and_load
from tests.cases.models import Mlp, reference

NAMES = ["up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias"]
WEIGHTS, REST = ["up.weight", "down.weight"], ["up.bias", "down.bias", "norm.weight", "norm.bias"]


def part_of(report: InspectReport, role: str) -> PartReport:
    """Return the only part of a role."""
    (part,) = [part for part in report.parts if part.role == role]
    return part


def group(objects: Any, number: int) -> dict[str, Any]:
    """Return the options of a param group from the flattened names of its items."""
    head = f"param_groups.{number}."
    return {name.removeprefix(head): value for name, value in objects.items() if name.startswith(head)}


def test_p34_every_group_shows_its_own_options(built: Path) -> None:
    """pytorch/pytorch#143828, VeOmni#878: later groups, and one without parameters, keep their hyper-parameters."""
    (part,) = [part for part in inspect_json(built / "p34", "--objects")["parts"] if part["role"] == "optimizer"]
    groups = [group(part["objects"], number) for number in range(3)]
    assert group(part["objects"], 3) == {}
    shown = [[item[name] for name in ("lr", "betas", "eps", "weight_decay", "params")] for item in groups]
    assert shown == [
        [1e-3, [0.8, 0.95], 1e-8, 0.1, WEIGHTS],
        [2e-3, [0.9, 0.999], 1e-8, 0.0, REST],
        [5e-4, [0.9, 0.999], 1e-6, 0.01, []],
    ]


@pytest.mark.parametrize(
    ("layout", "keys", "lrs"),
    [
        ("index", ["0", "1", "2", "3", "4", "5"], {"param_groups.0.lr": 1e-3, "param_groups.1.lr": 2e-3}),
        ("name", NAMES, {"param_groups.0.lr": 1e-3, "param_groups.1.lr": 2e-3}),
        ("flat", NAMES, {f"param_groups.{name}.lr": 1e-3 if name in WEIGHTS else 2e-3 for name in NAMES}),
    ],
)
def test_p37_three_layouts_of_one_optimizer(layout: str, keys: list[str], lrs: dict[str, float], built: Path) -> None:
    """accelerate#3971, fla-org/flame#15: keyed by index, by name, flattened."""
    report = fsdp_ckpt.inspect(built / "p37" / layout, objects=True)
    (part,) = report.parts
    assert part.role == "optimizer"
    assert report.complete
    wanted = {f"state.{key}.{kind}" for key in keys for kind in ("step", "exp_avg", "exp_avg_sq")}
    assert {tensor.name for tensor in part.tensors} == wanted
    assert {name: value for name, value in part.objects.items() if name.endswith(".lr")} == lrs


def test_p37_none_of_them_is_merged_as_a_model(built: Path, tmp_path: Path) -> None:
    """They hold optimizer state only."""
    for layout in ("index", "name", "flat"):
        with pytest.raises(fsdp_ckpt.FsdpCkptError, match="optimizer state, not model weights"):
            fsdp_ckpt.merge(built / "p37" / layout, tmp_path / "out")


def test_p40_each_ranks_position_in_its_data(built: Path) -> None:
    """pytorch/torchtitan#816, Megatron-Bridge#5637: four entries, one per rank."""
    part = part_of(fsdp_ckpt.inspect(built / "p40", objects=True), "dataloader")
    assert part.objects == {f"dp_rank_{rank}.pos": 10 * (rank + 1) for rank in range(4)}
    assert part.world_size == 4


@pytest.mark.parametrize(
    ("layout", "optim", "extra"),
    [
        ("old", ["param_groups"], {"extra": {"l": [1, {"x": 2}]}}),
        ("new", [f"param_groups.0.{option}" for option in ("betas", "eps", "lr", "params")], {"l.0": 1, "l.1.x": 2}),
    ],
)
def test_p44_containers_as_one_blob_or_flattened(
    layout: str, optim: list[str], extra: dict[str, Any], built: Path, tmp_path: Path
) -> None:
    """pytorch/pytorch#133923, mosaicml/composer#3565, #3252: torch <= 2.3 and now."""
    folder = built / "p44" / layout
    report = fsdp_ckpt.inspect(folder, objects=True)
    assert set(optim) <= set(part_of(report, "optimizer").objects)
    assert part_of(report, "other").objects == extra
    _, found = merge_and_load(folder, tmp_path / "out")
    assert_same(found, reference(Mlp()))


def test_p44_the_blob_shows_the_same_groups(built: Path) -> None:
    """One item, but nothing in it is lost."""
    old, new = (
        part_of(fsdp_ckpt.inspect(built / "p44" / layout, objects=True), "optimizer").objects
        for layout in ("old", "new")
    )
    assert old == {"param_groups": [group(new, 0)]}
    assert group(new, 0)["lr"] == 1e-3
    assert sorted(group(new, 0)["params"]) == sorted(NAMES)


class Evil:
    """Pickles into a call."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.mark}'",)


def save_random_states(file: Path, *, numpy_1: bool, **more: Any) -> dict[str, Any]:
    """Save random states as Trainer does; with the names of NumPy 1 or 2 in the pickle."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state(), **more}
    torch.save(state, file)
    if numpy_1:
        with zipfile.ZipFile(file) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, data in records.items():
                archive.writestr(name, data.replace(b"numpy._core.", b"numpy.core."))
    names = {name for name in pickled_globals(file) if "multiarray" in name}
    assert names == {f"numpy.{'core' if numpy_1 else '_core'}.multiarray _reconstruct"}
    return state


def pickled_globals(file: Path) -> set[str]:
    """Return the globals that a torch.save file refers to."""
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        data = archive.read(name)
    return {str(argument) for code, argument, _ in pickletools.genops(data) if code.name == "GLOBAL"}


@pytest.mark.parametrize("numpy_1", [True, False], ids=["numpy1", "numpy2"])
@pytest.mark.parametrize("name", ["rng_state_0.pth", "random_states_0.pkl"])
def test_p42_random_states_are_read_without_running_them(name: str, numpy_1: bool, built: Path, tmp_path: Path) -> None:
    """huggingface/transformers#40500, #34631: torch >= 2.6 refuses these files with weights_only."""
    folder = tmp_path / "checkpoint-1"
    shutil.copytree(built / "p22", folder)
    state = save_random_states(folder / name, numpy_1=numpy_1)
    part = part_of(fsdp_ckpt.inspect(folder, objects=True), "rng")
    shown = part.objects[name]
    version, numbers, gauss = state["python"]
    assert shown["python"][0] == version
    assert shown["python"][1][:64] == list(numbers[:64])
    assert shown["python"][2] == gauss
    kind, keys, position, has_gauss, cached = state["numpy"]
    assert [shown["numpy"][i] for i in (0, 2, 3, 4)] == [kind, position, has_gauss, cached]
    assert str(keys.shape) in shown["numpy"][1]
    assert "u4" in shown["numpy"][1] or "uint32" in shown["numpy"][1]
    assert shown["cpu"] == f"<tensor uint8 {state['cpu'].numel()}>"


def test_p42_any_other_global_is_named_and_not_run(tmp_path: Path) -> None:
    """Beside a model it is shown as what it would have needed; asked for by name, the file is refused."""
    folder, mark = tmp_path / "checkpoint-1", tmp_path / "MARK"
    folder.mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    save_random_states(folder / "rng_state_0.pth", numpy_1=False, x=Evil(mark))
    part = part_of(fsdp_ckpt.inspect(folder, objects=True), "rng")
    assert "posix.system" in part.objects["rng_state_0.pth"]["x"]
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        fsdp_ckpt.inspect(folder / "rng_state_0.pth", objects=True)
    assert not mark.exists()
    torch.load(folder / "rng_state_0.pth", weights_only=False)
    assert mark.exists(), "the file does not do what this test is about"
