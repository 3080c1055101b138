"""Find the checkpoint behind a path, and in it what belongs to each model, optimizer and other thing of a call."""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_ckpt.catalog import Checkpoint, Part, Role, Severity
from fsdp_ckpt.errors import CheckpointNotFound, ChecksumMismatch, IncompleteCheckpoint
from fsdp_ckpt.layouts.manifest import Manifest, Member, read_manifest
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.train.ranks import Ranks

__all__ = ["Source", "by_rank", "open_source", "refuse_faults"]

_log = logging.getLogger("fsdp_ckpt")

_NUMBER = re.compile(r".*?_(\d+)(?:/.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint that is to be loaded.

    Attributes:
        checkpoint: Its catalog.
        manifest: What it says about itself, where we wrote it.
        warnings: What was passed over on the caller's behalf.
        path: Where it is: the folder, or the file that was given.
    """

    checkpoint: Checkpoint
    manifest: Manifest | None
    warnings: Sequence[str]
    path: str

    @property
    def world_size(self) -> int | None:
        """Ranks that saved it, where that can be told."""
        return self.manifest.world_size if self.manifest else self.checkpoint.world_size

    @property
    def step(self) -> int | None:
        """Training step, where it is recorded or part of the folder's name."""
        if self.manifest is not None and self.manifest.step is not None:
            return self.manifest.step
        return self.checkpoint.step

    def parts(self, role: Role) -> list[Part]:
        """Return the parts of a role."""
        return [part for part in self.checkpoint.parts if part.role is role]

    def match(
        self,
        role: Role,
        members: Sequence[Member] | None,
        names: Iterable[str],
        what: str,
        *,
        numbers: Sequence[int] | None = None,
    ) -> dict[str, Part]:
        """Return the part for each name: by the manifest, else by number.

        Args:
            role: What to look among.
            members: The manifest's list; None when there is no manifest.
            names: As the caller named things; numbers for those of a list.
            what: For messages (``model``).
            numbers: For each name, the number that it has in the checkpoint when it was given in a list; None when
                that is its place in the list.

        Raises:
            CheckpointNotFound: There is nothing for a name.
        """
        wanted = list(names)
        parts = self.parts(role)
        order = dict(zip(wanted, range(len(wanted)) if numbers is None else numbers, strict=True))
        if members is not None:
            as_saved = {name: name for name in wanted}
            if numbers is not None:
                listed = [name for name in wanted if name.isdecimal() and order[name] < len(members)]
                as_saved |= {name: members[order[name]].name for name in listed}
            return {name: self._by_member(parts, members, order[name], as_saved[name], what) for name in wanted}
        numbered: dict[int, Part] = {}
        for part in parts:
            match = _NUMBER.fullmatch(part.name)
            numbered.setdefault(int(match[1]) if match else 0, part)
        if len(wanted) == 1 and len(parts) == 1:
            return {wanted[0]: parts[0]}
        found = {}
        for name, number in order.items():
            by_name = next((part for part in parts if part.name == name), None)
            chosen = by_name or numbered.get(number)
            if chosen is None:
                raise self._missing(parts, name, what)
            found[name] = chosen
        return found

    def _by_member(self, parts: list[Part], members: Sequence[Member], number: int, name: str, what: str) -> Part:
        member = next((member for member in members if member.name == name), None)
        if member is None and name.isdecimal() and number < len(members):
            member = members[number]
        stem = member.part if member else None
        # A full file of number 0 has no number, and a rank file belongs to its group.
        known = {stem, stem.removesuffix("_0")} if stem else set()
        part = next((part for part in parts if part.name in known), None)
        if part is None:
            if not members:
                raise CheckpointNotFound(
                    f"the checkpoint holds no {what}: none was saved", hint=f"leave out {what}= to load the rest"
                )
            saved = ", ".join(f"`{member.name}`" for member in members)
            raise CheckpointNotFound(
                f"the checkpoint has no {what} `{name}`; saved were: {saved}",
                hint="pass them as they were saved: a dictionary by these names, or a list in that order",
            )
        return part

    def _missing(self, parts: list[Part], name: str, what: str) -> CheckpointNotFound:
        have = ", ".join(f"`{part.name}`" for part in parts)
        if have:
            return CheckpointNotFound(f"the checkpoint has no {what} for `{name}`; it has: {have}")
        others = ", ".join(f"`{part.name}`" for part in self.checkpoint.parts) or "nothing"
        return CheckpointNotFound(
            f"`{self.checkpoint.root}` holds no {what}; it holds: {others}",
            hint=f"leave out {what}= to load the rest" if others != "nothing" else None,
        )


def open_source(path: str | os.PathLike[str], ranks: Ranks, doing: str) -> Source:
    """Read the catalog of the checkpoint at a path on every rank. A collective.

    The first rank decides which one it is when the path is a folder with several; the others read that one.

    Raises:
        CheckpointNotFound: Nothing is there.
        IncompleteCheckpoint: The checkpoint that was asked for is not whole.
    """
    text = os.fspath(path)
    kept: list[Checkpoint] = []

    def choose() -> tuple[str, list[str]]:
        _check_index_files(Path(text.removeprefix("file://")))
        found = read_checkpoint(text)
        kept.append(found)
        warnings = [f"passed over: {value}" for name, value in found.facts if name == "passed over"]
        if found.chosen is not None and found.chosen != str(found.root):
            _log.info("taking %s of %s", found.root.name, text)
        return (text if found.chosen is None else str(found.root)), warnings

    place, warnings = ranks.from_first(choose, doing)
    with ranks.together(doing):
        checkpoint = kept[0] if kept else read_checkpoint(place)
        is_file = Path(place.removeprefix("file://")).is_file()
        manifest = None if is_file else read_manifest(Folder(LocalStore(checkpoint.root)))
    return Source(
        checkpoint=checkpoint,
        manifest=manifest,
        warnings=warnings,
        path=place if is_file else str(checkpoint.root),
    )


def _check_index_files(folder: Path) -> None:
    """Compare the ``.metadata`` files of a checkpoint of ours with its manifest, before anybody tries to read them.

    A flipped bit in a pickle can look like anything, also like an attack.

    Raises:
        ChecksumMismatch: One is damaged.
    """
    if not folder.is_dir():
        return
    below = Folder(LocalStore(folder))
    manifest = read_manifest(below)
    for path, (size, crc) in (manifest.files if manifest else {}).items():
        if path.endswith(".metadata") and below.store.size(path) == size:
            found = zlib.crc32(below.store.read(path, limit_bytes=size))
            if found != int(crc, 16):
                raise ChecksumMismatch(f"`{folder}`: {path} is damaged: its CRC-32 is {found:08x}, {crc} was recorded")


def refuse_faults(source: Source, parts: Iterable[Part]) -> None:
    """Make sure that what is to be loaded is whole.

    Raises:
        IncompleteCheckpoint: A part, or the whole, has a fault.
    """
    faults = [problem for problem in source.checkpoint.problems if problem.severity is Severity.ERROR]
    faults += [problem for part in parts for problem in part.problems if problem.severity is Severity.ERROR]
    if faults:
        shown = "; ".join(f"{problem.where}: {problem.message}" for problem in faults[:5])
        more = f"; and {len(faults) - 5} more faults" if len(faults) > 5 else ""
        raise IncompleteCheckpoint(
            f"`{source.checkpoint.root}` is incomplete or damaged: {shown}{more}",
            hint=f"fsdp-ckpt inspect {source.checkpoint.root}; or load an older checkpoint",
        )


def by_rank(part: Part) -> Mapping[int, list[Any]]:
    """Return the objects of a part that stand under ``dp_rank_R`` or ``rank_R``, by rank."""
    found: dict[int, list[Any]] = {}
    for entry in part.objects.values():
        for step in entry.path or (entry.name,):
            match = re.fullmatch(r"(?:dp_)?rank_(\d+)", str(step))
            if match:
                found.setdefault(int(match[1]), []).append(entry)
                break
    return found
