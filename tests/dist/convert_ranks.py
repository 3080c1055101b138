"""Scenarios of test_convert_loads: saved on two ranks, converted without torch, loaded on three.

The jobs that saved say what is expected (``Job.tensors``), and what training would have gone on to do is a job on three
ranks that loaded the unconverted checkpoint.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdp_ckpt import convert, load_state, reshard, save_state
from tests.dist.accelerate_job import Accelerate, Job
from tests.dist.stage import main, scenario

KINDS = ("FSDP1", "FSDP2")
NAMES = ("mlp", "rich")
FRESH_SEED = 99
SAVES = "saves"


def _saved(place: Path) -> Path:
    return place.parent.parent / SAVES / "place"


def _names(job: Job) -> list[str]:
    """Return the parameters' names in the optimizer's order."""
    found = {id(parameter): name for name, parameter in job.model.named_parameters()}
    return [found[id(parameter)] for group in job.optimizer.param_groups for parameter in group["params"]]


@scenario(ranks=2)
def saves(place: Path) -> Any:
    """Save one job in many ways."""
    rank, found = dist.get_rank(), {}
    for kind in KINDS:
        for name in NAMES:
            job = Job.trained(kind, name)
            Accelerate(kind).save(place / "theirs" / f"{kind}-{name}", job)
            save_state(
                place / "ours" / f"{kind}-{name}" / "step-2", job.model, job.optimizer, job.scheduler,
                objects=job.counter, step=2,
            )  # fmt: skip
            found[kind, name] = job.state()
        job = Job.trained(kind)
        Accelerate(kind, use_dcp=False).save_sharded(place / "files" / kind, job)
        save_state(place / "full" / kind, job.model, job.optimizer, state_dict_type="FULL_STATE_DICT")
    job = Job.trained("FSDP2")
    folder = place / "verl"  # as its FSDPCheckpointManager does with FSDP2: plain state dicts, the optimizer by index
    folder.mkdir(exist_ok=True)
    torch.save(job.model.state_dict(), folder / f"model_world_size_2_rank_{rank}.pt")
    torch.save(job.optimizer.state_dict(), folder / f"optim_world_size_2_rank_{rank}.pt")
    if rank == 0:
        (place / "names.json").write_text(json.dumps(_names(job)))
    return found


def _once(work: Callable[..., Any], src: Path, out: Path, **options: Any) -> None:
    """Let the first rank convert, and the others wait."""
    if dist.get_rank() == 0:
        work(src, out, world_size=3, fsync=False, **options)
    dist.barrier()


def _by_torch(folder: Path, job: Job) -> None:
    """Load FSDP2 with torch alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = get_model_state_dict(job.model), get_optimizer_state_dict(job.model, job.optimizer)
        dcp.load({"model": model}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.load({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0")
        set_model_state_dict(job.model, model)
        set_optimizer_state_dict(job.model, job.optimizer, optimizer)


def _by_accelerate(folder: Path, job: Job) -> None:
    theirs = Accelerate(job.kind)
    theirs.load_model(folder, job)
    theirs.load_optimizer(folder, job)


def _by_us(folder: Path, job: Job) -> None:
    load_state(folder, job.model, job.optimizer, rng=False)


LOADERS: Mapping[str, Callable[[Path, Job], None]] = {"torch": _by_torch, "accelerate": _by_accelerate, "ours": _by_us}


def _load(folder: Path, kind: str, name: str, loader: str) -> dict[str, Any]:
    """Load into another job, and take one step."""
    # Accelerate loads FSDP1's moments into an optimizer that has some only.
    job = Job.trained(kind, name, seed=FRESH_SEED, steps=1 if (loader, kind) == ("accelerate", "FSDP1") else 0)
    LOADERS[loader](folder, job)
    found = {"tensors": job.state()["tensors"], "groups": job.groups()}
    losses = job.run(range(2, 3))
    return found | {"losses": losses, "end": job.state()["tensors"]}


def _loads(folder: Path, kind: str, name: str) -> dict[str, Any]:
    left_out = {("torch", "FSDP1", "mlp"), ("torch", "FSDP1", "rich"), ("accelerate", "FSDP1", "rich")}
    loaders = [loader for loader in LOADERS if (loader, kind, name) not in left_out]
    return {loader: _load(folder, kind, name, loader) for loader in loaders}


@scenario(ranks=3)
def controls(place: Path) -> Any:
    """Load what was saved, as it is."""
    return {(k, n): _load(_saved(place) / "theirs" / f"{k}-{n}", k, n, "ours") for k in KINDS for n in NAMES}


@scenario(ranks=3)
def accelerate_cannot(place: Path) -> Any:
    """Load what Accelerate saved with Accelerate, where the third rank holds nothing of the model."""
    _by_accelerate(_saved(place) / "theirs" / "FSDP1-rich", Job.trained("FSDP1", "rich", seed=FRESH_SEED, steps=1))


@scenario(ranks=3)
def resharded_of_accelerate(place: Path) -> Any:
    found = {}
    for kind in KINDS:
        for name in NAMES:
            src, out = _saved(place) / "theirs" / f"{kind}-{name}", place / f"{kind}-{name}"
            _once(reshard, src, out)
            found[kind, name] = _loads(out, kind, name)
    return found


@scenario(ranks=3)
def resharded_of_ours(place: Path) -> Any:
    found = {}
    for kind in KINDS:
        for name in NAMES:
            src, run = _saved(place) / "ours" / f"{kind}-{name}" / "step-2", place / f"{kind}-{name}"
            _once(reshard, src, run / "step-2")
            found[kind, name] = _loads(run / "step-2", kind, name)
            job = Job.build(kind, name, seed=FRESH_SEED)
            load_state(run, job.model, job.optimizer, job.scheduler, objects=job.counter)  # of a folder of checkpoints
            found[kind, name]["rest"] = job.rest()
    return found


@scenario(ranks=2)
def resharded_and_back(place: Path) -> Any:
    """Go on with three files on the two ranks that saved: random states are theirs."""
    _once(reshard, _saved(place) / "ours" / "FSDP2-mlp" / "step-2", place / "step-2")
    job = Job.build("FSDP2", seed=FRESH_SEED)
    load_state(place / "step-2", job.model, job.optimizer, job.scheduler, objects=job.counter)
    return job.state()


@scenario(ranks=3)
def rank_files(place: Path) -> Any:
    """Rank files, which nobody loads on another number of ranks, become a sharded checkpoint."""
    saved, found = _saved(place), {}
    for kind in KINDS:
        out = place / kind
        _once(convert, saved / "files" / kind, out, to="accelerate")
        found[kind] = _loads(out, kind, "mlp")
    _once(convert, saved / "verl", place / "verl", to="accelerate", param_names=saved / "names.json")
    return found | {"verl": _loads(place / "verl", "FSDP2", "mlp")}


@scenario(ranks=3)
def full_files(place: Path) -> Any:
    """A full checkpoint becomes a sharded one, and is loaded without a rank that holds all of it."""
    saved, found = _saved(place), {}
    for kind in KINDS:
        out = place / kind
        _once(convert, saved / "full" / kind, out, to="accelerate")
        for other in KINDS:
            found[kind, other] = _loads(out, other, "mlp")
    return found


if __name__ == "__main__":
    main()
