"""Where a lost ``.metadata`` may come from: contents that fit the data files in every item, with their source."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, read_metadata
from fsdp_ckpt.codec.dcp_metadata_facts import MetadataFacts, read_facts
from fsdp_ckpt.codec.dcp_metadata_writer import write_metadata
from fsdp_ckpt.errors import CorruptCheckpoint, FsdpCkptError, Incompatible
from fsdp_ckpt.layouts.registry import list_checkpoints
from fsdp_ckpt.ops.repairs.blobs import is_blob, metadata_of_blobs
from fsdp_ckpt.ops.repairs.items import check_items
from fsdp_ckpt.ops.repairs.like import metadata_like
from fsdp_ckpt.ops.repairs.look import Look, Read, counterpart, load_metadata
from fsdp_ckpt.ops.repairs.partners import check_partners
from fsdp_ckpt.store.local import Folder

__all__ = ["candidates", "written"]

_NAME = ".metadata"
_STORAGE_META = (2, 4)


def written(metadata: DcpMetadata, facts: MetadataFacts | None, look: Look) -> bytes | str:
    """Return metadata as bytes that every torch from 2.3 on reads, or why that cannot be."""
    ancient = look.for_torch is not None and look.for_torch < _STORAGE_META
    save_id = None if facts is None or ancient else facts.save_id
    try:
        data = write_metadata(metadata, save_id=save_id)
    except ValueError as error:
        return f"cannot be written anew: {error}"
    again = read_metadata(data, where=_NAME)
    if again != replace(metadata, writer=again.writer):
        return "cannot be written anew: what was written reads otherwise"  # a bug, but never a silent one
    return data


def candidates(look: Look, folder: Folder, unfinished: Read | None, tried: list[str]) -> Iterator[tuple[bytes, str]]:
    """Yield contents that fit, with their source; what does not fit is told in ``tried``."""
    file = folder.prefix + _NAME
    if unfinished is not None:
        why = unfinished.why
        if unfinished.metadata is not None:
            why = check_items(folder, unfinished.metadata, data=True).why or ""
        if not why:
            yield unfinished.data, file + ".tmp"
        tried.append(f".metadata.tmp does not do: {why}")
    yield from _by_manifest(look, folder)
    if look.replica is not None:
        yield from _of_other(look, folder, look.replica, "--replica", tried)
    if look.like is not None:
        yield from _of_other(look, folder, look.like, "--like", tried)
    data_files = [name for name, size in folder.files.items() if name.endswith(".distcp") and size]
    if any(is_blob(folder, name) for name in data_files):
        try:
            metadata = metadata_of_blobs(folder)
        except CorruptCheckpoint as error:
            tried.append(error.message)
        except Incompatible as error:
            tried.append(error.message)
        else:
            data = written(metadata, None, look)
            if isinstance(data, bytes):
                look.findings.note(
                    f"{file}: shapes are the furthest corners of pieces; were files of the last ranks lost, tensors "
                    "would be too short: compare with your model"
                )
                yield data, "the headers of the safetensors in the data files"


def _by_manifest(look: Look, folder: Folder) -> Iterator[tuple[bytes, str]]:
    """Yield the ``.metadata`` of a neighbour that is, byte by byte, the one that our manifest lists.

    The metadata of our saves only say where things are, and so are the same from step to step.
    """
    file = folder.prefix + _NAME
    listed = look.manifest.files.get(file) if look.manifest is not None else None
    if listed is None:
        return
    here = look.root.path.resolve()
    for _, path in list_checkpoints(here.parent):
        other = None if path.resolve() == here else counterpart(path, folder.prefix)
        if other is None or other.files.get(_NAME) != listed[0]:
            continue
        try:
            data = other.store.read(other.prefix + _NAME, limit_bytes=listed[0])
            is_it = zlib.crc32(data) == int(listed[1], 16)
            if is_it and check_items(folder, read_metadata(data, where=file), data=False).why is None:
                yield data, f"{path / file}, which has the CRC-32 that the manifest says"
        except FsdpCkptError:
            continue


def _is_listed(data: bytes, listed: tuple[int, str]) -> bool:
    return (len(data), zlib.crc32(data)) == (listed[0], int(listed[1], 16))


def _spellings(metadata: DcpMetadata, found: Read) -> Iterator[bytes]:
    """Yield metadata as we write them: the same names and places always give the same bytes."""
    facts = read_facts(found.data, where=_NAME)
    for save_id in dict.fromkeys((None, facts.save_id)):
        with suppress(ValueError):
            yield write_metadata(metadata, save_id=save_id)


def _of_other(look: Look, folder: Folder, path: Path, option: str, tried: list[str]) -> Iterator[tuple[bytes, str]]:
    """Yield metadata with the names of another checkpoint and the places of this one."""
    other = counterpart(path, folder.prefix)
    found = None if other is None else load_metadata(other, _NAME)
    if other is None or found is None or found.metadata is None:
        tried.append(f"{option} {path} has no {folder.prefix}{_NAME}" + (f": {found.why}" if found else ""))
        return
    source = str(other.path / _NAME)
    listed = look.manifest.files.get(folder.prefix + _NAME) if look.manifest is not None else None
    if listed is not None and _is_listed(found.data, listed):
        yield found.data, f"{source}, which has the CRC-32 that the manifest says"
        return
    if listed is not None and option == "--replica":
        tried.append(f"{option} {path} is no copy of it: the manifest lists another CRC-32 for {folder.prefix}{_NAME}")
        return
    try:
        metadata = metadata_like(folder, other, found.metadata)
        check_partners(look.root, folder, metadata)
    except (Incompatible, CorruptCheckpoint) as error:
        tried.append(f"{option} {path} does not fit: {error.message}")
        return
    if listed is not None:
        same = next((data for data in _spellings(metadata, found) if _is_listed(data, listed)), None)
        if same is not None:
            yield same, f"{source}, and it has the CRC-32 that the manifest says"
            return
        tried.append(
            f"{option} {path} does not fit: what would be written has not the CRC-32 that the manifest lists, so that "
            "its names or places are not those that were saved"
        )
        return
    if option == "--replica" and metadata == found.metadata and look.manifest is None:
        data: bytes | str = found.data
    else:
        data = written(metadata, None, look)
    if isinstance(data, str):
        tried.append(data)
        return
    look.findings.note(
        f"{folder.prefix}{_NAME}: all names come from {source}. Every item agrees with it in dtype, shape and order, "
        "but that it is a checkpoint of the same model is for you to know"
    )
    yield data, source
