"""What a training run is to do: checked when made, passed to its ranks as a file. Does not import torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import UsageError

__all__ = ["AUTO", "TrainOptions"]

AUTO = "auto"
"""Value of ``resume``: from the newest whole checkpoint, or from the beginning when there is none."""

_AT_LEAST_ONE = ("steps", "save_every", "keep", "batch_size", "layers", "hidden", "heads", "kv_heads", "digits")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What a run does.

    Attributes:
        folder: The run's folder: ``step-N`` and ``log.jsonl``.
        steps: Last step, inclusive; steps count from 1.
        save_every: A checkpoint is saved at every multiple, and at the last step.
        resume: ``auto``, the path of a checkpoint, or None to begin in a folder without checkpoints.
        keep: Number of checkpoints to keep; None for all.
        kill_at: Step after which every rank is killed; in the middle of the save where that step saves.
        seed: Of the initial weights and of all samples, from 0.
        batch_size: Samples of a step on all ranks together; a multiple of the number of ranks.
        lr: Highest learning rate.
        warmup: Steps over which it rises; it then falls to a tenth along a cosine.
        model: A Hugging Face ``config.json``, or the folder that holds one; None for the decoder of our own.
        layers: Of that decoder.
        hidden: Its width.
        heads: Its attention heads; divide ``hidden`` into even parts.
        kv_heads: Its key and value heads; divide ``heads``.
        digits: Length of the numbers that are sorted.
        fsdp: Fields of ``FSDPConfig``; not fp16, which would need a gradient scaler.
        async_save: Whether training goes on while files are written.
        durable: Whether a save waits for the disk.

    Raises:
        UsageError: A value that is not allowed; says what is.
    """

    folder: str
    steps: int = 400
    save_every: int = 100
    resume: str | None = None
    keep: int | None = None
    kill_at: int | None = None
    seed: int = 0
    batch_size: int = 64
    lr: float = 3e-3
    warmup: int = 20
    model: str | None = None
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    digits: int = 8
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    async_save: bool = False
    durable: bool = True

    def __post_init__(self) -> None:
        _demand_text("folder", self.folder)
        for name in ("resume", "model"):
            if getattr(self, name) is not None:
                _demand_text(name, getattr(self, name))
        for name in _AT_LEAST_ONE:
            _demand_whole(name, getattr(self, name), 1, optional=name == "keep")
        _demand_whole("seed", self.seed, 0)
        _demand_whole("warmup", self.warmup, 0)
        if self.kill_at is not None:
            _demand_whole("kill_at", self.kill_at, 1)
            if self.kill_at > self.steps:
                raise UsageError(f"kill_at: {self.kill_at} is not possible; allowed: 1 to {self.steps} (steps)")
        _demand_positive("lr", self.lr)
        if self.hidden % (2 * self.heads):
            raise UsageError(
                f"hidden: {self.hidden} is not possible; allowed: multiples of {2 * self.heads} (2 x heads)"
            )
        if self.heads % self.kv_heads:
            raise UsageError(f"kv_heads: {self.kv_heads} is not possible; allowed: divisors of {self.heads} (heads)")
        _check_fsdp(self.fsdp)

    def check_ranks(self, num_ranks: int) -> None:
        """Make sure that so many ranks can share a batch evenly.

        Raises:
            UsageError: They cannot; says which sizes they can.
        """
        if self.batch_size % num_ranks:
            lower = self.batch_size // num_ranks * num_ranks
            near = " or ".join(str(size) for size in (lower, lower + num_ranks) if size)
            raise UsageError(
                f"batch_size: {self.batch_size} is not possible on {num_ranks} ranks; "
                f"allowed: multiples of {num_ranks}, such as {near}"
            )

    def saves_at(self, step: int) -> bool:
        """Tell whether a step saves."""
        return step % self.save_every == 0 or step == self.steps

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write them as JSON.

        Raises:
            OSError: The file cannot be written.
        """
        values = {one.name: getattr(self, one.name) for one in fields(self)} | {"fsdp": dict(self.fsdp)}
        Path(path).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read what ``write`` wrote.

        Raises:
            UsageError: No file, no JSON object, an unknown name, or a value that is not allowed.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"`{path}` cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"`{path}` is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise UsageError(f"`{path}` is no JSON object")
        names = [one.name for one in fields(cls)]
        unknown = sorted(values.keys() - set(names))
        if unknown or "folder" not in values:
            wrong = f"knows no `{unknown[0]}`" if unknown else "lacks `folder`"
            raise UsageError(f"`{path}` {wrong}; allowed: {', '.join(names)}")
        return cls(**values)


def _demand_whole(name: str, value: Any, minimum: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UsageError(f"{name}: {value!r} is not possible; allowed: a whole number from {minimum}")


def _demand_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"{name}: {value!r} is not possible; allowed: a number above 0")


def _demand_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name}: {value!r} is not possible; allowed: a local path")


def _check_fsdp(values: Any) -> None:
    if not isinstance(values, Mapping):
        raise UsageError(f"fsdp: {values!r} is not possible; allowed: options of FSDPConfig by name")
    config = FSDPConfig.of(values)
    if config.ignored_modules is not None:
        raise UsageError(
            f"ignored_modules: {config.ignored_modules} is not possible here: this loop does not reduce the gradients "
            "of modules that FSDP leaves alone, and ranks would drift apart"
        )
    if config.mixed_precision == "fp16" or "float16" in (config.mixed_precision_policy or {}).values():
        raise UsageError(
            "mixed_precision: fp16 is not possible here, as it takes a gradient scaler; allowed: no, bf16",
            hint="set mixed_precision: bf16, or pass scaler= to save_state and load_state in a program of your own",
        )
