"""Save the whole state of a training job, so that the checkpoint is there complete or not at all."""

from __future__ import annotations

import hashlib
import logging
import operator
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.manifest import MANIFEST, write_manifest
from fsdp_ckpt.store.publish import Staging, resolve_destination
from fsdp_ckpt.store.syscalls import fsync_folder
from fsdp_ckpt.train.destination import check_replaceable, local_path
from fsdp_ckpt.train.files import FileFacts, write_file
from fsdp_ckpt.train.hooks import Hooks, SaveEvent, check_hooks
from fsdp_ckpt.train.modules import collect_model, refuse_meta, settle
from fsdp_ckpt.train.parts import unite_groups, write_part
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.save_plan import SaveJob
from fsdp_ckpt.train.subjects import Subjects

__all__ = ["SaveReport", "StateDictType", "save_state", "whole_step"]

StateDictType = Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"]
_TYPES = ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT")

_log = logging.getLogger("fsdp_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What ``save_state`` did.

    Attributes:
        path: The checkpoint.
        step: The step that was given.
        files: Size in bytes of every file, by path.
        num_bytes: Their sum.
        world_size: Ranks that took part.
        elapsed_s: Wall time in seconds, until everything was durable.
        skipped: Parts that a hook left out.
    """

    path: str
    step: int | None
    files: Mapping[str, int]
    num_bytes: int
    world_size: int
    elapsed_s: float
    skipped: Sequence[str] = ()


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
    overwrite: bool = True,
    durable: bool = True,
    hooks: Sequence[Hooks] = (),
    process_group: dist.ProcessGroup | None = None,
) -> SaveReport:
    """Save models, optimizers and everything else that a resume needs. A collective: every rank has to call it.

    The folder is laid out like Accelerate's, and Accelerate loads it; beside that it holds ``fsdp_ckpt.json``, which
    says what is in it. It appears in one step when all ranks are done. Until then, and whenever a rank fails, what
    was at ``path`` stays as it was, and every rank raises the same error.

    Nothing in the live state is changed, and each rank writes straight from its own memory: with SHARDED_STATE_DICT
    no tensor travels between ranks. Saving before the first optimizer step is fine.

    Args:
        path: Folder of the checkpoint, on a file system that all ranks see.
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
        overwrite: Replace a checkpoint at ``path``, in one step. Any other folder with content is never replaced.
        durable: Return only when the disk has everything.
        hooks: Called before and after.
        process_group: The ranks that save together; None for all.

    Returns:
        What was written, on every rank.

    Raises:
        DestinationExists: Something else is at ``path``, or somebody else is writing to it.
        NotEnoughSpace: The disk is full; the message names the rank.
        Incompatible: State that could not be loaded again.
        UsageError: Arguments that contradict each other.
        RankFailed: A rank failed or died.

    Example:
        >>> save_state("run/step-100", model, optimizer, scheduler, step=100)  # doctest: +SKIP
    """
    begun = time.monotonic()
    ranks = Ranks(process_group)
    ranks.refuse_strangers()
    target = os.fspath(path).removeprefix("file://")
    doing = f"saving {target}"
    with ranks.together(doing):
        step = whole_step(step)
        if state_dict_type not in _TYPES:
            raise UsageError(f"state_dict_type {state_dict_type!r} is none of {', '.join(_TYPES)}")
        local_path(target)
        check_hooks(hooks)
        subjects = Subjects.of(
            model=model, optimizer=optimizer, scheduler=scheduler, dataloader=dataloader, objects=objects, scaler=scaler
        )
        live = {name: collect_model(item, ranks) for name, item in subjects.models.items()}
        for one in live.values():
            refuse_meta(one, "load or initialize it before saving")
    ranks.demand_same((target, step, state_dict_type), "path, step or state_dict_type", doing)
    ranks.demand_same(subjects.names(), "what is to be saved", doing)
    for one in live.values():
        settle(one, ranks, doing)
    with ranks.together(doing):
        job = SaveJob.plan(subjects, live, ranks, state_dict_type, step=step, values=values or {}, rng=rng)
        event = SaveEvent(path=target, step=step, rank=ranks.rank, parts=job.names())
        for hook in hooks:
            hook.before_save(event)
        job.apply(event, ranks)
    ranks.demand_same([(part.name, part.style) for part in job.parts], "the list of models and optimizers", doing)
    if any(one.differs for one in live.values()):
        job.parts = [unite_groups(part, ranks, doing) if part.groups else part for part in job.parts]
    sizes = _publish(job, Path(target), ranks, overwrite=overwrite, durable=durable)
    report = SaveReport(
        path=target,
        step=step,
        files=sizes,
        num_bytes=sum(sizes.values()),
        world_size=ranks.size,
        elapsed_s=time.monotonic() - begun,
        skipped=sorted(event.skipped),
    )
    with ranks.together(f"{doing} (the checkpoint is in its place)"):
        for hook in hooks:
            hook.after_save(report)
    if ranks.is_first:
        _log.info("saved %s: %d bytes in %.1f s", target, report.num_bytes, report.elapsed_s)
    return report


_Files = dict[str, FileFacts]
"""By path."""


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


def _publish(job: SaveJob, target: Path, ranks: Ranks, *, overwrite: bool, durable: bool) -> dict[str, int]:
    """Write everything beside the destination and put it there in one step; return the sizes of all files."""
    doing = f"saving {target}"
    staging: list[Staging] = []

    def begin() -> str:
        destination = resolve_destination(target)
        check_replaceable(destination, overwrite=overwrite)
        # One name for all saves to a place: the lock in it keeps two writers apart.
        identity = hashlib.sha256(os.fsencode(destination)).hexdigest()[:16]
        staging.append(Staging(destination, identity, overwrite=overwrite))
        for part in job.parts:
            if part.is_folder:
                (staging[0].path / part.name).mkdir()
        return str(staging[0].path)

    try:
        place = Path(ranks.from_first(begin, doing))
        files = _write(job, place, ranks, durable=durable, doing=doing)
        return ranks.from_first(lambda: _commit(job, staging[0], files, durable=durable), doing)
    except BaseException:
        for one in staging:
            one.discard()
        raise


def _write(job: SaveJob, place: Path, ranks: Ranks, *, durable: bool, doing: str) -> _Files:
    """Write everything but the manifest; on the first rank the result lists the files of all."""
    with ranks.together(doing):
        if not place.is_dir():
            raise UsageError(
                f"rank {ranks.rank} on {platform.node()} does not see {place}, which the first rank made",
                hint="save to a file system that all ranks share",
            )
    files: _Files = {}
    for part in job.parts:
        files |= write_part(part, place, ranks, durable=durable, doing=doing)
    mine: _Files = {}
    with ranks.together(doing):
        for name, data in job.own.items():
            mine[name] = write_file(place / name, data, durable=durable)
    for theirs in ranks.gather_first(mine, doing) or ():
        files |= theirs
    return files


def _commit(job: SaveJob, staging: Staging, files: _Files, *, durable: bool) -> dict[str, int]:
    """Add the first rank's files and the manifest, and put the folder in its place."""
    for name, data in job.shared.items():
        files[name] = write_file(staging.path / name, data, durable=durable)
    manifest = replace(job.manifest, save_id=job.save_id, files=files)
    data = write_manifest(manifest)
    if durable:
        for folder in sorted({path.rpartition("/")[0] for path in files} - {""}):
            fsync_folder(staging.path / folder)
    staging.add_file(MANIFEST, data, durable=durable)
    staging.publish(durable=durable)
    return {path: size for path, (size, _) in sorted(files.items())} | {MANIFEST: len(data)}
