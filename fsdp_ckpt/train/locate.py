"""Find the checkpoint behind a path, and in it what belongs to each model, optimizer and other thing of a call."""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_ckpt.catalog import Checkpoint, Part, Problem, Role, Severity
from fsdp_ckpt.errors import CheckpointNotFound, ChecksumMismatch, CorruptCheckpoint, IncompleteCheckpoint
from fsdp_ckpt.layouts.elsewhere import ELSEWHERE
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, Member, check_files, check_stamps, read_manifest
from fsdp_ckpt.layouts.registry import list_checkpoints, read_checkpoint
from fsdp_ckpt.store.leftovers import recover_replaced
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.remote.mirrors import mirror_of, shown
from fsdp_ckpt.store.remote.urls import is_url
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.remote_files import RemoteFiles, find_remote
from fsdp_ckpt.train.remote_source import FarFiles

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
        remote: What hands over files of other nodes, where nodes have disks of their own.
        far: What fetches files, where the checkpoint is at a URL.
    """

    checkpoint: Checkpoint
    manifest: Manifest | None
    warnings: Sequence[str]
    path: str
    remote: RemoteFiles | None = None
    far: FarFiles | None = None

    def close(self) -> None:
        """Remove what was fetched from elsewhere."""
        for source in (self.remote, self.far):
            if source is not None:
                source.close()

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

    def ranks_with(self, stem: str) -> set[int]:
        """Return the ranks that saved a file ``STEM_R.pkl``, by our manifest: files of other nodes count as well."""
        found = (re.fullmatch(rf"{stem}_(\d+)\.pkl", path) for path in (self.manifest.files if self.manifest else ()))
        return {int(match[1]) for match in found if match}

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
        Unreachable: Nothing is at a URL, or it does not answer.
    """
    text = os.fspath(path)
    if is_url(text):
        return _open_far(text, ranks, doing)
    kept: list[Checkpoint] = []

    def choose() -> tuple[str, bool, list[str]]:
        chosen, found, warnings = _choose(text)
        if found is not None:
            kept.append(found)
        return chosen, (Path(chosen.removeprefix("file://")) / MANIFEST).is_file(), warnings

    place, is_ours, warnings = ranks.from_first(choose, doing)
    local = Path(place.removeprefix("file://"))
    manifest: Manifest | None = None
    with ranks.together(doing):
        if local.is_dir():
            manifest = read_manifest(Folder(LocalStore(local)))
            _check_index_files(local, manifest)
            _check_stamps(local, manifest, ranks)
    remote = find_remote(local, manifest, ranks, doing) if is_ours else None
    if remote is not None:
        return _open_spread(local, remote, warnings, ranks, doing)
    with ranks.together(doing):
        checkpoint = kept[0] if kept else read_checkpoint(place)
    return Source(
        checkpoint=checkpoint,
        manifest=manifest,
        warnings=warnings,
        path=place if local.is_file() else str(checkpoint.root),
    )


def _open_far(url: str, ranks: Ranks, doing: str) -> Source:
    """Read the catalog of a checkpoint at a URL. A collective."""
    kept: list[Checkpoint] = []

    def choose(place: Path) -> tuple[Path, list[str]]:
        chosen, found, warnings = _choose(str(place))
        if found is not None:
            kept.append(found)
        return Path(chosen), warnings

    far, warnings = FarFiles.open(url, choose, ranks, doing)
    manifest: Manifest | None = None
    try:
        with ranks.together(doing):
            far.fetch_index()
            if far.path.is_dir():
                manifest = read_manifest(Folder(LocalStore(far.path)))
                _check_index_files(far.path, manifest)
                _refuse_stamps(far.path, far.check_stamps(manifest, ranks))
            checkpoint = kept[0] if kept else read_checkpoint(far.path)
    except BaseException:
        far.close()
        raise
    path = far.url if far.path.is_file() else shown(checkpoint.root)
    return Source(checkpoint=checkpoint, manifest=manifest, warnings=warnings, path=path, far=far)


def _choose(text: str) -> tuple[str, Checkpoint | None, list[str]]:
    """Return which checkpoint a path leads to, its catalog where it had to be read for that, and what to warn of."""
    folder = Path(text.removeprefix("file://"))
    is_far = mirror_of(folder) is not None
    for place in () if is_far else (folder.parent, folder):
        if place.is_dir() and not (place / MANIFEST).is_file():
            recover_replaced(place)
    if (folder / MANIFEST).is_file():
        return text, None, []  # a checkpoint itself: all ranks read it at the same time
    try:
        found = read_checkpoint(text)
    except IncompleteCheckpoint:
        spread = None if is_far else _newest_spread(folder)
        if spread is None:
            raise
        _log.info("taking %s of %s, which lies on several nodes", spread.name, text)
        return str(spread), None, []
    warnings = [f"passed over: {value}" for name, value in found.facts if name == "passed over"]
    if found.chosen is None:
        return text, found, warnings
    if found.chosen != str(found.root):
        _log.info("taking %s of %s", found.root.name, shown(text))
    return str(found.root), found, warnings


def _open_spread(place: Path, remote: RemoteFiles, warnings: Sequence[str], ranks: Ranks, doing: str) -> Source:
    """Read the catalog where nodes have disks of their own. A collective."""
    try:
        remote.begin(doing)
        with ranks.together(doing):
            checkpoint = _without_remote(read_checkpoint(remote.roots), remote)
            manifest = read_manifest(Folder(LocalStore(checkpoint.roots)))
        remote.fetch_small(checkpoint, doing)
    except BaseException:
        remote.close()
        raise
    return Source(checkpoint=checkpoint, manifest=manifest, warnings=warnings, path=str(place), remote=remote)


def _newest_spread(folder: Path) -> Path | None:
    """Return the newest of our checkpoints of a run that lacks files of other ranks; None when there is none."""
    for _, path in list_checkpoints(folder) if folder.is_dir() else ():
        if (path / MANIFEST).is_file():
            with suppress(CorruptCheckpoint):
                if any(problem.code == ELSEWHERE for problem in read_checkpoint(path).problems):
                    return path
    return None


def _without_remote(checkpoint: Checkpoint, remote: RemoteFiles) -> Checkpoint:
    """Return a catalog without complaints about files that are on other nodes."""

    def keep(problems: Sequence[Problem]) -> list[Problem]:
        return [problem for problem in problems if problem.code != "missing-file" or not remote.has(problem.where)]

    parts = [replace(part, problems=keep(part.problems)) for part in checkpoint.parts]
    return replace(checkpoint, parts=parts, problems=keep(checkpoint.problems))


def _check_index_files(folder: Path, manifest: Manifest | None) -> None:
    """Compare the ``.metadata`` files of a checkpoint of ours with its manifest, before anybody tries to read them.

    A flipped bit in a pickle can look like anything, also like an attack.

    Raises:
        ChecksumMismatch: One is damaged.
    """
    below = Folder(LocalStore(folder))
    for path, (size, crc) in (manifest.files if manifest else {}).items():
        if path.endswith(".metadata") and below.store.size(path) == size:
            found = zlib.crc32(below.store.read(path, limit_bytes=size))
            if found != int(crc, 16):
                raise ChecksumMismatch(f"`{folder}`: {path} is damaged: its CRC-32 is {found:08x}, {crc} was recorded")


def _check_stamps(folder: Path, manifest: Manifest | None, ranks: Ranks) -> None:
    """Make sure that the data files are of the save that the manifest tells of: the first rank looks for all.

    Where nodes have disks of their own, each rank looks at what its node has.

    Raises:
        IncompleteCheckpoint: One is of another save, or of another rank.
    """
    below = Folder(LocalStore(folder))
    if not (ranks.is_first or (manifest is not None and check_files(below, manifest))):
        return
    folders = sorted(below.folders) if manifest is None else ()
    files = [f"{name}/{file}" for name in folders for file in below.sub(name).files]
    _refuse_stamps(folder, check_stamps(below, manifest, files))


def _refuse_stamps(folder: Path, problems: Iterable[Problem]) -> None:
    found = next(iter(problems), None)
    if found is not None:
        raise IncompleteCheckpoint(
            f"`{folder}`: {found.where} {found.message}",
            hint=f"fsdp-ckpt validate {folder}; or load an older checkpoint",
        )


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
            hint=f"fsdp-ckpt validate {source.checkpoint.root}; or load an older checkpoint",
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
