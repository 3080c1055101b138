"""Write planned files as one transaction: several workers, resumable, shared with other processes if asked."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_ckpt import __version__
from fsdp_ckpt.catalog import Checkpoint, Part
from fsdp_ckpt.errors import NotEnoughSpace, Unreachable
from fsdp_ckpt.ops.destination import attend_uploads, counts_uploads, open_staging, target_of
from fsdp_ckpt.ops.share import Share, all_done, note_done, publish_lock
from fsdp_ckpt.run.checksum import combine_crc
from fsdp_ckpt.run.copy import Copier
from fsdp_ckpt.run.engine import FileResult, OutputSpec, write_files
from fsdp_ckpt.run.progress import Listener, Meter
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.run.tasks import CopyTask
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.store.publish import Staging
from fsdp_ckpt.store.remote.mirrors import mirror_of, shown

__all__ = ["SmallFile", "WriteJob", "WriteOptions", "Written", "identify", "num_workers", "write_out"]

SmallFile = bytes | Path | Callable[[Path, Mapping[str, Mapping[str, int]]], bytes]
"""Content; a file to copy; or what makes the content of the folder that has all large files, and of the CRC-32 of every
tensor in them, by file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How files are written, whatever is in them.

    Attributes:
        overwrite: Replace a destination with content, in one step at the end.
        resume: Keep files that an interrupted run finished.
        verify: Compare recorded checksums.
        fsync: Return when the disk has everything.
        jobs: Threads; None for the number of cores, at most 4.
        share: This process's share of the files; None for all.
        into: Write into a folder that has files of its own.
        keep_crcs: Remember the CRC-32 of every tensor written, for reading the result back.
    """

    overwrite: bool = False
    resume: bool = False
    verify: bool = True
    fsync: bool = True
    jobs: int | None = None
    share: Share | None = None
    into: bool = False
    keep_crcs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """What is to be written.

    Attributes:
        destination: The folder to make, links resolved.
        roots: Folders that the sources' files are relative to.
        specs: The large files.
        files: The small ones, by name. They are written last, in this order.
        identity: Hexadecimal; equal for runs that would write the same bytes.
        options: How.
    """

    destination: Path
    roots: Sequence[Path]
    specs: Sequence[OutputSpec]
    files: Mapping[str, SmallFile]
    identity: str
    options: WriteOptions

    @property
    def mine(self) -> Sequence[OutputSpec]:
        """The files that this process writes."""
        return self.specs if self.options.share is None else self.options.share.of(self.specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written.

    Attributes:
        results: By file name; of this run only.
        pending: Shares that other processes have still to write; None unless the work is shared.
        published: Whether this process put the result in its place.
        resumed: Files of this process that an earlier run had finished.
        crcs: CRC-32 of each tensor by file, where ``keep_crcs`` asked for them.
    """

    results: Mapping[str, FileResult]
    pending: Sequence[int] | None = None
    published: bool = True
    resumed: int = 0
    crcs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def num_workers(options: WriteOptions) -> int:
    """Return how many threads move bytes."""
    return options.jobs or min(4, os.cpu_count() or 1)


def identify(checkpoint: Checkpoint, parts: Sequence[Part], facts: object) -> str:
    """Return a hash that is equal for runs which would write the same bytes.

    Args:
        checkpoint: The source.
        parts: Those of its parts that are read; their files' sizes and times count.
        facts: Whatever else says what is written, fit for JSON.
    """
    roots = [root.resolve() for root in checkpoint.roots]
    store, stamps = LocalStore(roots), {}
    for file in sorted({file for part in parts for file in part.files}):
        status = os.stat(store.path(file))
        stamps[file] = [status.st_size, status.st_mtime_ns]
    places = [
        shown(given) if mirror_of(given) else str(root) for given, root in zip(checkpoint.roots, roots, strict=True)
    ]
    everything = [__version__, places, [part.name for part in parts], stamps, facts]
    return hashlib.sha256(json.dumps(everything, default=str, sort_keys=True).encode()).hexdigest()[:16]


def write_out(job: WriteJob, listener: Listener | None) -> Written:
    """Write all files and put the folder in its place.

    Raises:
        DestinationExists: Another run is writing there, or something appeared.
        NotEnoughSpace: The disk is full after all.
        CorruptCheckpoint: The source is damaged; nothing is left at the destination.
        Unreachable: The destination is a URL, and its store failed for good.
    """
    is_remote, options = target_of(job.destination) is not None, job.options
    share = None if is_remote else options.share  # one of one: no others are let in
    is_asked = any(callable(content) for content in job.files.values())
    staging = open_staging(job, digests=is_asked and combine_crc(0, 0, 0) is None, listener=listener)
    crcs: dict[str, dict[str, int]] = {}
    try:
        results = _fill(job, staging, listener)
        if share is not None:
            note_done(staging, share)
            pending = all_done(staging, share)
            if pending:
                staging.suspend()
                return Written(results=results, pending=pending, published=False, resumed=len(job.mine) - len(results))
        with publish_lock(staging, shared=share is not None) as still_there:
            if still_there:
                if options.keep_crcs:
                    crcs = _load_crcs(staging, job.specs)
                _publish(job, staging)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt) or (is_remote and isinstance(error, Unreachable))
        if is_remote and isinstance(error, NotEnoughSpace):
            error.hint = "set TMPDIR to a folder on a larger disk"
        if share is not None or (interrupted and staging.has_finished()):
            staging.suspend()
        else:
            staging.discard()
        raise
    return Written(
        results=results,
        pending=None if share is None else [],
        published=still_there,
        resumed=len(job.mine) - len(results),
        crcs=crcs,
    )


def _fill(job: WriteJob, staging: Staging, listener: Listener | None) -> dict[str, FileResult]:
    options = job.options
    todo = [spec for spec in job.mine if not _is_finished(staging, spec, options)]
    uploads = counts_uploads(job.destination)
    size_of = _whole_size if uploads else _num_bytes
    total = sum(map(size_of, job.mine))
    meter = Meter(total, listener)
    meter.add(total - sum(map(size_of, todo)))
    durable = options.fsync and target_of(job.destination) is None  # what goes on from here need not stay
    with Sources(job.roots, spill=staging.path) as sources:
        copier = Copier(
            sources,
            Meter(total, None) if uploads else meter,
            verify=options.verify,
            writeback=durable,
            hash_output=options.keep_crcs or any(spec.seal is not None for spec in todo),
        )
        if uploads:
            attend_uploads(staging, copier.stop, meter.add)
        names = {spec.name for spec in todo}
        finished = [spec for spec in job.mine if spec.name not in names]
        for task in (task for spec in finished for _, task in spec.tasks()):
            if isinstance(task, CopyTask):
                copier.expect(task)
        return write_files(
            todo, staging, copier, jobs=num_workers(options), durable=durable, need_crcs=options.keep_crcs
        )


def _whole_size(spec: OutputSpec) -> int:
    return spec.size


def _num_bytes(spec: OutputSpec) -> int:
    return sum(stop - start for start, stop in spec.ranges.values())


def _is_finished(staging: Staging, spec: OutputSpec, options: WriteOptions) -> bool:
    note = staging.finished(spec.name, spec.size)
    return note is not None and (not options.keep_crcs or json.loads(note) != {})


def _load_crcs(staging: Staging, specs: Sequence[OutputSpec]) -> dict[str, dict[str, int]]:
    return {spec.name: json.loads(staging.finished(spec.name, spec.size) or "{}") for spec in specs}


def _publish(job: WriteJob, staging: Staging) -> None:
    for name, content in job.files.items():
        if isinstance(content, Path):
            staging.add_copy(name, content, durable=job.options.fsync)
            continue
        data = content if isinstance(content, bytes) else content(staging.path, _load_crcs(staging, job.specs))
        staging.add_file(name, data, durable=job.options.fsync)
    staging.publish(durable=job.options.fsync)
