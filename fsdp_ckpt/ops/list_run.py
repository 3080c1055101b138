"""List the checkpoints of a run: which are whole, and which one resuming would take."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_ckpt.errors import CheckpointNotFound, FsdpCkptError, IncompleteCheckpoint
from fsdp_ckpt.layouts.manifest import read_manifest
from fsdp_ckpt.layouts.runs import RunCheckpoint, RunFolder, iter_checkpoints, read_run, run_path
from fsdp_ckpt.layouts.verdict import State
from fsdp_ckpt.run.checksum import checksum_range
from fsdp_ckpt.run.progress import Listener, Meter
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.remote.places import speaks_urls

__all__ = ["ListReport", "ListedCheckpoint", "ListedLeftover", "find_latest", "list_run", "read_run_deep"]

_MAX_DEPTH = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint of a run.

    Attributes:
        name: Of its folder.
        step: As the name says.
        path: The folder.
        age_s: Seconds since it was written.
        num_bytes: Size of its files.
        state: ``complete``, ``incomplete``, ``model only`` or ``damaged``.
        why: What is wrong, and with which file; empty when it is whole.
        layout: ``fsdp-ckpt`` for one with our manifest, else its dialect; None when it holds nothing that is known.
        own: Whether it has our manifest.
        compared: Whether the CRC-32 of every file was compared, and is right; only manifests of ours have them.
        latest: Whether this is the one that resuming takes: the newest that is whole.
        values: Numbers and texts saved with it; what JSON cannot say is text.
    """

    name: str
    step: int
    path: str
    age_s: float
    num_bytes: int
    state: str
    why: str
    layout: str | None
    own: bool
    compared: bool
    latest: bool
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLeftover:
    """A hidden folder of a save that died or still goes on: its path, seconds since the last write, bytes."""

    path: str
    age_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListReport:
    """What lies in a run folder.

    Attributes:
        path: The folder.
        latest: Path of the newest checkpoint that is whole; None when none is.
        deep: Whether checksums were compared.
        num_complete: Checkpoints that are whole.
        num_bytes: Size of all files of checkpoints and leftovers.
        checkpoints: Newest step first.
        leftovers: Of saves that did not end.
    """

    path: str
    latest: str | None
    deep: bool
    num_complete: int
    num_bytes: int
    checkpoints: Sequence[ListedCheckpoint]
    leftovers: Sequence[ListedLeftover]


@speaks_urls
def list_run(path: str | os.PathLike[str], *, deep: bool = False, listener: Listener | None = None) -> ListReport:
    """Look at every checkpoint of a run folder.

    Args:
        path: The run's folder.
        deep: Read every file of checkpoints with our manifest, and compare its CRC-32.
        listener: Told how far that is.

    Raises:
        CheckpointNotFound: Nothing is there that is named like a checkpoint.
        UsageError: A file, a URL, or a checkpoint rather than a folder of them.

    Example:
        >>> list_run("run").latest  # doctest: +SKIP
        'run/step-1000'
    """
    run = read_run_deep(path, listener) if deep else read_run(path)
    if not run.checkpoints:
        raise _nothing(run.path, len(run.leftovers))
    now = time.time()
    latest = next((item for item in run.checkpoints if item.state is State.COMPLETE), None)
    return ListReport(
        path=str(run.path),
        latest=None if latest is None else str(latest.path),
        deep=deep,
        num_complete=sum(item.state is State.COMPLETE for item in run.checkpoints),
        num_bytes=sum(item.num_bytes for item in run.checkpoints) + sum(item.num_bytes for item in run.leftovers),
        checkpoints=[
            ListedCheckpoint(
                name=item.path.name,
                step=item.step,
                path=str(item.path),
                age_s=_age(now, item.written_s),
                num_bytes=item.num_bytes,
                state=item.state.value,
                why=item.why,
                layout=item.layout,
                own=item.is_own,
                compared=deep and item.is_own and item.state is State.COMPLETE,
                latest=item is latest,
                values={name: _as_json(value) for name, value in item.values.items()},
            )
            for item in run.checkpoints
        ],
        leftovers=[
            ListedLeftover(path=str(item.path), age_s=_age(now, item.written_s), num_bytes=item.num_bytes)
            for item in run.leftovers
        ],
    )


@speaks_urls
def find_latest(path: str | os.PathLike[str], *, deep: bool = False) -> Path:
    """Return the newest checkpoint of a run that is whole; older ones are not looked at.

    Args:
        path: The run's folder.
        deep: As for ``list_run``.

    Raises:
        CheckpointNotFound: Nothing is there that is named like a checkpoint.
        IncompleteCheckpoint: None is whole.
        UsageError: As for ``list_run``.
    """
    folder = run_path(path)
    passed = []
    for item in iter_checkpoints(folder) if folder.is_dir() else ():
        found = _compare(item, Meter(item.num_bytes, None)) if deep else item
        if found.state is State.COMPLETE:
            return found.path
        passed.append(f"{item.path.name} ({found.why})")
    if not passed:
        raise _nothing(folder, 0)
    more = f"; and {len(passed) - 3} more" if len(passed) > 3 else ""
    raise IncompleteCheckpoint(
        f"`{folder}` holds no complete checkpoint: {'; '.join(passed[:3])}{more}",
        hint=f"fsdp-ckpt list {shlex.quote(str(folder))}",
    )


def read_run_deep(path: str | os.PathLike[str], listener: Listener | None = None) -> RunFolder:
    """Judge every checkpoint of a run, ours also by the CRC-32 of every file.

    Args:
        path: The run's folder.
        listener: Told how far it is.

    Raises:
        CheckpointNotFound: There is no such folder.
        UsageError: As for ``list_run``.
    """
    run = read_run(path)
    readable = [item for item in run.checkpoints if item.is_own and item.state is State.COMPLETE]
    meter = Meter(sum(item.num_bytes for item in readable), listener)
    return replace(run, checkpoints=[_compare(item, meter) for item in run.checkpoints])


def _compare(item: RunCheckpoint, meter: Meter) -> RunCheckpoint:
    """Compare the checksums of a checkpoint of ours that is whole by sizes."""
    if not item.is_own or item.state is not State.COMPLETE:
        return item
    store = LocalStore(item.path)
    try:
        manifest = read_manifest(Folder(store))
        for file, (size, crc) in (manifest.files if manifest else {}).items():
            with store.opened(file) as source:
                found = checksum_range(source, 0, size)
            if found != int(crc, 16):
                why = f"{file}: its CRC-32 is {found:08x}, the manifest says {crc}"
                return replace(item, state=State.DAMAGED, why=why)
            meter.add(size)
    except FsdpCkptError as error:
        return replace(item, state=State.DAMAGED, why=error.message)
    except OSError as error:  # a bad sector, say
        return replace(item, state=State.DAMAGED, why=f"cannot be read: {error}")
    finally:
        store.close()
    return item


def _nothing(folder: Path, num_leftovers: int) -> CheckpointNotFound:
    if not folder.is_dir():
        return CheckpointNotFound(f"there is no folder `{folder}`", hint=f"ls {shlex.quote(str(folder.parent))}")
    left = f", only {num_leftovers} unfinished saves that are hidden" if num_leftovers else ""
    return CheckpointNotFound(
        f"`{folder}` holds no checkpoint such as step-100 or checkpoint-100{left}",
        hint=f"fsdp-ckpt inspect {shlex.quote(str(folder))}",
    )


def _age(now: float, written_s: float) -> float:
    return round(max(now - written_s, 0.0), 3)


def _as_json(value: object, depth: int = 0) -> object:
    """Return a value of a manifest without what JSON lacks: NaN and infinities are text, depths are cut off."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict() | list() if depth >= _MAX_DEPTH:
            return "…"
        case dict():
            return {str(name): _as_json(item, depth + 1) for name, item in value.items()}
        case list():
            return [_as_json(item, depth + 1) for item in value]
        case _:
            return value
