"""The checkpoints of a run at a URL: which there are, which are whole, and how they are removed.

What is told here follows from one listing and the manifests: data files are not looked into. A checkpoint is removed
manifest first, with a mark beside it, so that one that is half removed is never taken for whole, and the next removal
ends what this one has begun.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_ckpt.errors import CorruptCheckpoint, FsdpCkptError, UsageError
from fsdp_ckpt.layouts.composite import step_of
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, read_manifest
from fsdp_ckpt.store.leftovers import is_removing, removing_mark
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.train.remote_objects import Objects, check_url, take_down

__all__ = ["RemoteRun"]

_MAX_MANIFEST_BYTES = 256 << 20

_log = logging.getLogger("fsdp_ckpt")

Sizes = Mapping[str, int]
"""Bytes of objects by name."""

Choose = Callable[[dict[int, Mapping[str, object]]], Iterable[int]]
"""Returns which steps go; given the values of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A manifest that was read.

    Attributes:
        size: Its bytes.
        files: Bytes of the files that it lists.
        values: Numbers and texts that were saved.
    """

    size: int
    files: Sizes
    values: Mapping[str, object]


class RemoteRun:
    """The folder of a run at a URL. Nothing is asked before something is wanted.

    Args:
        url: Its URL.

    Attributes:
        url: As given, without a slash at its end.

    Raises:
        UsageError: A URL that cannot be saved to.
    """

    def __init__(self, url: str) -> None:
        check_url(url)
        self.url = url.rstrip("/")
        self._known: dict[int, _Known] = {}

    def path(self, step: int) -> str:
        """Return the URL of a step."""
        return f"{self.url}/step-{step}"

    def candidates(self) -> list[tuple[str, bool]]:
        """Return the checkpoints by falling step: the URL of each, and whether it has a manifest of ours.

        Raises:
            UsageError: The URL is that of a checkpoint.
            Unreachable: It cannot be listed; that is not the same as an empty run.
        """
        objects = self._objects()
        try:
            sizes = objects.now()
        finally:
            objects.close()
        found: dict[str, int] = {}
        for head in {name.partition("/")[0] for name in sizes if "/" in name}:
            step = step_of(Folder(LocalStore(Path(head))))
            if step is not None and not head.startswith("."):
                found[head] = step
        if not found and any(name == MANIFEST or name.rpartition("/")[2] == ".metadata" for name in sizes):
            above = self.url.rpartition("/")[0]
            raise UsageError(
                f"`{self.url}` is a checkpoint, not the folder of a run",
                hint=f"Checkpointer({above!r}, …), or load_state({self.url!r}, …)",
            )
        order = sorted(found, key=lambda head: (found[head], head), reverse=True)
        return [(f"{self.url}/{head}", f"{head}/{MANIFEST}" in sizes) for head in order]

    def prune(self, step: int, choose: Choose) -> None:
        """Remove what no rule keeps, and end removals that were cut off. What cannot be removed stays.

        Args:
            step: The step that was saved just now.
            choose: Returns which of our checkpoints that are whole go.
        """
        objects = self._objects()
        try:
            steps = _by_step(objects.now())
            self._known.pop(step, None)
            read = {number: self._own(objects, number, names) for number, names in steps.items()}
            own = {number: known.values for number, known in read.items() if known is not None}
            for number in choose(own):
                self._remove(objects, number, steps[number])
            for number in steps.keys() - own.keys():
                self._end_removal(objects, number, steps[number])
        except FsdpCkptError as error:
            _log.warning("could not remove old checkpoints in %s: %s", self.url, error)
        finally:
            objects.close()

    def _objects(self) -> Objects:
        return Objects(self.url, found={})

    def _own(self, objects: Objects, step: int, names: Sizes) -> _Known | None:
        """Return what a checkpoint's manifest says, None where it has none or is not whole."""
        size = names.get(MANIFEST)
        if size is None or size > _MAX_MANIFEST_BYTES:
            return None
        known = self._known.get(step)
        if known is None or known.size != size:
            manifest = _parse(objects.read(f"step-{step}/{MANIFEST}"))
            if manifest is None:
                return None
            files = {path: facts[0] for path, facts in manifest.files.items()}
            known = self._known[step] = _Known(size=size, files=files, values=manifest.values)
        is_whole = all(names.get(path) == size for path, size in known.files.items())
        return known if is_whole else None

    def _remove(self, objects: Objects, step: int, names: Sizes) -> None:
        self._known.pop(step, None)
        mark = removing_mark(os.urandom(8).hex())
        with tempfile.TemporaryDirectory(prefix="fsdp-ckpt-prune-") as folder:
            objects.mark(Path(folder), f"step-{step}/{mark}", names)
        self._take_down(objects, step, names, [mark])

    def _end_removal(self, objects: Objects, step: int, names: Sizes) -> None:
        """Remove what a removal that was cut off has left of a checkpoint, and nothing that came after it."""
        marks = [name for name in names if is_removing(name)]
        if MANIFEST in names or not marks:
            return
        listed = {name for mark in marks for name in objects.marked(f"step-{step}/{mark}", names[mark])}
        self._take_down(objects, step, listed & names.keys(), marks)

    def _take_down(self, objects: Objects, step: int, names: Iterable[str], marks: Sequence[str]) -> None:
        take_down(objects, [f"step-{step}/{name}" for name in names if name not in marks])
        objects.remove(f"step-{step}/{mark}" for mark in marks)


def _by_step(sizes: Sizes) -> dict[int, dict[str, int]]:
    """Return the objects of each ``step-N``, by their names below it."""
    found: dict[int, dict[str, int]] = {}
    for name, size in sizes.items():
        head, _, rest = name.partition("/")
        match = re.fullmatch(r"step-(0|[1-9][0-9]*)", head)
        if match and rest:
            found.setdefault(int(match[1]), {})[rest] = size
    return found


def _parse(data: bytes) -> Manifest | None:
    with tempfile.TemporaryDirectory(prefix="fsdp-ckpt-manifest-") as folder:
        (Path(folder) / MANIFEST).write_bytes(data)
        try:
            return read_manifest(Folder(LocalStore(Path(folder))))
        except CorruptCheckpoint:
            return None
