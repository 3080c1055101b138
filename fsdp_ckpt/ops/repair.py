"""Mend a checkpoint: what can be told for certain, in place, and so that all of it can be undone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.ops.repairs.actions import Findings, Kind, RepairAction, RepairFault
from fsdp_ckpt.ops.repairs.look import real_folders
from fsdp_ckpt.ops.repairs.places import Place, find_other, find_place
from fsdp_ckpt.ops.repairs.survey import Wishes, manifest_of, survey
from fsdp_ckpt.ops.repairs.swap import hold_place
from fsdp_ckpt.ops.repairs.torch_versions import parse_version
from fsdp_ckpt.ops.repairs.transaction import Backup, apply_steps, forget_owed
from fsdp_ckpt.run.progress import Listener, Meter
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["Kind", "RepairAction", "RepairFault", "RepairReport", "repair"]

_ROUNDS = 6
"""A lost ``.metadata`` hides what is damaged behind it; more than four rounds have never been needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What a repair found, and what it did or would do.

    Attributes:
        path: The checkpoint's folder.
        chosen: What was given, where that was a folder above or below; None otherwise.
        applied: Whether anything was to be changed; without it nothing was.
        whole: Whether nothing is wrong any more, as far as was looked: what was asked for by ``only``.
        actions: In the order in which they are done.
        faults: What is wrong and cannot be mended.
        notes: What else somebody should know.
        backup: Folder with all that was replaced or set aside; None when there is nothing in it.
        undo: Commands that bring everything back.
        drop_backup: The command that gives the space back, once all is well.
        num_bytes: Bytes that were written, or would be.
        checked_bytes: Bytes whose checksums were compared.
    """

    path: str
    chosen: str | None
    applied: bool
    whole: bool
    actions: Sequence[RepairAction]
    faults: Sequence[RepairFault]
    notes: Sequence[str]
    backup: str | None
    undo: Sequence[str]
    drop_backup: str | None
    num_bytes: int
    checked_bytes: int


def repair(
    path: str | os.PathLike[str],
    *,
    apply: bool = False,
    for_torch: str | None = None,
    like: str | os.PathLike[str] | None = None,
    replica: str | os.PathLike[str] | None = None,
    only: Sequence[str] = (),
    verify: bool = True,
    listener: Listener | None = None,
) -> RepairReport:
    """Find what is wrong with a checkpoint and, with ``apply``, mend what can be mended for certain.

    Nothing is guessed, and nothing is lost: what is replaced or set aside goes into a hidden folder of the checkpoint,
    ``.before-repair-N``, and the report says how to bring it back. Killed at any moment, a repair leaves a checkpoint
    of which at least as much can be read as before. torch is not imported, and no pickle is run.

    Args:
        path: One checkpoint: a folder. It may be gone, if a save that died had moved it away.
        apply: Change files; otherwise the report says what would be done.
        for_torch: Version of torch, such as ``"2.9"``: write ``.metadata`` anew where this torch, or any Python, could
            not read it, and make one where each rank has its own.
        like: A checkpoint of the same model, the step before, say: its names and shapes serve for a lost ``.metadata``,
            if every item of the data files agrees with them.
        replica: Another copy of this very checkpoint: files that are damaged or missing are taken from there.
        only: Kinds of repair, see ``Kind``; all by default.
        verify: Compare the recorded checksums of all tensors, which reads them; without it damage is not noticed.
        listener: Told how many bytes were compared.

    Returns:
        What was found. With ``apply`` it was looked at again afterwards.

    Raises:
        CheckpointNotFound: Nothing is there, nor anything that was moved away from there.
        UsageError: No such kind or version; the folder of a run; a folder that cannot be written to.
        Incompatible: torch before 2.3.
        DestinationExists: Another process is writing to this place.
        NotEnoughSpace: The disk is too small; nothing was changed.

    Example:
        >>> repair("run/step-1000").whole  # doctest: +SKIP
        True
    """
    version, kinds = None if for_torch is None else parse_version(for_torch), _kinds(only)
    place = find_place(path)
    wishes = Wishes(
        for_torch=version,
        like=None if like is None else find_other(like, place, "--like"),
        replica=None if replica is None else find_other(replica, place, "--replica"),
        only=kinds,
        verify=verify,
    )
    meter = _meter(place, wishes, listener, looks=2 if apply else 1)
    if not apply:
        return _report(place, survey(place, wishes, meter), None, [], meter)
    writable = place.root if place.root.exists() else place.root.parent
    if not os.access(writable, os.W_OK):
        raise UsageError(
            f"`{writable}` cannot be written to: nothing was changed", hint=f"ls -ld {shlex.quote(str(writable))}"
        )
    with hold_place(place.root) as mine:
        done, left, backup = _apply(place, wishes, meter, mine)
    return _report(place, left, backup, done, meter)


def _kinds(only: Sequence[str]) -> frozenset[Kind]:
    names = [kind.value for kind in Kind]
    for name in only:
        if name not in names:
            raise UsageError(f"`{name}` is no kind of repair", hint=f"--only takes: {', '.join(names)}")
    return frozenset(map(Kind, only))


def _meter(place: Place, wishes: Wishes, listener: Listener | None, *, looks: int) -> Meter:
    total = 0
    if place.root.exists() and wishes.verify:
        total = sum(size for folder in real_folders(Folder(LocalStore(place.root))) for size in folder.files.values())
    return Meter(total * looks, listener)


def _apply(place: Place, wishes: Wishes, meter: Meter, mine: Path | None) -> tuple[list[Findings], Findings, Backup]:
    """Carry out what is found until nothing is found any more; also return the last look."""
    backup, done = Backup(place.root), list[Findings]()
    if place.root.exists():
        forget_owed(place.root)
    for _ in range(_ROUNDS):
        found = survey(place, wishes, meter, mine)
        if not found.steps:
            return done, found, backup
        first = [step for step in found.steps if not step.last]
        within = [step for step in first if step.run is None]
        if within:
            apply_steps(within, backup, manifest_of(place.root))
        # What is removed is gone: only once everything was looked at again, and found whole.
        for step in first or found.steps:
            if step.run is not None:
                step.run()
        done.append(replace(found, steps=first or found.steps))
    return done, survey(place, wishes, meter, mine), backup


def _report(
    place: Place, found: Findings, backup: Backup | None, done: Sequence[Findings], meter: Meter
) -> RepairReport:
    applied = backup is not None
    actions = [step.action for findings in (done if applied else [found]) for step in findings.steps]
    told = [note for findings in [*done, found] for note in findings.notes]
    notes = list(dict.fromkeys([*told, *(backup.notes if backup is not None else ())]))
    folder = backup.path if backup is not None and backup.path is not None and backup.path.is_dir() else None
    faults = list(found.faults)
    if applied:
        faults += [
            RepairFault(where=step.action.file, why=f"was to be mended, but still: {step.action.why}")
            for step in found.steps
        ]
    return RepairReport(
        path=str(place.root),
        chosen=place.chosen,
        applied=applied,
        whole=not faults and (applied or not actions),
        actions=actions,
        faults=faults,
        notes=notes,
        backup=None if folder is None else str(folder),
        undo=[] if backup is None else _undo(backup, folder),
        drop_backup=None if folder is None else f"rm -r {shlex.quote(str(folder))}",
        num_bytes=sum(action.num_bytes for action in actions),
        checked_bytes=meter.done_bytes,
    )


_MANY = 6


def _undo(backup: Backup, folder: Path | None) -> list[str]:
    """Return the commands that bring everything back."""
    root = backup.root
    commands = [f"rm {shlex.quote(str(root / file))}" for file in backup.added]
    commands += [f"rmdir {shlex.quote(str(root / folder))}" for folder in reversed(backup.folders)]
    if folder is None:
        return commands
    if len(backup.kept) > _MANY:
        commands.append(f"cp -a {shlex.quote(f'{folder}/.')} {shlex.quote(f'{root}/')}")
    else:
        commands += [shlex.join(["mv", "-f", str(folder / file), str(root / file)]) for file in backup.kept]
    return [*commands, f"rm -r {shlex.quote(str(folder))}"]
