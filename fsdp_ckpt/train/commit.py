"""Write a checkpoint beside its destination, by all ranks, and put it there in one step.

Where nodes have disks of their own, each gets a folder with the files of its ranks, the metadata of all, and the same
manifest. They are put in their places at the same moment, that of the first rank last: where it has a new checkpoint,
all have it. Until then, all of them can go back to what they had.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.layouts.manifest import MANIFEST, write_manifest
from fsdp_ckpt.store.publish import Staging, place_identity, resolve_destination
from fsdp_ckpt.store.syscalls import fsync_folder
from fsdp_ckpt.train.destination import check_replaceable
from fsdp_ckpt.train.files import FileFacts, write_file
from fsdp_ckpt.train.parts import write_part
from fsdp_ckpt.train.places import find_leaders, is_visible
from fsdp_ckpt.train.ranks import Ranks, has_lost_touch
from fsdp_ckpt.train.save_plan import SaveJob

__all__ = ["commit", "sizes_of", "write_files"]


def commit(
    job: SaveJob, target: Path, ranks: Ranks, *, overwrite: bool, durable: bool
) -> tuple[dict[str, int], Sequence[int]]:
    """Write everything beside the destination and put it there in one step. A collective.

    Returns:
        Size in bytes of every file, by path; and for each rank the lowest one with the same file system. On every
        rank.

    Raises:
        FsdpCkptError: On all ranks, when it fails on one; what was at the destination is as it was.
    """
    doing = f"saving {target}"
    staging: list[Staging] = []

    def begin() -> tuple[str, str, str]:
        _begin(staging, job, target, overwrite=overwrite)
        token = f".{os.urandom(8).hex()}"
        (staging[0].path / token).touch()
        return str(staging[0].path), token, job.save_id

    try:
        place, token, save_id = ranks.from_first(begin, doing)
        job = replace(job, save_id=save_id)
        with ranks.together(doing):
            sees_first = is_visible(Path(place) / token)
        leaders = find_leaders(target, sees_first, ranks, doing)
        if not any(leaders):
            files, shared = write_files(job, Path(place), ranks, durable=durable, doing=doing)
            return ranks.from_first(lambda: _finish(job, staging[0], files, shared, durable=durable), doing), leaders
        with ranks.together(doing):
            if ranks.rank in leaders and not ranks.is_first:
                _begin(staging, job, target, overwrite=overwrite)
        places = ranks.gather_all(str(staging[0].path) if staging else "", doing)
        files, shared = write_files(job, Path(places[leaders[ranks.rank]]), ranks, durable=durable, doing=doing)
        return _finish_everywhere(job, staging, files, shared, ranks, durable=durable, doing=doing), leaders
    except BaseException:
        for one in staging:
            one.discard()
        raise


def _begin(staging: list[Staging], job: SaveJob, target: Path, *, overwrite: bool) -> None:
    """Make and lock this file system's folder; it is in the list before anything in it can fail."""
    destination = resolve_destination(target)
    check_replaceable(destination, overwrite=overwrite)
    staging.append(Staging(destination, place_identity(destination), overwrite=overwrite))
    for part in job.parts:
        if part.is_folder:
            (staging[0].path / part.name).mkdir()


def write_files(
    job: SaveJob, place: Path, ranks: Ranks, *, durable: bool, doing: str
) -> tuple[dict[str, FileFacts], dict[str, bytes]]:
    """Write what is each rank's own. A collective.

    Args:
        job: What is saved.
        place: Where this rank writes; folders of parts are there already.
        ranks: The ranks.
        durable: Wait until the disk has it.
        doing: For messages.

    Returns:
        On the first rank: the files of all, and the content of those that are yet to be written.
    """
    files: dict[str, FileFacts] = {}
    shared = dict(job.shared)
    for part in job.parts:
        written, unwritten = write_part(part, place, ranks, save_id=job.save_id, durable=durable, doing=doing)
        files |= written
        shared |= unwritten
    mine: dict[str, FileFacts] = {}
    with ranks.together(doing):
        for name, data in job.own.items():
            mine[name] = write_file(place / name, data, durable=durable)
    for theirs in ranks.gather_first(mine, doing) or ():
        files |= theirs
    return files, shared


def _finish(
    job: SaveJob, staging: Staging, files: dict[str, FileFacts], shared: Mapping[str, bytes], *, durable: bool
) -> dict[str, int]:
    """Add what the ranks share and the manifest, and put the folder in its place."""
    for path, data in shared.items():
        files[path] = write_file(staging.path / path, data, durable=durable)
    manifest = write_manifest(replace(job.manifest, save_id=job.save_id, files=files))
    _seal(staging, files, manifest, durable=durable)
    check_replaceable(staging.destination, overwrite=staging.overwrite)  # much may have happened meanwhile
    staging.publish(durable=durable)
    return sizes_of(files, manifest)


def _seal(staging: Staging, files: Mapping[str, FileFacts], manifest: bytes, *, durable: bool) -> None:
    """Add the manifest, when all other files and their names are durable."""
    if durable:
        for folder in sorted({path.rpartition("/")[0] for path in files} - {""}):
            fsync_folder(staging.path / folder)
    staging.add_file(MANIFEST, manifest, durable=durable)


def _finish_everywhere(
    job: SaveJob,
    staging: Sequence[Staging],
    files: dict[str, FileFacts],
    shared: Mapping[str, bytes],
    ranks: Ranks,
    *,
    durable: bool,
    doing: str,
) -> dict[str, int]:
    """Do the same on every file system. A collective.

    Args:
        job: What is saved.
        staging: This rank's folder, where it is the lowest of those that share one.
        files: On the first rank, those that have been written.
        shared: On the first rank, what every node gets.
        ranks: The ranks.
        durable: Wait until the disk has it all.
        doing: For messages.
    """
    shared = ranks.from_first(lambda: shared, doing)
    added: dict[str, FileFacts] = {}
    with ranks.together(doing):
        for one in staging:
            added = {path: write_file(one.path / path, data, durable=durable) for path, data in shared.items()}
    files, manifest = ranks.from_first(
        lambda: (files | added, write_manifest(replace(job.manifest, save_id=job.save_id, files=files | added))), doing
    )
    with ranks.together(doing):
        for one in staging:
            _seal(one, files, manifest, durable=durable)
    published: list[Staging] = []
    try:
        with ranks.together(doing):
            for one in () if ranks.is_first else staging:
                one.publish(durable=durable, keep_old=True)
                published.append(one)
        ranks.from_first(lambda: staging[0].publish(durable=durable, keep_old=True), doing)
    except BaseException as error:
        # Where nobody knows whether the first rank has published, what is in its place stays there.
        for one in () if has_lost_touch(error) else published:
            one.take_back()
        raise
    for one in staging:
        one.forget_old()
    return sizes_of(files, manifest)


def sizes_of(files: Mapping[str, FileFacts], manifest: bytes) -> dict[str, int]:
    """Return the size of every file of a checkpoint in bytes, the manifest's as well, by path."""
    return {path: size for path, (size, _) in sorted(files.items())} | {MANIFEST: len(manifest)}
