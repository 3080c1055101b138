"""Scenarios of test_silent_failures: what goes wrong without a word elsewhere, tried on us.

Each returns plain values; what they are compared with is read by torch from live jobs (``Job.state``), from files by
torch or json, or is Accelerate's own behaviour in the same place.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import tests.dist.silent_content_ranks
import tests.dist.silent_hook_ranks  # noqa: F401 - both register their scenarios
from fsdp_ckpt import Checkpointer, load_state
from fsdp_ckpt.train.shards import ShardWriter
from tests.dist.accelerate_job import Accelerate, Job
from tests.dist.silent_job import FRESH, KINDS, attempt, load, names, on_first, refused, save
from tests.dist.stage import main, scenario

FULL, LOCAL = "FULL_STATE_DICT", "LOCAL_STATE_DICT"


# Findings of facts/accelerate.md, section 0, by number.


@scenario(ranks=2)
def finding_1(place: Path) -> Any:
    found = {}
    for kind in ("FSDP1", "FSDP1-flat"):
        job = Job.trained(kind, "rich")
        save(place / kind, job)
        expected = job.state()
        fresh = Job.build(kind, "rich", **FRESH)
        assert not fresh.optimizer.state
        load(place / kind, fresh)
        found[kind] = {"expected": expected, "found": fresh.state()}
    return found


@scenario(ranks=2)
def finding_2(place: Path) -> Any:
    job = Job.trained("FSDP2")
    save(place / "saved", job)
    expected = job.state()
    fresh = Job.build("FSDP2", **FRESH)
    fresh.loss(9).backward()
    grads = [parameter.grad.to_local().clone() for parameter in fresh.model.parameters()]
    load(place / "saved", fresh)
    kept = [parameter.grad.to_local() for parameter in fresh.model.parameters()]
    found = fresh.state()
    theirs = Job.build("FSDP2", **FRESH)
    theirs.loss(9).backward()
    Accelerate("FSDP2").load_optimizer(place / "saved", theirs)
    moments = [name for name in theirs.tensors() if name.startswith("state.")]
    return {"expected": expected, "found": found, "grads": grads, "kept": kept, "accelerate": moments}


def _checkpointer(folder: Path, job: Job) -> Checkpointer:
    return Checkpointer(folder, job.model, job.optimizer, job.scheduler, objects=job.counter, keep=2)


@scenario(ranks=2)
def finding_3(place: Path) -> Any:
    run = place / "run"
    on_first(lambda: (run / "notes of checkpoint").mkdir(parents=True))
    job = Job.build("FSDP2")
    first = _checkpointer(run, job)
    states = {}
    for step in (8, 9, 10):
        job.run(range(step, step + 1))
        first.save(step, values={"lr": step / 10})
        states[step] = job.tensors()
    out: dict[str, Any] = {"saved": states, "after_first": names(run)}
    fresh = Job.build("FSDP2", **FRESH)
    second = _checkpointer(run, fresh)
    report = second.resume()
    out |= {"resumed": (report and report.step, report and report.values), "resumed_state": fresh.tensors()}
    fresh.run(range(11, 12))
    second.save(11)
    out |= {"newest": fresh.tensors(), "after_second": names(run)}
    third = Job.build("FSDP2", seed=98)
    report = _checkpointer(run, third).resume()
    out |= {"resumed_again": report and report.step, "resumed_again_state": third.tensors()}
    # Somebody goes back, and saves where newer checkpoints are.
    second.save(5)
    out["after_going_back"] = names(run)
    return out


class _NoSpace:
    """A disk that is full on the last rank."""

    def __enter__(self) -> None:
        self.close = ShardWriter.close

        def fail(writer: ShardWriter) -> Any:
            raise OSError(28, "No space left on device")

        if dist.get_rank() == dist.get_world_size() - 1:
            ShardWriter.close = fail  # type: ignore[assignment, method-assign]

    def __exit__(self, *_: object) -> None:
        ShardWriter.close = self.close  # type: ignore[method-assign]


@scenario(ranks=2)
def finding_3_prunes_last(place: Path) -> Any:
    job = Job.trained("FSDP2")
    checkpointer = _checkpointer(place / "run", job)
    for step in (1, 2):
        checkpointer.save(step)
    with _NoSpace():
        error = attempt(lambda: checkpointer.save(3))
    after_failure = names(place / "run")
    checkpointer.save(3)
    return {"error": error, "after_failure": after_failure, "after": names(place / "run")}


@scenario(ranks=2)
def finding_4(place: Path) -> Any:
    found = {}
    for kind in ("FSDP1", "FSDP1-flat"):
        for name in ("mlp", "rich"):
            job = Job.trained(kind, name)
            folder = place / f"{kind}-{name}"
            save(folder / "local", job, state_dict_type=LOCAL)
            without = Accelerate(kind, use_dcp=False)
            without.save_sharded(folder / "no-dcp", job)
            expected = job.state()
            local, no_dcp = Job.build(kind, name, **FRESH), Job.build(kind, name, **FRESH)
            theirs = [
                attempt(partial(Accelerate(kind, LOCAL).load_model, folder / "local", local))[0],
                attempt(partial(without.load_model, folder / "no-dcp", no_dcp))[0],
            ]
            load_state(folder / "no-dcp", no_dcp.model, no_dcp.optimizer, rng=False)
            load(folder / "local", local)
            found[kind, name] = {
                "expected": expected,
                "local": local.state(),
                "no_dcp": no_dcp.state(),
                "accelerate": theirs,
                "fsdp2": refused(partial(load, folder / "local"), Job.build("FSDP2", name, **FRESH)),
            }
    return found


@scenario(ranks=2)
def finding_5(place: Path) -> Any:
    """A model that keeps its parameters gathered after forward stays so, and does not go on with the old ones."""
    found = {}
    for kind in KINDS:
        job = Job.trained(kind, strategy="SHARD_GRAD_OP")
        save(place / kind, job)
        expected = job.run(range(2, 4))
        fresh = Job.build(kind, strategy="SHARD_GRAD_OP", **FRESH)
        with torch.no_grad():
            fresh.loss(5)  # leaves the parameters gathered
        load(place / kind, fresh)
        losses = fresh.run(range(2, 4))
        facts = json.loads((place / kind / "fsdp_ckpt.json").read_text())["models"][0]
        if isinstance(fresh.model, FSDPModule):
            group: Any = fresh.model._get_fsdp_state()._fsdp_param_group
            strategy = str(group._reshard_after_forward)
        else:
            strategy = fresh.model.sharding_strategy.name
        found[kind] = {"expected": expected, "found": losses, "manifest": facts, "live": strategy}
    return found


def _flip(file: Path, needle: Tensor) -> None:
    """Change one bit in the middle of where a file holds a tensor."""
    data = bytearray(file.read_bytes())
    raw = needle.contiguous().numpy().tobytes()
    assert data.count(raw) == 1
    data[data.index(raw) + len(raw) // 2] ^= 0x10
    file.write_bytes(data)


@scenario(ranks=2)
def finding_6(place: Path) -> Any:
    """Damage in the last rank's file, which the other ranks do not read."""
    found = {}
    for part, key in (("pytorch_model_fsdp_0", "up.weight"), ("optimizer_0", "state.up.weight.exp_avg")):
        for writer in ("ours", "accelerate"):
            job = Job.trained("FSDP2")
            folder = place / part / writer
            if writer == "ours":
                save(folder, job)
            else:
                Accelerate("FSDP2").save(folder, job)
            if dist.get_rank() == 1:
                _flip(folder / part / "__1_0.distcp", job.locals()[key])
            dist.barrier()
            one = refused(partial(load, folder), Job.trained("FSDP2", **FRESH))
            theirs = Accelerate("FSDP2")
            victim = Job.build("FSDP2", **FRESH)
            load_theirs = theirs.load_model if part.startswith("pytorch") else theirs.load_optimizer
            one["accelerate"] = attempt(partial(load_theirs, folder, victim))
            one["wrong"] = not torch.equal(victim.tensors()[key], job.tensors()[key])
            found[part, writer] = one
    return found


@scenario(ranks=2)
def finding_7_a_rank_fails(place: Path) -> Any:
    """As when a rank dies while overwriting, but it lives to tell; see also ``overwrite_and_die``."""
    job = Job.trained("FSDP2")
    save(place / "saved", job, step=2)
    expected = job.state()
    job.run(range(2, 3))
    with _NoSpace():
        error = attempt(lambda: save(place / "saved", job, step=3))
    fresh = Job.build("FSDP2", **FRESH)
    report = load(place / "saved", fresh)
    return {
        "error": error, "step": report.step, "expected": expected, "found": fresh.state(), "names": names(place),
    }  # fmt: skip


def overwrite_and_die(rank: int, place: str, dying: int) -> None:
    """Save, then die on one rank while everybody saves to the same place. For ``tests.build.run_ranks``."""
    job = Job.trained("FSDP2")
    save(Path(place, "saved"), job, step=2)
    torch.save(job.tensors(), Path(place, f"expected_{rank}.pt"))
    job.run(range(2, 3))
    if rank == dying:
        ShardWriter.close = lambda _: os._exit(9)  # type: ignore[assignment, method-assign]
    save(Path(place, "saved"), job, step=3)


@scenario(ranks=2)
def finding_8(place: Path) -> Any:
    """FSDP1 with FULL_STATE_DICT, where torch itself crashes."""
    found = {}
    for kind in KINDS:
        for name in ("mlp", "rich"):
            job = Job.trained(kind, name)
            save(place / kind / name, job, state_dict_type=FULL)
            expected = job.state()
            fresh = Job.build(kind, name, **FRESH)
            load(place / kind / name, fresh)
            found[kind, name] = {"expected": expected, "found": fresh.state()}
    return found


if __name__ == "__main__":
    main()
