"""Save a model's flat parameters with real gloo ranks, in all ways: `python -m tests.contract.flat_ranks OUT`.

torch is imported once; the ranks are forked from here. Beside each checkpoint lies the model as it was before FSDP1
wrapped it (`whole.pt`), and the shapes of its parameters (`shapes.json`).
"""

from __future__ import annotations

import faulthandler
import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, LocalStateDictConfig, StateDictType
from torch.multiprocessing import start_processes

CASES: dict[str, tuple[int, bool, str]] = {
    "flat_w2": (2, False, "files"),
    "flat_w3": (3, False, "files"),
    "flat_dcp": (2, False, "dcp"),
    "slices_w2": (2, True, "files"),
    "slices_w3": (3, True, "files"),
    "slices_copied": (2, True, "copied"),
    "slices_dcp": (2, True, "dcp"),
}
"""World size, use_orig_params, and how it was saved."""


class Leaf(nn.Module):
    """All sizes odd; its own parameter comes first, and one holds a single element."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.norm = nn.LayerNorm(out)
        self.gain = nn.Parameter(torch.randn(1))
        self.kernel = nn.Parameter(torch.randn(3, 5, 2))
        self.register_buffer("count", torch.arange(3) + (1 << 60))


class Mid(nn.Module):
    """A module whose first child is a unit of its own in some places."""

    def __init__(self) -> None:
        super().__init__()
        self.one: nn.Module = Leaf(3, 5)
        self.two = Leaf(5, 7)
        self.weight = nn.Parameter(torch.randn(2, 3, 3))


class Net(nn.Module):
    """Units in units, a shared parameter, two dtypes, a tensor that is not row-major, one that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.mids = nn.ModuleList([Mid(), Mid()])
        self.low: nn.Module = nn.Linear(3, 3).to(torch.bfloat16)
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.apart = nn.Linear(2, 3)
        self.head = nn.Linear(3, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(2, 3))


def wrap(model: Net, *, use_orig_params: bool) -> nn.Module:
    """Wrap a model in five units, one in another."""
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    model.low = FullyShardedDataParallel(model.low, **options)
    first = model.mids[0]
    assert isinstance(first, Mid)
    first.one = FullyShardedDataParallel(first.one, **options)
    model.mids[0] = FullyShardedDataParallel(first, **options)
    model.mids[1] = FullyShardedDataParallel(model.mids[1], **options)
    return FullyShardedDataParallel(model, ignored_modules=[model.apart], **options)


def save(rank: int, folder: Path, *, use_orig_params: bool, how: str) -> None:
    """Save one case."""
    torch.manual_seed(1)
    model = Net()
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        torch.save(model.state_dict(), folder / "whole.pt")
        shapes = [[name, p.shape, p.stride()] for name, p in model.named_parameters()]
        (folder / "shapes.json").write_text(json.dumps(shapes))
    wrapped = wrap(model, use_orig_params=use_orig_params)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
        state = wrapped.state_dict()
    if how == "copied":
        state = {name: value.clone() if type(value) is Tensor else value for name, value in state.items()}
    if how == "dcp":
        dcp.save(state, checkpoint_id=str(checkpoint))
    else:
        torch.save(state, checkpoint / f"pytorch_model_fsdp_0_rank{rank}.bin")


def work(rank: int, world_size: int, out: Path) -> None:
    """Be one rank."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(60, exit=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{out}/.store-{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=40))
    for name, (ranks, use_orig_params, how) in CASES.items():
        if ranks == world_size:
            save(rank, out / name, use_orig_params=use_orig_params, how=how)
            dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Save everything."""
    out = Path(sys.argv[1])
    for world_size in (2, 3):
        start_processes(work, (world_size, out), nprocs=world_size, start_method="fork")


if __name__ == "__main__":
    main()
