"""What a repair consists of: actions for people to read, and the steps that carry them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

__all__ = ["Findings", "Kind", "Patch", "RepairAction", "RepairFault", "Step"]


class Kind(StrEnum):
    """Kinds of repair, as ``--only`` takes them."""

    METADATA_FOR_TORCH = "metadata-for-torch"
    """Write ``.metadata`` anew so that a given torch, and any Python, can read it."""
    REBUILD_METADATA = "rebuild-metadata"
    """Make a ``.metadata`` that is lost or broken."""
    DROP_STALE = "drop-stale"
    """Set aside what belongs to no checkpoint any more."""
    FINISH_SWAP = "finish-swap"
    """Put back what a dead save had moved away, and remove what it left."""
    REBUILD_INDEX = "rebuild-index"
    """Make the index of numbered safetensors files."""
    RESTORE_BOX = "restore-box"
    """Replace damaged bytes by those of another copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairAction:
    """Something that a repair does, or would do.

    Attributes:
        kind: See ``Kind``.
        what: ``write``, ``set aside``, ``put back`` or ``remove``.
        file: The file, relative to the checkpoint's root; a path for what lies beside the checkpoint.
        why: What is wrong with it.
        num_bytes: Bytes to write; 0 for what is only moved.
        source: Where the new content comes from; None when it follows from the checkpoint itself.
    """

    kind: Kind
    what: str
    file: str
    why: str
    num_bytes: int = 0
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairFault:
    """Something that is wrong and that cannot be mended from what is at hand.

    Attributes:
        where: The file or tensor, relative to the checkpoint's root.
        why: What is wrong, and why it cannot be mended.
        hint: The next thing to do; None where nothing sensible can be suggested.
    """

    where: str
    why: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A file's new content: another file, with ranges replaced by those of further ones.

    Attributes:
        base: The file to begin with.
        size: Its size in bytes.
        ranges: Position in the new file, the file to take from, and its bytes ``[start, stop)``.
    """

    base: Path
    size: int
    ranges: Sequence[tuple[int, Path, int, int]] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the new file."""
        return self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An action and how to carry it out; at most one of content, ``drop`` and ``run``.

    Attributes:
        action: For people.
        content: The file's new content.
        crc32: What the new content's CRC-32 must be; None where only its records tell.
        drop: Move the file into the backup.
        run: Does the work, for what lies beside the checkpoint.
        last: Cannot be undone: it waits until nothing else is left to do.
    """

    action: RepairAction
    content: bytes | Patch | None = None
    crc32: int | None = None
    drop: bool = False
    run: Callable[[], None] | None = None
    last: bool = False


@dataclass(slots=True)
class Findings:
    """What one look at a checkpoint found.

    Attributes:
        only: Kinds that are asked for; empty for all.
        steps: In the order in which they are to be done.
        faults: What cannot be mended.
        notes: What else somebody should know.
        covered: Files that are missing only as long as the steps are not done.
    """

    only: frozenset[Kind] = frozenset()
    steps: list[Step] = field(default_factory=list)
    faults: list[RepairFault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    covered: set[str] = field(default_factory=set)
    _known: set[tuple[str, ...]] = field(default_factory=set, repr=False)

    def wants(self, kind: Kind) -> bool:
        """Whether a kind of repair is asked for."""
        return not self.only or kind in self.only

    def write(
        self,
        kind: Kind,
        file: str,
        content: bytes | Patch,
        why: str,
        *,
        source: str | None = None,
        crc32: int | None = None,
    ) -> None:
        """Plan to write a file, in place of the one that is there or where none is."""
        num_bytes = len(content) if isinstance(content, bytes) else content.num_bytes
        action = RepairAction(kind=kind, what="write", file=file, why=why, num_bytes=num_bytes, source=source)
        self.steps.append(Step(action=action, content=content, crc32=crc32))

    def drop(self, kind: Kind, file: str, why: str) -> None:
        """Plan to move a file into the backup."""
        self.steps.append(Step(action=RepairAction(kind=kind, what="set aside", file=file, why=why), drop=True))

    def run(self, kind: Kind, what: str, path: Path, why: str, run: Callable[[], None]) -> None:
        """Plan something beside the checkpoint."""
        action = RepairAction(kind=kind, what=what, file=str(path), why=why)
        self.steps.append(Step(action=action, run=run, last=what == "remove"))

    def keep(self, why: str) -> None:
        """Take back all that would be removed for good."""
        for step in self.steps:
            if step.last:
                self.note(f"`{step.action.file}` stays {why}")
        self.steps = [step for step in self.steps if not step.last]

    def fault(self, where: str, why: str, hint: str | None = None) -> None:
        """Note what cannot be mended, once."""
        if (where, why) not in self._known:
            self._known.add((where, why))
            self.faults.append(RepairFault(where=where, why=why, hint=hint))

    def note(self, text: str) -> None:
        """Note something, once."""
        if (text,) not in self._known:
            self._known.add((text,))
            self.notes.append(text)

    @property
    def written(self) -> set[str]:
        """Files that steps write or drop."""
        return {step.action.file for step in self.steps if step.run is None}
