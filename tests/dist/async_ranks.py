"""Saves in the background, on real ranks: what goes wrong, who hears of it, and what goes on meanwhile."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_ckpt.train.save as save_module
from fsdp_ckpt import Checkpointer, Hooks, load_state, save_state
from fsdp_ckpt.train.background import host_memory
from fsdp_ckpt.train.commit import commit
from tests.dist.attempt import attempt, failing, only, tree
from tests.dist.job import Job
from tests.dist.matrix_ranks import held_back
from tests.dist.stage import main, scenario

FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


def _job(seed: int) -> Job:
    return Job(seed, width=64)


def _loaded(path: Path) -> list[Any]:
    other = _job(9)
    load_state(path, **other.state())
    return other.bits(live=False)


def _failed(place: Path, surface: Any) -> Any:
    """A save of rank 1 fails in the background; ``surface``, which would work by itself, is what tells."""
    path = place / "run" / "step-1"
    job = _job(1)
    job.save(path)
    stored, files = job.bits(live=False), tree(place)
    dist.barrier()
    job.train()
    with only(1, failing("fsdp_ckpt.train.record_file.write_all", FULL_DISK)):
        call = attempt(lambda: pending.append(save_state(path, **job.state(), async_save=True, durable=False)))
        limit = time.monotonic() + 20
        while pending and not pending[0].is_done():
            assert time.monotonic() < limit
            time.sleep(0.01)
        pending.clear()
    found = attempt(lambda: surface(job, path))
    dist.barrier()
    unchanged = tree(place) == files
    previous = _loaded(path) == stored
    again = attempt(lambda: job.save(path))
    dist.barrier()
    newest = _loaded(path) == job.bits(live=False)
    return found | {
        "call": call["kind"], "again": again["kind"], "newest": newest, "unchanged": unchanged, "previous": previous,
        "names": sorted(tree(place)) == sorted(files), "stored": stored != job.bits(live=False),
    }  # fmt: skip


pending: list[Any] = []


@scenario(ranks=2)
def fails_and_is_waited_for(place: Path) -> Any:
    def wait(job: Job, path: Path) -> None:
        from fsdp_ckpt.train import background

        assert background._pending is not None
        background._pending.wait()

    return _failed(place, wait)


@scenario(ranks=2)
def fails_and_the_next_save_tells(place: Path) -> Any:
    return _failed(place, lambda job, path: job.save(path))


@scenario(ranks=2)
def fails_and_the_next_load_tells(place: Path) -> Any:
    return _failed(place, lambda job, path: load_state(path, **job.state()))


@scenario(ranks=2)
def fails_and_closing_tells(place: Path) -> Any:
    def close(job: Job, path: Path) -> None:
        with Checkpointer(place / "run", **job.state()):
            pass

    return _failed(place, close)


@scenario(ranks=2)
def one_at_a_time(place: Path) -> Any:
    """The second save begins when the first has ended, and both hold the values of their calls."""
    job = _job(1)
    under_way, most = [0], [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        under_way[0] += 1
        most[0] = max(most)
        most.append(under_way[0])
        time.sleep(0.2)
        try:
            return commit(*arguments, **options)
        finally:
            under_way[0] -= 1

    bits, pending = [], []
    with mock.patch.object(save_module, "commit", counted):
        for step in (1, 2, 3):
            bits.append(job.bits(live=False))
            pending.append(save_state(place / f"step-{step}", **job.state(), step=step, async_save=True, durable=False))
            job.train()
        report = pending[-1].wait()
    return {
        "most": max(most),
        "right": [_loaded(place / f"step-{step}") == bits[step - 1] for step in (1, 2, 3)],
        "report": (report.step, Path(report.path).name, report.stopped_s < report.elapsed_s, pending[-1].is_done()),
        "again": pending[-1].wait() == report,
    }


@scenario(ranks=2)
def memory_is_used_again(place: Path) -> Any:
    """A rank's memory holds what it stores, and stays where it is."""
    job = _job(1)
    host_memory.release()
    places, sizes = [], []
    for _ in range(3):
        save_state(place / "step-1", **job.state(), async_save=True, durable=False).wait()
        places.append(host_memory._buffer.data_ptr())
        sizes.append(host_memory._buffer.numel())
        job.train()
    shards = list(job.model.state_dict().values())
    shards += [value for state in job.optimizer.state.values() for value in state.values()]
    local = [value.to_local() if hasattr(value, "to_local") else value for value in shards]
    return {"places": len(set(places)), "sizes": set(sizes), "state": sum(value.nbytes for value in local)}


@scenario(ranks=4)
def replicas_are_copied_once(place: Path) -> Any:
    """HSDP: two copies of each shard; each byte is copied and written by one rank, and all ranks take part."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    host_memory.release()
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    save_state(place / "step-1", model, async_save=True, rng=False, durable=False).wait()
    files = {path.name: path.stat().st_size for path in (place / "step-1/pytorch_model_fsdp_0").glob("*.distcp")}
    other = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    load_state(place / "step-1", other)
    right = all(torch.equal(value, whole[name]) for name, value in other.state_dict().items())
    return {"copied": host_memory._buffer.numel(), "files": files, "right": right}


@scenario(ranks=4)
def two_groups_at_once(place: Path) -> Any:
    """Groups of two ranks save to places of their own, in the background, and train meanwhile."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("jobs", "shards"))["shards"]
    torch.manual_seed(mine)
    model = nn.Linear(64, 64)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    out = place / str(mine)
    with held_back() as go:
        kept = model.weight.full_tensor().clone()  # type: ignore[attr-defined]
        pending = save_state(out, model, optimizer, step=mine, process_group=groups[mine], async_save=True)
        for _ in range(3):
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            go.set()  # from here on while the thread and the loop both talk to their peers
        report = pending.wait()
    other = nn.Linear(64, 64)
    load_state(out, other, process_group=groups[mine])
    return {"step": report.step, "world": report.world_size, "right": torch.equal(other.weight, kept)}


@scenario(ranks=2)
def hooks_and_values(place: Path) -> Any:
    """Hooks run in the caller's thread; values that change after the call are stored as they were."""
    threads = []

    class Watch(Hooks):
        def after_save(self, report: Any) -> None:
            threads.append((threading.current_thread() is threading.main_thread(), report.step))

    class Counter:
        def __init__(self) -> None:
            self.state: Any = {"seen": [1], "tensor": torch.zeros(3)}

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    counter, job, values = Counter(), _job(1), {"list": [1]}
    with held_back() as go:
        pending = save_state(
            place / "step-1", **job.state(), objects=counter, values=values, step=1, async_save=True, hooks=[Watch()],
            durable=False,
        )  # fmt: skip
        before = list(threads)
        counter.state["seen"].append(2)
        counter.state["tensor"] += 1
        values["list"].append(2)
        for group in job.optimizer.param_groups:
            group["lr"] = 77.0
        go.set()
        pending.wait()
        pending.wait()
    other, again = _job(2), Counter()
    report = load_state(place / "step-1", **other.state(), objects=again)
    return {
        "before": before, "threads": threads, "seen": again.state["seen"], "tensor": again.state["tensor"],
        "values": dict(report.values), "lr": other.optimizer.param_groups[0]["lr"],
    }  # fmt: skip


@scenario(ranks=2)
def prunes_after_the_commit(place: Path) -> Any:
    job = _job(1)
    kinds = set()
    with Checkpointer(place, **job.state(), keep=2, async_save=True, durable=False) as checkpointer:
        for step in range(1, 6):
            pending = checkpointer.save(step)
            kinds.add(type(pending).__name__)
            job.train()
    dist.barrier()
    return {"left": sorted(os.listdir(place)), "kinds": kinds}


if __name__ == "__main__":
    main()
