"""Four ranks on two nodes with disks of their own: the same path shows each another folder (mount namespaces)."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import fsdp_ckpt
from fsdp_ckpt import Checkpointer, load_state
from tests.dist.attempt import attempt, failing, only, tree
from tests.dist.job import Job
from tests.dist.stage import main, scenario

CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def show(place: Path, node: int) -> Path:
    """Let this process see a node's folder at ``disk``; return that path."""
    disk, own = place / "disk", place / f"node{node}"
    disk.mkdir(exist_ok=True)
    own.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    for done in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(os.fsencode(own), os.fsencode(disk), None, MS_BIND, None),
    ):
        if done:
            raise OSError(ctypes.get_errno(), "cannot give this process a disk of its own")
    dist.barrier()
    return disk


def my_node() -> int:
    return dist.get_rank() // 2


def _files(place: Path, node: int) -> list[str]:
    return sorted(tree(place / f"node{node}" / "run"))


@scenario(ranks=4)
def saves_and_loads(place: Path) -> Any:
    """Twice to the same place; into a new job each time."""
    disk = show(place, my_node())
    job = Job(1)
    found: dict[str, Any] = {}
    for turn in ("first", "second"):
        job.train()
        job.save(disk / "run" / "step-1", step=1)
        other = Job(2)
        report = load_state(disk / "run" / "step-1", **other.state())
        found[turn] = other.bits(live=False) == job.bits(live=False)
        found[f"{turn} warnings"] = list(report.warnings)
        found |= {"rng": report.rng, "data": report.data}
    dist.barrier()
    found["files"] = [_files(place, node) for node in (0, 1)]
    whole = {
        name: value.full_tensor() for name, value in job.model.state_dict().items() if hasattr(value, "full_tensor")
    }
    if dist.get_rank() == 0:
        both = [place / f"node{node}" / "run" / "step-1" for node in (0, 1)]
        fsdp_ckpt.merge(both, place / "merged")
        merged = load_file(place / "merged" / "model.safetensors")
        found["merged"] = all(torch.equal(merged[name], value) for name, value in whole.items())
        found["alone"] = attempt(lambda: fsdp_ckpt.merge(both[0], place / "alone"))
    return found


@scenario(ranks=4)
def saves_in_the_background(place: Path) -> Any:
    disk = show(place, my_node())
    job = Job(1)
    stored = job.bits(live=False)
    pending = fsdp_ckpt.save_state(disk / "run" / "step-1", **job.state(), async_save=True, durable=False)
    job.train()
    pending.wait()
    other = Job(2)
    load_state(disk / "run", **other.state())
    return {"right": other.bits(live=False) == stored, "files": [len(_files(place, node)) for node in (0, 1)]}


@scenario(ranks=4)
def ranks_change_places(place: Path) -> Any:
    """The node with ranks 0 and 1 has become that of ranks 2 and 3: every shard is on the other disk."""
    job = Job(1)
    disk = show(place, my_node())
    job.save(disk / "run" / "step-1")
    dist.barrier()
    disk = show(place, 1 - my_node())
    other = Job(2)
    others = ("fsdp-ckpt-mirror-", "fsdp-ckpt-save-")  # of tests that run at the same time
    before = {name for name in os.listdir(tempfile.gettempdir()) if not name.startswith("fsdp-ckpt-")}
    dist.barrier()
    report = load_state(disk / "run" / "step-1", **other.state())
    dist.barrier()
    return {
        "right": other.bits(live=False) == job.bits(live=False), "rng": report.rng, "data": report.data,
        "spilled": sorted({name for name in os.listdir(tempfile.gettempdir()) if not name.startswith(others)} - before),
    }  # fmt: skip


@scenario(ranks=4)
def fewer_ranks_load(place: Path) -> Any:
    """One rank of each node."""
    job = Job(1)
    disk = show(place, my_node())
    job.save(disk / "run" / "step-1")
    whole = job.model[0].weight.full_tensor()  # type: ignore[operator, union-attr]
    group = dist.new_group([0, 2])
    if dist.get_rank() not in (0, 2):
        return None
    first = torch.nn.Linear(6, 5)
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(5, affine=False), torch.nn.Linear(5, 6))
    report = load_state(disk / "run" / "step-1", model, process_group=group)
    return {"right": torch.equal(first.weight, whole), "saved_by": report.saved_world_size}


def _damaged(place: Path, damage: Callable[[], None], *, style: str = "SHARDED_STATE_DICT") -> Any:
    job = Job(1, style=style)
    disk = show(place, my_node())
    job.save(disk / "run" / "step-1")
    stored = job.bits(live=False)
    job.train()
    job.save(disk / "run" / "step-2")
    dist.barrier()
    if dist.get_rank() == 0:
        damage()
    dist.barrier()
    other = Job(2)
    before = other.bits()
    found = attempt(lambda: load_state(disk / "run" / "step-1", **other.state()))
    return found | {"right": other.bits(live=False) == stored, "untouched": other.bits() == before}


@scenario(ranks=4)
def a_file_is_lost(place: Path) -> Any:
    lost = place / "node1/run/step-1/optimizer_0/__3_0.distcp"
    return _damaged(place, lost.unlink)


@scenario(ranks=4)
def a_node_is_new(place: Path) -> Any:
    return _damaged(place, lambda: shutil.rmtree(place / "node1/run/step-1"))


@scenario(ranks=4)
def a_node_is_new_and_nothing_was_on_it(place: Path) -> Any:
    """Whole state dicts are on the first rank's node; the other one has its random states and data positions."""

    def damage() -> None:
        for path in (place / "node1/run/step-1").iterdir():
            if not path.name.startswith(("random_states", "dl_states")):
                path.unlink()

    return _damaged(place, damage, style="FULL_STATE_DICT")


@scenario(ranks=4)
def a_node_has_another_save(place: Path) -> Any:
    def damage() -> None:
        shutil.rmtree(place / "node1/run/step-1")
        os.rename(place / "node1/run/step-2", place / "node1/run/step-1")

    return _damaged(place, damage)


@scenario(ranks=4)
def a_node_fails(place: Path) -> Any:
    """The leader of the second node cannot write what all nodes get."""
    job = Job(1)
    disk = show(place, my_node())
    job.save(disk / "run" / "step-1")
    stored = job.bits(live=False)
    dist.barrier()
    before = [tree(place / f"node{node}") for node in (0, 1)]
    dist.barrier()
    job.train()
    full = OSError(errno.ENOSPC, "No space left on device")
    with only(2, failing("fsdp_ckpt.train.commit.write_file", full, after=3)):
        found = attempt(lambda: job.save(disk / "run" / "step-1"))
    dist.barrier()
    same = [tree(place / f"node{node}") for node in (0, 1)] == before
    other = Job(2)
    load_state(disk / "run" / "step-1", **other.state())
    return found | {"same": same, "previous": other.bits(live=False) == stored}


@scenario(ranks=4)
def a_node_fails_to_publish(place: Path) -> Any:
    """The second node has put the new checkpoint in its place when the first one cannot."""
    job = Job(1)
    disk = show(place, my_node())
    job.save(disk / "run" / "step-1")
    stored = job.bits(live=False)
    dist.barrier()
    before = [tree(place / f"node{node}") for node in (0, 1)]
    dist.barrier()
    job.train()
    broken = OSError(errno.EIO, "Input/output error")
    with only(0, failing("fsdp_ckpt.store.publish.exchange", broken)):
        found = attempt(lambda: job.save(disk / "run" / "step-1"))
    dist.barrier()
    same = [tree(place / f"node{node}") for node in (0, 1)] == before
    dist.barrier()
    with only(0, failing("fsdp_ckpt.store.publish.Staging._rename", broken)):
        other = attempt(lambda: job.save(disk / "run" / "step-2"))
    dist.barrier()
    steps = [sorted(os.listdir(place / f"node{node}" / "run")) for node in (0, 1)]
    again = Job(2)
    load_state(disk / "run" / "step-1", **again.state())
    return found | {
        "same": same, "previous": again.bits(live=False) == stored, "other": other["kind"], "steps": steps,
    }  # fmt: skip


@scenario(ranks=4)
def whole_files_are_pruned_everywhere(place: Path) -> Any:
    job = Job(1, style="FULL_STATE_DICT")
    disk = show(place, my_node())
    options: Any = {"keep": 1, "durable": False, "state_dict_type": "FULL_STATE_DICT"}
    with Checkpointer(disk / "run", **job.state(), **options) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
    dist.barrier()
    return [sorted(os.listdir(place / f"node{node}" / "run")) for node in (0, 1)]


@scenario(ranks=4)
def the_first_node_is_new(place: Path) -> Any:
    job = Job(1)
    disk = show(place, my_node())
    job.save(disk / "run" / "step-1")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place / "node0/run")
    dist.barrier()
    return attempt(lambda: Checkpointer(disk / "run", **Job(2).state()).resume())


@scenario(ranks=4)
def every_node_is_pruned(place: Path) -> Any:
    job = Job(1)
    disk = show(place, my_node())
    with Checkpointer(disk / "run", **job.state(), keep=2, durable=False) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
    dist.barrier()
    left = [sorted(os.listdir(place / f"node{node}" / "run")) for node in (0, 1)]
    dist.barrier()
    if dist.get_rank() == 0:  # cut off between the two nodes: the first rank's comes last
        shutil.rmtree(place / "node0/run/step-3")
    dist.barrier()
    report = Checkpointer(disk / "run", **Job(2).state()).resume()
    dist.barrier()
    if dist.get_rank() == 0:  # removed here, and then the job was killed
        shutil.rmtree(place / "node0/run/step-2")
    dist.barrier()
    with Checkpointer(disk / "run", **job.state(), keep=1, durable=False) as checkpointer:
        checkpointer.save(4)
    dist.barrier()
    then = [sorted(os.listdir(place / f"node{node}" / "run")) for node in (0, 1)]
    return {"left": left, "resumed": report and report.step, "then": then}


if __name__ == "__main__":
    main()
