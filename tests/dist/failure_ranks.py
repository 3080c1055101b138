"""Saves and loads that fail on one rank: what all ranks raise, how soon, and what is left of anything."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes

from fsdp_ckpt import Checkpointer, Hooks, get_state_dict, load_state, save_model, save_state
from tests.dist.stage import Raised, main, scenario

Break = Callable[[], AbstractContextManager[Any]]


class Feed:
    """A data loader: where it is."""

    def __init__(self) -> None:
        self.position = dist.get_rank() + 10

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Job:
    """A model, an optimizer that has run, a scheduler, and data."""

    def __init__(self, seed: int, *, width: int = 5, style: str = "SHARDED_STATE_DICT") -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width, affine=False), nn.Linear(width, 6))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.feed = Feed()
        self.style: Any = style
        self.train()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.feed.position += 1

    def state(self) -> dict[str, Any]:
        found = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return found | {"dataloader": self.feed}

    def save(self, path: Path, **options: Any) -> None:
        save_state(path, **self.state(), state_dict_type=self.style, durable=False, **options)

    def bits(self, *, live: bool = True) -> list[Any]:
        """Everything in it; not the random generators, which tests draw from."""
        found: list[Any] = [_digest(param) for param in self.model.parameters()]
        if live:  # batch statistics are each rank's own, and those of one rank are stored
            found += [_digest(buffer) for buffer in self.model.buffers()]
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                found.append({kind: _digest(value) for kind, value in self.optimizer.state.get(param, {}).items()})
            found.append({key: value for key, value in group.items() if key != "params"})
        return [*found, self.scheduler.last_epoch, self.feed.position]


def _digest(value: Any) -> str:
    detached: Any = value.detach()
    local: Tensor = detached.to_local() if isinstance(value, DTensor) else detached
    return hashlib.sha256(local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call raised, and after how many seconds."""
    begun = time.monotonic()
    kind, message, hint = "nothing", "", None
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - this is what is looked at
        kind, message, hint = type(error).__name__, str(error), getattr(error, "hint", None)
    return {"kind": kind, "message": message, "hint": hint, "seconds": time.monotonic() - begun}


def tree(folder: Path) -> dict[str, str]:
    """Everything in a folder, hidden or not, with digests."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def only(rank: int, breaking: Break) -> AbstractContextManager[Any]:
    return breaking() if dist.get_rank() == rank else nullcontext()


def failing(target: str, error: BaseException, *, after: int = 0) -> Break:
    """Let a function of the package raise, after so many calls that work."""

    def begin() -> AbstractContextManager[Any]:
        module, _, name = target.rpartition(".")
        owner: Any = sys.modules.get(module)
        if owner is None:
            owner = getattr(sys.modules[module.rpartition(".")[0]], module.rpartition(".")[2])
        real, calls = getattr(owner, name), [0]

        def broken(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] > after:
                raise error
            return real(*args, **options)

        return mock.patch.object(owner, name, broken)

    return begin


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
    return failed_save(place, 1, failing("fsdp_ckpt.train.shards.write_all", full, after=3))


@scenario(ranks=2)
def a_broken_disk_of_the_first_rank(place: Path) -> Any:
    return failed_save(place, 0, failing("fsdp_ckpt.train.shards.write_all", OSError(errno.EIO, "Input/output error")))


@scenario(ranks=2)
def a_full_disk_for_one_file(place: Path) -> Any:
    full = OSError(errno.ENOSPC, "No space left on device")
    breaking = failing("fsdp_ckpt.train.full.write_all", full, after=3)
    return failed_save(place, 0, breaking, style="FULL_STATE_DICT")


@scenario(ranks=2)
def small_files_fail(place: Path) -> Any:
    return failed_save(place, 1, failing("fsdp_ckpt.train.save.write_all", OSError(errno.EIO, "Input/output error")))


@scenario(ranks=2)
def metadata_fail(place: Path) -> Any:
    return failed_save(place, 0, failing("fsdp_ckpt.train.parts.write_all", OSError(errno.EIO, "Input/output error")))


@scenario(ranks=2)
def the_manifest_fails(place: Path) -> Any:
    breaking = failing("fsdp_ckpt.train.save.write_manifest", OSError(errno.EIO, "Input/output error"))
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
    return found | {"left": sorted(path.name for path in place.iterdir()), "bits": _digest(model.weight)}


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


@scenario(ranks=2)
def exporting_fails(place: Path) -> Any:
    job = Job(1)
    with only(1, failing("fsdp_ckpt.train.export.collect_model", ValueError("no such thing"))):
        found = attempt(lambda: get_state_dict(job.model))
        found["model"] = attempt(lambda: save_model(job.model, place / "hf"))
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
        "type": lambda: save_state(out, job.model, state_dict_type="SHARDED"),  # type: ignore[arg-type]
        "lone optimizer": lambda: save_state(out, optimizer=job.optimizer),
        "early optimizer": lambda: save_state(out, wrapped, optimizer),
        "early optimizer of FSDP2": lambda: save_state(out, late, built_early),
        "scheduler": lambda: save_state(out, job.model, job.optimizer, anything),
        "loader": lambda: save_state(out, job.model, dataloader=anything),
        "model": lambda: save_state(out, anything),
        "optimizer": lambda: save_state(out, job.model, anything),
        "values": lambda: save_state(out, job.model, values={"seen": {1, 2}}),
        "tensor in values": lambda: save_state(out, job.model, values={"loss": torch.tensor(1.0)}),
        "url": lambda: save_state("s3://bucket/step-1", job.model),
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


# --- ranks that end. They are started by hand: torch's launcher would end the others as well.


def _dying(rank: int, out: Path, name: str) -> None:
    """Save; then let the last of three ranks end in the midst of another save or load."""
    dist.init_process_group(
        "gloo", init_method=f"file://{out / name}/store", rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    act, target, end = _DEATHS[name]
    place = out / name / "place"
    job = Job(1)
    job.save(place / "step-1")
    files = tree(place)
    dist.barrier()
    job.train()
    before = job.bits()
    if rank == 2:
        with mock.patch(target, side_effect=end):
            act(place, job)
    found: Any = attempt(lambda: act(place, job))
    if rank == 0:
        found["files"] = tree(place) == files
    torch.save(found | {"live": job.bits() == before}, out / name / f"rank_{rank}.pt")
    os._exit(0)  # the group cannot be left in good order


def _save_again(place: Path, job: Job) -> None:
    job.save(place / "step-1")


def _load_again(place: Path, job: Job) -> None:
    load_state(place / "step-1", **job.state())


def _export(place: Path, job: Job) -> None:
    save_model(job.model, place / "hf")


def _die(*_: Any, **__: Any) -> None:
    os._exit(9)


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


_DEATHS: dict[str, tuple[Callable[[Path, Job], None], str, Callable[..., None]]] = {
    "dies_while_collecting": (_save_again, "fsdp_ckpt.train.save_plan.encode", _die),
    "dies_while_writing": (_save_again, "fsdp_ckpt.train.shards.write_all", _die),
    "dies_while_loading": (_load_again, "fsdp_ckpt.train.load.plan_model", _die),
    "dies_while_exporting": (_export, "fsdp_ckpt.train.export.gather_tensors", _die),
    "is_interrupted_while_writing": (_save_again, "fsdp_ckpt.train.shards.write_all", _interrupt),
}


def play_deaths(out: Path) -> None:
    """Start three ranks each, and wait for those that are left, half a minute at most."""
    for name in _DEATHS:
        (out / name / "place").mkdir(parents=True)
        context = start_processes(_dying, (out, name), nprocs=3, join=False, start_method="fork")
        limit = time.monotonic() + 30
        for rank, process in enumerate(context.processes):
            process.join(max(0.1, limit - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(10)
                torch.save(Raised("Hung", "killed after 30 s", f"rank {rank} hung"), out / name / f"rank_{rank}.pt")


if __name__ == "__main__":
    if len(sys.argv) == 2 or set(sys.argv[2:]) & _DEATHS.keys():
        torch.set_num_threads(1)
        play_deaths(Path(sys.argv[1]))
    main(limit_s=100)
