"""torch's own saves, with a disk per rank: what torch leaves on each, merged, is the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import inspect, merge, open_checkpoint
from fsdp_ckpt.errors import Incompatible, IncompleteCheckpoint
from tests.build import assert_same, read_safetensors, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def save(rank: int, place: str) -> None:
    """Save a model twice, each rank to a folder of its own, as if its path were on a disk of its own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    if rank == 0:
        Path(place, "expected").mkdir()
        save_file(model.state_dict(), f"{place}/expected/model.safetensors")
    fully_shard(model)
    for step in (10, 20):
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{place}/node{rank}/step-{step}")
        dist.barrier()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disks")
    run_ranks(save, 3, str(folder))
    return folder


def test_what_torch_leaves_on_three_disks(place: Path, tmp_path: Path) -> None:
    nodes = [place / f"node{rank}" / "step-10" for rank in range(3)]
    assert [sorted(path.name for path in node.iterdir()) for node in nodes] == [
        [".metadata", "__0_0.distcp"], ["__1_0.distcp"], ["__2_0.distcp"],
    ]  # fmt: skip
    expected = read_safetensors(place / "expected")
    report = inspect(nodes)
    assert (report.complete, report.step, report.world_size) == (True, 10, 3)
    for number, order in enumerate((nodes, nodes[::-1])):
        merge(order, tmp_path / str(number))
        assert_same(read_safetensors(tmp_path / str(number)), expected)
    with open_checkpoint(nodes, framework="pt") as view:
        assert torch.equal(view.get_slice("0.weight")[1:6, ::2], expected["0.weight"][1:6, ::2])
    merge([place / f"node{rank}" for rank in range(3)], tmp_path / "runs")
    assert_same(read_safetensors(tmp_path / "runs"), expected)


@pytest.mark.parametrize("lacking", [1, 2])
def test_a_disk_that_was_not_given(lacking: int, place: Path, tmp_path: Path) -> None:
    nodes = [place / f"node{rank}" / "step-10" for rank in range(3) if rank != lacking]
    with pytest.raises(IncompleteCheckpoint, match=rf"`__{lacking}_0.distcp`.*not there \(of rank {lacking}\)"):
        merge(nodes, tmp_path / "out")
    assert inspect(nodes).world_size == 3


def test_metadata_of_two_saves(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "node0"
    other.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (other / name).write_bytes((place / "node0" / "step-20" / name).read_bytes())
    with pytest.raises(Incompatible, match=r"not of one save: .*\.metadata"):
        inspect([place / "node0" / "step-10", other])
