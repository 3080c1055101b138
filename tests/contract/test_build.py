"""What builds the checkpoints of these tests must be right itself: torch's own loaders are the judge."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.build import (
    DeadRanksError,
    Sharded,
    assert_same,
    full_bits,
    grid,
    read_bin,
    read_safetensors,
    rows,
    run_ranks,
    save_dcp,
    save_rank_files,
)

WEIGHT = torch.arange(35.0).reshape(7, 5)


def test_rows_and_grids() -> None:
    assert rows(WEIGHT, 3).boxes == [((0, 0), (3, 5)), ((3, 0), (3, 5)), ((6, 0), (1, 5))]
    assert rows(WEIGHT, 8).boxes[-1] == ((7, 0), (0, 5))
    assert len(rows(WEIGHT, 8, empty=False).boxes) == 7
    cut = grid(WEIGHT, [[4], [1, 2]], ranks=2)
    assert list(cut.boxes) == [
        ((0, 0), (4, 1)), ((0, 1), (4, 1)), ((0, 2), (4, 3)), ((4, 0), (3, 1)), ((4, 1), (3, 1)), ((4, 2), (3, 3)),
    ]  # fmt: skip
    assert list(cut.owners) == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("by_columns", [False, True])
def test_torch_loads_what_was_written(by_columns: bool, tmp_path: Path) -> None:
    cut = grid(WEIGHT, [[4], [1, 2]], ranks=3)
    state = {
        "model": {
            "rows": rows(WEIGHT, 3),
            "grid": Sharded(WEIGHT, cut.boxes, cut.owners, by_columns),
            "plain": torch.tensor(7),
        },
        "lr": 0.5,
    }
    save_dcp(tmp_path / "x", state, ranks=3, thread_count=2)
    target = {
        "model": {"rows": torch.zeros(7, 5), "grid": torch.zeros(7, 5), "plain": torch.tensor(0)},
        "lr": 0.0,
    }
    dcp.load(target, checkpoint_id=tmp_path / "x", no_dist=True)
    assert_same(target["model"], {"rows": WEIGHT, "grid": WEIGHT, "plain": torch.tensor(7)})  # type: ignore[arg-type]
    assert target["lr"] == 0.5
    files = sorted(path.name for path in (tmp_path / "x").iterdir())
    assert files[0] == ".metadata"
    assert {name.split("_")[2] for name in files[1:]} == {"0", "1", "2"}, "every rank has files of its own"
    metadata = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    assert len(metadata.state_dict_metadata["model.grid"].chunks) == 6


def test_dtensors_in_rank_files(tmp_path: Path) -> None:
    placements = [Replicate(), Shard(0)]
    save_rank_files(tmp_path, {"w": WEIGHT, "b": torch.ones(2)}, mesh=(2, 2), placements={"w": placements})
    found = [torch.load(tmp_path / f"model_world_size_4_rank_{rank}.pt", weights_only=True) for rank in range(4)]
    assert [state["w"].to_local().shape[0] for state in found] == [4, 3, 4, 3]
    assert torch.equal(torch.cat([found[0]["w"].to_local(), found[1]["w"].to_local()]), WEIGHT)
    assert all(tuple(state["w"].placements) == tuple(placements) for state in found)
    assert not dist.is_initialized()


def test_comparing() -> None:
    nan = torch.tensor([float("nan"), -0.0])
    assert_same({"a": nan}, {"a": nan.clone()})
    for other in (torch.tensor([float("nan"), 0.0]), nan.double(), nan.reshape(2, 1)):
        with pytest.raises(AssertionError):
            assert_same({"a": other}, {"a": nan})
    with pytest.raises(AssertionError):
        assert_same({}, {"a": nan})
    with pytest.raises(AssertionError):
        assert_same({"a": nan, "b": nan}, {"a": nan})
    assert full_bits(WEIGHT.t()) == WEIGHT.t().contiguous().numpy().tobytes()


def test_readers_notice_an_index_that_is_wrong(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": WEIGHT}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(AssertionError):
        read_safetensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"b": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(AssertionError):
        read_safetensors(tmp_path)
    torch.save({"a": WEIGHT}, tmp_path / "pytorch_model.bin")
    assert_same(read_bin(tmp_path), {"a": WEIGHT})


def add_up_and_fail(rank: int, folder: str) -> None:
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    Path(folder, f"{rank}").write_text(f"{value.item():g} of {dist.get_world_size()}")
    if rank == 1:
        raise ValueError("rank 1 says no")


def wait(_rank: int) -> None:
    time.sleep(600)


@pytest.mark.dist
def test_ranks_talk_to_each_other_and_a_failure_is_heard(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match="rank 1 says no"):
        run_ranks(add_up_and_fail, 2, str(tmp_path))
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["3 of 2", "3 of 2"]


@pytest.mark.dist
def test_ranks_that_hang_are_killed() -> None:
    with pytest.raises(DeadRanksError, match="did not end"):
        run_ranks(wait, 2, timeout_s=2)
    assert multiprocessing.active_children() == []
