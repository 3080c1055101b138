"""Load the state of a training job: from our checkpoints and anyone's, on any number of ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ckpt.store.remote.mirrors import shown
from fsdp_ckpt.store.remote.places import speaks_urls
from fsdp_ckpt.store.remote.urls import redact
from fsdp_ckpt.train.background import finish_pending
from fsdp_ckpt.train.hooks import Hooks, LoadEvent, check_hooks
from fsdp_ckpt.train.load_plan import LoadJob, LoadOptions, LoadReport
from fsdp_ckpt.train.locate import open_source
from fsdp_ckpt.train.model_plan import Resize
from fsdp_ckpt.train.modules import collect_model, settle
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.reader import Reader, threads_per_rank
from fsdp_ckpt.train.small_parts import Positions
from fsdp_ckpt.train.subjects import Subjects

__all__ = ["LoadReport", "load_state"]

_log = logging.getLogger("fsdp_ckpt")


@speaks_urls
def load_state(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    dataloader: Any = None,
    scaler: Any = None,
    objects: Any = None,
    rng: bool | None = None,
    strict: bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    resize: Resize = None,
    positions: Positions = "exact",
    verify: bool = True,
    hooks: Sequence[Hooks] = (),
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load models, optimizers and everything else that was saved. A collective: every rank has to call it.

    Only what is given is loaded: pass the model alone to load weights. The checkpoint may be ours, Accelerate's, the
    Trainer's, torchtitan's or any other that ``fsdp-ckpt inspect`` shows, sharded for any number of ranks or one whole
    file; each rank reads only the bytes that it needs. Nothing is unpickled without the allow-list.

    Everything is checked before anything is changed: names, global shapes, dtypes, groups, checksums, small files.
    When a check fails on one rank, all ranks raise, and models and optimizers are as they were. (Only an I/O error
    while the checked bytes are read once more can leave them half loaded; the message says so.)

    A fresh optimizer gets its full state, whether or not parameters have gradients.

    Args:
        path: A checkpoint, or a folder of checkpoints of which the newest complete one is taken; or the URL of one
            (``s3://bucket/run``). What a rank needs from there is fetched to a temporary folder first, where there is
            room for it.
        model: A module, or a list or dictionary of them; names and order as when saving.
        optimizer: Likewise; matched by parameter names.
        scheduler: Likewise.
        dataloader: Likewise; see ``positions``.
        scaler: A gradient scaler.
        objects: Anything else with ``load_state_dict``.
        rng: Restore each rank's random states; None to do so when an optimizer is loaded.
        strict: Refuse names that only one side has. Off: they are in the report.
        include: Globs; load only these names of the model.
        exclude: Globs; leave these names of the model alone. With ``["*"]`` the checkpoint need not hold a model: what
            is loaded is the optimizer alone, and the model says what its parameters are called.
        resize: ``"grow"`` to load into tensors that have become larger (rows that are new stay as they are),
            ``"truncate"`` into smaller ones as well. Optimizer state follows.
        positions: ``"exact"`` to refuse data loader positions of another number of ranks, ``"fresh"`` to leave the
            loaders alone then.
        verify: Compare recorded checksums first; this reads everything twice, the second time from memory.
        hooks: Called before anything is changed, and after.
        process_group: The ranks that load together; None for all.

    Returns:
        What was loaded and what was not, on every rank.

    Raises:
        CheckpointNotFound: There is none, or something that was asked for is not in it.
        IncompleteCheckpoint: It is not whole.
        ChecksumMismatch: It is damaged.
        Unreachable: Nothing is at a URL, or it does not answer.
        UnsafePickle: A file in it asks for code; nothing was run.
        StateMismatch: Names or shapes differ; lists are in the exception.
        Incompatible: State that cannot be brought into the live objects.
        FsdpCkptError: An asynchronous save is under way, and it fails.

    Example:
        >>> report = load_state("run", model, optimizer, scheduler)  # doctest: +SKIP
        >>> for step in range((report.step or 0) + 1, 1001):  # doctest: +SKIP
        ...     train(step)
    """
    begun = time.monotonic()
    finish_pending()
    ranks = Ranks(process_group)
    target = redact(os.fspath(path))
    doing = f"loading {target}"
    with ranks.together(doing):
        subjects = Subjects.of(
            model=model, optimizer=optimizer, scheduler=scheduler, dataloader=dataloader, objects=objects, scaler=scaler
        )
        options = LoadOptions(
            strict=strict,
            include=include,
            exclude=exclude,
            resize=resize,
            positions=positions,
            rng=bool(subjects.optimizers) if rng is None else rng,
            verify=verify,
        )
        check_hooks(hooks)
    ranks.demand_same(target, "the path", doing)
    source = open_source(path, ranks, doing)
    threads = threads_per_rank(ranks.size)
    with closing(source), Reader(source.checkpoint, num_threads=threads) as reader:
        with ranks.together(doing):
            live = {name: collect_model(item, ranks) for name, item in subjects.models.items()}
        ranks.demand_same(subjects.names(), "what is to be loaded", doing)
        for one in live.values():
            settle(one, ranks, doing)
        with ranks.together(doing):
            job = LoadJob(source, subjects, live, ranks, reader=reader, options=options)
            event = LoadEvent(
                path=shown(source.checkpoint.root), step=source.step, rank=ranks.rank, parts=sorted(job.used)
            )
            for hook in hooks:
                hook.before_load(event)
            job.compare(event)
            if source.far is not None:
                source.far.fetch(job.spans())
            if source.remote is None:
                job.verify()
        if source.remote is not None:
            source.remote.fetch_chunks(job.chunks(), doing)
            with ranks.together(doing):
                job.verify()
        ranks.demand_same((sorted(event.skipped), sorted(event.replaced)), "what hooks skip or replace", doing)
        half = f"{doing} (models and optimizers may be half loaded: do not go on with them)"
        with ranks.together(half), torch.no_grad():
            job.apply(event)
    with ranks.together(f"{doing} (everything is loaded)"):
        report = job.report(time.monotonic() - begun)
        for hook in hooks:
            hook.after_load(report)
    if ranks.is_first:
        for warning in report.warnings:
            _log.warning("%s: %s", target, warning)
    return report
