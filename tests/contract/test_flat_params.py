"""FSDP1's flat parameters get their names and shapes back: saved by real ranks, judged by the model before wrapping."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsdp_ckpt.catalog import Checkpoint
from fsdp_ckpt.errors import FlatParameters, IncompleteCheckpoint
from fsdp_ckpt.layouts.flat_params import name_flat_parameters
from fsdp_ckpt.layouts.flat_shapes import ModelShapes, read_shapes
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.view import SliceView
from fsdp_ckpt.plan.output import OutputTensor
from fsdp_ckpt.run.sources import Sources
from tests.build import assert_same
from tests.cases.launch import build_once, run_module
from tests.compat.samples import SHARED
from tests.contract.flat_ranks import CASES
from tests.contract.suite import FIXTURES

SHARED_NAME = "head.weight"
"""The further name of the embedding, which `named_parameters()` leaves out."""

GOLDEN = sorted(path for root in (FIXTURES, SHARED / "golden") for path in root.glob("torch-*/local_state_dict*_w2"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one folder per case."""
    return build_once(tmp_path_factory, "flat-params", lambda out: run_module("tests.contract.flat_ranks", str(out)))


def read(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a named model's tensors, checksums compared."""
    part = checkpoint.parts[0]
    assert part.flat is None
    assert [*part.problems] == []
    with Sources(checkpoint.roots) as sources:
        found = {}
        for entry in part.tensors.values():
            tensor = OutputTensor(name=entry.name, dtype=entry.dtype, source=entry)
            view = SliceView(tensor, sources, "pt", verify=True)
            found[entry.name] = view.read((0,) * len(entry.shape), entry.shape)
    return found


def whole(folder: Path) -> dict[str, Tensor]:
    """Return the model's state dict as it was before wrapping."""
    found: dict[str, Tensor] = torch.load(folder / "whole.pt", weights_only=True)
    return found


def without_shared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != SHARED_NAME}


@pytest.mark.dist
@pytest.mark.parametrize("case", [case for case in CASES if case != "slices_dcp"])
def test_with_the_state_dict_before_wrapping(saved: Path, case: str) -> None:
    shapes = read_shapes(saved / case / "whole.pt")
    assert shapes.aliases == {SHARED_NAME: "embed.weight"}
    named = name_flat_parameters(read_checkpoint(saved / case / "checkpoint"), shapes)
    assert_same(read(named), whole(saved / case))
    assert [*named.parts[0].tensors] == [*whole(saved / case)], "in the module's order"


@pytest.mark.dist
@pytest.mark.parametrize("case", ["flat_w2", "flat_w3", "flat_dcp"])
def test_with_shapes_as_json(saved: Path, case: str) -> None:
    named = name_flat_parameters(
        read_checkpoint(saved / case / "checkpoint"), read_shapes(saved / case / "shapes.json")
    )
    assert_same(read(named), without_shared(whole(saved / case)))


@pytest.mark.dist
@pytest.mark.parametrize("case", ["slices_w2", "slices_w3"])
def test_slices_tell_of_the_shared_name_that_json_leaves_out(saved: Path, case: str) -> None:
    named = name_flat_parameters(
        read_checkpoint(saved / case / "checkpoint"), read_shapes(saved / case / "shapes.json")
    )
    assert_same(read(named), whole(saved / case))


@pytest.mark.dist
def test_copied_slices_of_a_name_that_the_shapes_lack_are_refused(saved: Path) -> None:
    checkpoint = read_checkpoint(saved / "slices_copied" / "checkpoint")
    with pytest.raises(FlatParameters, match=r"does not tell the shape of `head\.weight`"):
        name_flat_parameters(checkpoint, read_shapes(saved / "slices_copied" / "shapes.json"))


@pytest.mark.dist
@pytest.mark.parametrize("file", ["whole.pt", "shapes.json"])
def test_a_distributed_checkpoint_with_one_rank_of_the_slices_is_refused(saved: Path, file: str) -> None:
    checkpoint = read_checkpoint(saved / "slices_dcp" / "checkpoint")
    with pytest.raises(FlatParameters, match="one rank's slices were kept"):
        name_flat_parameters(checkpoint, read_shapes(saved / "slices_dcp" / file))


@pytest.mark.dist
def test_slices_need_no_order(saved: Path, tmp_path: Path) -> None:
    """Row-major, that is: safetensors cannot say that a tensor was laid out otherwise."""
    expected = whole(saved / "slices_w3")
    tensors = without_shared({name: tensor.contiguous() for name, tensor in expected.items()})
    save_file(tensors, tmp_path / "model.safetensors")
    shapes = read_shapes(tmp_path / "model.safetensors")
    assert shapes.doubt is not None
    orders = read_shapes(saved / "slices_w3" / "whole.pt").orders
    assert orders == {"conv.weight": (0, 2, 3, 1)}
    checkpoint = read_checkpoint(saved / "slices_w3" / "checkpoint")
    assert_same(read(name_flat_parameters(checkpoint, replace(shapes, orders=orders))), expected)


@pytest.mark.dist
def test_flat_parameters_need_the_order(saved: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in without_shared(whole(saved / "flat_w2")).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(saved / "flat_w2" / "checkpoint")
    with pytest.raises(FlatParameters, match="safetensors files do not keep the order") as caught:
        name_flat_parameters(checkpoint, read_shapes(tmp_path / "model.safetensors"))
    assert "named_parameters()" in str(caught.value.hint)


@pytest.mark.dist
def test_shapes_that_do_not_add_up_are_refused_with_both_numbers(saved: Path, tmp_path: Path) -> None:
    rows = json.loads((saved / "flat_w2" / "shapes.json").read_text())
    (tmp_path / "shapes.json").write_text(json.dumps([row for row in rows if row[0] != "mids.0.one.gain"]))
    checkpoint = read_checkpoint(saved / "flat_w2" / "checkpoint")
    # 3 * 5 + 5 of the linear layer, 5 + 5 of the norm, 3 * 5 * 2, and the one that is left out
    with pytest.raises(FlatParameters, match=r"`mids\.0\.one\._flat_param` has 61 elements, .* have 60"):
        name_flat_parameters(checkpoint, read_shapes(tmp_path / "shapes.json"))


@pytest.mark.dist
@pytest.mark.parametrize("case", ["flat_w3", "slices_w3"])
def test_a_missing_rank_shows(saved: Path, case: str, tmp_path: Path) -> None:
    shutil.copytree(saved / case / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "pytorch_model_fsdp_0_rank1.bin").unlink()
    shapes = read_shapes(saved / case / "whole.pt")
    checkpoint = read_checkpoint(tmp_path / "checkpoint")
    if case == "slices_w3":
        with pytest.raises(IncompleteCheckpoint, match="2 of 3 rank files are there; missing: rank 1"):
            name_flat_parameters(checkpoint, shapes)
        return
    part = name_flat_parameters(checkpoint, shapes).parts[0]
    assert not part.is_complete
    assert {problem.code for problem in part.problems} == {"missing-rank", "missing-shard"}


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name}")
@pytest.mark.parametrize("is_ordered", [True, False])
def test_what_versions_of_torch_saved(folder: Path, is_ordered: bool) -> None:
    layout = json.loads((folder / "layout.json").read_text())["flat_params"]["0"]
    names = {
        f"{unit}.{fqn}".removeprefix("."): tuple(shape)
        for unit, held in layout.items()
        for fqn, shape in zip(held["fqns"], held["shapes"], strict=True)
    }
    tied = {"lm_head.weight": "embed.weight"}
    shapes = {**names, "lm_head.weight": names["embed.weight"]}
    known = ModelShapes(source="shapes", shapes=shapes, doubt=None if is_ordered else "no order", aliases=tied)
    checkpoint = read_checkpoint(folder)
    if not is_ordered and "flat_w2" in folder.name:
        with pytest.raises(FlatParameters, match="no order"):
            name_flat_parameters(checkpoint, known)
        return
    assert_same(read(name_flat_parameters(checkpoint, known)), load_file(folder / "expected.safetensors"))
