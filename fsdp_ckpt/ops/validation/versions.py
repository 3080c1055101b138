"""Check what reading a checkpoint asks of torch and of Python, apart from ``fsdp-ckpt`` itself.

What a version of torch can read follows from the fields and classes of ``torch/distributed/checkpoint/metadata.py`` and
``filesystem.py`` from 2.1 to 2.15, and from the element types that it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from fsdp_ckpt.catalog import Checkpoint, Encoding, Part, Problem
from fsdp_ckpt.codec.dcp_metadata import read_metadata
from fsdp_ckpt.errors import CorruptCheckpoint, UsageError
from fsdp_ckpt.ops.validation.pickled_names import NEW_PATHS, foreign_packages, names_module, oldest_for_dtensor
from fsdp_ckpt.ops.validation.wording import counted, finding
from fsdp_ckpt.store.local import LocalStore

__all__ = ["check_torch", "check_versions", "torch_sentence"]

Version = tuple[int, int]

_SIX_FIELDS = "torch >= 2.15"
_ONE_PER_RANK = (2, 9)
_TRANSFORMS = (2, 7)
_SINCE: dict[str, tuple[Version, str]] = {
    "torch 2.3": ((2, 3), "their classes stand where torch 2.3 put them"),
    "torch 2.4-2.6": ((2, 4), "they hold a StorageMeta, a class of torch 2.4"),
    "torch 2.7-2.8": ((2, 4), "they hold a StorageMeta, a class of torch 2.4"),
    "torch 2.9-2.14": ((2, 4), "they hold a StorageMeta, a class of torch 2.4"),
    _SIX_FIELDS: ((2, 15), "each tensor has six properties, of which older versions know five"),
}
"""The oldest torch that reads what ``DcpMetadata.writer`` wrote, and why."""

_NEWER_DTYPES: dict[str, Version] = {
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), (2, 2)),
    **dict.fromkeys(("uint16", "uint32", "uint64"), (2, 3)),
    "float8_e8m0fnu": (2, 7),
    "float4_e2m1fn_x2": (2, 8),
}

_REPAIRED = (2, 3)
_WRITTEN_ONLY = "tensors are stored as safetensors within .distcp files, which torch writes but does not read"
_PARSED_BYTES = 4 << 20
_RANK_METADATA = re.compile(r"__\d+\.metadata")
_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:[.\-+a-zA-Z][\w.+\-]*)?")


def check_versions(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield notes about what torch's own loader needs. Of the metadata, names of classes are looked for."""
    store = LocalStore(checkpoint.roots)
    for part in _folders(checkpoint):
        files = _metadata_files(part)
        if not files:
            continue
        per_rank = [file for file in files if _RANK_METADATA.fullmatch(file.rpartition("/")[2])]
        if per_rank:
            message = f"{counted(len(per_rank), 'rank')} wrote metadata, each of its own shards"
            yield finding("metadata-per-rank", per_rank[0], message)
        if _writer(part, store) == _SIX_FIELDS:
            yield finding("needs-torch-2.15", files[0], _SINCE[_SIX_FIELDS][1])
        if any(names_module(store, file, NEW_PATHS) for file in files):
            yield finding("needs-python-3.13", files[0], "they name `pathlib._local`, a module of Python 3.13")
        foreign = list(foreign_packages(store, files))
        for package in foreign:
            yield finding("foreign-classes", files[0], f"they name classes of {package}")
        if _has_safetensors(part, foreign):
            yield finding("safetensors-items", files[0], _WRITTEN_ONLY)


def check_torch(checkpoint: Checkpoint, version: str) -> Iterator[Problem]:
    """Yield why a version of torch cannot read a checkpoint; nothing when it can.

    Args:
        checkpoint: The checkpoint.
        version: Such as ``2.9``, ``2.9.1`` or ``2.9.1+cu128``.

    Raises:
        UsageError: That is no version.
    """
    wanted = _parse(version)
    store = LocalStore(checkpoint.roots)
    for part in _folders(checkpoint):
        files = _metadata_files(part)
        if not files:
            continue
        for kind, since, reason in _demands(part, store, files):
            if since is None or wanted < since:
                # repair writes metadata for torch 2.3 and newer.
                name = kind if wanted >= _REPAIRED else "torch-lacks-items"
                yield finding(name, files[0], _cannot(wanted, since, reason))
    yield from _new_dtypes(checkpoint, wanted)
    for part in checkpoint.parts:
        since = oldest_for_dtensor(part, store) if part.dialect == "rank-files" else None
        if since is not None and wanted < since:
            reason = f"its tensors are DTensor, of a module of torch {_text(since)}"
            yield finding("torch-lacks-items", next(iter(part.files)), _cannot(wanted, since, reason))


def torch_sentence(version: str, problems: Iterable[Problem]) -> str:
    """Return that a version of torch can read a checkpoint; empty where what ``check_torch`` found says otherwise."""
    return "" if any(True for _ in problems) else f"torch {_text(_parse(version))} can read it"


def _cannot(wanted: Version, since: Version | None, reason: str) -> str:
    until = "nor can any other" if since is None else f"torch {_text(since)} can"
    return f"torch {_text(wanted)} cannot read it, {until}: {reason}"


def _parse(version: str) -> Version:
    match = _VERSION.fullmatch(version.strip())
    if match is None or int(match[1]) < 1:
        raise UsageError(f"`{version}` is no version of torch", hint="write it as 2.9, or 2.9.1")
    return int(match[1]), int(match[2])


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _demands(part: Part, store: LocalStore, files: list[str]) -> Iterator[tuple[str, Version | None, str]]:
    """Yield the kind of finding, since when torch has what a folder asks for, None for never, and what that is."""
    foreign = list(foreign_packages(store, files))
    if foreign:
        reason = f"the metadata name classes of {' and '.join(foreign)}, without which no torch reads them"
        yield "torch-too-old", None, reason
    known = _SINCE.get(_writer(part, store) or "")
    if known is not None and not foreign:
        yield "torch-too-old", known[0], f"the metadata are of another form: {known[1]}"
    if any(_RANK_METADATA.fullmatch(file.rpartition("/")[2]) for file in files):
        yield "torch-too-old", _ONE_PER_RANK, "each rank has metadata of its own"
    if Encoding.ZSTD_TORCH_ZIP in _encodings(part):
        reason = "items are compressed with zstd, which torch reads through an extension"
        yield "torch-lacks-items", _TRANSFORMS, reason
    if _has_safetensors(part, foreign):
        yield "torch-lacks-items", None, _WRITTEN_ONLY


def _encodings(part: Part) -> set[Encoding]:
    found = {entry.chunks[0].encoding for entry in part.tensors.values() if entry.chunks}
    return found | {entry.encoding for entry in part.objects.values()}


def _has_safetensors(part: Part, foreign: list[str]) -> bool:
    return "ByteCheckpoint" not in foreign and Encoding.RAW in _encodings(part)


def _new_dtypes(checkpoint: Checkpoint, wanted: Version) -> Iterator[Problem]:
    for part in checkpoint.parts:
        seen: dict[str, str] = {}
        for entry in part.tensors.values():
            if wanted < _NEWER_DTYPES.get(entry.dtype.name, wanted):
                seen.setdefault(entry.dtype.name, entry.key)
        for dtype, key in seen.items():
            since = _text(_NEWER_DTYPES[dtype])
            message = f"torch {_text(wanted)} has no {dtype}; torch {since} has"
            yield finding("torch-lacks-items", key, message)


def _folders(checkpoint: Checkpoint) -> Iterator[Part]:
    """Yield one part for each folder of a distributed checkpoint, with the entries of all that lie in it."""
    found: dict[str, Part] = {}
    for part in checkpoint.parts:
        if part.dialect == "dcp":
            known = found.get(part.folder)
            found[part.folder] = (
                part
                if known is None
                else replace(
                    known,
                    tensors={**known.tensors, **part.tensors},
                    objects={**known.objects, **part.objects},
                )
            )
    yield from found.values()


def _metadata_files(part: Part) -> list[str]:
    return [file for file in part.files if file.rpartition("/")[2].endswith(".metadata")]


def _writer(part: Part, store: LocalStore) -> str | None:
    """Return what wrote the metadata; where the manifest says that we did, by their form."""
    if part.writer is None or not part.writer.startswith("fsdp-ckpt"):
        return part.writer
    file = _metadata_files(part)[0]
    with suppress(CorruptCheckpoint):
        if (store.size(file) or 0) <= _PARSED_BYTES:
            return read_metadata(store.read(file), where=file).writer
    return None
