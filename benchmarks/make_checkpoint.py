"""Write an FSDP2 checkpoint of a chosen size with torch itself, laid out as Accelerate does it.

Run as a process of its own (`python -m benchmarks.make_checkpoint`), so that torch never enters the measuring process.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing import start_processes

from benchmarks.inputs import FOLDER_NAME
from benchmarks.llama import Llama
from fsdp_ckpt import FastFileSystemWriter

_DEADLINE_S = 300.0
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write(folder: Path, model: Llama, dtype: torch.dtype, *, num_ranks: int = 2, ours: bool = False) -> None:
    """Write `folder/pytorch_model_fsdp_0` from gloo processes on the CPU.

    Args:
        folder: Where the checkpoint goes; made when absent.
        model: Names and global shapes of the tensors.
        dtype: Element type of every tensor.
        num_ranks: Processes; every dimension 0 is a multiple of it.
        ours: Write with FastFileSystemWriter.

    Raises:
        TimeoutError: The ranks did not finish in time; they have been killed.
        torch.multiprocessing.ProcessRaisedException: A rank failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rendezvous = folder / f".rendezvous-{os.getpid()}"
    arguments = (num_ranks, folder, rendezvous, model, dtype, ours)
    ranks = start_processes(_write_rank, arguments, nprocs=num_ranks, join=False, start_method="spawn")
    deadline = time.monotonic() + _DEADLINE_S
    try:
        while not ranks.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the {num_ranks} ranks did not write the checkpoint in {_DEADLINE_S:.0f} s")
    finally:
        for process in ranks.processes:
            process.kill()
        rendezvous.unlink(missing_ok=True)


def _write_rank(  # noqa: PLR0917
    rank: int, num_ranks: int, folder: Path, rendezvous: Path, model: Llama, dtype: torch.dtype, ours: bool
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    shapes = {name: (shape[0] // num_ranks, *shape[1:]) for name, shape in model.shapes().items()}
    # All shards of one shape are one tensor, so a rank needs little memory however many layers there are. Views of one
    # large pool would not do: DCP clones what does not fill its storage and keeps the clones until the file is there.
    random = torch.Generator().manual_seed(rank)
    values = {
        shape: torch.randn(shape, generator=random).mul_(0.02).to(dtype) for shape in dict.fromkeys(shapes.values())
    }
    state_dict = {
        name: DTensor.from_local(values[shape], mesh, [Shard(0)], run_check=False) for name, shape in shapes.items()
    }
    writer: Any = FastFileSystemWriter if ours else FileSystemWriter
    save(
        {"model": state_dict},
        storage_writer=writer(folder / FOLDER_NAME),
        planner=DefaultSavePlanner(),
    )
    dist.destroy_process_group()


def main() -> int:
    """Parse the command line and write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bfloat16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ours", action="store_true", help="write with FastFileSystemWriter")
    args = parser.parse_args()
    model = Llama(hidden=args.hidden, num_layers=args.layers, vocab=args.vocab)
    write(args.folder, model, _DTYPES[args.dtype], num_ranks=args.ranks, ours=args.ours)
    return 0


if __name__ == "__main__":
    sys.exit(main())
