"""What a rank holds while it trains: made by all ranks together, and loaded from a checkpoint where asked for."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.registry import list_checkpoints
from fsdp_ckpt.train.checkpointer import Checkpointer
from fsdp_ckpt.train.driver.events import Event, LogWriter, Saved, Started
from fsdp_ckpt.train.driver.model import TASK_KEY, build_model, param_groups, task_of
from fsdp_ckpt.train.driver.options import AUTO, TrainOptions
from fsdp_ckpt.train.hooks import Hooks, SaveEvent
from fsdp_ckpt.train.load import LoadReport, load_state
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.report import SaveReport
from fsdp_ckpt.train.sharding.wrap import wrap

__all__ = ["Job", "check_options", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A rank's share of a run.

    Attributes:
        options: What is to be done.
        ranks: All of them.
        device: Of this rank.
        model: Sharded.
        optimizer: Of its parameters.
        scheduler: Of the learning rate.
        checkpointer: Saves them.
        log: On the first rank; None on others.
        first_step: Step that comes next.
    """

    options: TrainOptions
    ranks: Ranks
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    checkpointer: Checkpointer
    log: LogWriter | None
    first_step: int

    def tell(self, event: Event) -> None:
        """Append to the log, on the first rank."""
        if self.log is not None:
            self.log.append(event)


class _Log(Hooks):
    """Notes saves in the log, which the first rank has, when they are in their places."""

    def __init__(self, log: LogWriter | None) -> None:
        self._log = log

    def after_commit(self, report: SaveReport) -> None:
        if self._log is None:
            return
        self._log.append(
            Saved(
                step=report.step or 0,
                path=report.path,
                elapsed_s=report.elapsed_s,
                stopped_s=report.stopped_s,
                num_bytes=report.num_bytes,
            )
        )


class _ConfigFile(Hooks):
    """Puts ``config.json`` into every checkpoint, from where ``merge`` takes it along."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._data = (json.dumps(config, indent=2) + "\n").encode()

    def before_save(self, event: SaveEvent) -> None:
        event.add_file("config.json", self._data)


def check_options(options: TrainOptions, num_ranks: int) -> None:
    """Check what depends on the number of ranks and on the folder.

    Raises:
        UsageError: A batch that cannot be shared evenly, or a folder that another run has used.
    """
    options.check_ranks(num_ranks)
    folder = Path(options.folder)
    if options.resume == AUTO or not folder.is_dir() or not list_checkpoints(folder):
        return
    if options.resume is None or not Path(options.resume).resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"`{folder}` holds checkpoints already; nothing was changed",
            hint="--resume auto goes on from the newest of them; to begin anew, use another folder",
        )


def prepare(options: TrainOptions, ranks: Ranks, device: torch.device, attempt: str) -> Job:
    """Build, shard and, where asked for, load. A collective.

    Args:
        options: The same on every rank.
        ranks: All of them.
        device: Of this rank.
        attempt: For the log.

    Raises:
        UsageError: As ``check_options``, ``build_model`` and ``wrap``; a folder that cannot be written to.
        FsdpCkptError: As ``load_state``.
    """
    with ranks.together("preparing the run"):
        check_options(options, ranks.size)
    with ranks.together("building the model"):
        log = _open_log(options.folder, attempt) if ranks.is_first else None
        fsdp = FSDPConfig.of(options.fsdp)
        built = build_model(options)
    model = wrap(built.module, fsdp, device=device)
    torch.manual_seed(options.seed + ranks.rank)  # for dropout, before random states are loaded
    optimizer = AdamW(param_groups(model, built.matrices), lr=options.lr, betas=(0.9, 0.98))
    scheduler = LambdaLR(optimizer, lambda done: _lr_share(done, options))
    checkpointer = Checkpointer(
        options.folder,
        model,
        optimizer,
        scheduler,
        keep=options.keep,
        state_dict_type=fsdp.state_dict_type,
        async_save=options.async_save,
        durable=options.durable,
        hooks=[_ConfigFile(built.config), _Log(log)],
    )
    report: LoadReport | None = None
    if options.resume == AUTO:
        report = checkpointer.resume()
    elif options.resume is not None:
        report = load_state(options.resume, model, optimizer, scheduler)
    if report is not None:
        _follow_options(optimizer, scheduler, options)
    job = Job(
        options=options,
        ranks=ranks,
        device=device,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        checkpointer=checkpointer,
        log=log,
        first_step=(report.step or 0) + 1 if report else 1,
    )
    if ranks.is_first:
        job.tell(_started(job, fsdp, built.num_params, report))
    return job


def _follow_options(optimizer: AdamW, scheduler: LambdaLR, options: TrainOptions) -> None:
    """Take the learning rate of the options, which may be another than the checkpoint's, at the checkpoint's place."""
    scheduler.base_lrs = [options.lr] * len(optimizer.param_groups)
    for group in optimizer.param_groups:
        group["initial_lr"] = options.lr
        group["lr"] = options.lr * _lr_share(scheduler.last_epoch, options)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # get_last_lr() has no setter


def _open_log(folder: str, attempt: str) -> LogWriter:
    try:
        return LogWriter(folder, attempt)
    except OSError as error:
        raise UsageError(f"folder: cannot write to `{folder}`: {error.strerror}") from None


def _lr_share(done: int, options: TrainOptions) -> float:
    """Return the share of the highest learning rate for the step after ``done`` steps."""
    if done < options.warmup:
        return (done + 1) / (options.warmup + 1)
    progress = min(1.0, (done - options.warmup) / max(1, options.steps - options.warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _started(job: Job, fsdp: FSDPConfig, num_params: int, report: LoadReport | None) -> Started:
    warnings = [] if report is None else [*report.warnings, *_doubts(job, Path(report.path))]
    return Started(
        world_size=job.ranks.size,
        device=job.device.type,
        num_params=num_params,
        steps=job.options.steps,
        first_step=job.first_step,
        fsdp=_summary(fsdp),
        resumed_from=report.path if report else None,
        saved_world_size=report.saved_world_size if report else None,
        warnings=tuple(warnings),
    )


def _summary(fsdp: FSDPConfig) -> str:
    """Say in a line how the model is sharded."""
    strategy = fsdp.sharding_strategy or ("FULL_SHARD" if fsdp.reshard_after_forward else "SHARD_GRAD_OP")
    precision = [] if fsdp.mixed_precision == "no" else [fsdp.mixed_precision]
    return ", ".join([f"FSDP{fsdp.fsdp_version}", strategy, *precision, fsdp.state_dict_type])


def _doubts(job: Job, path: Path) -> list[str]:
    """Say what the user should know about going on from a checkpoint."""
    found = []
    try:
        trained_for = json.loads((path / "config.json").read_bytes()).get(TASK_KEY)
    except (OSError, ValueError, AttributeError):
        trained_for = None
    if trained_for not in (None, task_of(job.options)):
        found.append(f"`{path}` was trained for {trained_for}, this run is {task_of(job.options)}")
    folder = Path(job.options.folder)
    newer = [name.name for step, name in list_checkpoints(folder) if step >= job.first_step] if folder.is_dir() else []
    if newer and job.options.resume != AUTO:
        found.append(f"newer checkpoints are replaced as the run gets to their steps: {', '.join(newer)}")
    return found
