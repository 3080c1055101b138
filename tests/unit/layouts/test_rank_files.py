"""One file per rank: which files belong together; what happens when one is damaged, missing or different."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from fsdp_ckpt import merge
from fsdp_ckpt.catalog import Part, Problem, Role, Severity
from fsdp_ckpt.errors import CorruptCheckpoint, FlatParameters, IncompleteCheckpoint
from fsdp_ckpt.layouts.rank_files import group_rank_files
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.store.local import Folder, LocalStore
from tests.build import assert_same, read_safetensors, save_rank_files

STATE = {"w": torch.arange(30.0).reshape(10, 3), "b": torch.arange(5, dtype=torch.int64), "buffer": torch.tensor([2.5])}
SHARDED = {"w": [Shard(0)], "b": [Shard(0)]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_rank_files(tmp_path / "actor", STATE, mesh=(3,), placements=SHARDED)


def model(path: Path) -> Part:
    return read_checkpoint(path).parts[0]


def problems(path: Path) -> dict[str, Problem]:
    return {problem.code: problem for problem in model(path).problems}


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"], [("model", 2, [0, 1])]),
        (["model_world_size_8_rank_3.pt"], [("model", 8, [3])]),
        (["model_world_size_2_rank_0.pt", "optim_world_size_2_rank_0.pt"], [("model", 2, [0]), ("optim", 2, [0])]),
        (["model_world_size_4_rank_0.pt", "model_world_size_2_rank_0.pt"], [("model", 4, [0]), ("model", 2, [0])]),
        (["pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank1.bin"], [("pytorch_model_fsdp_0", 2, [0, 1])]),
        (["ep0-ba10-rank0.pt", "ep0-ba10-rank10.pt"], [("ep0-ba10", 11, [0, 10])]),
        (["model_final.rank_1.pth"], [("model_final", 2, [1])]),
        (["pytorch_model.bin", "rng_state_0.pth", "ranking.pt", "rank.pt", "model_rank_x.pt"], []),
    ],
)
def test_names(names: list[str], groups: list[tuple[str, int, list[int]]], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    found = group_rank_files(Folder(LocalStore(tmp_path)))
    assert [(group.stem, group.world_size, list(group.files)) for group in found] == groups


def test_a_sound_folder(saved: Path, tmp_path: Path) -> None:
    part = model(saved)
    assert (part.name, part.role, part.world_size, part.is_complete) == ("model", Role.MODEL, 3, True)
    assert {key: entry.shape for key, entry in part.tensors.items()} == {"w": (10, 3), "b": (5,), "buffer": (1,)}
    assert {key: entry.placements for key, entry in part.tensors.items()} == {
        "w": "Shard(0)", "b": "Shard(0)", "buffer": None,
    }  # fmt: skip
    assert len(part.tensors["buffer"].replicas) == 2
    merge(saved, tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), STATE)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_rank(rank: int, saved: Path, tmp_path: Path) -> None:
    (saved / f"model_world_size_3_rank_{rank}.pt").unlink()
    problem = problems(saved)["missing-rank"]
    assert problem.severity is Severity.ERROR
    assert f"missing: rank {rank}" in problem.message
    with pytest.raises(IncompleteCheckpoint):
        merge(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_save(saved: Path) -> None:
    other = save_rank_files(saved.parent / "other", {**STATE, "w": STATE["w"][:9]}, mesh=(3,), placements=SHARDED)
    shutil.copy(other / "model_world_size_3_rank_1.pt", saved)
    with pytest.raises(CorruptCheckpoint, match=r"rank_1\.pt: `w` has another shape"):
        model(saved)


def test_one_file_twice(saved: Path) -> None:
    shutil.copy(saved / "model_world_size_3_rank_0.pt", saved / "model_world_size_3_rank_1.pt")
    assert problems(saved)["missing-shard"].severity is Severity.ERROR


def test_buffers_that_differ_between_ranks(saved: Path) -> None:
    other = save_rank_files(
        saved.parent / "other", {**STATE, "buffer": torch.tensor([7.0])}, mesh=(3,), placements=SHARDED
    )
    shutil.copy(other / "model_world_size_3_rank_2.pt", saved)
    problem = problems(saved)["replicas-differ"]
    assert (problem.severity, problem.where) == (Severity.WARNING, "buffer")
    assert "rank 2" in problem.message


def test_a_damaged_buffer_is_read_from_another_rank(saved: Path, tmp_path: Path) -> None:
    path = saved / "model_world_size_3_rank_0.pt"
    data = bytearray(path.read_bytes())
    at = data.index(STATE["buffer"].numpy().tobytes())
    data[at + 1] ^= 0x40
    path.write_bytes(data)
    report = merge(saved, tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), STATE)
    (sentence,) = report.recovered
    assert "model_world_size_3_rank_1.pt" in sentence


@pytest.mark.parametrize("stem", ["optim", "extra_state"])
def test_damage_beside_the_model_does_not_matter_to_it(stem: str, saved: Path, tmp_path: Path) -> None:
    """As with ``optimizer.bin`` of Accelerate: the merge of a sound model needs none of it."""
    state: dict[str, Any] = {"state": {0: {"exp_avg": STATE["w"]}}, "lr": 0.1}
    for rank in range(3):
        torch.save(state, saved / f"{stem}_world_size_3_rank_{rank}.pt")
    path = saved / f"{stem}_world_size_3_rank_1.pt"
    path.write_bytes(path.read_bytes()[:-40])
    checkpoint = read_checkpoint(saved)
    assert checkpoint.parts[0].is_complete
    merge(saved, tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), STATE)


def test_flat_parameters_of_two_ranks(tmp_path: Path) -> None:
    # Case P12.
    for rank in range(2):
        state = {"model": {"student.backbone._fsdp_wrapped_module._flat_param": torch.arange(61.0)}}
        torch.save(state, tmp_path / f"model_final.rank_{rank}.pth")
    part = model(tmp_path)
    assert part.world_size == 2
    assert part.flat is not None
    assert "names and shapes" in part.flat
    with pytest.raises(FlatParameters, match="names and shapes"):
        merge(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_local_slices_of_unequal_length(tmp_path: Path) -> None:
    # LOCAL_STATE_DICT with use_orig_params=True: 65 elements on one rank, 1 on the other.
    for rank, size in enumerate((65, 1)):
        torch.save({"embed.weight": torch.arange(float(size))}, tmp_path / f"pytorch_model_fsdp_0_rank{rank}.bin")
    with pytest.raises(FlatParameters, match=r"`embed\.weight`"):
        merge(tmp_path, tmp_path / "out")
