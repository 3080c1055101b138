"""Save the whole state of a training job, so that the checkpoint is there complete or not at all."""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_ckpt.errors import FsdpCkptError, UsageError
from fsdp_ckpt.store.remote.urls import is_url, redact
from fsdp_ckpt.train.background import PendingSave, background_ranks, finish_pending, host_memory, start_save
from fsdp_ckpt.train.commit import commit
from fsdp_ckpt.train.destination import local_path
from fsdp_ckpt.train.hooks import Hooks, SaveEvent, check_hooks
from fsdp_ckpt.train.modules import LiveModel, collect_model, refuse_meta, settle
from fsdp_ckpt.train.parts import encode_values, unite_groups
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.remote_commit import commit_remote
from fsdp_ckpt.train.remote_objects import check_url
from fsdp_ckpt.train.report import SaveReport
from fsdp_ckpt.train.save_plan import SaveJob
from fsdp_ckpt.train.snapshot import snapshot
from fsdp_ckpt.train.subjects import Subjects

__all__ = ["SaveReport", "StateDictType", "save_state", "whole_step"]

StateDictType = Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"]
_TYPES = ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT")

_log = logging.getLogger("fsdp_ckpt")


@overload
def save_state(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    dataloader: Any = None,
    scaler: Any = None,
    objects: Any = None,
    values: Mapping[str, Any] | None = None,
    step: int | None = None,
    rng: bool = True,
    state_dict_type: StateDictType = "SHARDED_STATE_DICT",
    async_save: Literal[False] = False,
    overwrite: bool = True,
    durable: bool = True,
    hooks: Sequence[Hooks] = (),
    process_group: dist.ProcessGroup | None = None,
) -> SaveReport: ...


@overload
def save_state(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    dataloader: Any = None,
    scaler: Any = None,
    objects: Any = None,
    values: Mapping[str, Any] | None = None,
    step: int | None = None,
    rng: bool = True,
    state_dict_type: StateDictType = "SHARDED_STATE_DICT",
    async_save: Literal[True],
    overwrite: bool = True,
    durable: bool = True,
    hooks: Sequence[Hooks] = (),
    process_group: dist.ProcessGroup | None = None,
) -> PendingSave: ...


@overload
def save_state(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    dataloader: Any = None,
    scaler: Any = None,
    objects: Any = None,
    values: Mapping[str, Any] | None = None,
    step: int | None = None,
    rng: bool = True,
    state_dict_type: StateDictType = "SHARDED_STATE_DICT",
    async_save: bool,
    overwrite: bool = True,
    durable: bool = True,
    hooks: Sequence[Hooks] = (),
    process_group: dist.ProcessGroup | None = None,
) -> SaveReport | PendingSave: ...


def save_state(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    dataloader: Any = None,
    scaler: Any = None,
    objects: Any = None,
    values: Mapping[str, Any] | None = None,
    step: int | None = None,
    rng: bool = True,
    state_dict_type: StateDictType = "SHARDED_STATE_DICT",
    async_save: bool = False,
    overwrite: bool = True,
    durable: bool = True,
    hooks: Sequence[Hooks] = (),
    process_group: dist.ProcessGroup | None = None,
) -> SaveReport | PendingSave:
    """Save models, optimizers and everything else that a resume needs. A collective: every rank has to call it.

    The folder is laid out like Accelerate's, and Accelerate loads it; beside that it holds ``fsdp_ckpt.json``, which
    says what is in it. It appears in one step when all ranks are done. Until then, and whenever a rank fails, what
    was at ``path`` stays as it was, and every rank raises the same error.

    Nothing in the live state is changed, and each rank writes straight from its own memory: with SHARDED_STATE_DICT
    no tensor travels between ranks. Saving before the first optimizer step is fine.

    Args:
        path: Folder of the checkpoint. Where nodes have disks of their own, each gets the files of its ranks. Or a URL
            (``s3://bucket/run/step-100``): each rank writes its files to a temporary folder and uploads them, and the
            manifest is the last object. A checkpoint that is replaced there is gone as soon as uploading begins.
        model: A module (FSDP1, FSDP2, DDP, tensor-parallel or plain), or a list or dictionary of them.
        optimizer: One, a list or a dictionary. Which model an optimizer belongs to follows from its parameters.
        scheduler: Learning rate schedulers, likewise.
        dataloader: Data loaders or samplers with ``state_dict``; each rank's own state is kept.
        scaler: A gradient scaler.
        objects: Anything else with ``state_dict``; the first rank's state is kept.
        values: Numbers, texts, lists and dictionaries (what JSON has) that ``load_state`` gives back.
        step: Training step, for the manifest.
        rng: Save the random states of Python, NumPy, torch and its devices, each rank's own.
        state_dict_type: ``SHARDED_STATE_DICT`` (a file per rank), ``FULL_STATE_DICT`` (one file, written tensor by
            tensor) or ``LOCAL_STATE_DICT`` (FSDP1's flat parameters; loads only into a model that is wrapped alike).
        async_save: Return as soon as the state is copied to host memory, and write in the background. The optimizer
            may step at once. One save is under way at a time: the next call waits for it, and raises its error. The
            process waits for it at its end, and on SIGTERM where no handler of yours is set.
        overwrite: Replace a checkpoint at ``path``, in one step. Any other folder with content is never replaced.
        durable: Return only when the disk has everything; a store always has.
        hooks: Called before and after.
        process_group: The ranks that save together; None for all.

    Returns:
        What was written, on every rank; with ``async_save`` a ``PendingSave``, whose ``wait`` returns that.

    Raises:
        DestinationExists: Something else is at ``path``, or somebody else is writing to it.
        NotEnoughSpace: The disk is full; the message names the rank.
        Unreachable: A URL that does not answer, or not to us.
        Incompatible: State that could not be loaded again.
        UsageError: Arguments that contradict each other.
        RankFailed: A rank failed or died.
        FsdpCkptError: The asynchronous save before this one failed.

    Example:
        >>> save_state("run/step-100", model, optimizer, scheduler, step=100)  # doctest: +SKIP
    """
    begun = time.monotonic()
    try:
        finish_pending()
    except FsdpCkptError as error:
        shown = redact(os.fspath(path))
        error.hint = f"{f'{error.hint}; ' if error.hint else ''}the save of {shown} was not begun: call it again"
        raise
    ranks = Ranks(process_group)
    ranks.refuse_strangers()
    text = os.fspath(path).removeprefix("file://")
    target = redact(text).rstrip("/") if is_url(text) else text
    doing = f"saving {target}"
    with ranks.together(doing):
        step = whole_step(step)
        if state_dict_type not in _TYPES:
            raise UsageError(f"state_dict_type {state_dict_type!r} is none of {', '.join(_TYPES)}")
        if is_url(text):
            check_url(text)
        else:
            local_path(text)
        check_hooks(hooks)
        subjects = Subjects.of(
            model=model, optimizer=optimizer, scheduler=scheduler, dataloader=dataloader, objects=objects, scaler=scaler
        )
        live = {name: collect_model(item, ranks) for name, item in subjects.models.items()}
        for one in live.values():
            refuse_meta(one, "load or initialize it before saving")
    is_told = async_save and _wants_after_save(hooks)
    call = (target, step, state_dict_type, async_save, is_told)
    ranks.demand_same(call, "path, step, state_dict_type, async_save or what hooks do after a save", doing)
    ranks.demand_same(subjects.names(), "what is to be saved", doing)
    for one in live.values():
        settle(one, ranks, doing)
    job, skipped = _plan(
        subjects, live, ranks, hooks, target=target, style=state_dict_type, step=step, values=values or {}, rng=rng
    )
    if async_save:
        with ranks.together(doing):
            job.parts = snapshot(job.parts, host_memory)
    writers = background_ranks(ranks, doing) if async_save else ranks
    stopped_s = time.monotonic() - begun if async_save else None

    def write() -> SaveReport:
        if is_url(text):
            sizes: Mapping[str, int] = commit_remote(job, text, writers, overwrite=overwrite)
            leaders: Sequence[int] = (0,) * writers.size
        else:
            sizes, leaders = commit(job, Path(text), writers, overwrite=overwrite, durable=durable)
        elapsed_s = time.monotonic() - begun
        return SaveReport(
            path=target,
            step=step,
            files=sizes,
            num_bytes=sum(sizes.values()),
            world_size=ranks.size,
            elapsed_s=elapsed_s,
            stopped_s=elapsed_s if stopped_s is None else stopped_s,
            leaders=leaders,
            skipped=skipped,
        )

    committed = partial(_call_after_commit, hooks, ranks)

    def call_hooks(report: SaveReport) -> None:
        with ranks.together(f"{doing} (the checkpoint is in its place)"):
            for hook in hooks:
                hook.after_save(report)

    if stopped_s is None:
        report = write()
        committed(report)
        call_hooks(report)
        return report
    pending = PendingSave(
        target, step, stopped_s, write=write, committed=committed, waited_for=call_hooks if is_told else None
    )
    start_save(pending)
    return pending


def _plan(
    subjects: Subjects,
    live: Mapping[str, LiveModel],
    ranks: Ranks,
    hooks: Sequence[Hooks],
    *,
    target: str,
    style: StateDictType,
    step: int | None,
    values: Mapping[str, Any],
    rng: bool,
) -> tuple[SaveJob, Sequence[str]]:
    """Collect what will be written, let hooks have their say, and return what they skipped as well. A collective."""
    doing = f"saving {target}"
    with ranks.together(doing):
        job = SaveJob.plan(subjects, live, ranks, style, step=step, values=values, rng=rng)
        event = SaveEvent(path=target, step=step, rank=ranks.rank, parts=job.names())
        for hook in hooks:
            hook.before_save(event)
        job.apply(event, ranks)
    ranks.demand_same([(part.name, part.style) for part in job.parts], "the list of models and optimizers", doing)
    if any(one.differs for one in live.values()):
        job.parts = [unite_groups(part, ranks, doing) if part.groups else part for part in job.parts]
    with ranks.together(doing):
        job.parts = [encode_values(part) for part in job.parts]
    return job, sorted(event.skipped)


def _wants_after_save(hooks: Sequence[Hooks]) -> bool:
    return any(getattr(hook.after_save, "__func__", None) is not Hooks.after_save for hook in hooks)


def _call_after_commit(hooks: Sequence[Hooks], ranks: Ranks, report: SaveReport) -> None:
    if ranks.is_first:
        _log.info("saved %s: %d bytes in %.1f s", report.path, report.num_bytes, report.elapsed_s)
    for hook in hooks if ranks.rank in report.leaders else ():
        try:
            hook.after_commit(report)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - a caller's code; the checkpoint is there
            _log.exception("%s.after_commit failed after %s was saved: %s", type(hook).__name__, report.path, error)


def whole_step(step: Any) -> int | None:
    """Return a step as an integer; NumPy's and others are taken as well.

    Raises:
        UsageError: It is no whole number.
    """
    if step is None:
        return None
    try:
        return operator.index(step)
    except TypeError:
        raise UsageError(f"step must be a whole number, not {step!r:.40} ({type(step).__name__})") from None
