"""``.metadata`` of one folder: lost, broken, left unfinished beside a good one, or of no use to another torch."""

from __future__ import annotations

import shlex
import zlib

from fsdp_ckpt.codec.dcp_metadata import DcpMetadata
from fsdp_ckpt.codec.dcp_metadata_facts import read_facts
from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.layouts.dcp import RANK_METADATA
from fsdp_ckpt.layouts.registry import list_checkpoints
from fsdp_ckpt.ops.repairs.actions import Kind
from fsdp_ckpt.ops.repairs.candidates import candidates, written
from fsdp_ckpt.ops.repairs.items import Fit, check_items
from fsdp_ckpt.ops.repairs.look import Look, Read, counterpart, load_metadata
from fsdp_ckpt.ops.repairs.torch_versions import obstacles, refusals
from fsdp_ckpt.ops.repairs.union import unite
from fsdp_ckpt.store.local import Folder

__all__ = ["mend_metadata"]

_NAME = ".metadata"


def mend_metadata(look: Look, folder: Folder) -> frozenset[str] | None:
    """Look at the metadata of a DCP folder, and plan what mends them.

    Returns:
        Data files that the metadata refer to; None where there are no metadata, or the files do not fit them.
    """
    own, unfinished = load_metadata(folder, _NAME), load_metadata(folder, _NAME + ".tmp")
    ranks = {name: load_metadata(folder, name) for name in folder.files if RANK_METADATA.fullmatch(name)}
    known = {name: found for name, found in ranks.items() if found is not None}
    own = _as_listed(look, folder, own)
    if own is not None and own.metadata is not None:
        fit = check_items(folder, own.metadata, data=False)
        if unfinished is not None and _take_unfinished(look, folder, fit, unfinished):
            return None
        _for_torch(look, folder, _NAME, own, fit)
        return _files_of(own.metadata) if fit.why is None else None
    if known:
        return _mend_ranks(look, folder, own, known)
    if look.findings.wants(Kind.REBUILD_METADATA):
        _rebuild(look, folder, own, unfinished)
    return None


def _as_listed(look: Look, folder: Folder, own: Read | None) -> Read | None:
    """Return metadata as they were read, or why not to believe them: our manifest has another checksum."""
    listed = look.manifest.files.get(folder.prefix + _NAME) if look.manifest is not None else None
    if own is None or own.metadata is None or listed is None:
        return own
    found = zlib.crc32(own.data)
    if (len(own.data), found) == (listed[0], int(listed[1], 16)):
        return own
    return Read(why=f"its CRC-32 is {found:08x}, the manifest says {listed[1]}")


def _is_listed(look: Look, file: str, data: bytes) -> bool:
    """Tell whether our manifest lists this content, or none."""
    listed = look.manifest.files.get(file) if look.manifest is not None else None
    return listed is None or (len(data), zlib.crc32(data)) == (listed[0], int(listed[1], 16))


def _files_of(metadata: DcpMetadata) -> frozenset[str]:
    return frozenset(info[0] for info in metadata.storage.values())


def _take_unfinished(look: Look, folder: Folder, fit: Fit, unfinished: Read) -> bool:
    """Decide between a ``.metadata`` and one that a save had not put in its place; return whether that one is it."""
    findings, file = look.findings, folder.prefix + _NAME
    if fit.why is None:
        if findings.wants(Kind.DROP_STALE):
            findings.drop(
                Kind.DROP_STALE, file + ".tmp", "left by a save that was cut off; the .metadata beside it fits"
            )
        return False
    candidate = unfinished.metadata if _is_listed(look, file, unfinished.data) else None
    if candidate is not None and check_items(folder, candidate, data=look.verify).why is None:
        if findings.wants(Kind.REBUILD_METADATA):
            reason = f"it is of an older save ({fit.why}); .metadata.tmp fits the data files"
            findings.write(Kind.REBUILD_METADATA, file, unfinished.data, reason, source=file + ".tmp")
            findings.drop(Kind.REBUILD_METADATA, file + ".tmp", "becomes .metadata")
        return True
    findings.note(f"{file}.tmp stays: neither it nor .metadata fits the data files")
    return False


def _for_torch(look: Look, folder: Folder, name: str, found: Read, fit: Fit | None = None) -> None:
    """Plan to write a metadata file anew where the torch that was asked for could not read it."""
    version, metadata, findings = look.for_torch, found.metadata, look.findings
    if version is None or metadata is None or not findings.wants(Kind.METADATA_FOR_TORCH):
        return
    file, shown = folder.prefix + name, ".".join(map(str, version))
    for refusal in refusals(metadata, version):
        findings.fault(file, f"cannot serve torch {shown}: {refusal}", _merge_hint(look))
        return
    facts = read_facts(found.data, where=file)
    reasons = list(obstacles(facts, version))
    if not reasons:
        findings.note(f"{file} can be read by torch {shown} and any Python as it is")
        return
    data = written(metadata, facts, look)
    if isinstance(data, str):
        findings.fault(file, data)
        return
    if fit is not None and fit.strided:
        some = min(fit.strided)
        findings.note(
            f"{len(fit.strided)} tensors are stored with strides of their own, first `{some}`: nothing is lost, as "
            "each item says so itself, and every torch reads it there"
        )
    findings.write(Kind.METADATA_FOR_TORCH, file, data, f"torch {shown} cannot read it: {'; '.join(reasons)}")


def _mend_ranks(look: Look, folder: Folder, own: Read | None, ranks: dict[str, Read]) -> frozenset[str] | None:
    """Look at the metadata that each rank has left, which are enough for torch 2.9 and newer."""
    for name, found in ranks.items():
        if found.metadata is None:
            look.findings.fault(folder.prefix + name, found.why)
        else:
            _for_torch(look, folder, name, found)
    if look.for_torch is not None or own is not None:
        _from_ranks(look, folder, own, ranks)
    try:
        metadata, _ = unite({name: found.metadata for name, found in ranks.items()})
    except Incompatible:
        return None
    fits = check_items(folder, metadata, data=False).why is None
    return (
        frozenset().union(*(_files_of(found.metadata) for found in ranks.values() if found.metadata)) if fits else None
    )


def _from_ranks(look: Look, folder: Folder, own: Read | None, ranks: dict[str, Read]) -> None:
    """Plan a ``.metadata`` from the metadata that each rank has left."""
    findings, file = look.findings, folder.prefix + _NAME
    if not findings.wants(Kind.REBUILD_METADATA):
        return
    try:
        metadata, notes = unite({name: found.metadata for name, found in ranks.items()})
    except Incompatible as error:
        findings.fault(file, f"cannot be made from {len(ranks)} files of ranks: {error.message}", _nodes_hint(look))
        return
    fit = check_items(folder, metadata, data=False)
    if fit.why is not None:
        findings.fault(file, f"cannot be made from the files of ranks: {fit.why}")
        return
    if look.for_torch is not None:
        for refusal in refusals(metadata, look.for_torch):
            findings.fault(
                file, f"cannot serve torch {'.'.join(map(str, look.for_torch))}: {refusal}", _merge_hint(look)
            )
            return
    data = written(metadata, None, look)
    if isinstance(data, bytes) and own is not None and not _is_listed(look, file, data):
        data = f"{own.why}; the manifest lists another CRC-32 than what the files of ranks give"
    if isinstance(data, str):
        findings.fault(file, data)
        return
    for text in notes:
        findings.note(f"{file}: {text}")
    why = "each rank has metadata of its own, which torch before 2.9 does not know" if own is None else own.why
    findings.write(Kind.REBUILD_METADATA, file, data, why, source=f"{len(ranks)} files of ranks")


def _rebuild(look: Look, folder: Folder, own: Read | None, unfinished: Read | None) -> None:
    """Plan a ``.metadata`` where there is none that can be read, from whatever fits the data files in every item."""
    findings, file = look.findings, folder.prefix + _NAME
    why = "missing: a save was cut off, or it was removed" if own is None else own.why
    tried: list[str] = []
    for data, source in candidates(look, folder, unfinished, tried):
        if not _is_listed(look, file, data):
            tried.append(f"{source} does not do: the manifest lists another CRC-32")
            continue
        findings.write(Kind.REBUILD_METADATA, file, data, why, source=source)
        if source == file + ".tmp":
            findings.drop(Kind.REBUILD_METADATA, file + ".tmp", "becomes .metadata")
        return
    tried = tried or ["the names of the tensors are nowhere in the data files"]
    findings.fault(file, f"{why}; {'; '.join(tried)}", _like_hint(look, folder))


def _merge_hint(look: Look) -> str:
    return f"fsdp-ckpt merge {shlex.quote(look.shown)} OUT    (any torch reads the result)"


def _nodes_hint(look: Look) -> str:
    return f"copy the files of all ranks into {shlex.quote(look.shown)} first"


def _like_hint(look: Look, folder: Folder) -> str | None:
    """Suggest the checkpoint of the run that was saved nearest to this one, among those that have what is missing."""
    if look.like is not None:
        return None
    here = look.root.path.resolve()
    for _, path in list_checkpoints(here.parent):
        other = None if path.resolve() == here else counterpart(path, folder.prefix)
        if other is not None and _NAME in other.files:
            return f"fsdp-ckpt repair {shlex.quote(look.shown)} --like {shlex.quote(str(path))}"
    return f"fsdp-ckpt repair {shlex.quote(look.shown)} --like OTHER    (a checkpoint of the same model)"
