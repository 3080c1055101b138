"""One look at everything: what is wrong with a checkpoint, and the steps that would mend it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp_ckpt.catalog import Checkpoint, Problem, Severity
from fsdp_ckpt.codec.safetensors import read_header
from fsdp_ckpt.errors import CorruptCheckpoint, FsdpCkptError
from fsdp_ckpt.layouts.dcp import looks_like_dcp
from fsdp_ckpt.layouts.elsewhere import ELSEWHERE
from fsdp_ckpt.layouts.faults import DAMAGE
from fsdp_ckpt.layouts.manifest import Manifest, check_stamps, read_manifest
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.layouts.torch_file import open_torch_value
from fsdp_ckpt.ops.repairs.actions import Findings, Kind
from fsdp_ckpt.ops.repairs.boxes import mend_boxes
from fsdp_ckpt.ops.repairs.index import mend_indexes
from fsdp_ckpt.ops.repairs.interrupted import finish_interrupted
from fsdp_ckpt.ops.repairs.look import Look, real_folders
from fsdp_ckpt.ops.repairs.manifest import restore_manifest
from fsdp_ckpt.ops.repairs.metadata import mend_metadata
from fsdp_ckpt.ops.repairs.places import Place
from fsdp_ckpt.ops.repairs.stale import (
    drop_foreign_items,
    drop_stale_items,
    drop_stale_shards,
    drop_unfinished,
    is_foreign,
)
from fsdp_ckpt.ops.repairs.swap import find_swap
from fsdp_ckpt.ops.repairs.torch_versions import Version
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["Wishes", "manifest_of", "survey"]

_FILE_CODES = frozenset({"missing-file", "short-file", "wrong-size"}) | DAMAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What was asked for."""

    for_torch: Version | None
    like: Path | None
    replica: Path | None
    only: frozenset[Kind]
    verify: bool


def survey(place: Place, wishes: Wishes, meter: Meter, mine: Path | None = None) -> Findings:
    """Look at everything once.

    Args:
        place: The checkpoint.
        wishes: What was asked for.
        meter: Told about bytes that were compared.
        mine: The folder beside the checkpoint whose lock this process holds.
    """
    findings = Findings(only=wishes.only)
    find_swap(place.root, findings, mine=mine)
    if not place.root.exists():
        return findings
    root = Folder(LocalStore(place.root))
    look = Look(
        root=root,
        shown=place.shown,
        findings=findings,
        manifest=manifest_of(place.root),
        for_torch=wishes.for_torch,
        like=wishes.like,
        replica=wishes.replica,
        verify=wishes.verify,
        count=meter.add,
    )
    try:
        _look_around(look)
    finally:
        root.store.close()
    if findings.faults:
        findings.keep("until the checkpoint is whole: there may be something to save in it")
    elif not (wishes.verify and findings.wants(Kind.RESTORE_BOX)):
        findings.keep("as long as the checkpoint was not read to the last byte: there may be something to save in it")
    return findings


def _look_around(look: Look) -> None:
    root, findings = look.root, look.findings
    if finish_interrupted(look) or restore_manifest(look):
        findings.note("everything else is looked at once this is done")
        return
    folders = list(real_folders(root))
    if look.for_torch is not None and not any(map(looks_like_dcp, folders)):
        findings.note("there is no .metadata to be written anew: any torch reads these files")
    for folder in folders:
        if looks_like_dcp(folder) and is_foreign(look, folder):
            if findings.wants(Kind.DROP_STALE):
                drop_foreign_items(look, folder)
        elif looks_like_dcp(folder):
            belonging = mend_metadata(look, folder)
            if findings.wants(Kind.DROP_STALE):
                drop_stale_items(look, folder, belonging)
        if findings.wants(Kind.REBUILD_INDEX):
            mend_indexes(look, folder)
        if findings.wants(Kind.DROP_STALE):
            drop_stale_shards(look, folder)
            drop_unfinished(look, folder)
    _look_at_content(look)
    _refuse_links(look)


def _look_at_content(look: Look) -> None:
    """Read the catalog, compare checksums, and note what is wrong and nothing mends."""
    findings = look.findings
    try:
        checkpoint = read_checkpoint(look.root.path, tolerant=True)
    except FsdpCkptError as error:
        if not findings.written and not findings.faults:
            findings.fault(".", error.message, error.hint)
        return
    problems = [*checkpoint.problems, *(problem for part in checkpoint.parts for problem in part.problems)]
    faults = [problem for problem in problems if problem.severity is Severity.ERROR]
    broken = {fault.where: fault.message for fault in faults if fault.code in _FILE_CODES and _is_file(look, fault)}
    if any(fault.code in DAMAGE for fault in faults):
        broken = _unreadable(look) | broken
    strange = _strange(look, checkpoint)
    faults += strange
    broken = {fault.where: fault.message for fault in strange} | broken
    if findings.wants(Kind.RESTORE_BOX):
        listed = look.manifest.files if look.manifest is not None else {}
        mend_boxes(
            look, checkpoint, {f: why for f, why in broken.items() if f in listed or not f.endswith(".metadata")}
        )
    told = findings.written | findings.covered | {fault.where for fault in findings.faults}
    for fault in faults:
        if fault.where not in told:
            findings.fault(fault.where, fault.message)
    for problem in problems:
        is_told = problem.severity is Severity.WARNING or problem.code == ELSEWHERE
        if is_told and problem.where not in told:
            findings.note(f"{problem.where}: {problem.message}")


def _strange(look: Look, checkpoint: Checkpoint) -> list[Problem]:
    """Return data files that say of themselves that they are of another save, or of another rank."""
    try:
        files = [file for part in checkpoint.parts for file in part.files]
        return list(check_stamps(look.root, look.manifest, files))
    except (CorruptCheckpoint, OSError):  # told of where they are read
        return []


def _is_file(look: Look, fault: Problem) -> bool:
    """Tell whether a problem is one of a file, rather than of a tensor that is named like one."""
    try:
        look.root.store.path(fault.where)
    except CorruptCheckpoint:
        return False
    return True


def _unreadable(look: Look) -> dict[str, str]:
    """Return files that cannot be opened as what they are called, and why."""
    found: dict[str, str] = {}
    for folder in real_folders(look.root):
        for name, size in folder.files.items():
            file = folder.prefix + name
            try:
                if name.endswith(".safetensors"):
                    read_header(look.root.store.reader(file), 0, size, where=file)
                elif name.endswith((".bin", ".pt", ".pth", ".ckpt")):
                    open_torch_value(look.root.store, file)
            except FsdpCkptError as error:
                found[file] = error.message
    return found


def _refuse_links(look: Look) -> None:
    """Take back what would be written through a link."""
    for step in list(look.findings.steps):
        if step.run is None and look.is_link(step.action.file, itself=not step.drop):
            look.findings.steps.remove(step)
            why = f"{step.action.why}; it is a link, or in a folder that is one: links are not written through"
            look.findings.fault(step.action.file, why, "repair the folder that it leads to")


def manifest_of(root: Path) -> Manifest | None:
    """Return our manifest, None where there is none that can be read."""
    try:
        return read_manifest(Folder(LocalStore(root)))
    except CorruptCheckpoint:
        return None
