"""Run folders: the checkpoints in them by step, whether each is whole, and what saves that died left behind."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import overload

from fsdp_ckpt.errors import CheckpointNotFound, UsageError
from fsdp_ckpt.layouts.composite import looks_composite, step_of
from fsdp_ckpt.layouts.dcp import looks_like_dcp
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.layouts.verdict import OWN_LAYOUT, State, Verdict, judge
from fsdp_ckpt.store.leftovers import is_staging
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.remote.mirrors import mirror_of, shown
from fsdp_ckpt.store.remote.places import place_of, speaks_urls
from fsdp_ckpt.store.remote.urls import is_url

__all__ = [
    "Leftover", "RunCheckpoint", "RunFolder", "Seen", "iter_checkpoints", "latest_complete", "own_values", "read_run",
    "run_path",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoint:
    """A checkpoint of a run.

    Attributes:
        step: As its name says.
        path: Its folder, or a link to it.
        state: Whether it is whole.
        why: What is wrong, and with which file; empty when it is whole.
        layout: ``fsdp-ckpt`` for one with our manifest, else its dialect; None when it holds nothing that is known.
        written_s: When it was written, Unix time in seconds: what our manifest says, else the newest of its files.
        num_bytes: Size of its files; links in it do not count.
        values: Numbers and texts that were saved with it: ours, or what the Trainer logged at this step.
    """

    step: int
    path: Path
    state: State
    why: str
    layout: str | None
    written_s: float
    num_bytes: int
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether it has our manifest."""
        return self.layout == OWN_LAYOUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A hidden folder of a save that died, or that goes on at this moment.

    Attributes:
        path: The folder.
        written_s: When something in it was last written, Unix time in seconds.
        num_bytes: Size of its files.
    """

    path: Path
    written_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """What lies in a run folder.

    Attributes:
        path: The folder.
        checkpoints: Newest step first.
        leftovers: Of saves that did not end.
    """

    path: Path
    checkpoints: Sequence[RunCheckpoint]
    leftovers: Sequence[Leftover]


def read_run(folder: str | os.PathLike[str]) -> RunFolder:
    """Judge every checkpoint of a run, by sizes and metadata.

    Raises:
        CheckpointNotFound: There is no such folder, or it cannot be read.
        UsageError: A file, a URL, or a checkpoint rather than a folder of them.
    """
    path = run_path(folder)
    if not path.is_dir():
        raise CheckpointNotFound(f"there is no folder `{path}`", hint=f"ls {shlex.quote(str(path.parent))}")
    checkpoints = list(iter_checkpoints(path))
    left = [entry for entry in sorted(path.iterdir()) if is_staging(entry.name) and _is_real_folder(entry)]
    leftovers = []
    for entry in left:
        num_bytes, written_s = _measure(entry)
        leftovers.append(Leftover(path=entry, written_s=written_s, num_bytes=num_bytes))
    return RunFolder(path=path, checkpoints=checkpoints, leftovers=leftovers)


def iter_checkpoints(folder: Path) -> Iterator[RunCheckpoint]:
    """Judge the checkpoints of a run one by one, newest step first.

    Args:
        folder: As ``run_path`` returns it; it has to exist.
    """
    places = _places(folder)
    verdict_of = lru_cache(maxsize=None)(judge)
    for step, path in places:
        num_bytes, written_s = _measure(path)
        verdict = verdict_of(path)
        is_bare = verdict.state is State.COMPLETE and not verdict.has_optimizer and verdict.layout != OWN_LAYOUT
        if is_bare and any(verdict_of(other).has_optimizer for _, other in places):
            why = "holds no optimizer, which others of this run do"
            verdict = replace(verdict, state=State.MODEL_ONLY, why=why)
        yield RunCheckpoint(
            step=step,
            path=path,
            state=verdict.state,
            why=verdict.why,
            layout=verdict.layout,
            written_s=written_s if verdict.written_s is None else verdict.written_s,
            num_bytes=num_bytes,
            values=verdict.values,
        )


@overload
def latest_complete(folder: os.PathLike[str]) -> Path | None: ...


@overload
def latest_complete(folder: str) -> Path | str | None: ...


@speaks_urls
def latest_complete(folder: str | os.PathLike[str]) -> Path | str | None:
    """Return the newest checkpoint of a run that is whole, by step; never one that is not.

    Sizes, manifests and metadata are looked at, not the numbers in the files; ``load_state`` compares their checksums.
    Works for runs of ours, of the Trainer (``checkpoint-N``), of torchtitan (``step-N``) and others. torch is not
    imported.

    Args:
        folder: The run's folder, or its URL.

    Returns:
        Its path, or its URL; None when there is none, or no such folder.

    Raises:
        UsageError: A file, or a checkpoint rather than a folder of them.
        CheckpointNotFound: The folder cannot be read.
        Unreachable: A URL that does not answer.

    Example:
        >>> latest_complete("run")  # doctest: +SKIP
        PosixPath('run/step-1000')
    """
    text = os.fspath(folder)
    if is_url(text):
        from fsdp_ckpt.store.remote.target import target  # the network is seldom needed

        path = _demand_run(target(text).path, text)
    else:
        path = run_path(text)
    found = iter_checkpoints(path) if path.is_dir() else iter(())
    newest = next((item.path for item in found if item.state is State.COMPLETE), None)
    return newest if newest is None or mirror_of(newest) is None else shown(newest)


Seen = dict[str, tuple[tuple[int, int, int], Verdict]]
"""By name: which manifest it was, and what was found."""


def own_values(folder: Path, seen: Seen, *, like: int | None = None) -> dict[int, Mapping[str, object]]:
    """Return the values of every ``step-N`` in a folder that has our manifest and is whole, by step.

    Links, other names and checkpoints of others are left out.

    Args:
        folder: The run's folder.
        seen: What an earlier call found; read and written, so that each manifest is read once.
        like: A step that was saved just now. When it is on several nodes' disks, those of which this node has its
            share count as whole.
    """
    found: dict[int, Verdict] = {}
    for step, path in _places(folder):
        if path.name != f"step-{step}" or not _is_real_folder(path):
            continue
        try:
            status = os.lstat(path / MANIFEST)
        except OSError:
            continue
        mark = (status.st_ino, status.st_mtime_ns, status.st_size)
        if path.name not in seen or seen[path.name][0] != mark:
            seen[path.name] = mark, judge(path)
        found[step] = seen[path.name][1]
    nodes = like in found and found[like].node
    return {
        step: verdict.values
        for step, verdict in found.items()
        if verdict.layout == OWN_LAYOUT and (verdict.state is State.COMPLETE or (nodes and verdict.node))
    }


def run_path(folder: str | os.PathLike[str]) -> Path:
    """Return a run's folder as a path, whether it exists or not.

    Raises:
        UsageError: A file, a URL, or a checkpoint rather than a folder of them.
    """
    text = os.fspath(folder)
    if not text:
        raise UsageError("the path is empty", hint="fsdp-ckpt list .")
    return _demand_run(place_of(text), text)


def _demand_run(path: Path, text: str) -> Path:
    if path.exists() and not path.is_dir():
        raise UsageError(f"`{text}` is a file", hint=f"fsdp-ckpt inspect {shlex.quote(text)}")
    if path.is_dir() and not _places(path):
        below = Folder(LocalStore(path))
        if looks_composite(below) or looks_like_dcp(below):
            raise UsageError(
                f"`{text}` is a checkpoint, not the folder of a run", hint=f"fsdp-ckpt inspect {shlex.quote(text)}"
            )
    return path


def _places(folder: Path) -> list[tuple[int, Path]]:
    """Return the folders that are named like checkpoints, newest first; links only where they lead elsewhere."""
    found: dict[str, tuple[int, Path]] = {}
    for entry in sorted(_entries(folder), key=os.path.islink):
        step = step_of(Folder(LocalStore(entry)))
        if step is not None and ".tmp" not in entry.name and not entry.name.startswith("."):
            found.setdefault(os.path.realpath(entry), (step, entry))
    return sorted(found.values(), reverse=True)


def _entries(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    is_folder = entry.is_dir()
                except OSError:  # a link to itself
                    continue
                if is_folder:
                    yield folder / entry.name
    except PermissionError:
        raise CheckpointNotFound(f"`{folder}` cannot be read: permission denied") from None


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _measure(folder: Path) -> tuple[int, float]:
    """Return the size of all files below a folder, and when the newest of them was written."""
    num_bytes, times = 0, []
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError:  # gone at this moment
                continue
            if stat.S_ISREG(status.st_mode):
                num_bytes += status.st_size
                times.append(status.st_mtime)
    try:
        return num_bytes, max(times) if times else folder.stat().st_mtime
    except OSError:
        return num_bytes, 0.0
