"""Calls that nobody meant: ranks that disagree, folders of others, and wrong arguments."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp_ckpt import Checkpointer, Hooks, get_state_dict, load_state, save_model, save_state
from tests.dist.attempt import attempt, tree
from tests.dist.job import Job, digest
from tests.dist.stage import main, scenario

# --- ranks that disagree


@scenario(ranks=2)
def another_model_on_one_rank(place: Path) -> Any:
    model = nn.Linear(6, 5 + 2 * dist.get_rank())
    fully_shard(model)
    found = attempt(lambda: save_state(place / "step-1", model, durable=False))
    found["exported"] = attempt(lambda: get_state_dict(model))
    found["model"] = attempt(lambda: save_model(model, place / "hf"))
    dist.barrier()
    return found | {"left": sorted(path.name for path in place.iterdir())}


@scenario(ranks=2)
def another_path_on_one_rank(place: Path) -> Any:
    job = Job(1)
    found = attempt(lambda: job.save(place / f"step-{dist.get_rank()}"))
    dist.barrier()
    found["left"] = sorted(path.name for path in place.iterdir())
    dist.barrier()
    job.save(place / "step-5")
    job.save(place / "step-6")
    found["load"] = attempt(lambda: load_state(place / f"step-{5 + dist.get_rank()}", **job.state()))
    return found


@scenario(ranks=2)
def an_optimizer_on_one_rank_only(place: Path) -> Any:
    job = Job(1)
    mine = job.optimizer if dist.get_rank() else None
    found = attempt(lambda: save_state(place / "step-1", job.model, mine, durable=False))
    dist.barrier()
    return found | {"left": sorted(path.name for path in place.iterdir())}


@scenario(ranks=2)
def another_style_on_one_rank(place: Path) -> Any:
    job = Job(1, style=["SHARDED_STATE_DICT", "FULL_STATE_DICT"][dist.get_rank()])
    found = attempt(lambda: job.save(place / "step-1"))
    dist.barrier()
    return found | {"left": sorted(path.name for path in place.iterdir())}


@scenario(ranks=4)
def two_groups_save_to_one_path(place: Path) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    torch.manual_seed(dist.get_rank() // 2)
    model = nn.Linear(300, 300)
    dist.barrier()
    found = attempt(lambda: save_state(place / "step-1", model, durable=False, process_group=group))
    dist.barrier()
    load_state(place / "step-1", model)
    return found | {"left": sorted(path.name for path in place.iterdir()), "bits": digest(model.weight)}


class Skipping(Hooks):
    """Leaves a part out on one rank."""

    def before_save(self, event: Any) -> None:
        if event.rank == 1:
            event.skip("optimizer_0")


@scenario(ranks=2)
def a_hook_skips_on_one_rank(place: Path) -> Any:
    job = Job(1)
    found = attempt(lambda: job.save(place / "step-1", hooks=[Skipping()]))
    dist.barrier()
    return found | {"left": sorted(path.name for path in place.iterdir())}


# --- what may be replaced


@scenario(ranks=2)
def folders_of_others(place: Path) -> Any:
    first = dist.get_rank() == 0
    if first:
        home = place / "home"
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh" / "id").write_text("key")
        (home / "notes.txt").write_text("mine")
        checkout = place / "checkout"
        checkout.mkdir()
        (checkout / "model.py").write_text("import torch\n")
        subprocess.run(["git", "init", "-q", str(checkout)], check=True)
        (place / "dotted").mkdir()
        (place / "dotted" / ".hidden").write_text("mine")
        (place / "file").write_text("mine")
    dist.barrier()
    job = Job(1)
    job.save(place / "run" / "step-1")
    job.save(place / "beside")
    if first:
        (place / "beside" / "thesis.tex").write_text("mine")
        (place / "nested").mkdir()
        os.rename(place / "beside", place / "nested" / "beside")
        os.symlink(place / "home", place / "link")
    dist.barrier()
    before = tree(place)
    dist.barrier()
    tries = {
        name: attempt(lambda name=name: job.save(place / name))  # type: ignore[misc]
        for name in ("home", "checkout", "dotted", "file", "run", "nested/beside", "link")
    }
    dist.barrier()
    tries["not overwriting"] = attempt(lambda: job.save(place / "run" / "step-1", overwrite=False))
    dist.barrier()
    return {"tries": tries, "untouched": tree(place) == before}


# --- wrong arguments


@scenario(ranks=2)
def wrong_arguments(place: Path) -> Any:
    job = Job(1)
    job.save(place / "good")
    before = job.bits()
    early = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(early.parameters(), lr=0.1)
    wrapped: Any = FullyShardedDataParallel(early, device_id=torch.device("cpu"))
    late = nn.Linear(6, 5)
    built_early = torch.optim.SGD(late.parameters(), lr=0.1)
    fully_shard(late)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 6))
    anything: Any = object()
    out = place / "bad"
    calls: dict[str, Callable[[], Any]] = {
        "type": lambda: save_state(out, job.model, state_dict_type="SHARDED"),  # type: ignore[call-overload]
        "lone optimizer": lambda: save_state(out, optimizer=job.optimizer),
        "early optimizer": lambda: save_state(out, wrapped, optimizer),
        "early optimizer of FSDP2": lambda: save_state(out, late, built_early),
        "scheduler": lambda: save_state(out, job.model, job.optimizer, anything),
        "loader": lambda: save_state(out, job.model, dataloader=anything),
        "model": lambda: save_state(out, anything),
        "optimizer": lambda: save_state(out, job.model, anything),
        "values": lambda: save_state(out, job.model, values={"seen": {1, 2}}),
        "tensor in values": lambda: save_state(out, job.model, values={"loss": torch.tensor(1.0)}),
        "url": lambda: save_state("hf://user/run/step-1", job.model),
        "local": lambda: save_state(out, job.model, state_dict_type="LOCAL_STATE_DICT"),
        "meta": lambda: save_state(out, empty),
        "get meta": lambda: get_state_dict(empty),
        "export meta": lambda: save_model(empty, out),
        "load meta": lambda: load_state(place / "good", empty),
        "load lone optimizer": lambda: load_state(place / "good", optimizer=job.optimizer),
        "load resize": lambda: load_state(place / "good", job.model, resize="shrink"),  # type: ignore[arg-type]
        "load positions": lambda: load_state(place / "good", job.model, positions="any"),  # type: ignore[arg-type]
        "load nothing there": lambda: load_state(place / "goof", job.model),
        "load scaler": lambda: load_state(place / "good", job.model, scaler=torch.amp.GradScaler("cpu")),
        "load other model": lambda: load_state(place / "good", nn.Linear(2, 2)),
        "keep": lambda: Checkpointer(place, keep=0),
        "step": lambda: Checkpointer(place / "run", job.model).save(-1),
    }
    tries = {name: attempt(call) for name, call in calls.items()}
    dist.barrier()
    left = sorted(path.name for path in place.iterdir())
    return {"tries": tries, "left": left, "live": job.bits() == before}


if __name__ == "__main__":
    main()
