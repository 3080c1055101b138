"""Whether a checkpoint is whole, from its manifest, the sizes of its files and its metadata.

A folder with our manifest is whole when every file is there with the size that the manifest says; any other one is
judged by its own rules, as its reader knows them: metadata present, every byte range that they name inside its file.
"""

from __future__ import annotations

import datetime as dt
import json
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from fsdp_ckpt.catalog import Problem, Role, Severity
from fsdp_ckpt.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    FsdpCkptError,
    IncompleteCheckpoint,
    MalformedFile,
    UnknownLayout,
)
from fsdp_ckpt.layouts.composite import looks_composite, step_of
from fsdp_ckpt.layouts.dcp import looks_like_dcp
from fsdp_ckpt.layouts.elsewhere import rank_of
from fsdp_ckpt.layouts.faults import DAMAGE
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, check_files, check_stamps, read_manifest
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["OWN_LAYOUT", "State", "Verdict", "judge"]

OWN_LAYOUT = "fsdp-ckpt"


class State(StrEnum):
    """What can be said of a checkpoint."""

    COMPLETE = "complete"
    """Everything is there."""
    INCOMPLETE = "incomplete"
    """Something is missing or cut off, or nothing that is known was ever there."""
    MODEL_ONLY = "model only"
    """Whole as far as it goes, but without the optimizer that other checkpoints of its run have: weights that were
    merged or exported to there, or a checkpoint of another tool that was cut off between two files."""
    DAMAGED = "damaged"
    """What is there contradicts itself, or cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found.

    Attributes:
        state: Whether it is whole.
        why: What is wrong, and with which file; empty when it is whole.
        layout: ``fsdp-ckpt`` for one with our manifest, else its dialect; None when it holds nothing that is known.
        written_s: When our manifest says that it was written, Unix time in seconds; None without one.
        values: Numbers and texts that were saved with it: ours, or what the Trainer logged at this step.
        has_optimizer: Whether an optimizer was saved with it.
        node: Whether it is ours and lacks nothing but the files of ranks of which nothing is here, as on each node
            where nodes saved to disks of their own. It is incomplete, but none of it was lost here.
    """

    state: State
    why: str = ""
    layout: str | None = None
    written_s: float | None = None
    values: Mapping[str, object] = field(default_factory=dict)
    has_optimizer: bool = False
    node: bool = False


def judge(path: Path) -> Verdict:
    """Judge a checkpoint by sizes and metadata; whatever is wrong with it is in the answer.

    Args:
        path: Its folder, or a link to it.
    """
    folder = Folder(LocalStore(path))
    layout = None
    try:
        if MANIFEST in folder.files:
            layout = OWN_LAYOUT
            return _judge_own(folder)
        if looks_like_dcp(folder) or looks_composite(folder):
            layout = "dcp" if looks_like_dcp(folder) else "files"
        return _judge_foreign(folder, path)
    except UnknownLayout:
        names = sorted(entry.name for entry in path.iterdir())
        listed = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        why = f"nothing in it is known: {listed}" if names else "it is empty"
        return Verdict(state=State.INCOMPLETE, why=why, layout=layout)
    except (IncompleteCheckpoint, CheckpointNotFound) as error:
        return Verdict(state=State.INCOMPLETE, why=error.message, layout=layout)
    except CorruptCheckpoint as error:
        return Verdict(state=State.DAMAGED, why=error.message, layout=layout)
    except FsdpCkptError as error:  # too large for this machine, say
        return Verdict(state=State.DAMAGED, why=f"cannot be judged: {error.message}", layout=layout)
    except OSError as error:
        why = f"cannot be read: {error.filename or path}: {error.strerror or error}"
        return Verdict(state=State.DAMAGED, why=why, layout=layout)


def _judge_own(folder: Folder) -> Verdict:
    manifest = read_manifest(folder)
    assert manifest is not None
    problems = check_files(folder, manifest)
    why = _first_of(problems)
    state = State.INCOMPLETE if why else State.COMPLETE
    node = bool(why) and _is_of_node(manifest, problems)
    if node:
        why = f"{why}; nothing of that rank is here: is it on another node?"
    if not why:
        why = _first_of(list(check_stamps(folder, manifest))) or _damaged_index(folder, manifest)
        state = State.DAMAGED if why else State.COMPLETE
    try:
        created = dt.datetime.fromisoformat(manifest.created)
        created = created if created.tzinfo else created.replace(tzinfo=dt.UTC)
        written_s = created.timestamp()
    except (ValueError, OverflowError):
        written_s = None
    return Verdict(
        state=state,
        why=why,
        layout=OWN_LAYOUT,
        written_s=written_s,
        values=manifest.values,
        has_optimizer=bool(manifest.optimizers),
        node=node,
    )


def _is_of_node(manifest: Manifest, problems: Sequence[Problem]) -> bool:
    faults = [problem for problem in problems if problem.severity is Severity.ERROR]
    missing = {fault.where for fault in faults if fault.code == "missing-file"}
    here = {rank_of(file) for file in manifest.files if file not in missing}
    return len(missing) == len(faults) and not {rank_of(file) for file in missing} & (here | {None})


def _damaged_index(folder: Folder, manifest: Manifest) -> str:
    """Compare the checksums of ``.metadata`` files, which say where everything is; empty when they are right."""
    for file, (size, crc) in manifest.files.items():
        if file.endswith(".metadata"):
            found = zlib.crc32(folder.store.read(folder.prefix + file, limit_bytes=size))
            if found != int(crc, 16):
                return f"{file}: its CRC-32 is {found:08x}, the manifest says {crc}"
    return ""


def _judge_foreign(folder: Folder, path: Path) -> Verdict:
    found = read_checkpoint(path)
    below = found.root.relative_to(path).parts
    if any(step_of(Folder(LocalStore(path.joinpath(*below[: depth + 1])))) is not None for depth in range(len(below))):
        why = f"it is no checkpoint, but the folder of a run: fsdp-ckpt list {shlex.quote(str(path))}"
        return Verdict(state=State.INCOMPLETE, why=why)
    problems = [*found.problems, *(problem for part in found.parts for problem in part.problems)]
    why = _first_of(problems)
    is_damaged = any(problem.code in DAMAGE for problem in problems)
    state = State.DAMAGED if is_damaged else State.INCOMPLETE
    if not why:
        state = State.COMPLETE
        if not any(part.tensors for part in found.parts):
            state, why = State.INCOMPLETE, "it holds no tensors"
    return Verdict(
        state=state,
        why=why,
        layout=found.layout,
        values=_trainer_values(folder),
        has_optimizer=any(part.role is Role.OPTIMIZER for part in found.parts),
    )


def _first_of(problems: Sequence[Problem]) -> str:
    """Return the first fault as a sentence; empty when there is none."""
    faults = [problem for problem in problems if problem.severity is Severity.ERROR]
    if not faults:
        return ""
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{faults[0].where}: {faults[0].message}{more}"


def _trainer_values(folder: Folder) -> Mapping[str, object]:
    """Return what the Trainer logged at the step of its checkpoint (``eval_loss`` and the like)."""
    if "trainer_state.json" not in folder.files:
        return {}
    data = folder.store.read("trainer_state.json")
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"trainer_state.json: broken: {error}") from None
    try:
        step, logged = state["global_step"], state["log_history"]
        entries = [entry for entry in logged if isinstance(entry, dict) and entry.get("step") == step]
    except (KeyError, TypeError):
        return {}
    return {name: value for entry in entries for name, value in entry.items() if name != "step"}
