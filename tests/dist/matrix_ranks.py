"""Training jobs in every wrapper: trained and saved in one launch, resumed in processes that know nothing of the first.

``trained_X`` trains an uninterrupted control and a job that saves in the middle; ``resumed_X``, in another launch with
the same output folder, loads what it saved into new objects and trains on. ``moved_X_to_Y`` loads it on another number
of ranks, or in another wrapper. All that is compared comes from torch: local memory, ``full_tensor()``, FSDP's own
full state dicts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fsdp_ckpt.train.save as save_module
import tests.dist.matrix_pair_ranks  # noqa: F401 - registers its scenarios
from fsdp_ckpt import load_state, save_state
from fsdp_ckpt.train.commit import commit
from tests.dist.matrix_job import HALF, Job, gathered
from tests.dist.matrix_variants import MOVES, TARGETS, VARIANTS, Variant
from tests.dist.stage import main, scenario


def _trained(variant: Variant, place: Path) -> Any:
    control = Job.build(variant, 1)
    losses = control.train(2 * HALF)
    end = control.fingerprint()  # draws from the generators
    job = Job.build(variant, 1)
    begun = job.train(HALF)
    job.evaluate()
    options: dict[str, Any] = {
        "step": 2, "values": {"seen": [1, 2]}, "state_dict_type": variant.style, "durable": False
    }  # fmt: skip
    save_state(place / "step-2", **job.state(), **options)
    found = {
        "control": losses,
        "end": end,
        "saved": gathered(job),
        "begun": begun,
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in _groups(job)],
    }
    with held_back() as go:
        pending = save_state(place / "behind", **job.state(), **options, async_save=True)
        found["went_on"] = job.train(HALF)
        go.set()
        pending.wait()
    found["behind"] = differences(place / "step-2", place / "behind")
    found["went_on_end"] = job.fingerprint()
    if _name_of(variant) in {old for old, _ in MOVES}:
        mover = Job.build(variant, 3)
        load_state(place / "step-2", **mover.state())
        mover.common_step()
        found["stepped"] = gathered(mover)
    return found


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Let nothing be written until the event is set."""
    go = threading.Event()

    def later(*arguments: Any, **options: Any) -> Any:
        assert go.wait(60)
        return commit(*arguments, **options)

    with mock.patch.object(save_module, "commit", later):
        yield go


def differences(first: Path, second: Path) -> list[str]:
    """Names of files that are not equal byte by byte; manifest and data files say which save they are of."""
    names = {
        str(path.relative_to(folder)) for folder in (first, second) for path in folder.rglob("*") if path.is_file()
    }
    pairs = [(name, first / name, second / name) for name in sorted(names - {"fsdp_ckpt.json"})]
    assert len(pairs) > 3
    return [name for name, a, b in pairs if not (a.exists() and b.exists() and _content(a) == _content(b))]


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix != ".distcp":
        return data
    assert data.startswith(b"fsdp-ckpt/data/1 save=")
    return data[64:]


def _groups(job: Job) -> Iterator[dict[str, Any]]:
    yield from job.optimizer.param_groups


def _name_of(variant: Variant) -> str:
    return next(name for name, known in VARIANTS.items() if known is variant)


def _resumed(variant: Variant, place: Path) -> Any:
    """Into objects that have run already: gradients, moments and a gathered root must not survive."""
    job = Job.build(variant, 2)
    if len(_name_of(variant)) % 2:
        job.train(1)
    before = job.evaluate()
    report = load_state(place.parents[1] / f"trained_{_name_of(variant)}" / "place" / "step-2", **job.state())
    return {
        "moved": before != job.evaluate(),
        "loaded": gathered(job),
        "losses": job.train(HALF),
        "end": job.fingerprint(),
        "step": report.step,
        "values": dict(report.values),
        "fits": (list(report.missing), list(report.unexpected), dict(report.cast)),
        "rng": report.rng,
        "data": report.data,
    }


def _moved(old: str, variant: Variant, place: Path) -> Any:
    before = VARIANTS[old]
    variant = replace(variant, hidden=before.hidden, optimizer=before.optimizer, schedule=before.schedule)
    job = Job.build(variant, 4)
    source = place.parents[1] / f"trained_{old}" / "place" / "step-2"
    state = job.state()
    if not before.scaled:
        state.pop("scaler", None)
    report = load_state(source, **state, positions="fresh")
    loaded = gathered(job)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in job.optimizer.param_groups]
    job.common_step()
    return {"loaded": loaded, "stepped": gathered(job), "groups": groups, "warnings": list(report.warnings)}


for _name, _variant in VARIANTS.items():
    for _stage, _function in (("trained", _trained), ("resumed", _resumed)):
        _play: Any = partial(_function, _variant)
        _play.__name__ = f"{_stage}_{_name}"
        scenario(ranks=_variant.ranks)(_play)
for _old, _new in MOVES:
    _play = partial(_moved, _old, TARGETS[_new])
    _play.__name__ = f"moved_{_old}_to_{_new}"
    scenario(ranks=TARGETS[_new].ranks)(_play)


if __name__ == "__main__":
    main()
