"""Checkpoints of a training loop: a folder of ``step-N``, saved, pruned and resumed from."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from fsdp_ckpt.errors import ChecksumMismatch, IncompleteCheckpoint, MalformedFile, UnknownLayout, UsageError
from fsdp_ckpt.layouts.composite import looks_composite
from fsdp_ckpt.layouts.dcp import looks_like_dcp
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.layouts.registry import list_checkpoints
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.publish import remove_leftovers
from fsdp_ckpt.train.destination import local_path
from fsdp_ckpt.train.hooks import Hooks
from fsdp_ckpt.train.load import LoadReport, load_state
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.save import SaveReport, StateDictType, save_state, whole_step

__all__ = ["Checkpointer"]

_log = logging.getLogger("fsdp_ckpt")


class Checkpointer:
    """Saves and resumes one training run.

    Checkpoints are named by step, so a resumed run goes on where the numbers were, and pruning goes by step number:
    what was just saved is never removed, nor is anything newer, nor a folder that this class did not write.

    Args:
        folder: The run's folder; made when missing.
        model: As for ``save_state``.
        optimizer: As for ``save_state``.
        scheduler: As for ``save_state``.
        dataloader: As for ``save_state``.
        scaler: As for ``save_state``.
        objects: As for ``save_state``.
        keep: Number of checkpoints to keep; None for all.
        rng: Save and restore random states.
        state_dict_type: As for ``save_state``.
        durable: As for ``save_state``.
        hooks: As for ``save_state``.
        process_group: As for ``save_state``.

    Raises:
        UsageError: ``keep`` below 1, or a folder that is not local.

    Example:
        >>> with Checkpointer("run", model, optimizer, scheduler, keep=3) as checkpointer:  # doctest: +SKIP
        ...     report = checkpointer.resume()
        ...     for step in range(report.step + 1 if report else 1, 1001):
        ...         train(step)
        ...         if step % 100 == 0:
        ...             checkpointer.save(step)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        dataloader: Any = None,
        scaler: Any = None,
        objects: Any = None,
        keep: int | None = None,
        rng: bool = True,
        state_dict_type: StateDictType = "SHARDED_STATE_DICT",
        durable: bool = True,
        hooks: Sequence[Hooks] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep}: at least one checkpoint has to stay")
        self.folder = local_path(folder)
        self.keep = keep
        self._state: dict[str, Any] = {
            "model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": dataloader, "scaler": scaler,
            "objects": objects, "hooks": hooks, "process_group": process_group, "rng": rng,
        }  # fmt: skip
        self._type: StateDictType = state_dict_type
        self._durable = durable

    def __repr__(self) -> str:
        """Show folder and newest step."""
        steps = [step for step, _ in list_checkpoints(self.folder)] if self.folder.is_dir() else []
        newest = f"newest step {steps[0]}" if steps else "empty"
        return f"Checkpointer({str(self.folder)!r}, {newest}, keep={self.keep})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish what is under way. Every save has ended when ``save`` returns; nothing is left to do."""

    def path(self, step: int) -> Path:
        """Return the folder of a step."""
        return self.folder / f"step-{step}"

    def save(self, step: int, *, values: Mapping[str, Any] | None = None) -> SaveReport:
        """Save ``step-N``, then remove checkpoints beyond the number to keep. A collective.

        Args:
            step: Training step, from 0. A checkpoint of this step is replaced.
            values: Numbers and texts that ``resume`` gives back.

        Raises:
            As ``save_state``.
        """
        number = whole_step(step)
        if number is None or number < 0:
            raise UsageError(f"step {step}: steps count from 0")
        step = number
        report = save_state(
            self.path(step),
            step=step,
            values=values,
            state_dict_type=self._type,
            durable=self._durable,
            **self._state,
        )
        if self.keep is not None:
            ranks = Ranks(self._state["process_group"])
            ranks.from_first(lambda: self._prune_quietly(step), f"removing old checkpoints in {self.folder}")
        return report

    def resume(self, *, strict: bool = True, **options: Any) -> LoadReport | None:
        """Load the newest checkpoint that is whole; older ones when the newest are incomplete or damaged. A collective.

        Args:
            strict: As for ``load_state``.
            **options: Further arguments of ``load_state``: ``include``, ``resize``, ``positions`` …

        Returns:
            What was loaded; None when there is no checkpoint yet.

        Raises:
            IncompleteCheckpoint: There are checkpoints, but none of them can be used.
            UnsafePickle: The newest one asks for code; that is for you to look into.
            CheckpointNotFound: The newest one is whole, but lacks something that was asked for.
            StateMismatch: The newest one is whole, but of another model.
        """
        ranks = Ranks(self._state["process_group"])
        doing = f"resuming from {self.folder}"
        found = ranks.from_first(lambda: [str(path) for _, path in self._candidates()], doing)
        passed: list[str] = []
        for place in found:
            try:
                report = load_state(place, strict=strict, **{**self._state, **options})
            except (IncompleteCheckpoint, ChecksumMismatch, MalformedFile, UnknownLayout) as error:
                passed.append(f"{Path(place).name}: {error}")
                if ranks.is_first:
                    _log.warning("passed over %s: %s", place, error)
                continue
            return replace(report, warnings=[*(f"passed over {text}" for text in passed), *report.warnings])
        if passed:
            raise IncompleteCheckpoint(
                f"`{self.folder}` holds no checkpoint that can be used: {'; '.join(passed)}",
                hint=f"fsdp-ckpt inspect {found[0]}; to begin anew, use another folder",
            )
        if ranks.is_first:
            _log.info("nothing to resume in %s", self.folder.absolute())
        return None

    def _candidates(self) -> list[tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        found = list_checkpoints(self.folder)
        folder = Folder(LocalStore(self.folder))
        if not found and (looks_composite(folder) or looks_like_dcp(folder)):
            raise UsageError(
                f"`{self.folder}` is a checkpoint, not the folder of a run",
                hint=f"Checkpointer({str(self.folder.parent)!r}, …), or load_state({str(self.folder)!r}, …)",
            )
        return found

    def _prune_quietly(self, step: int) -> None:
        """Prune; what cannot be removed stays for the next time, as the checkpoint that was just saved is whole."""
        try:
            self._prune(step)
        except OSError as error:
            _log.warning("could not remove old checkpoints in %s: %s", self.folder, error)

    def _prune(self, step: int) -> None:
        """Remove the oldest of our checkpoints up to a step, each in one move, so that no half of one is seen."""
        assert self.keep is not None
        own = [
            (number, path)
            for number, path in self._candidates()
            if number <= step and path.name == f"step-{number}" and (path / MANIFEST).is_file()
        ]
        for _, path in own[self.keep :]:
            gone = path.with_name(f".{path.name}.fsdp-ckpt-{os.urandom(8).hex()}")
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)
        remove_leftovers(self.folder)
