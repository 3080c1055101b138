"""Megatron-core checkpoints from public repositories, in ../shared/real where that folder is there."""

from __future__ import annotations

from pathlib import Path

import pytest

import fsdp_ckpt
from tests.cases.check import assert_same, merge_and_load
from tests.compat.judges import read_item_by_item, read_with_torch
from tests.compat.samples import REALS, sample_id

HERE = pytest.mark.skipif(not REALS, reason="../shared/real, which may not be committed, is not here")


@HERE
@pytest.mark.parametrize("folder", REALS or [None], ids=sample_id)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_merge_gives_what_each_item_holds(folder: Path, kind: str, tmp_path: Path) -> None:
    """Stacked layers, tensor-parallel grids, metadata classes that are not torch's."""
    _, found = merge_and_load(folder, tmp_path / "out", format=kind)
    assert_same(found, read_item_by_item(folder))
    assert len(found) == 17


@HERE
def test_torch_reads_the_same(tmp_path: Path) -> None:
    """One of the two has no foreign class in its metadata."""
    (folder,) = [path for path in REALS if path.name.startswith("LionRock")]
    _, found = merge_and_load(folder, tmp_path / "out")
    assert_same(found, read_with_torch(folder))


@HERE
def test_megatron_is_recognised() -> None:
    """By its own metadata class; complete, and its extra states are listed."""
    (folder,) = [path for path in REALS if path.name.startswith("Lizixuan")]
    report = fsdp_ckpt.inspect(folder)
    assert (report.layout, report.world_size, report.complete) == ("megatron", 2, True)
    assert report.parts[0].num_objects > 0
