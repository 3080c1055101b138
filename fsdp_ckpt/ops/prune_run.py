"""Remove checkpoints of a run that are not to be kept, by the rule of ``Checkpointer``; nothing but checkpoints."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_ckpt.errors import CheckpointNotFound, IncompleteCheckpoint, UsageError
from fsdp_ckpt.layouts.composite import SIDE_FILES
from fsdp_ckpt.layouts.manifest import MANIFEST, read_manifest
from fsdp_ckpt.layouts.runs import Leftover, RunCheckpoint, RunFolder, read_run
from fsdp_ckpt.layouts.verdict import State
from fsdp_ckpt.ops.list_run import read_run_deep
from fsdp_ckpt.plan.retention import Retention, choose_kept
from fsdp_ckpt.run.progress import Listener
from fsdp_ckpt.store.leftovers import is_backup, is_staging, remove_folder, remove_leftovers
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.remote.urls import is_url, redact

__all__ = ["KeptCheckpoint", "PruneReport", "PrunedFolder", "SparedFolder", "prune_run"]

_PLAIN = re.compile(r"(epoch=[0-9]+-|ep[0-9]+-)?(step|checkpoint|global_step|iter|ba)[-_=]?[0-9]+(\.ckpt)?")
"""Names that say nothing but a step. ``my-step-5``, ``step-5.bak``, ``epoch-3`` may be anything."""

_KNOWN_FILES = re.compile(
    r"\.metadata(\.tmp)?|__[0-9]+\.metadata|.*\.distcp|.*\.safetensors(\.index\.json)?"
    r"|pytorch_model.*\.bin(\.index\.json)?|.*_world_size_[0-9]+_rank_[0-9]+\.pt"
    r"|(optimizer|scheduler)(_[0-9]+)?\.(bin|pt)|(rng_state|random_states)(_[0-9]+)?\.(pth|pkl)"
    r"|(sampler|dl_state_dict)(_[0-9]+)?\.bin|dl_states_[0-9]+\.pkl|scaler\.pt|custom_checkpoint_[0-9]+\.pkl|meta\.pt"
    r"|training_args\.bin|trainer_state\.json|recipe_state\.pt|README\.md|\.gitattributes|LICENSE(\.\w+)?"
)
"""What frameworks put into checkpoints, beside ``SIDE_FILES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint that stays: its step, path, and the rules that ask for it."""

    step: int
    path: str
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedFolder:
    """What was removed, or would be.

    Attributes:
        path: The folder, as it was called.
        step: Its step; None for an unfinished save.
        num_bytes: Size of its files.
        why: Why it could go.
    """

    path: str
    step: int | None
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SparedFolder:
    """A folder that no rule keeps, and that was left alone all the same; or that could not be removed."""

    path: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What a prune did, or would do.

    Attributes:
        path: The run's folder.
        dry_run: Whether nothing was removed.
        latest: The newest checkpoint that is whole, which is never removed.
        kept: Newest first.
        removed: In the order of removal, oldest first.
        spared: What is incomplete, is a link, or holds something that is no part of a checkpoint.
        failed: What the system did not let go.
        freed_bytes: Sum of the sizes of what was removed.
    """

    path: str
    dry_run: bool
    latest: str
    kept: Sequence[KeptCheckpoint]
    removed: Sequence[PrunedFolder]
    spared: Sequence[SparedFolder]
    failed: Sequence[SparedFolder]
    freed_bytes: int


def prune_run(
    path: str | os.PathLike[str],
    *,
    keep: int,
    keep_every: int | None = None,
    keep_best: str | Sequence[str] | None = None,
    incomplete: bool = False,
    deep: bool = False,
    dry_run: bool = False,
    listener: Listener | None = None,
) -> PruneReport:
    """Remove the checkpoints of a run that no rule keeps.

    Only checkpoints that are whole count and go. Those whose names differ in more than the number (``step-10``,
    ``checkpoint-10``) are series of their own, and the rule is applied to each. The newest of a series always stays.
    With our manifest a checkpoint goes as a whole; another one only when everything in it is a file that frameworks
    put into checkpoints. Links are neither followed nor removed.

    Args:
        path: The run's folder.
        keep: How many of the last ones stay, at least 1.
        keep_every: Steps that are multiples of this stay for good.
        keep_best: ``METRIC[:min|max][=COUNT]``, or several; see ``plan.retention``.
        incomplete: Also remove what is incomplete and older than the newest whole one of its series, and what saves
            that died left behind. Damaged ones stay: there may be something to save in them.
        deep: First compare the CRC-32 of every file of checkpoints with our manifest; damaged ones do not count.
        dry_run: Only say what would be removed.
        listener: Told how far the comparison is.

    Raises:
        UsageError: No such rule; a folder that cannot be written to; a file, a URL or a checkpoint as ``path``.
        CheckpointNotFound: Nothing is there that is named like a checkpoint.
        IncompleteCheckpoint: None is whole, so that nothing can go.

    Example:
        >>> prune_run("run", keep=3, keep_best="eval_loss", dry_run=True).freed_bytes  # doctest: +SKIP
        48318382080
    """
    rule = Retention.of(keep, keep_every, keep_best)
    assert rule is not None
    if is_url(os.fspath(path)):
        raise UsageError(
            f"`{redact(os.fspath(path))}` is remote: prune removes local folders only",
            hint="Checkpointer(keep=…) prunes where it saves, also in a bucket",
        )
    run = read_run_deep(path, listener) if deep else read_run(path)
    latest = _newest_whole(run)
    if not dry_run and not os.access(run.path, os.W_OK):
        raise UsageError(
            f"`{run.path}` cannot be written to: nothing was removed", hint=f"ls -ld {shlex.quote(str(run.path))}"
        )
    kept: list[KeptCheckpoint] = []
    spared: list[SparedFolder] = []
    going: list[tuple[RunCheckpoint, str]] = []
    _refuse_unknown_metrics(rule, run)
    reasons = {series: choose_kept(rule, values) for series, values in _whole_series(run).items()}
    for item in run.checkpoints:
        here = reasons.get(_series(item), {})
        is_whole = item.state is State.COMPLETE
        may_go = is_whole or (incomplete and item.state is State.INCOMPLETE and item.step < max(here, default=0))
        why = "no rule keeps it" if is_whole else f"{item.state}: {item.why}"
        if is_whole and here.get(item.step) and not item.path.is_symlink():
            kept.append(KeptCheckpoint(step=item.step, path=str(item.path), reasons=here[item.step]))
            continue
        obstacle = _obstacle(item) if may_go else why
        if obstacle is None:
            going.append((item, why))
        else:
            spared.append(SparedFolder(path=str(item.path), why=obstacle))
    removed, failed = _remove(going, dry_run=dry_run)
    gone, left = _sweep(run, dry_run=dry_run) if incomplete else ([], run.leftovers)
    removed += gone
    spared += [
        SparedFolder(path=str(item.path), why="unfinished: a save or removal that died, or goes on") for item in left
    ]
    return PruneReport(
        path=str(run.path),
        dry_run=dry_run,
        latest=str(latest.path),
        kept=kept,
        removed=removed,
        spared=spared,
        failed=failed,
        freed_bytes=sum(item.num_bytes for item in removed),
    )


def _refuse_unknown_metrics(rule: Retention, run: RunFolder) -> None:
    """A metric that no checkpoint has is a slip, and would keep none of them.

    Raises:
        UsageError: There is one.
    """
    known = {
        name
        for item in run.checkpoints
        for name, value in item.values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    for best in rule.keep_best:
        if best.metric not in known:
            have = ", ".join(sorted(known)) or "none"
            raise UsageError(
                f"no checkpoint in `{run.path}` has a number called `{best.metric}`: nothing was removed",
                hint=f"numbers that they have: {have}",
            )


def _newest_whole(run: RunFolder) -> RunCheckpoint:
    for item in run.checkpoints:
        if item.state is State.COMPLETE:
            return item
    shown = shlex.quote(str(run.path))
    if not run.checkpoints:
        raise CheckpointNotFound(
            f"`{run.path}` holds no checkpoint such as step-100 or checkpoint-100", hint=f"fsdp-ckpt inspect {shown}"
        )
    raise IncompleteCheckpoint(
        f"no checkpoint in `{run.path}` is whole: nothing was removed", hint=f"fsdp-ckpt list {shown}"
    )


def _series(item: RunCheckpoint) -> str:
    return re.sub(r"[0-9]+", "#", item.path.name)


def _whole_series(run: RunFolder) -> dict[str, dict[int, Mapping[str, object]]]:
    """Return the values of what counts, by series and step: whole, under a plain name, no link to somewhere else."""
    found: dict[str, dict[int, Mapping[str, object]]] = {}
    for item in run.checkpoints:
        if item.state is State.COMPLETE and not item.path.is_symlink() and _PLAIN.fullmatch(item.path.name):
            found.setdefault(_series(item), {})[item.step] = item.values
    return found


def _obstacle(item: RunCheckpoint) -> str | None:
    """Return why a checkpoint must not be removed, whatever the rule says; None when it may be."""
    if item.path.is_symlink():
        return "a link: neither followed nor removed"
    if not _PLAIN.fullmatch(item.path.name):
        return "its name says more than a step (step-N, checkpoint-N): remove it yourself"
    stranger = _stranger_to_manifest(item.path) if item.is_own else _stranger(item.path)
    if stranger is not None:
        return f"holds `{stranger}`, which is no part of a checkpoint: remove it yourself"
    if item.layout is None and any(item.path.iterdir()):
        return "holds nothing that is known as a checkpoint"
    return None


def _stranger_to_manifest(folder: Path) -> str | None:
    """Return something in a checkpoint of ours that its manifest does not list."""
    manifest = read_manifest(Folder(LocalStore(folder)))
    listed = set(manifest.files) | {MANIFEST} if manifest else set()
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_backup(name)]
        for name in sorted(folders + files):
            path = Path(place, name)
            inner = str(path.relative_to(folder))
            is_known = any(file.startswith(f"{inner}/") for file in listed) if name in folders else inner in listed
            if path.is_symlink() or not (is_known or is_staging(name)):
                return inner
    return None


def _stranger(folder: Path) -> str | None:
    """Return something in a folder that no framework puts into a checkpoint; links, hidden folders, checkpoints."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_backup(name)]
        for name in sorted(folders + files):
            path = Path(place, name)
            if name in folders:
                is_known = not name.startswith(".") and not _PLAIN.fullmatch(name)
            else:
                is_known = _is_known_file(path)
            if path.is_symlink() or not is_known:
                return str(path.relative_to(folder))
    return None


def _is_known_file(path: Path) -> bool:
    return path.is_file() and bool(_KNOWN_FILES.fullmatch(path.name) or SIDE_FILES.fullmatch(path.name))


def _remove(
    going: Sequence[tuple[RunCheckpoint, str]], *, dry_run: bool
) -> tuple[list[PrunedFolder], list[SparedFolder]]:
    """Remove the oldest first, so that what is left after an interruption is newer."""
    removed, failed = [], []
    for item, why in reversed(going):
        entry = PrunedFolder(path=str(item.path), step=item.step, num_bytes=item.num_bytes, why=why)
        try:
            if dry_run or remove_folder(item.path):
                removed.append(entry)
            else:
                text = f"some of its files could not be deleted; they are in {item.path.parent}/.{item.path.name}.*"
                failed.append(SparedFolder(path=entry.path, why=text))
        except FileNotFoundError:  # a training job that prunes here, too, was faster
            continue
        except OSError as error:
            failed.append(SparedFolder(path=entry.path, why=error.strerror or str(error)))
    return removed, failed


def _sweep(run: RunFolder, *, dry_run: bool) -> tuple[list[PrunedFolder], list[Leftover]]:
    """Remove what saves left behind that are dead, which their locks tell; return what went, and what did not.

    What a save had moved away (``.old``) is put back where nothing took its place: neither.
    """
    if not dry_run:
        remove_leftovers(run.path)
    gone = [item for item in run.leftovers if item.path.suffix != ".old" and (dry_run or not item.path.exists())]
    left = [item for item in run.leftovers if item.path.exists() and item not in gone]
    why = "left by a save or removal that died" + (", unless it goes on" if dry_run else "")
    return [PrunedFolder(path=str(item.path), step=None, num_bytes=item.num_bytes, why=why) for item in gone], left
