"""Saves and loads that fail on one rank: what all ranks raise, how soon, and what is left of anything.

Plays its siblings as well: calls that nobody meant, and ranks that end.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tests.dist.slips_ranks  # noqa: F401 - registers its scenarios
from fsdp_ckpt import Checkpointer, Hooks, get_state_dict, load_state, save_model
from tests.dist.attempt import Break, attempt, failing, only, tree
from tests.dist.dying_ranks import DEATHS, play_deaths
from tests.dist.job import Feed, Job
from tests.dist.stage import main, scenario


def failed_save(place: Path, rank: int, breaking: Break, *, style: str = "SHARDED_STATE_DICT", **options: Any) -> Any:
    """Save; fail to replace it; load what was there; save again."""
    path = place / "run" / "step-1"
    job = Job(1, style=style)
    job.save(path)
    stored, files = job.bits(live=False), tree(place)
    dist.barrier()
    job.train()
    before = job.bits()
    with only(rank, breaking):
        found = attempt(lambda: job.save(path, **options))
    dist.barrier()
    found |= {"live": job.bits() == before, "files": tree(place) == files}
    dist.barrier()
    other = Job(2)
    load_state(path, **other.state())
    found["previous"] = other.bits(live=False) == stored
    job.save(path)
    load_state(path, **other.state())
    found["next"] = other.bits(live=False) == job.bits(live=False)
    return found


def failed_load(place: Path, rank: int, breaking: Break, **options: Any) -> Any:
    """Save; fail to load it into a job that goes on; load it."""
    path = place / "run" / "step-1"
    job = Job(1)
    job.save(path)
    stored = job.bits(live=False)
    other = Job(2)
    before, states = other.bits(), torch.get_rng_state()
    with only(rank, breaking):
        found = attempt(lambda: load_state(path, **other.state(), **options))
    same_states = torch.equal(states, torch.get_rng_state())
    dist.barrier()
    found |= {"live": other.bits() == before and same_states}
    other.train()
    if attempt(lambda: load_state(path, **other.state()))["kind"] == "nothing":
        found["again"] = other.bits(live=False) == stored
    return found


# --- saving


@scenario(ranks=2)
def collecting_fails(place: Path) -> Any:
    return failed_save(place, 1, lambda: mock.patch.object(Feed, "state_dict", side_effect=KeyError("lost")))


@scenario(ranks=2)
def collecting_a_model_fails(place: Path) -> Any:
    return failed_save(place, 1, failing("fsdp_ckpt.train.save.collect_model", ValueError("no such thing")))


@scenario(ranks=2)
def a_full_disk(place: Path) -> Any:
    full = OSError(errno.ENOSPC, "No space left on device")
    return failed_save(place, 1, failing("fsdp_ckpt.train.record_file.write_all", full, after=3))


@scenario(ranks=2)
def a_broken_disk_of_the_first_rank(place: Path) -> Any:
    broken = OSError(errno.EIO, "Input/output error")
    return failed_save(place, 0, failing("fsdp_ckpt.train.record_file.write_all", broken))


@scenario(ranks=2)
def a_full_disk_for_one_file(place: Path) -> Any:
    full = OSError(errno.ENOSPC, "No space left on device")
    breaking = failing("fsdp_ckpt.train.full.write_all", full, after=3)
    return failed_save(place, 0, breaking, style="FULL_STATE_DICT")


@scenario(ranks=2)
def small_files_fail(place: Path) -> Any:
    return failed_save(place, 1, failing("fsdp_ckpt.train.files.write_all", OSError(errno.EIO, "Input/output error")))


@scenario(ranks=2)
def metadata_fail(place: Path) -> Any:
    return failed_save(place, 0, failing("fsdp_ckpt.train.files.write_all", OSError(errno.EIO, "Input/output error")))


@scenario(ranks=2)
def the_manifest_fails(place: Path) -> Any:
    breaking = failing("fsdp_ckpt.train.commit.write_manifest", OSError(errno.EIO, "Input/output error"))
    return failed_save(place, 0, breaking)


@scenario(ranks=2)
def publishing_fails(place: Path) -> Any:
    breaking = failing("fsdp_ckpt.store.publish.Staging.publish", OSError(errno.EROFS, "Read-only file system"))
    return failed_save(place, 0, breaking)


class Refusing(Hooks):
    """Refuses on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def before_save(self, event: Any) -> None:
        if event.rank == self.rank:
            event.veto("loss is not finite")

    def before_load(self, event: Any) -> None:
        self.before_save(event)


@scenario(ranks=2)
def a_hook_refuses_to_save(place: Path) -> Any:
    return failed_save(place, 1, nullcontext, hooks=[Refusing(1)])


@scenario(ranks=2)
def an_error_that_torch_raises(place: Path) -> Any:
    from torch.distributed.checkpoint.api import CheckpointException

    error = CheckpointException("collective", {1: (RuntimeError("boom"), None)})  # type: ignore[dict-item]
    return failed_save(place, 1, failing("fsdp_ckpt.train.save.collect_model", error))


@scenario(ranks=2)
def exporting_fails(place: Path) -> Any:
    job = Job(1)
    with only(1, failing("fsdp_ckpt.train.export.collect_model", ValueError("no such thing"))):
        found = attempt(lambda: get_state_dict(job.model))
        found["model"] = attempt(lambda: save_model(job.model, place / "hf"))
    dist.barrier()
    return found | {"left": sorted(path.name for path in place.iterdir())}


# --- loading


@scenario(ranks=2)
def a_hook_refuses_to_load(place: Path) -> Any:
    return failed_load(place, 1, nullcontext, hooks=[Refusing(1)])


@scenario(ranks=2)
def reading_fails(place: Path) -> Any:
    breaking = failing("fsdp_ckpt.train.reader.verify_boxes", OSError(errno.EIO, "Input/output error"), after=1)
    return failed_load(place, 1, breaking)


@scenario(ranks=2)
def reading_once_more_fails(place: Path) -> Any:
    breaking = failing("fsdp_ckpt.train.reader.Gatherer", OSError(errno.EIO, "Input/output error"), after=4)
    return failed_load(place, 1, breaking)


def _damaged(place: Path, damage: Callable[[Path, Job], None]) -> Any:
    path = place / "run" / "step-1"
    job = Job(1)
    job.save(path)
    job.train()
    job.save(place / "run" / "step-2")
    dist.barrier()
    if dist.get_rank() == 1:
        damage(place / "run" / "step-2", job)
    dist.barrier()
    other = Job(2)
    before = other.bits()
    found = attempt(lambda: load_state(place / "run" / "step-2", **other.state()))
    found |= {"live": other.bits() == before}
    report = Checkpointer(place / "run", **other.state()).resume()
    assert report is not None
    return found | {"resumed": Path(report.path).name}


@scenario(ranks=2)
def a_bit_of_one_rank_has_flipped(place: Path) -> Any:
    """In the data that only the second rank reads."""

    def damage(path: Path, job: Job) -> None:
        file = path / "pytorch_model_fsdp_0" / "__1_0.distcp"
        data = bytearray(file.read_bytes())
        weight: Any = job.model[0].weight
        data[data.index(weight.to_local().detach().numpy().tobytes())] ^= 1
        file.write_bytes(data)

    return _damaged(place, damage)


@scenario(ranks=2)
def the_file_of_one_rank_is_gone(place: Path) -> Any:
    return _damaged(place, lambda path, _: (path / "optimizer_0" / "__1_0.distcp").unlink())


@scenario(ranks=2)
def the_random_states_of_one_rank_are_gone(place: Path) -> Any:
    return _damaged(place, lambda path, _: (path / "random_states_1.pkl").unlink())


@scenario(ranks=2)
def the_data_position_of_one_rank_is_garbage(place: Path) -> Any:
    def damage(path: Path, _: Job) -> None:
        file = path / "dl_states_1.pkl"
        file.write_bytes(bytes(file.stat().st_size))

    return _damaged(place, damage)


if __name__ == "__main__":
    if len(sys.argv) == 2 or set(sys.argv[2:]) & DEATHS.keys():
        torch.set_num_threads(1)
        play_deaths(Path(sys.argv[1]))
    main(limit_s=100)
