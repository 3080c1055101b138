"""Where a result goes: a local folder, an object store, or a repository on the hub."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.run.progress import Listener
from fsdp_ckpt.store.leftovers import unfinished_marks
from fsdp_ckpt.store.publish import Staging, resolve_destination
from fsdp_ckpt.store.remote.mirrors import mirror_of
from fsdp_ckpt.store.remote.urls import is_url, local_path, redact, scheme_of

if TYPE_CHECKING:
    from fsdp_ckpt.ops.write_out import WriteJob
    from fsdp_ckpt.store.remote.target import Target

__all__ = [
    "attend_uploads", "counts_uploads", "destination_of", "is_unfinished", "local_bytes", "open_staging",
    "place_in_words", "refuse_for_urls", "shown_destination", "target_of", "upload_bytes",
]  # fmt: skip

_LIBRARY_BYTES = 64 << 20
"""Measured with s3fs."""
_SAME_STORE = {"gcs": "gs", "abfs": "az"}


def destination_of(text: str) -> Path:
    """Return the folder to write to: of a URL, the local one that stands for it.

    Raises:
        UsageError: A URL of an unknown scheme, or one whose package is not installed.
        Unreachable: It cannot be looked at.
    """
    if not is_url(text):
        return resolve_destination(Path(local_path(text)))
    if scheme_of(text) == "hf":
        from fsdp_ckpt.ops.sharing.hub_staging import hub_target

        return hub_target(text).path
    from fsdp_ckpt.store.remote.target import target

    return target(text).path


def shown_destination(text: str) -> str:
    """Return a destination for messages: without ``file://``, and without credentials."""
    return redact(text) if is_url(text) else local_path(text)


def target_of(destination: Path) -> Target | None:
    """Return what is behind a destination that stands for a URL."""
    found = mirror_of(destination)
    if found is None:
        return None
    from fsdp_ckpt.store.remote.target import Target

    return found if isinstance(found, Target) else None


def place_in_words(path: Path) -> PurePosixPath | Path:
    """Return a path by which local folders and URLs can be compared."""
    found = mirror_of(path)
    if found is None:
        return path.resolve()
    inner = path.relative_to(found.top)
    return PurePosixPath(f"{_SAME_STORE.get(found.scheme, found.scheme)}://", inner.as_posix())


def refuse_for_urls(
    out: str, *, remove_source: bool = False, resume: bool = False, into: bool = False, shared: bool = False
) -> None:
    """Refuse what is only possible on a local disk.

    Args:
        out: The destination, as typed.
        remove_source: Whether the source was to be removed.
        resume: Whether an unfinished result was to be taken up.
        into: Whether the folder may have files of its own.
        shared: Whether several processes share the work.

    Raises:
        UsageError: It was asked for, and the destination is a URL.
    """
    if not is_url(out):
        return
    if remove_source:
        raise UsageError(
            "--remove-source is for local results: what is in a store is not read back",
            hint="validate the result, then remove the source",
        )
    if shared:
        raise UsageError(
            f"several processes cannot share the writing of `{redact(out)}`",
            hint="run it in one process, without torchrun or srun",
        )
    if into:
        raise UsageError(f"`{redact(out)}`: into is for local folders", hint="write to a new folder")
    if resume and scheme_of(out) == "hf":
        raise UsageError(
            f"--resume: what goes to `{redact(out)}` goes in one commit at the end, nothing is kept before",
            hint="convert into a local folder with --resume, then fsdp-ckpt push",
        )


def is_unfinished(destination: Path) -> bool:
    """Tell whether what is at a URL was left by a run that can be resumed."""
    if target_of(destination) is None or not destination.is_dir():
        return False
    return bool(unfinished_marks(entry.name for entry in destination.iterdir()))


def local_bytes(job: WriteJob, *, workers: int) -> int:
    """Return how many bytes of a result's large files are on the local disk at a time.

    Args:
        job: What is written.
        workers: How many files are written at a time.
    """
    sizes, target = [spec.size for spec in job.mine], target_of(job.destination)
    if target is None or target.scheme == "hf":
        return sum(sizes)
    return sum(heapq.nlargest(workers, sizes))


def upload_bytes(destination: Path, *, workers: int) -> int:
    """Return how much memory uploads take, and the library that makes them."""
    target = target_of(destination)
    return 0 if target is None else _LIBRARY_BYTES + workers * target.memory_bytes


def open_staging(job: WriteJob, *, digests: bool, listener: Listener | None) -> Staging:
    """Return what takes the files of a result.

    Args:
        job: What is written.
        digests: Whether the CRC-32 of whole files is asked for when they are gone.
        listener: Told about the progress of an upload that comes after everything is written.

    Raises:
        As ``Staging``.
    """
    options, target = job.options, target_of(job.destination)
    if target is None:
        return Staging(
            job.destination,
            job.identity,
            overwrite=options.overwrite,
            resume=options.resume,
            shared=options.share is not None,
            into=options.into,
        )
    if target.scheme == "hf":
        from fsdp_ckpt.ops.sharing.hub_staging import HubStaging

        return HubStaging(target, job.identity, overwrite=options.overwrite, listener=listener)
    from fsdp_ckpt.store.remote.upload import UploadStaging

    return UploadStaging(target, job.identity, overwrite=options.overwrite, resume=options.resume, digests=digests)


def attend_uploads(staging: Staging, stop: threading.Event, count: Callable[[int], None]) -> None:
    """Let uploads be given up when a run is stopped, and say how far they are.

    Args:
        staging: Of ``open_staging``, of one that ``counts_uploads``.
        stop: Set when they are to be given up.
        count: Told how many more bytes are there.
    """
    from fsdp_ckpt.store.remote.upload import UploadStaging

    assert isinstance(staging, UploadStaging)
    staging.stop, staging.count = stop, count


def counts_uploads(destination: Path) -> bool:
    """Tell whether a file is done when it is uploaded, one by one."""
    target = target_of(destination)
    return target is not None and target.scheme != "hf"
