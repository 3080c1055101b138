"""Check what lies in the folders of a checkpoint: files that nobody lists, bytes that nobody or two items claim."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fsdp_ckpt.catalog import Checkpoint, Encoding, Part, Problem, Role, Severity
from fsdp_ckpt.codec.stamp import STAMP_BYTES, is_free, read_stamp
from fsdp_ckpt.codec.torchzip import open_archive
from fsdp_ckpt.errors import CorruptCheckpoint, MalformedFile
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest
from fsdp_ckpt.ops.validation.wording import finding
from fsdp_ckpt.plan.extents import collect_extents, find_gaps, iter_shared_bytes
from fsdp_ckpt.store.leftovers import is_backup, is_staging, leftovers
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.units import format_size

__all__ = ["check_extents", "check_files", "check_leftovers", "check_permissions"]

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_PADDING_BYTES = 4096
"""Tensors of ours begin on a multiple of this; the bytes before are nobody's."""
_SHOWN = 50


def check_files(checkpoint: Checkpoint, manifest: Manifest | None, *, look: bool) -> Iterator[Problem]:
    """Find files that a manifest of ours does not list, data files newer than their metadata, and empty checkpoints.

    Args:
        checkpoint: What to check.
        manifest: Ours, if there is one.
        look: Read heads of files, to tell ours where the manifest is not there.
    """
    if manifest is not None:
        yield from _foreign_files(checkpoint, manifest)
    elif look and checkpoint.layout == "accelerate" and not checkpoint.problems and _is_ours(checkpoint):
        yield finding("missing-manifest", MANIFEST, "items and small files are as only save_state writes them")
    if not any(part.tensors or part.problems for part in checkpoint.parts):
        has_objects = any(part.objects for part in checkpoint.parts)
        message = "it holds no tensors" + (", but objects, which may have some in them" if has_objects else "")
        yield finding("no-tensors", ".", message, severity=Severity.WARNING if has_objects else None)
    if manifest is None:  # else each file says which save it is of
        for part in checkpoint.parts:
            yield from _mixed_saves(checkpoint, part)


def _is_ours(checkpoint: Checkpoint) -> bool:
    """Tell whether save_state wrote a checkpoint: stamped shards, or a file in its manner; small files likewise.

    What ``convert`` writes has no stamp: it never had a manifest.
    """
    store = LocalStore(checkpoint.roots)
    small = [file for part in checkpoint.parts if part.role not in (Role.MODEL, Role.OPTIMIZER) for file in part.files]
    try:
        if not small or any(store.reader(file)(30, 8) != b"archive/" for file in small):
            return False
        for part in checkpoint.parts:
            chunks = ((tensor, chunk) for tensor in part.tensors.values() for chunk in tensor.chunks if chunk.numel)
            tensor, chunk = next(chunks, (None, None))
            if tensor is None or chunk is None or part.role is not Role.MODEL:
                continue
            read = store.reader(chunk.file)
            if chunk.encoding is Encoding.TORCH_ZIP:
                return read_stamp(read(0, STAMP_BYTES)) is not None
            archive = open_archive(read, 0, part.files[chunk.file], where=chunk.file)
            return ".data/serialization_id" not in archive.records and "byteorder" in archive.records
    except (CorruptCheckpoint, OSError):  # reported elsewhere
        return False
    finally:
        store.close()
    return False


def check_permissions(checkpoint: Checkpoint, manifest: Manifest | None) -> Iterator[Problem]:
    """Find files that this user may not read; other checks pass over them."""
    store = LocalStore(checkpoint.roots)
    listed = manifest.files if manifest is not None else ()
    for file in dict.fromkeys([*(file for part in checkpoint.parts for file in part.files), *listed]):
        with suppress(MalformedFile):  # reported when the files were read
            path = store.path(file)
            if os.path.exists(path) and not os.access(path, os.R_OK):
                yield finding("no-permission", file, "permission denied")


def _foreign_files(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[Problem]:
    known = {MANIFEST, *manifest.files}
    for root in checkpoint.roots:
        found = []
        for folder, names, files in os.walk(root):
            names[:] = [name for name in names if not is_backup(name) and not is_staging(name)]
            below = Path(folder).relative_to(root)
            found += [file for name in files if (file := str(below / name)) not in known and not is_staging(name)]
        for file in sorted(found)[:_SHOWN]:
            yield finding("foreign-file", file, "the manifest does not list it")


def _mixed_saves(checkpoint: Checkpoint, part: Part) -> Iterator[Problem]:
    """Compare times: metadata are written last, so data files on both sides of them are of two saves, or copied."""
    metadata = next((file for file in part.files if file.rpartition("/")[2] == ".metadata"), None)
    if metadata is None or part.dialect != "dcp":
        return
    store = LocalStore(checkpoint.roots)
    try:
        written = os.stat(store.path(metadata)).st_mtime
        times = {file: os.stat(store.path(file)).st_mtime for file in part.files if file.endswith(".distcp")}
    except (OSError, MalformedFile):  # reported when the files were read
        return
    newer = sorted(file for file, when in times.items() if when > written + 1)
    if not newer or len(newer) == len(times):
        return
    is_cut = any(found.code == "unfinished-metadata" for found in part.problems)
    message = (
        f"{len(newer)} of {len(times)} data files are newer than the metadata, first by "
        f"{times[newer[0]] - written:.0f} s: a save was killed while it replaced another one, or files were copied"
    )
    yield finding("mixed-saves" if is_cut else "mixed-times", newer[0], message)


def check_extents(checkpoint: Checkpoint, *, look: bool) -> Iterator[Problem]:
    """Find bytes of data files that two items claim, or none.

    Args:
        checkpoint: What to check.
        look: Read what is unclaimed, to tell padding from items.
    """
    tensors = {tensor.key: tensor for part in checkpoint.parts for tensor in part.tensors.values()}
    objects = [entry for part in checkpoint.parts for entry in part.objects.values()]
    extents = collect_extents((tensor for part in checkpoint.parts for tensor in part.tensors.values()), objects)
    for number, (file, first, second) in enumerate(iter_shared_bytes(extents, tensors)):
        if number == _SHOWN:
            break
        message = f"`{first}` and `{second}` claim the same bytes of {file}"
        yield finding("shared-bytes", second, message)
    raw = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks if chunk.encoding is Encoding.RAW}
    store = LocalStore(checkpoint.roots)
    for file, listed in extents.items():
        try:
            size = store.size(file)
        except MalformedFile:  # likewise
            continue
        if size is None or file in raw or not file.endswith(".distcp"):
            continue
        gaps = [gap for gap in find_gaps(listed, size) if not _is_padding(store, file, gap, size, look=look)]
        if gaps:
            num_bytes = sum(stop - start for start, stop in gaps)
            message = f"{format_size(num_bytes)} of {format_size(size)} belong to no item, first from byte {gaps[0][0]}"
            lost = look and any(_begins_archive(store, file, gap) for gap in gaps)
            if lost:
                message += ": an item that the metadata do not mention"
            yield finding("unclaimed-bytes", file, message, severity=Severity.ERROR if lost else None)
    store.close()


def _is_padding(store: LocalStore, file: str, gap: tuple[int, int], size: int, *, look: bool) -> bool:
    start, stop = gap
    if stop - start >= _PADDING_BYTES or stop == size:
        return False
    if not look or not os.access(store.path(file), os.R_OK):
        return True
    return is_free(store.reader(file)(start, stop - start), start)


def _begins_archive(store: LocalStore, file: str, gap: tuple[int, int]) -> bool:
    """Tell whether an item stands in a gap, perhaps after padding."""
    if not os.access(store.path(file), os.R_OK):
        return False
    data = store.reader(file)(gap[0], min(gap[1] - gap[0], 2 * _PADDING_BYTES))
    return data.lstrip(b"\0").startswith((b"PK\3\4", _ZSTD_MAGIC))


def check_leftovers(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Find what runs that were to replace this checkpoint have left beside it."""
    root = Path(os.path.realpath(checkpoint.root))
    for path in leftovers(root):
        try:
            is_old = path.suffix == ".old" and stat.S_ISDIR(path.lstat().st_mode)
        except OSError:  # gone meanwhile
            continue
        what = "what it had moved away" if is_old else "what it had written"
        yield finding("interrupted-run", f"../{path.name}", f"{what} is still there, or it is still running")
