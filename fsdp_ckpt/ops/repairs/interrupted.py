"""A repair that was killed after it took our manifest away, and before it wrote the new one."""

from __future__ import annotations

from pathlib import Path

from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.layouts.manifest import MANIFEST, read_manifest, write_manifest
from fsdp_ckpt.ops.repairs.actions import Kind
from fsdp_ckpt.ops.repairs.look import Look
from fsdp_ckpt.ops.repairs.transaction import relisted
from fsdp_ckpt.run.checksum import checksum_range
from fsdp_ckpt.store.leftovers import backup_number
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["finish_interrupted"]


def finish_interrupted(look: Look) -> bool:
    """Plan to write the manifest that a killed repair did not come to write.

    Only files that it kept a copy of were to change; all others must have the sizes that were listed.

    Returns:
        Whether there is such a manifest to write: nothing else may change before.
    """
    if MANIFEST in look.root.files or not look.findings.wants(Kind.FINISH_SWAP):
        return False
    backup = _backup(look.root.path)
    if backup is None:
        return False
    where = f"{backup.name}/{MANIFEST}"
    try:
        manifest = read_manifest(Folder(LocalStore(backup)))
        assert manifest is not None
        written: dict[str, tuple[int, int]] = {}
        for file, (size, _) in manifest.files.items():
            have = look.root.store.size(file)
            if (backup / file).is_file() and have is not None:
                with look.root.store.descriptor(file) as fd:
                    written[file] = have, checksum_range(fd, 0, have)
            elif have != size:
                text = "missing" if have is None else f"{have} bytes instead of {size}"
                look.findings.fault(MANIFEST, f"cannot be made again from {where}: {file} is {text}")
                return False
    except FsdpCkptError as error:
        look.findings.fault(MANIFEST, f"cannot be made again: {error.message}")
        return False
    data = write_manifest(relisted(manifest, written, ()) or manifest)
    look.findings.write(Kind.FINISH_SWAP, MANIFEST, data, "a repair was killed before it had written it", source=where)
    return True


def _backup(root: Path) -> Path | None:
    """Return the latest backup, if our manifest is in it."""
    numbers = []
    for entry in root.iterdir():
        number = backup_number(entry.name)
        if number is not None and entry.is_dir() and not entry.is_symlink():
            numbers.append((number, entry))
    latest = max(numbers, default=None)
    return latest[1] if latest is not None and (latest[1] / MANIFEST).is_file() else None
