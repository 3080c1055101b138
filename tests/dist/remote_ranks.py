"""Scenarios of test_remote: ranks save to an S3 server and load from it. Each has a bucket, named like the scenario."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.multiprocessing import start_processes

from fsdp_ckpt import Checkpointer, latest_complete, load_state, save_state
from fsdp_ckpt.train.remote_objects import Objects
from tests.dist import accelerate_job
from tests.dist.attempt import attempt
from tests.dist.job import Job
from tests.dist.stage import Raised, main, scenario

__all__ = ["BUCKETS", "DEATHS"]

DEATHS = ("a-rank-dies-after-its-upload", "the-first-rank-dies-before-the-manifest")
BUCKETS = (
    "saves-and-loads", "ranks-list-once", "three-list-once", "is-replaced", "resumes-and-prunes", "an-upload-fails",
    "the-manifest-fails", "is-throttled", "accelerate-loads", "in-the-background", *DEATHS,
)  # fmt: skip


def _whole(job: Job) -> dict[str, Any]:
    """Everything in model and optimizer, unsharded, as torch gathers it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: dict[str, Any] = {"model": get_model_state_dict(job.model, options=options)}
    found["optimizer"] = get_optimizer_state_dict(job.model, job.optimizer, options=options)
    return found


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return bool(first == second)


def _save(job: Job, url: str, **options: Any) -> Any:
    return save_state(url, **job.state(), **options)


@scenario(ranks=2)
def saves_and_loads(place: Path) -> Any:
    url = "s3://saves-and-loads/run/step-7"
    job = Job(1)
    report = _save(job, url, step=7, values={"epoch": 3})
    whole = _whole(job)
    if dist.get_rank() == 0:
        torch.save(whole, place / "whole.pt")
    other = Job(2)
    loaded = load_state(url, **other.state())
    by_run = load_state("s3://saves-and-loads/run", **Job(3).state())
    return {
        "right": other.bits(live=False) == job.bits(live=False), "path": report.path, "files": dict(report.files),
        "loaded": [loaded.path, loaded.step, loaded.values, loaded.rng, loaded.data, list(loaded.warnings)],
        "by run": by_run.path, "refused": attempt(lambda: _save(job, url, overwrite=False)),
        "not there": attempt(lambda: load_state("s3://saves-and-loads/rum", **Job(3).state())),
    }  # fmt: skip


@scenario(ranks=2)
def one_rank_loads(place: Path) -> Any:
    """A job of one rank; the other one has nothing to do."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    if dist.get_rank() == 1:
        return None
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5, affine=False), torch.nn.Linear(5, 6)
    )  # as Job's
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    load_state("s3://saves-and-loads/run/step-7", model, optimizer, process_group=groups[0])
    expected = torch.load(place.parent.parent / "saves_and_loads/place/whole.pt")
    names = [name for name, _ in model.named_parameters()]
    state = {name: optimizer.state[param] for name, param in model.named_parameters()}
    return {
        "model": _same(dict(model.state_dict()), expected["model"]),
        "moments": [_same(state[name], expected["optimizer"]["state"][name]) for name in names],
    }


@scenario(ranks=3)
def three_ranks_load(place: Path) -> Any:
    job = Job(4)
    report = load_state("s3://saves-and-loads/run/step-7", **job.state(), positions="fresh")
    expected = torch.load(place.parent.parent / "saves_and_loads/place/whole.pt")
    found = _whole(job)  # on all ranks, as it is a collective
    return {"right": dist.get_rank() != 0 or _same(found, expected), "saved by": report.saved_world_size}


def _load_once(bucket: str) -> Any:
    """Save, mark the time by an object of another name, and load."""
    job = Job(1)
    _save(job, f"s3://{bucket}/run/step-1")
    if dist.get_rank() == 0:
        fsspec.filesystem("s3", skip_instance_cache=True).pipe_file(f"{bucket}/now-loading", b"x")
    dist.barrier()
    report = load_state(f"s3://{bucket}/run/step-1", **Job(2).state())
    return {"read": report.read_bytes, "verified": report.verified_bytes}


@scenario(ranks=2)
def ranks_list_once(place: Path) -> Any:
    return _load_once("ranks-list-once")


@scenario(ranks=3)
def three_list_once(place: Path) -> Any:
    return _load_once("three-list-once")


@scenario(ranks=2)
def is_replaced(place: Path) -> Any:
    """A checkpoint of other files, by another: nothing of the first is left."""
    url = "s3://is-replaced/step-1"
    _save(Job(1, style="FULL_STATE_DICT"), url, state_dict_type="FULL_STATE_DICT")
    job = Job(2)
    report = _save(job, url)
    other = Job(3)
    load_state(url, **other.state())
    return {"right": other.bits(live=False) == job.bits(live=False), "files": sorted(report.files)}


@scenario(ranks=2)
def resumes_and_prunes(place: Path) -> Any:
    url = "s3://resumes-and-prunes/run"
    job = Job(1)
    with Checkpointer(url, **job.state(), keep=2, keep_best="loss:min") as checkpointer:
        nothing = checkpointer.resume()
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4), (4, 0.3)):
            job.train()
            checkpointer.save(step, values={"loss": loss})
    dist.barrier()
    other = Job(2)
    report = Checkpointer(url, **other.state(), keep=2).resume()
    assert report is not None
    return {
        "nothing": nothing is None, "step": report.step, "values": report.values, "path": report.path,
        "right": other.bits(live=False) == job.bits(live=False), "latest": latest_complete(url),
    }  # fmt: skip


@scenario(ranks=2)
def in_the_background(place: Path) -> Any:
    url = "s3://in-the-background/run"
    job = Job(1)
    with Checkpointer(url, **job.state(), keep=1, async_save=True) as checkpointer:
        checkpointer.save(1)
        job.train()
        stored = job.bits(live=False)
        checkpointer.save(2)
        job.train()
    dist.barrier()
    other = Job(2)
    load_state(url, **other.state())
    return other.bits(live=False) == stored


def _fails(bucket: str) -> Any:
    """The second save meets what the test's proxy does to it."""
    url = f"s3://{bucket}/run"
    job = Job(1)
    _save(job, f"{url}/step-1")
    stored = job.bits(live=False)
    job.train()
    found = attempt(lambda: _save(job, f"{url}/step-2"))
    dist.barrier()
    other = Job(2)
    report = Checkpointer(url, **other.state()).resume()
    return found | {"previous": other.bits(live=False) == stored, "path": report and report.path}


@scenario(ranks=2)
def an_upload_fails(place: Path) -> Any:
    return _fails("an-upload-fails")


@scenario(ranks=2)
def the_manifest_fails(place: Path) -> Any:
    return _fails("the-manifest-fails")


@scenario(ranks=2)
def is_throttled(place: Path) -> Any:
    """Every object is refused once or more by the test's proxy, and nobody notices."""
    job = Job(1)
    _save(job, "s3://is-throttled/step-1")
    other = Job(2)
    load_state("s3://is-throttled/step-1", **other.state())
    return other.bits(live=False) == job.bits(live=False)


@scenario(ranks=2)
def accelerate_loads(place: Path) -> Any:
    """What was uploaded is downloaded by s3fs, and loaded by Accelerate's own functions."""
    job = accelerate_job.Job.trained("FSDP2")
    save_state("s3://accelerate-loads/ck", job.model, job.optimizer, job.scheduler, objects=job.counter)
    if dist.get_rank() == 0:
        fsspec.filesystem("s3", skip_instance_cache=True).get("accelerate-loads/ck/", f"{place}/ck/", recursive=True)
    dist.barrier()
    other = accelerate_job.Job.build("FSDP2", seed=9)
    theirs = accelerate_job.Accelerate("FSDP2")
    theirs.load_model(place / "ck", other)
    theirs.load_optimizer(place / "ck", other)
    mine, found = job.tensors(), other.tensors()
    return {name: name in found and torch.equal(tensor, found[name]) for name, tensor in mine.items()}


def _dying(rank: int, out: Path, name: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{out / name}/store", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    url = f"s3://{name}/run"
    job = Job(1)
    _save(job, f"{url}/step-1")
    torch.save(job.bits(live=False), out / name / f"stored_{rank}.pt")
    job.train()
    dist.barrier()
    found = attempt(lambda: _die_saving(name, rank, job, f"{url}/step-2"))
    torch.save(found, out / name / f"rank_{rank}.pt")
    os._exit(0)


def _die_saving(name: str, rank: int, job: Job, url: str) -> None:
    real = Objects.put_files

    def uploads_and_dies(self: Objects, *arguments: Any) -> None:
        real(self, *arguments)
        os._exit(9)

    def dies(*_: Any, **__: Any) -> None:
        os._exit(9)

    if rank == 1 and name == DEATHS[0]:
        with mock.patch.object(Objects, "put_files", uploads_and_dies):
            _save(job, url)
    if rank == 0 and name == DEATHS[1]:
        with mock.patch("fsdp_ckpt.train.remote_commit.write_manifest", dies):
            _save(job, url)
    _save(job, url)


def _after_death(rank: int, out: Path, name: str) -> None:
    """A new job: what it resumes from, and whether it can save what the dead one could not."""
    dist.init_process_group(
        "gloo", init_method=f"file://{out / name}/store-2", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    url = f"s3://{name}/run"
    job = Job(3)
    latest = latest_complete(url)
    refused = attempt(lambda: load_state(f"{url}/step-2", **Job(3).state()))
    report = Checkpointer(url, **job.state()).resume()
    right = job.bits(live=False) == torch.load(out / name / f"stored_{rank}.pt", weights_only=False)
    if rank == 0:  # as when a rank is killed while it uploads
        fs = fsspec.filesystem("s3", skip_instance_cache=True)
        fs.call_s3("create_multipart_upload", Bucket=name, Key="run/step-2/optimizer_0/__1_0.distcp")
    dist.barrier()
    _save(job, f"{url}/step-2", overwrite=False)
    again = Job(4)
    load_state(url, **again.state())
    value = {
        "latest": latest, "refused": refused, "path": report and report.path, "right": right,
        "saved": again.bits(live=False) == job.bits(live=False), "then": latest_complete(url),
    }  # fmt: skip
    torch.save(value, out / name / f"after_{rank}.pt")
    os._exit(0)


def _run(function: Callable[..., None], out: Path, name: str, file: str) -> None:
    context = start_processes(function, (out, name), nprocs=2, join=False, start_method="fork")
    limit = time.monotonic() + 40
    for rank, process in enumerate(context.processes):
        process.join(max(0.1, limit - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(10)
            torch.save(Raised("Hung", "killed after 40 s", f"rank {rank} hung"), out / name / f"{file}_{rank}.pt")


if __name__ == "__main__":
    if sys.argv[2:] == ["deaths"]:
        torch.set_num_threads(1)
        for death in DEATHS:
            (Path(sys.argv[1]) / death).mkdir()
            _run(_dying, Path(sys.argv[1]), death, "rank")
            _run(_after_death, Path(sys.argv[1]), death, "after")
    else:
        main()
