"""inspect tells what is in the checkpoints of real torch: names, shapes, shards, placements, writers, objects."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import fsdp_ckpt
from fsdp_ckpt.catalog import Part, Role
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.inspect import PartReport
from tests.cases.check import inspect_json
from tests.compat.samples import NAMED, RIGHT, SAMPLES, Sample, sample_id

OBJECTS = [sample for sample in RIGHT if sample.variant == "objects_w2"]
Box = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.mark.parametrize("sample", NAMED, ids=sample_id)
def test_names_dtypes_and_global_shapes(sample: Sample, tmp_path: Path) -> None:
    """As layout.json notes them while the checkpoint was written."""
    report = fsdp_ckpt.inspect(sample.copy(tmp_path / "src"))
    model = report.parts[0]
    assert model.role == "model"
    assert report.complete
    found = {tensor.name: (f"torch.{tensor.dtype}", list(tensor.shape)) for tensor in model.tensors}
    assert found == {name: (row["dtype"], row["shape"]) for name, row in sample.layout.items()}


@pytest.mark.parametrize("sample", NAMED, ids=sample_id)
def test_every_rank_holds_the_share_that_it_held(sample: Sample, tmp_path: Path) -> None:
    """The boxes of DTensors have the shapes of the ranks' local tensors, those of ShardedTensors also their places."""
    model = next(p for p in read_checkpoint(sample.copy(tmp_path / "src")).parts if p.role is Role.MODEL)
    boxes = _boxes(model)
    checked = 0
    for name, row in sample.layout.items():
        ranks = row.get("by_rank", {"0": {}}).values()
        if row["kind"] == "ShardedTensor":
            shards = [shard for rank in ranks for shard in rank.get("all", row.get("all"))]
            assert boxes[name] == {(tuple(shard["offsets"]), tuple(shard["sizes"])) for shard in shards}
        elif row["kind"] == "DTensor" and not any("_Strided" in text for text in _placements(row)):
            local = [rank.get("local_shape", row.get("local_shape")) for rank in ranks]
            assert {lengths for _, lengths in boxes[name]} == {tuple(shape) for shape in local if 0 not in shape}
        else:
            continue
        checked += 1
    assert checked >= 10 or sample.variant.startswith(("full", "hf_", "dcp_safetensors", "dcp_nodist"))


@pytest.mark.parametrize("sample", [s for s in NAMED if s.variant.startswith("rank_files")], ids=sample_id)
def test_placements_of_files_per_rank(sample: Sample, tmp_path: Path) -> None:
    """Where the files record them: as torch prints them."""
    model = fsdp_ckpt.inspect(sample.copy(tmp_path / "src")).parts[0]
    for tensor in model.tensors:
        row = sample.layout[tensor.name]
        if row["kind"] == "DTensor":
            assert tensor.placements == ", ".join(text.replace("dim=", "") for text in _placements(row))
        else:
            assert tensor.placements == ("ShardedTensor" if row["kind"] == "ShardedTensor" else None)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.dcp_folders()], ids=sample_id)
def test_the_writer_is_told_from_the_metadata(sample: Sample, tmp_path: Path) -> None:
    """A range of versions that holds the one that wrote it."""
    parts = [part for part in fsdp_ckpt.inspect(sample.copy(tmp_path / "src")).parts if part.dialect == "dcp"]
    for part in parts:
        match = re.fullmatch(r"torch (\d+)\.(\d+)(?:-(\d+)\.(\d+))?", part.writer or "")
        assert match, part.writer
        low, high = (int(match[1]), int(match[2])), (int(match[3] or match[1]), int(match[4] or match[2]))
        assert low <= sample.torch_version <= high


@pytest.mark.parametrize(
    "sample", [s for s in NAMED if s.dcp_folders() or s.variant.startswith("rank_files")], ids=sample_id
)
def test_the_number_of_ranks(sample: Sample, tmp_path: Path) -> None:
    """From file names and metadata."""
    assert fsdp_ckpt.inspect(sample.copy(tmp_path / "src")).world_size == sample.row["world_size"]


@pytest.mark.parametrize(
    "sample", [s for s in RIGHT if (s.folder / "expected_optim.safetensors").is_file()], ids=sample_id
)
def test_optimizers_show_moments_and_groups(sample: Sample, tmp_path: Path) -> None:
    """AdamW's state of every parameter, its learning rate, and two groups that differ in weight decay."""
    report = fsdp_ckpt.inspect(sample.copy(tmp_path / "src"), objects=True)
    (part,) = [part for part in report.parts if part.role == "optimizer"]
    expected = load_file(sample.folder / "expected_optim.safetensors")
    shapes = {name: (str(value.dtype), tuple(value.shape)) for name, value in expected.items()}
    found = {tensor.name.removeprefix("state."): (f"torch.{tensor.dtype}", tensor.shape) for tensor in part.tensors}
    if sample.variant in ("rank_files_fsdp1_w2", "rank_files_fsdp1_mesh_w2"):  # FSDP1's slices of what is flat
        assert "the shape of the whole is not in the files" in (part.flat or "")
    elif "0.exp_avg" in found:  # by index
        assert sorted(found.values()) == sorted(shapes.values())
    else:
        assert found == shapes
    lrs = [value for name, value in _options(part) if name == "lr"]
    assert lrs
    assert set(lrs) == {1e-3}
    decays = {value for name, value in _options(part) if name == "weight_decay"}
    assert decays in ({0.01, 0.0}, {0.01})


@pytest.mark.parametrize("sample", OBJECTS, ids=sample_id)
def test_objects_are_shown_as_they_were(sample: Sample, tmp_path: Path) -> None:
    """Numbers, texts and containers by value; up to torch 2.3 a nested container is one object."""
    shown: dict[str, Any] = {}
    for part in fsdp_ckpt.inspect(sample.copy(tmp_path / "src"), objects=True).parts:
        shown |= dict(_leaves(part.objects))
    expected = json.loads((sample.folder / "expected_objects.json").read_text())
    checked = 0
    for name, text in expected.items():
        if name == "np_float64":
            continue
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            continue
        if isinstance(value, int | float | str | list | tuple) and abs(_magnitude(value)) < 2**63:
            assert shown[name] == json.loads(json.dumps(value)), name
            checked += 1
    assert checked >= 15


@pytest.mark.parametrize("sample", OBJECTS, ids=sample_id)
def test_numbers_of_numpy_are_numbers(sample: Sample, tmp_path: Path) -> None:
    """A learning rate that a scheduler computed with NumPy is shown as its value."""
    report = fsdp_ckpt.inspect(sample.copy(tmp_path / "src"), objects=True)
    shown = [part.objects["np_float64"] for part in report.parts if "np_float64" in part.objects]
    assert shown == [1.5]


@pytest.mark.parametrize("sample", OBJECTS, ids=sample_id)
def test_json_is_json_by_the_standard(sample: Sample, tmp_path: Path) -> None:
    """One object is infinite; `jq` and JavaScript read the output all the same."""
    described = inspect_json(sample.copy(tmp_path / "src"), "--objects")
    shown = {name: value for part in described["parts"] for name, value in part["objects"].items()}
    assert shown["float"] == 0.1
    assert "inf" in str(shown["inf"]).lower()


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        name = f"{path}.{key}" if path else key
        if isinstance(item, dict):
            yield from _leaves(item, name)
        else:
            yield name, item


def _boxes(part: Part) -> dict[str, set[Box]]:
    """Return the boxes with something in them, by name."""
    return {
        entry.name: {(chunk.offsets, chunk.lengths) for chunk in entry.chunks if chunk.numel}
        for entry in part.tensors.values()
    }


def _placements(row: dict[str, Any]) -> list[str]:
    """Return the placements of a row of layout.json; they are the same on all ranks."""
    found: list[str] = row["placements"]
    return found


def _options(part: PartReport) -> list[tuple[str, Any]]:
    """Return (name, value) of the options of all param groups, whichever way they are stored."""
    found = []
    for name, value in part.objects.items():
        if name == "param_groups":
            found += [item for group in value for item in group.items()]
        elif name.startswith("param_groups."):
            found.append((name.rpartition(".")[2], value))
    return found


def _magnitude(value: Any) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0
