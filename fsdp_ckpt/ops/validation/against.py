"""Compare a checkpoint with what it is to be loaded into: another checkpoint, a model's or a job's configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdp_ckpt.catalog import Checkpoint, Part, Problem, Role, Severity
from fsdp_ckpt.config.accelerate_yaml import read_config
from fsdp_ckpt.errors import CheckpointNotFound, UnknownLayout, UsageError
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.choose import choose_model_part
from fsdp_ckpt.ops.validation.against_adapter import compare_adapter
from fsdp_ckpt.ops.validation.against_config import check_launch, check_model_config
from fsdp_ckpt.ops.validation.against_model import compare_models
from fsdp_ckpt.ops.validation.expected import expected_beside
from fsdp_ckpt.ops.validation.names import is_adapter
from fsdp_ckpt.ops.validation.wording import counted, finding
from fsdp_ckpt.store.remote.mirrors import materialise
from fsdp_ckpt.store.remote.places import place_of

__all__ = ["check_against", "fit_sentence"]

_LIMIT_BYTES = 4 << 20


def check_against(checkpoint: Checkpoint, other: str, *, part: str | None = None) -> Iterator[Problem]:
    """Yield what does not fit.

    Args:
        checkpoint: The checkpoint.
        other: A checkpoint, a file of weights, a model's ``config.json`` or the folder that it is alone in, or a
            configuration of a job as ``accelerate config`` writes it.
        part: Name of the model in the checkpoint, where it holds several.

    Raises:
        CheckpointNotFound: Nothing is there; or one of the two holds no model.
        UsageError: It is nothing that a checkpoint can be compared with; or several models fit.
        CorruptCheckpoint: The other checkpoint is damaged.
    """
    path = place_of(other)
    config = _config_file(path)
    if config is not None and (config.suffix != ".json" or _is_launch(_read_json(config))):
        yield from check_launch(checkpoint, read_config(config), config.name)
        return
    model = choose_model_part(checkpoint, part, paths=[str(checkpoint.root)])[0]
    if config is not None:
        if model.flat is not None:
            yield _incomparable(model, config.name)
        elif is_adapter(model):
            message = "an adapter, whose tensors are not in the configuration of its base model"
            yield finding("adapter", model.name, f"{message}: compare with the weights of the base model")
        else:
            yield from check_model_config(model, _read_json(config), config.name)
        return
    beside = read_checkpoint(other)
    theirs = choose_model_part(beside, None, paths=[other])[0]
    name = os.path.basename(os.path.abspath(path))
    flat = next((one for one in (model, theirs) if one.flat is not None), None)
    if is_adapter(model) and not is_adapter(theirs) and flat is None:
        yield from compare_adapter(model, theirs, name)
        return
    if flat is not None:
        yield _incomparable(flat, name)
    else:
        is_tied = any(found is not None and found[1].is_tied for found in map(expected_beside, (checkpoint, beside)))
        yield from compare_models(model, theirs, name, is_tied=is_tied)
    if _has_optimizer(beside) and not _has_optimizer(checkpoint):
        yield finding("no-optimizer", "", f"{name} has an optimizer, and this has none")


def fit_sentence(checkpoint: Checkpoint, other: str, problems: Iterable[Problem]) -> str:
    """Return that a checkpoint fits, in a line; empty where what ``check_against`` found says that it does not.

    Args:
        checkpoint: The checkpoint.
        other: What it was compared with, as given.
        problems: What ``check_against`` found.
    """
    found = list(problems)
    if any(problem.severity is not Severity.NOTE for problem in found):
        return ""
    if any(problem.code == "flat-parameters" for problem in found):
        return ""
    name = os.path.basename(os.path.abspath(other.removeprefix("file://")))
    number = sum(len(part.tensors) for part in checkpoint.parts if part.role is Role.MODEL)
    in_part = ", as far as it was compared" if any(problem.code == "compared-in-part" for problem in found) else ""
    return f"fits {name}: {counted(number, 'tensor')}{in_part}"


def _config_file(path: Path) -> Path | None:
    """Return the configuration that a path means, None for a checkpoint."""
    if path.suffix in (".yaml", ".yml") or (path.suffix == ".json" and not path.name.endswith(".index.json")):
        if not path.is_file():
            raise CheckpointNotFound(f"`{path}` does not exist")
        return path
    if path.is_dir() and (path / "config.json").is_file():
        try:
            read_checkpoint(path)
        except UnknownLayout:
            return path / "config.json"
    return None


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        with materialise(path).open("rb") as file:
            data = file.read(_LIMIT_BYTES + 1)
        found = json.loads(data) if len(data) <= _LIMIT_BYTES else None
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`{path}` is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"`{path}` is no configuration", hint="give config.json, a checkpoint, or Accelerate's YAML")
    return found


def _is_launch(config: Mapping[str, Any]) -> bool:
    return "distributed_type" in config or "fsdp_config" in config


def _incomparable(part: Part, name: str) -> Problem:
    message = f"`{part.name}` holds flat parameters, whose names and shapes cannot be compared with {name}"
    return finding("flat-parameters", part.name, message, severity=Severity.NOTE)


def _has_optimizer(checkpoint: Checkpoint) -> bool:
    return any(part.role is Role.OPTIMIZER for part in checkpoint.parts)
