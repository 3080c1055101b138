"""Scenarios of test_silent_failures: what goes wrong without a word elsewhere, tried on us.

Each returns plain values; what they are compared with is read by torch from live jobs (``Job.state``), from files by
torch or json, or is Accelerate's own behaviour in the same place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_ckpt import Checkpointer, Hooks, load_state, save_state
from fsdp_ckpt.train.hooks import LoadEvent, SaveEvent
from fsdp_ckpt.train.shards import ShardWriter
from tests.cases.models import Mlp
from tests.dist.accelerate_job import Accelerate, Counter, Job, wrap
from tests.dist.stage import main, scenario

FRESH: dict[str, Any] = {"seed": 99}
KINDS = ("FSDP1", "FSDP1-flat", "FSDP2")
FULL, LOCAL = "FULL_STATE_DICT", "LOCAL_STATE_DICT"


def save(folder: Path, job: Job, **options: Any) -> Any:
    return save_state(folder, job.model, job.optimizer, job.scheduler, objects=job.counter, **options)


def load(folder: Path, job: Job, **options: Any) -> Any:
    return load_state(folder, job.model, job.optimizer, job.scheduler, objects=job.counter, **options)


def attempt(action: Callable[[], Any]) -> tuple[str, str]:
    """Return class and message of what is raised, or ("", "")."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - this is the outcome
        return type(error).__name__, str(error)
    return "", ""


def refused(action: Callable[[Job], Any], job: Job) -> dict[str, Any]:
    """Return the error of an action that must leave the job as it is, and the job before and after."""
    before = job.state()
    return {"error": attempt(lambda: action(job)), "before": before, "after": job.state()}


def on_first(action: Callable[[], Any]) -> None:
    """Do something to files, on one rank."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


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


def _names(folder: Path) -> list[str]:
    dist.barrier()
    names = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    return names


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
    out: dict[str, Any] = {"saved": states, "after_first": _names(run)}
    fresh = Job.build("FSDP2", **FRESH)
    second = _checkpointer(run, fresh)
    report = second.resume()
    out |= {"resumed": (report and report.step, report and report.values), "resumed_state": fresh.tensors()}
    fresh.run(range(11, 12))
    second.save(11)
    out |= {"newest": fresh.tensors(), "after_second": _names(run)}
    third = Job.build("FSDP2", seed=98)
    report = _checkpointer(run, third).resume()
    out |= {"resumed_again": report and report.step, "resumed_again_state": third.tensors()}
    # Somebody goes back, and saves where newer checkpoints are.
    second.save(5)
    out["after_going_back"] = _names(run)
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
    after_failure = _names(place / "run")
    checkpointer.save(3)
    return {"error": error, "after_failure": after_failure, "after": _names(place / "run")}


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
        "error": error, "step": report.step, "expected": expected, "found": fresh.state(), "names": _names(place),
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


# Sections 1 and 2.


@scenario(ranks=2)
def broken_random_states(place: Path) -> Any:
    found: dict[str, Any] = {}
    job = Job.trained("FSDP2")
    for damage in ("garbage", "truncated", "other", "missing", "other state"):
        folder = place / damage
        Accelerate("FSDP2").save(folder, job)
        file = folder / "random_states_1.pkl"

        def spoil(file: Path = file, damage: str = damage) -> None:
            match damage:
                case "garbage":
                    file.write_bytes(b"no pickle " * 100)
                case "truncated":
                    file.write_bytes(file.read_bytes()[:5000])
                case "other":
                    torch.save({"step": 3}, file)
                case "missing":
                    file.unlink()
                case _:
                    torch.save(torch.load(file, weights_only=False) | {"torch_manual_seed": torch.zeros(3)}, file)

        on_first(spoil)
        fresh = Job.trained("FSDP2", **FRESH)
        if damage == "missing":
            before = fresh.state()
            report = load(folder, fresh)
            found[damage] = {"before": before, "after": fresh.state(), "rng": report.rng, "warnings": report.warnings}
        else:
            found[damage] = refused(partial(load, folder), fresh)
        found[damage]["accelerate"] = attempt(partial(Accelerate("FSDP2").load_rest, folder, fresh))
    save(place / "ours", job)
    on_first((place / "ours" / "random_states_1.pkl").unlink)
    found["missing of ours"] = refused(partial(load, place / "ours"), Job.trained("FSDP2", **FRESH))
    return found


@scenario(ranks=2)
def objects_by_name(place: Path) -> Any:
    job = Job.trained("FSDP2")
    objects = {"epochs": Counter(3), "samples": Counter(500)}
    save_state(place / "saved", job.model, objects=objects)
    samples, epochs, only = Counter(), Counter(), Counter()
    load_state(place / "saved", objects={"samples": samples, "epochs": epochs})
    load_state(place / "saved", objects={"samples": only})
    unknown = attempt(lambda: load_state(place / "saved", objects={"sample": Counter()}))
    return {"samples": samples.count, "epochs": epochs.count, "only": only.count, "unknown": unknown}


class _Do(Hooks):
    """Run a function at one of the points, and keep what it could see."""

    def __init__(self, save: Callable[[SaveEvent], Any] | None = None, load: Callable[[LoadEvent], Any] | None = None):
        self.save, self.load = save, load
        self.parts: list[str] = []
        self.existed: bool | None = None
        self.reports: list[Any] = []

    def before_save(self, event: SaveEvent) -> None:
        self.parts, self.existed = sorted(event.parts), Path(event.path).exists()
        if self.save:
            self.save(event)

    def before_load(self, event: LoadEvent) -> None:
        self.parts = sorted(event.parts)
        if self.load:
            self.load(event)

    def after_save(self, report: Any) -> None:
        self.reports.append(report)

    def after_load(self, report: Any) -> None:
        self.reports.append(report)


@scenario(ranks=2)
def hooks_on_save(place: Path) -> Any:
    job = Job.trained("FSDP2")
    state = {name: torch.full(value.shape, 3.5) for name, value in job.tensors().items() if "state." not in name}

    def change(event: SaveEvent) -> None:
        event.skip("optimizer_0")
        event.skip("random_states")
        event.replace("pytorch_model_fsdp_0", state)
        event.add_file("config.json", b"{}")

    hook, veto = _Do(change), _Do(lambda event: event.veto("not now") if event.rank == 1 else None)
    report = save(place / "saved", job, hooks=[hook])
    fresh = Job.build("FSDP2", **FRESH)
    load_state(place / "saved", fresh.model)
    return {
        "parts": hook.parts,
        "existed": hook.existed,
        "skipped": report.skipped,
        "reports": len(hook.reports),
        "names": _names(place / "saved"),
        "found": fresh.tensors(),
        "expected": state,
        "veto": attempt(lambda: save(place / "vetoed", job, hooks=[veto])),
        "after_veto": (_names(place), len(veto.reports)),
        "unknown": attempt(lambda: save(place / "odd", job, hooks=[_Do(lambda event: event.skip("optimiser_0"))])),
        "loads_skipped": attempt(lambda: load(place / "saved", fresh)),
    }


def _load_with(folder: Path, hook: Hooks, job: Job) -> Any:
    return load(folder, job, hooks=[hook])


@scenario(ranks=2)
def hooks_on_load(place: Path) -> Any:
    job = Job.trained("FSDP2")
    save(place / "saved", job)
    expected = job.state()
    state = {name: torch.full(value.shape, 3.5) for name, value in job.tensors().items() if "state." not in name}
    found: dict[str, Any] = {"expected": expected, "replacement": state}

    def skip(event: LoadEvent) -> None:
        for part in ("optimizer_0", "random_states", "scheduler"):
            event.skip(part)

    hook = _Do(load=skip)
    fresh = Job.trained("FSDP2", **FRESH)
    found["before_skip"] = fresh.state()
    load(place / "saved", fresh, hooks=[hook])
    found |= {"skipped": fresh.state(), "parts": hook.parts, "reports": len(hook.reports)}

    fresh = Job.build("FSDP2", **FRESH)
    load(place / "saved", fresh, hooks=[_Do(load=lambda event: event.replace("pytorch_model_fsdp_0", state))])
    found["replaced"] = fresh.state()

    sharded = Job.build("FSDP2", **FRESH)
    state_of_job = job.model.state_dict()  # DTensors
    with_dtensors = Job.build("FSDP1-flat", **FRESH)
    for other in (sharded, with_dtensors):
        hook = _Do(load=lambda event: event.replace("pytorch_model_fsdp_0", state_of_job))
        load(place / "saved", other, hooks=[hook])
    found["replaced_by_dtensors"] = [sharded.tensors(), with_dtensors.tensors()]

    flat = Job.build("FSDP1", **FRESH)
    load(place / "saved", flat, hooks=[_Do(load=lambda event: event.replace("pytorch_model_fsdp_0", state))])
    found["replaced_fsdp1"] = flat.tensors()

    veto = _Do(load=lambda event: event.veto("not this one") if event.rank == 1 else None)
    found["veto"] = refused(lambda job: load(place / "saved", job, hooks=[veto]), Job.trained("FSDP2", **FRESH))

    # What cannot be replaced has to be refused, and what was given must fit.
    wrong: dict[str, tuple[str, dict[str, Any]]] = {
        "optimizer": ("optimizer_0", {"state": {}, "param_groups": []}),
        "scheduler": ("scheduler", {"last_epoch": 3}),
        "lacking": ("pytorch_model_fsdp_0", {name: value for name, value in state.items() if name != "up.bias"}),
        "extra": ("pytorch_model_fsdp_0", state | {"more.bias": torch.zeros(2)}),
        "shape": ("pytorch_model_fsdp_0", state | {"up.bias": torch.zeros(4, 2)}),
    }
    for name, (part, value) in wrong.items():
        change = _Do(load=partial(LoadEvent.replace, part=part, state=value))
        action = partial(_load_with, place / "saved", change)
        found[f"wrong {name}"] = refused(action, Job.trained("FSDP2", **FRESH))
    return found


@scenario(ranks=2)
def schedulers(place: Path) -> Any:
    job = Job.trained("FSDP2")
    save(place / "saved", job)
    save_state(place / "without", job.model, job.optimizer)
    expected = job.scheduler.state_dict()
    fresh = Job.build("FSDP2", **FRESH)
    load(place / "saved", fresh)
    lacking = refused(
        lambda job: load_state(place / "without", job.model, job.optimizer, job.scheduler),
        Job.trained("FSDP2", **FRESH),
    )
    save_state(place / "two", job.model, job.optimizer, [job.scheduler, job.scheduler])
    other = Job.build("FSDP2", **FRESH)
    left = load_state(place / "two", other.model, other.optimizer, other.scheduler).left
    return {"expected": expected, "found": fresh.scheduler.state_dict(), "lacking": lacking, "left": left}


@scenario(ranks=2)
def pairs_optimizers(place: Path) -> Any:
    """Two models with the same names: only the parameters tell which optimizer is whose."""
    found: dict[Any, Any] = {}
    one, two = Job.trained("FSDP2", seed=1), Job.trained("FSDP2", seed=2, steps=3)
    found["expected"] = [one.tensors(), two.tensors()]
    save_state(place / "ours", [one.model, two.model], [two.optimizer, one.optimizer])
    members = json.loads((place / "ours" / "fsdp_ckpt.json").read_text())["optimizers"]
    found["members"] = [member["of"] for member in members]
    theirs = Accelerate("FSDP2")
    for number, job in enumerate((one, two)):
        theirs.save_numbered(place / "accelerate", job, number)
    for folder in ("ours", "accelerate"):
        for order in ("saved", "other"):
            first, second = Job.build("FSDP2", **FRESH), Job.build("FSDP2", **FRESH)
            optimizers = [second.optimizer, first.optimizer]
            if order == "other":
                optimizers.reverse()
            load_state(place / folder, [first.model, second.model], optimizers)
            found[folder, order] = [first.tensors(), second.tensors()]
        first, second = Job.build("FSDP2", **FRESH), Job.build("FSDP2", **FRESH)
        load_state(place / folder, [first.model, second.model], second.optimizer)
        found[folder, "second alone"] = [second.tensors()]
    return found


class _More(Mlp):
    """Has what Mlp has not."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)
        self.register_buffer("extra", torch.ones(2))


@scenario(ranks=2)
def extra_names(place: Path) -> Any:
    larger = wrap(_More(), "FSDP2", ("up",))
    save_state(place / "larger", larger)
    fresh = Job.trained("FSDP2", **FRESH)
    strict = refused(lambda job: load_state(place / "larger", job.model), fresh)
    report = load_state(place / "larger", fresh.model, strict=False)
    lists = {}
    try:
        load_state(place / "larger", fresh.model)
    except ValueError as error:
        lists = {name: sorted(getattr(error, name)) for name in ("missing", "unexpected", "mismatched")}
    expected = {name: value.detach() for name, value in Mlp().named_parameters()}
    found = {name: value for name, value in fresh.tensors().items() if not name.startswith("state.")}
    return {"strict": strict, "lists": lists, "loose": sorted(report.unexpected), "expected": expected, "found": found}


@scenario(ranks=2)
def other_dtype(place: Path) -> Any:
    job = Job.trained("FSDP2")
    save(place / "saved", job)
    expected = job.tensors()
    fresh = Job.build("FSDP2", dtype=torch.bfloat16, **FRESH)
    report = load(place / "saved", fresh)
    return {"expected": expected, "found": fresh.tensors(), "cast": report.cast}


@scenario(ranks=2)
def before_the_first_step(place: Path) -> Any:
    found = {}
    for kind in KINDS:
        job = Job.build(kind)
        job.loss(0).backward()
        save(place / kind, job)
        untouched = dict(job.optimizer.state)
        grads = all(parameter.grad is not None for parameter in job.model.parameters() if parameter.numel())
        expected = job.state()
        fresh, trained = Job.build(kind, **FRESH), Job.trained(kind, **FRESH)
        report = load(place / kind, fresh)
        load(place / kind, trained)
        found[kind] = {
            "untouched": untouched,
            "grads": grads,
            "fresh": dict(fresh.optimizer.state),
            "trained": dict(trained.optimizer.state),
            "optimizer_fresh": sorted(report.optimizer_fresh),
            "expected": expected,
            "found": [fresh.state(), trained.state()],
        }
    return found


if __name__ == "__main__":
    main()
