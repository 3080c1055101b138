"""Checkpoints of a training loop: a folder of ``step-N``, saved, pruned and resumed from."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from fsdp_ckpt.errors import (
    CheckpointNotFound,
    ChecksumMismatch,
    IncompleteCheckpoint,
    MalformedFile,
    UnknownLayout,
    UsageError,
)
from fsdp_ckpt.layouts.composite import looks_composite
from fsdp_ckpt.layouts.dcp import looks_like_dcp
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.layouts.registry import list_checkpoints
from fsdp_ckpt.layouts.runs import Seen, own_values
from fsdp_ckpt.plan.retention import Retention, choose_removed
from fsdp_ckpt.store.leftovers import recover_replaced, remove_folder_soon, remove_leftovers
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.remote.urls import is_url
from fsdp_ckpt.train.background import PendingSave, finish_pending, flush_pending, host_memory
from fsdp_ckpt.train.destination import local_path
from fsdp_ckpt.train.hooks import Hooks, check_hooks
from fsdp_ckpt.train.load import LoadReport, load_state
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.remote_run import RemoteRun
from fsdp_ckpt.train.save import SaveReport, StateDictType, save_state, whole_step

__all__ = ["Checkpointer"]

_log = logging.getLogger("fsdp_ckpt")

Candidate = tuple[str, Callable[[], bool]]
"""A checkpoint, and what tells whether it is ours."""


class Checkpointer:
    """Saves and resumes one training run.

    Checkpoints are named by step, so a resumed run goes on where the numbers were, and pruning goes by step number:
    what was just saved is never removed, nor is anything newer, nor a folder that this class did not write. What is
    older goes when none of ``keep``, ``keep_every`` and ``keep_best`` asks for it. Only checkpoints that are whole
    count, and go; ``fsdp-ckpt prune --incomplete`` removes others.

    Args:
        folder: The run's folder; made when missing. Or its URL (``s3://bucket/run``), see ``save_state``: there a
            checkpoint without a manifest is passed over, and nobody else may save to the same run.
        model: As for ``save_state``.
        optimizer: As for ``save_state``.
        scheduler: As for ``save_state``.
        dataloader: As for ``save_state``.
        scaler: As for ``save_state``.
        objects: As for ``save_state``.
        keep: How many of the last checkpoints to keep; None for all. It has to be given with the next two.
        keep_every: Also keep steps that are multiples of this, for good.
        keep_best: Also keep the best by a number among the ``values`` of ``save``, until better ones come:
            ``"eval_loss:min=2"`` for the two lowest, ``"bleu:max"`` for the highest; or a list of such texts. ``min``
            and ``max`` may be left out for names that end with ``loss``, ``perplexity`` or ``accuracy``. A checkpoint
            without the number, or with NaN, is never among the best; of equal ones the earlier stays.
        rng: Save and restore random states.
        state_dict_type: As for ``save_state``.
        async_save: As for ``save_state``: ``save`` returns when the state is copied. Leaving the ``with`` block, or
            ``close``, waits for the last one.
        durable: As for ``save_state``.
        hooks: As for ``save_state``.
        process_group: As for ``save_state``.

    Raises:
        UsageError: ``keep`` below 1 or missing beside ``keep_every`` or ``keep_best``, a rule that cannot be read, or a
            URL that cannot be saved to.

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
        keep_every: int | None = None,
        keep_best: str | Sequence[str] | None = None,
        rng: bool = True,
        state_dict_type: StateDictType = "SHARDED_STATE_DICT",
        async_save: bool = False,
        durable: bool = True,
        hooks: Sequence[Hooks] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._retention = Retention.of(keep, keep_every, keep_best)
        self._seen: Seen = {}
        self._warned: set[str] = set()
        text = os.fspath(folder)
        self._far = RemoteRun(text) if is_url(text) else None
        self.folder: Path | str = local_path(text) if self._far is None else self._far.url
        self.keep = keep
        self._state: dict[str, Any] = {
            "model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": dataloader, "scaler": scaler,
            "objects": objects, "hooks": hooks, "process_group": process_group, "rng": rng,
        }  # fmt: skip
        self._async_save = async_save
        self._type: StateDictType = state_dict_type
        self._durable = durable

    def __repr__(self) -> str:
        """Show folder and newest step; of a URL the URL."""
        if isinstance(self.folder, str):
            return f"Checkpointer({self.folder!r}, keep={self.keep})"
        steps = [step for step, _ in list_checkpoints(self.folder)] if self.folder.is_dir() else []
        newest = f"newest step {steps[0]}" if steps else "empty"
        return f"Checkpointer({str(self.folder)!r}, {newest}, keep={self.keep})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            flush_pending()  # and no more: other ranks may be anywhere

    def close(self) -> None:
        """Wait for an asynchronous save that is under way, and give its memory back. Every rank has to call it.

        Raises:
            FsdpCkptError: The save fails.
        """
        finish_pending()
        if self._async_save:
            host_memory.release()

    def path(self, step: int) -> Path | str:
        """Return the folder of a step, or its URL."""
        return self.folder / f"step-{step}" if isinstance(self.folder, Path) else f"{self.folder}/step-{step}"

    def save(self, step: int, *, values: Mapping[str, Any] | None = None) -> SaveReport | PendingSave:
        """Save ``step-N``, then remove checkpoints that no rule keeps. A collective.

        Args:
            step: Training step, from 0. A checkpoint of this step is replaced.
            values: Numbers and texts that ``resume`` gives back.

        Returns:
            What was saved; with ``async_save`` what is being saved, see ``PendingSave``.

        Raises:
            As ``save_state``.
        """
        number = whole_step(step)
        if number is None or number < 0:
            raise UsageError(f"step {step}: steps count from 0")
        step = number
        self._warn_of_metrics(values or {})
        hooks = self._state["hooks"]
        check_hooks(hooks)
        prune = [] if self._retention is None else [_Prune(self)]
        return save_state(
            self.path(step),
            step=step,
            values=values,
            state_dict_type=self._type,
            async_save=self._async_save,
            durable=self._durable,
            **(self._state | {"hooks": [*prune, *hooks]}),
        )

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
            Unreachable: A URL that does not answer: then nothing is passed over.
            StateMismatch: The newest one is whole, but of another model.
        """
        finish_pending()
        ranks = Ranks(self._state["process_group"])
        doing = f"resuming from {self.folder}"
        found = self._found_far(ranks, doing) if self._far is not None else self._found(ranks, doing)
        passed: list[str] = []
        for place, is_own in found:
            try:
                report = load_state(place, strict=strict, **{**self._state, **options})
            except (IncompleteCheckpoint, ChecksumMismatch, MalformedFile, UnknownLayout, CheckpointNotFound) as error:
                if isinstance(error, CheckpointNotFound) and ranks.from_first(is_own, doing):
                    raise  # one of ours that is whole, and holds less than was asked for
                passed.append(f"{place.rpartition('/')[2]}: {error}")
                if ranks.is_first:
                    _log.warning("passed over %s: %s", place, error)
                continue
            return replace(report, warnings=[*(f"passed over {text}" for text in passed), *report.warnings])
        if passed:
            raise IncompleteCheckpoint(
                f"`{self.folder}` holds no checkpoint that can be used: {'; '.join(passed)}",
                hint=f"fsdp-ckpt validate {found[0][0]}; to begin anew, use another folder",
            )
        if ranks.is_first:
            _log.info("nothing to resume in %s", self.folder if self._far else os.path.abspath(self.folder))
        return None

    def _found_far(self, ranks: Ranks, doing: str) -> list[Candidate]:
        """Return the checkpoints at the URL, newest first; the first rank lists them. A collective.

        Raises:
            Unreachable: They cannot be listed. That is no reason to begin anew.
        """
        far = self._far
        assert far is not None
        return [(url, partial(bool, is_own)) for url, is_own in ranks.from_first(far.candidates, doing)]

    def _found(self, ranks: Ranks, doing: str) -> list[Candidate]:
        """Return the checkpoints that the first rank sees, newest first. A collective.

        Raises:
            IncompleteCheckpoint: It sees none, and another rank does: the disk of its node is new.
        """
        mine: list[str] = []
        folder = Path(self.folder)
        with ranks.together(doing):
            if folder.is_dir():
                recover_replaced(folder)
        with ranks.together(doing):  # now that no rank is at it any more, all see the same
            mine = [str(path) for _, path in self._candidates(folder)]
            if ranks.is_first and folder.is_dir():
                with suppress(OSError):  # what cannot be removed is in nobody's way
                    remove_leftovers(folder)
        rows = ranks.gather_all((platform.node(), mine), doing)
        host, found = rows[0]
        having = [(rank, other) for rank, (other, theirs) in enumerate(rows) if theirs]
        if having and not found:
            raise IncompleteCheckpoint(
                f"`{self.folder}` on {host}, the node of rank 0, holds no checkpoint; on {having[0][1]}, that of rank "
                f"{having[0][0]}, it does",
                hint="start the job on the nodes that saved it, or copy the folder of rank 0's node to this one",
            )
        return [(place, (Path(place) / MANIFEST).is_file) for place in found]

    def _candidates(self, path: Path) -> list[tuple[int, Path]]:
        if not path.is_dir():
            if path.exists():
                raise UsageError(f"`{path}` is a file", hint="a run needs a folder")
            return []
        found = list_checkpoints(path)
        folder = Folder(LocalStore(path))
        if not found and (looks_composite(folder) or looks_like_dcp(folder)):
            raise UsageError(
                f"`{path}` is a checkpoint, not the folder of a run",
                hint=f"Checkpointer({str(path.parent)!r}, …), or load_state({str(path)!r}, …)",
            )
        return found

    def _warn_of_metrics(self, values: Mapping[str, Any]) -> None:
        """Say once when a number is missing by which checkpoints are to be kept."""
        for best in self._retention.keep_best if self._retention is not None else ():
            value = values.get(best.metric)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number and best.metric not in self._warned:
                self._warned.add(best.metric)
                _log.warning(
                    "keep_best: the values= of this save have no number called %s (but: %s): it cannot be the best",
                    best.metric,
                    ", ".join(values) or "nothing",
                )

    def _own(self, step: int) -> dict[int, Mapping[str, object]]:
        """Return the values of our checkpoints that are whole, by step, when this step is in its place."""
        return own_values(Path(self.folder), self._seen, like=step)

    def _unkept(self, nodes: Sequence[Mapping[int, Mapping[str, object]]], step: int) -> list[int]:
        """Return the steps up to one that no rule keeps."""
        assert self._retention is not None
        return choose_removed(self._retention, nodes, up_to=step)

    def _remove(self, steps: Sequence[int]) -> None:
        """Remove checkpoints of ours, each in one move: no half of one is seen. What cannot be removed stays."""
        for number in steps:
            try:
                remove_folder_soon(Path(self.path(number)))
            except FileNotFoundError:  # somebody else prunes here, too
                continue
            except OSError as error:
                _log.warning("could not remove old checkpoints in %s: %s", self.folder, error)
        remove_leftovers(Path(self.folder))


class _Prune(Hooks):
    """Prunes when a step is in its place.

    Where nodes have disks of their own, the first rank decides for all of them, when the save is waited for.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def after_commit(self, report: SaveReport) -> None:
        far, step = self._checkpointer._far, report.step
        if far is not None and step is not None:
            far.prune(step, lambda own: self._checkpointer._unkept([own], step))
        elif not any(report.leaders) and report.step is not None:
            own = self._checkpointer._own(report.step)
            self._checkpointer._remove(self._checkpointer._unkept([own], report.step))

    def after_save(self, report: SaveReport) -> None:
        if not any(report.leaders) or report.step is None:
            return
        ranks, step = Ranks(self._checkpointer._state["process_group"]), report.step
        doing = f"removing old checkpoints in {self._checkpointer.folder}"
        leads = ranks.rank in report.leaders
        mine: dict[int, Mapping[str, object]] | None = None
        with ranks.together(doing):
            mine = self._checkpointer._own(step) if leads else None
        found = ranks.gather_first(mine, doing)
        nodes = [one for one in found or () if one is not None]
        steps = ranks.from_first(lambda: self._checkpointer._unkept(nodes, step), doing)
        with ranks.together(doing):
            if leads:
                self._checkpointer._remove(steps)
