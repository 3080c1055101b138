"""Cases of theme 1, shard geometry and placements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

import fsdp_ckpt
from tests.cases.check import assert_same, load_file, merge_and_load
from tests.cases.models import Buffers, Mlp, Odd, reference


@pytest.mark.parametrize("variant", ["verl", "one", "dcp"])
def test_p01_plain_buffers_are_not_row_shards(variant: str, built: Path, tmp_path: Path) -> None:
    """verl-project/verl#7610, #7612: 0-d and one-element buffers beside sharded parameters, and a world of one rank."""
    expected = reference(Buffers())
    report, found = merge_and_load(built / "p01" / variant, tmp_path / "out")
    assert_same(found, expected)
    assert found["scale0d"] == 7
    assert report.num_tensors == 7
    (part,) = fsdp_ckpt.inspect(built / "p01" / variant).parts
    assert {tensor.name: tensor.shape for tensor in part.tensors} == {k: tuple(v.shape) for k, v in expected.items()}


@pytest.mark.parametrize("variant", ["verl", "dcp"])
def test_p03_fsdp_over_tensor_parallel_keeps_the_order_of_rows(variant: str, built: Path, tmp_path: Path) -> None:
    """pytorch/torchtitan#1483, pytorch/pytorch#130760: strided shards are not glued in the order of ranks.

    convert: test_convert.
    """
    _, found = merge_and_load(built / "p03" / variant, tmp_path / "out")
    assert_same(found, reference(Mlp()))


def test_p03_the_files_are_the_trap_that_was_reported(built: Path) -> None:
    """The same files in the order of ranks would give rows 0, 1, 4, 5, 2, 3, 6, 7."""
    pieces = [load_file(built / "p03/verl" / f"model_world_size_4_rank_{rank}.pt")["up.weight"] for rank in range(4)]
    glued = torch.cat([piece.to_local() for piece in pieces if isinstance(piece, DTensor)])
    assert torch.equal(glued, reference(Mlp())["up.weight"][[0, 1, 4, 5, 2, 3, 6, 7]])


def test_p03_inspect_shows_placements(built: Path) -> None:
    """Placements as torch prints them, for the files that record them."""
    (part,) = fsdp_ckpt.inspect(built / "p03/verl").parts
    assert {tensor.name: tensor.placements for tensor in part.tensors} == {
        "up.weight": "_StridedShard(0, sf=2), Shard(0)",
        "up.bias": "_StridedShard(0, sf=2), Shard(0)",
        "down.weight": "Shard(0), Shard(1)",
        "down.bias": "Shard(0), Replicate()",
        "norm.weight": "Shard(0)",
        "norm.bias": "Shard(0)",
    }


@pytest.mark.parametrize(("variant", "shards"), [("fsdp2", [2, 2, 2, 0]), ("fsdp1", [2, 2, 2])])
def test_p05_dimensions_smaller_than_the_world(variant: str, shards: list[int], built: Path, tmp_path: Path) -> None:
    """pytorch/pytorch#108869, #102821: ranks without rows, with a zero-size chunk (FSDP2) or without one (FSDP1).

    reshard: test_convert. load_state: test_state_model.
    """
    folder = built / "p05" / variant
    chunks = FileSystemReader(folder).read_metadata().state_dict_metadata["model.a"]
    assert isinstance(chunks, TensorStorageMetadata)
    assert sorted((chunk.sizes[0] for chunk in chunks.chunks), reverse=True) == shards
    report, found = merge_and_load(folder, tmp_path / "out")
    assert_same(found, reference(Odd()))
    assert not [text for text in report.warnings if "config.json" not in text]
    assert fsdp_ckpt.inspect(folder).complete


@pytest.mark.parametrize("variant", ["verl", "dcp"])
def test_p08_replicas_are_merged_once(variant: str, built: Path, tmp_path: Path) -> None:
    """pytorch/torchtitan#799, #709, pytorch/pytorch#145978: HSDP does not double the rows.

    save_state, which stores one copy: test_state_model.
    """
    report, found = merge_and_load(built / "p08" / variant, tmp_path / "out")
    assert_same(found, reference(Mlp()))
    assert found["up.weight"].shape == (8, 6)
    assert report.tensor_bytes == 488
