"""Save and load the state of a training job on two gloo ranks, ours and Accelerate's in turns; print what each cost.

Run as a process of its own: `python -m benchmarks.state_ranks fsdp2 FOLDER --bytes N --rounds N`. The last line of
stdout is a JSON object: by operation, a list of [wall seconds, CPU seconds of both ranks, extra bytes], one per round.
Extra bytes are the peak of a rank's resident memory during the operation beyond what it held before and what the
operation is for: the moments that a fresh optimizer gets, the state dict that is returned. The first round is not
counted for its times, but its memory is, as later ones reuse what it left in the allocator. Linux only.
"""

import argparse
import gc
import json
import os
import resource
import shutil
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes

from benchmarks import state

NUM_RANKS = 2
_DEADLINE_S = 900.0
_WIDTH = 1024
_BLOCK_BYTES = 1 << 20
_BYTES_PER_PARAMETER = 12
"""float32, and the two moments of AdamW."""


def build(kind: str, num_layers: int) -> nn.Module:
    """Return a model of linear layers, each a unit of FSDP."""
    layers = [nn.Linear(_WIDTH, 4 * _WIDTH, bias=False), nn.Linear(4 * _WIDTH, _WIDTH, bias=False)]
    model: nn.Module = nn.Sequential(*[layer for _ in range(num_layers // 2) for layer in _copies(layers)])
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
        return model
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def _copies(layers: list[nn.Linear]) -> list[nn.Linear]:
    return [nn.Linear(layer.in_features, layer.out_features, bias=False) for layer in layers]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, _WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Bench:
    """One rank's share of the work.

    Args:
        kind: ``fsdp1`` or ``fsdp2``.
        folder: Where files go.
        num_layers: Linear layers of the model.
    """

    def __init__(self, kind: str, folder: Path, num_layers: int) -> None:
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.state import PartialState
        from accelerate.utils import fsdp_utils

        self.folder = folder
        self.model = build(kind, num_layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        _step(self.model, self.optimizer)
        self._kept: Any = None
        PartialState(cpu=True)
        version = 2 if kind == "fsdp2" else 1
        self._tools = fsdp_utils
        self._plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
        self._stand_in = types.SimpleNamespace(
            num_processes=dist.get_world_size(),
            process_index=dist.get_rank(),
            is_main_process=dist.get_rank() == 0,
            is_fsdp2=version == 2,
            wait_for_everyone=dist.barrier,
        )
        self._local = [_local(param) for param in self.model.parameters()]
        self._local += [_local(value) for state in self.optimizer.state.values() for value in state.values()]
        self._copy = torch.zeros(sum(tensor.nbytes for tensor in self._local), dtype=torch.uint8)

    def operations(self) -> dict[str, Callable[[], object]]:
        """Return what is measured, in the order of a round."""
        import fsdp_ckpt

        ours, behind, other = self.folder / "ours", self.folder / "async", self.folder / "other"
        model, optimizer = self.model, self.optimizer

        def load_theirs(folder: str) -> None:
            self._tools.load_fsdp_model(self._plugin, self._stand_in, model, folder)
            self._tools.load_fsdp_optimizer(self._plugin, self._stand_in, optimizer, model, folder)

        found: dict[str, Callable[[], object]] = {
            state.COPY: self._copy_all,
            state.ASYNC: lambda: fsdp_ckpt.save_state(behind, model, optimizer, async_save=True),
            state.SAVE_NO_FSYNC: lambda: fsdp_ckpt.save_state(self.folder / "fast", model, optimizer, durable=False),
            state.SAVE: lambda: fsdp_ckpt.save_state(ours, model, optimizer),
            state.DD: self._write_zeros,
            state.SAVE_ACCELERATE: lambda: self.save_theirs(self.folder / "theirs"),
            state.SAVE_DCP: lambda: self.save_dcp(self.folder / "dcp"),
            state.LOAD_FRESH: lambda: fsdp_ckpt.load_state(ours, model, self._fresh()),
            state.LOAD: lambda: fsdp_ckpt.load_state(ours, model, optimizer),
            state.LOAD_NO_VERIFY: lambda: fsdp_ckpt.load_state(ours, model, optimizer, verify=False),
            state.LOAD_ACCELERATE: lambda: load_theirs(str(self.folder / "theirs")),
            state.LOAD_DCP: lambda: self._load_dcp(self.folder / "dcp"),
        }
        if other.is_dir():
            found |= {
                state.LOAD_OTHER: lambda: fsdp_ckpt.load_state(other / "ours", model, optimizer, rng=False),
                state.LOAD_OTHER_DCP: lambda: self._load_dcp(other / "dcp"),
            }
            if (other / "theirs").is_dir():
                found[state.LOAD_OTHER_ACCELERATE] = lambda: load_theirs(str(other / "theirs"))
        return found | {
            state.GET_STATE_DICT: lambda: self._keep(fsdp_ckpt.get_state_dict(model)),
            state.SAVE_MODEL: lambda: fsdp_ckpt.save_model(model, self.folder / "model", max_shard_size="100MB"),
        }

    def save_theirs(self, folder: Path) -> None:
        """Save as Accelerate does."""
        self._tools.save_fsdp_model(self._plugin, self._stand_in, self.model, str(folder))
        self._tools.save_fsdp_optimizer(self._plugin, self._stand_in, self.optimizer, self.model, str(folder))

    def save_dcp(self, folder: Path) -> None:
        """Save as torch's own recipe does."""
        dcp.save(self._state(), checkpoint_id=folder)

    def _load_dcp(self, folder: Path) -> None:
        found = self._state()
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    def _state(self) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def _copy_all(self) -> None:
        position = 0
        for tensor in self._local:
            part = self._copy[position : position + tensor.nbytes]
            part.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
            position += tensor.nbytes

    def _write_zeros(self) -> None:
        zeros = memoryview(bytes(_BLOCK_BYTES))
        fd = os.open(self.folder / f"zeros-{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for position in range(0, self._copy.numel(), _BLOCK_BYTES):
            os.pwrite(fd, zeros[: min(_BLOCK_BYTES, self._copy.numel() - position)], position)
        os.fsync(fd)
        os.close(fd)

    def _fresh(self) -> torch.optim.Optimizer:
        self._kept = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        return self._kept  # type: ignore[no-any-return]

    def _keep(self, value: object) -> None:
        self._kept = value

    def _yields(self, name: str) -> int:
        """Return the bytes that an operation leaves behind on this rank, as it should."""
        parameters = sum(_local(param).nbytes for param in self.model.parameters())
        if name == state.LOAD_FRESH:
            return 2 * parameters
        if name == state.ASYNC:  # the first time: what is copied
            return self._copy.numel()
        if name == state.GET_STATE_DICT and dist.get_rank() == 0:
            return NUM_RANKS * parameters
        return 0

    def measure(self, name: str, run: Callable[[], object]) -> tuple[float, float, int]:
        """Run an operation on all ranks at once and return what it cost: the slowest, the sum, and the most.

        The time of a save in the background is that until the call returns; its memory counts until it has ended.
        """
        gc.collect()
        if dist.get_rank() == 0:
            os.sync()  # what the one before has left to be written is not this one's to wait for
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before, cpu, begun = _memory("VmRSS"), _cpu_s(), time.perf_counter()
        result = run()
        wall_s = time.perf_counter() - begun
        cpu_s = _cpu_s() - cpu
        if hasattr(result, "wait"):
            result.wait()
        peak = _memory("VmHWM")
        self._forget(name)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (wall_s, cpu_s, max(peak - before - self._yields(name), 0)))
        self._kept = None
        walls, cpus, extras = zip(*every, strict=True)
        return max(walls), sum(cpus), max(extras)

    def _forget(self, name: str) -> None:
        """Remove what no later operation reads."""
        dist.barrier()
        folders = {state.ASYNC: "async", state.SAVE_NO_FSYNC: "fast", state.SAVE_MODEL: "model"}
        if name in folders and dist.get_rank() == 0:
            shutil.rmtree(self.folder / folders[name])
        if name == state.DD:
            (self.folder / f"zeros-{dist.get_rank()}").unlink()

    def clean(self) -> None:
        """Remove what the last round wrote, and let the disk come to rest."""
        if dist.get_rank() == 0:
            for name in ("ours", "fast", "async", "theirs", "dcp", "model"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            for path in self.folder.glob("zeros-*"):
                path.unlink()
            os.sync()
        dist.barrier()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return found


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _begin(rank: int, num_ranks: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)


def _save_other(rank: int, kind: str, folder: Path, num_layers: int) -> None:
    """Save a checkpoint on another number of ranks, in every way."""
    import fsdp_ckpt

    _begin(rank, state.SOURCE_RANKS, folder)
    bench, out = Bench(kind, folder, num_layers), folder / "other"
    fsdp_ckpt.save_state(out / "ours", bench.model, bench.optimizer)
    bench.save_dcp(out / "dcp")
    if kind == "fsdp2":  # Accelerate cannot load an optimizer of FSDP1 that other ranks saved
        bench.save_theirs(out / "theirs")
    _end()


def _rank(rank: int, kind: str, folder: Path, num_layers: int, rounds: int) -> None:
    _begin(rank, NUM_RANKS, folder)
    bench = Bench(kind, folder, num_layers)
    costs: dict[str, list[tuple[float, float, int]]] = {}
    warm_up: dict[str, int] = {}
    for turn in range(rounds + 1):
        bench.clean()
        for name, run in bench.operations().items():
            wall_s, cpu_s, extra = bench.measure(name, run)
            if turn:
                costs.setdefault(name, []).append((wall_s, cpu_s, max(extra, warm_up.pop(name, 0))))
            else:
                warm_up[name] = extra
    bench.clean()
    if rank == 0:
        (folder / "costs.json").write_text(json.dumps(costs))
    _end()


def _end() -> None:
    """End this process at once: torch 2.13 now and then aborts while the interpreter of a gloo rank ends."""
    dist.barrier()
    os._exit(0)


def _run(function: Callable[..., None], arguments: tuple[object, ...], num_ranks: int) -> None:
    ranks = start_processes(function, arguments, nprocs=num_ranks, join=False, start_method="spawn")
    deadline = time.monotonic() + _DEADLINE_S
    try:
        while not ranks.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the ranks did not end in {_DEADLINE_S:.0f} s")
    finally:
        for process in ranks.processes:
            process.kill()


def main() -> int:
    """Parse the command line, run the ranks, print their result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("fsdp1", "fsdp2"))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--bytes", type=int, required=True, help="bytes of parameters and moments on all ranks together"
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:  # Accelerate insists on knowing an address
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    num_layers = max(2, args.bytes // (_BYTES_PER_PARAMETER * 4 * _WIDTH**2) // 2 * 2)
    if not args.folder.is_relative_to("/dev/shm"):  # where there is no room for it
        _run(_save_other, (args.kind, args.folder, num_layers), state.SOURCE_RANKS)
        (args.folder / "rendezvous").unlink(missing_ok=True)
    _run(_rank, (args.kind, args.folder, num_layers, args.rounds), NUM_RANKS)
    payload = num_layers * 4 * _WIDTH**2 * _BYTES_PER_PARAMETER
    print(json.dumps({"payload_bytes": payload, "costs": json.loads((args.folder / "costs.json").read_text())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
