"""Our manifest, broken or lost, from another copy of the checkpoint: if it lists what is here, to the last byte."""

from __future__ import annotations

import shlex

from fsdp_ckpt.errors import CorruptCheckpoint, FsdpCkptError
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, read_manifest
from fsdp_ckpt.ops.repairs.actions import Kind
from fsdp_ckpt.ops.repairs.look import Look
from fsdp_ckpt.run.checksum import checksum_range
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["restore_manifest"]


def restore_manifest(look: Look) -> bool:
    """Plan to take the manifest from the other copy, or note that it is broken.

    Returns:
        Whether there is one to take: everything else is judged by it, and so comes after it.
    """
    why = ""
    try:
        if read_manifest(look.root) is not None:
            return False
    except CorruptCheckpoint as error:
        why = error.message
    wanted = look.replica is not None and look.findings.wants(Kind.RESTORE_BOX)
    theirs = _of_replica(look) if wanted else None
    if theirs is not None:
        manifest, data = theirs
        doubt, why = _difference(look, manifest), why or "missing, without it the checkpoint is judged by less"
        if not doubt:
            source = str(Folder(LocalStore(look.replica or look.root.path)).path / MANIFEST)
            look.findings.write(Kind.RESTORE_BOX, MANIFEST, data, why, source=source)
            return True
        why = f"{why}; that of `{look.replica}` does not list what is here: {doubt}"
    if why:
        hint = (
            f"fsdp-ckpt repair {shlex.quote(look.shown)} --replica BACKUP; or: fsdp-ckpt list {shlex.quote(look.run)}"
        )
        look.findings.fault(MANIFEST, f"{why}; nothing else has the sizes and checksums in it", hint)
    return False


def _of_replica(look: Look) -> tuple[Manifest, bytes] | None:
    assert look.replica is not None
    other = Folder(LocalStore(look.replica))
    try:
        manifest = read_manifest(other)
        return None if manifest is None else (manifest, other.store.read(MANIFEST, limit_bytes=1 << 30))
    except FsdpCkptError:
        return None


def _difference(look: Look, manifest: Manifest) -> str:
    """Return the first file here that is not as a manifest lists it; empty when there is none."""
    store = look.root.store
    for file, (size, crc) in manifest.files.items():
        try:
            if store.size(file) != size:
                return file
            with store.opened(file) as source:
                if checksum_range(source, 0, size) != int(crc, 16):
                    return file
        except (FsdpCkptError, OSError):
            return file
    return ""
