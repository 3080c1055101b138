"""Settle what a run is to do before its ranks start. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_ckpt.errors import CheckpointNotFound, DestinationExists, UsageError
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.layouts.registry import list_checkpoints
from fsdp_ckpt.store.remote.urls import is_url, redact
from fsdp_ckpt.train.driver.options import AUTO, TrainOptions

__all__ = ["OPTIONS_FILE", "keep_options", "options_before", "settle_options"]

OPTIONS_FILE = "train.json"
"""Name of the options in a run's folder: of the last attempt that began, for a later ``--resume`` to go on with."""

# Of one attempt, not of the run.
_NOT_KEPT = ("folder", "resume", "kill_at")


def settle_options(folder: str | os.PathLike[str], given: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a run: what is given, else what the run had when it is resumed, else defaults.

    Args:
        folder: The run's folder.
        given: Values by name; None says nothing.

    Raises:
        UsageError: A value that is not allowed; a URL.
        DestinationExists: The folder has checkpoints, and nothing says to resume.
        CheckpointNotFound: The checkpoint to resume from is not there.
    """
    if is_url(os.fspath(folder)):
        raise UsageError(
            f"`{redact(os.fspath(folder))}` is a URL: this loop trains in a local folder",
            hint="in a loop of your own: fsdp_ckpt.Checkpointer saves to a URL",
        )
    path = Path(folder)
    if (path / MANIFEST).is_file():
        raise UsageError(
            f"`{path}` is a checkpoint, not the folder of a run",
            hint=f"fsdp-ckpt train {path.parent} --resume {path}",
        )
    values = {name: value for name, value in given.items() if value is not None}
    resume = values.get("resume")
    if resume is None and path.is_dir() and list_checkpoints(path):
        raise DestinationExists(
            f"{path} already holds checkpoints; nothing was changed",
            hint=f"fsdp-ckpt train {path} --resume auto goes on from the newest; or name another folder",
        )
    if resume not in (None, AUTO) and not os.path.exists(resume):
        raise CheckpointNotFound(
            f"{resume}: there is no checkpoint to resume from", hint=f"fsdp-ckpt train {path} --resume auto"
        )
    kept: dict[str, Any] = {}
    before = options_before(path) if resume is not None else None
    if before is not None:
        kept = {name: value for name, value in asdict(before).items() if name not in _NOT_KEPT}
    return TrainOptions(**{**kept, **values, "folder": str(path)})


def options_before(folder: str | os.PathLike[str]) -> TrainOptions | None:
    """Return the options that a run had; None when it had none yet.

    Raises:
        UsageError: The file is damaged.
    """
    file = Path(folder) / OPTIONS_FILE
    return TrainOptions.read(file) if file.is_file() else None


def keep_options(written: Path, folder: str | os.PathLike[str]) -> None:
    """Make the options of an attempt that has begun those of the run, in one step."""
    os.replace(written, Path(folder) / OPTIONS_FILE)
