"""What is beside a model on real ranks: objects, hooks, pickling, and another process at the same path."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import fsdp_ckpt.train.commit as commit_module
from fsdp_ckpt import Checkpointer, Hooks, get_state_dict, load_state, save_model, save_state
from tests.dist.attempt import attempt, nothing_left
from tests.dist.stage import main, scenario
from tests.dist.wrappers import WRAPPERS, fsdp1, fsdp2


class Plain:
    """An object with a state."""

    def __init__(self, state: Any) -> None:
        self.state: Any = state

    def state_dict(self) -> Any:
        return self.state() if callable(self.state) else self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@scenario(ranks=2)
def sharded_objects(place: Path) -> Any:
    """Shards among the objects, of which one rank's state is stored."""
    result = {}
    for name, wrap in WRAPPERS.items():
        model = wrap(nn.Linear(4, 4))
        result[name] = attempt(lambda name=name, model=model: save_state(place / name, objects={"ema": model}))  # type: ignore[misc]
        within = nn.Sequential(nn.Linear(4, 4), wrap(nn.Linear(4, 4)))
        result[f"{name} within"] = attempt(
            lambda name=name, model=within: save_state(place / name, objects={"ema": model})  # type: ignore[misc]
        )
    model = fsdp2(nn.Linear(4, 4))
    state: Any = {"list": [{"weight": model.weight}]}
    result["DTensor"] = attempt(lambda: save_state(place / "d", objects={"own": Plain(state)}))
    flat = fsdp1(nn.Linear(4, 4))
    with FullyShardedDataParallel.state_dict_type(flat, StateDictType.SHARDED_STATE_DICT):
        shards = flat.state_dict()
    result["ShardedTensor"] = attempt(lambda: save_state(place / "s", objects={"own": Plain(shards)}))
    return nothing_left(place, result)


@scenario(ranks=2)
def a_collective_state_dict(place: Path) -> Any:
    """An object whose state_dict gathers."""

    def gathered() -> dict[str, list[int]]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, dist.get_rank() * 10)
        return {"all": found}

    save_state(place / "run", objects={"own": Plain(gathered)}, durable=False)
    own = Plain(None)
    load_state(place / "run", objects={"own": own})
    return own.state


class Raises(Hooks):
    """Raises on one rank when all is done."""

    def after_save(self, report: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("upload failed")

    def after_load(self, report: Any) -> None:
        if dist.get_rank() == 0:
            raise KeyError("lost")


@scenario(ranks=2)
def failures_beside_the_data(place: Path) -> Any:
    """Errors of hooks, of what becomes of gathered tensors, and of pickling."""
    model = fsdp2(nn.Linear(4, 4))
    run = Checkpointer(place / "hooks", model, keep=1, hooks=[Raises()])
    result = {"after_save": attempt(lambda: run.save(1)), "after_load": attempt(run.resume)}

    def full() -> None:
        save_state(place / "full", model, state_dict_type="FULL_STATE_DICT")

    def broken(*arguments: Any, **options: Any) -> Any:
        raise OSError(5, "Input/output error")

    with mock.patch("fsdp_ckpt.train.full.write_tensor", broken):
        result["writing a full file"] = attempt(full)
    with mock.patch("fsdp_ckpt.train.export.write_tensor", broken):
        result["writing a model"] = attempt(lambda: save_model(model, place / "model"))
    real = torch.empty

    def empty(*arguments: Any, **options: Any) -> Any:
        if arguments[0] == (4, 4) and dist.get_rank() == 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*arguments, **options)

    with mock.patch("torch.empty", empty):
        result["no memory"] = attempt(lambda: get_state_dict(model))
    odd = torch.optim.SGD([{"params": model.parameters(), "option": lambda: None}], lr=0.1)
    for style in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        result[f"option {style}"] = attempt(
            lambda style=style: save_state(place / "odd", model, odd, state_dict_type=style)  # type: ignore[misc]
        )
    own = Plain({"function": lambda: None} if dist.get_rank() == 0 else {})
    result["object"] = attempt(lambda: save_state(place / "object", objects={"own": own}))
    feed = Plain({"function": lambda: None} if dist.get_rank() == 1 else {})
    result["data loader"] = attempt(lambda: save_state(place / "feed", dataloader=feed))
    return nothing_left(place, result)


class Skips(Hooks):
    """Leaves parts out."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def before_save(self, event: Any) -> None:
        for part in self.parts:
            event.skip(part)

    before_load = before_save


@scenario(ranks=2)
def skipping(place: Path) -> Any:
    """Parts left out by hooks on every rank, also where the world has grown."""
    model = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    skips = [Skips("scaler", "random_states")]
    report = save_state(place / "less", model, scaler=scaler, hooks=skips, durable=False)
    result: dict[str, Any] = {"files": sorted(report.files)}
    save_state(place / "all", model, scaler=scaler, durable=False)
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        save_state(place / "one", model, scaler=scaler, process_group=group, durable=False)
    dist.barrier()
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    other.scale(torch.ones(()))
    torch.manual_seed(77)
    before = torch.get_rng_state()
    for name in ("all", "one"):
        load_state(place / name, model, scaler=other, rng=True, hooks=skips)
        result[name] = (other.get_scale(), torch.equal(torch.get_rng_state(), before))
    load_state(place / "one", model, scaler=other, rng=True)
    result["loaded"] = (other.get_scale(), torch.equal(torch.get_rng_state(), before))
    return result


@scenario(ranks=2)
def two_processes_at_one_path(place: Path) -> Any:
    """The second one comes while the first is writing."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    begun, ended = place / "begun", place / "ended"

    def wait(path: Path) -> None:
        limit = time.monotonic() + 10
        while not path.exists():
            assert time.monotonic() < limit
            time.sleep(0.005)

    def save() -> None:
        save_state(place / "run", model, step=rank, process_group=groups[rank], durable=False)

    if rank == 0:
        real = commit_module.write_files

        def slow(*arguments: Any, **options: Any) -> Any:
            begun.touch()
            wait(ended)
            return real(*arguments, **options)

        with mock.patch.object(commit_module, "write_files", slow):
            result = attempt(save)
    else:
        wait(begun)
        result = attempt(save)
        ended.touch()
    dist.barrier()
    return result | {"step": load_state(place / "run", model, process_group=groups[rank]).step}


if __name__ == "__main__":
    main()
