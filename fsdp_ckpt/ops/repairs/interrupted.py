"""A repair that was killed after it took our manifest away, and before the new one was in its place.

It had written down what every file was and what it was to become. No file is believed beyond that: one that is neither
stays listed as it was, and so is found to be damaged.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.errors import FsdpCkptError, MalformedFile
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from fsdp_ckpt.ops.repairs.actions import Kind
from fsdp_ckpt.ops.repairs.look import Look
from fsdp_ckpt.ops.repairs.transaction import OWED, PREVIOUS
from fsdp_ckpt.run.checksum import checksum_range
from fsdp_ckpt.store.leftovers import backup_number
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["finish_interrupted"]

_Entry = tuple[int, str]


def finish_interrupted(look: Look) -> bool:
    """Plan to put the manifest in its place that a killed repair did not come to.

    Returns:
        Whether a repair is unfinished: nothing else may change before.
    """
    if MANIFEST in look.root.files:
        return False
    backups = _backups(look.root.path)
    owing = [backup for backup in backups if (backup / OWED).is_file()]
    if owing:
        _finish(look, owing)
        return True
    return look.findings.wants(Kind.FINISH_SWAP) and _bring_back(look, backups)


def _backups(root: Path) -> list[Path]:
    """Return all backups, the latest first."""
    found = []
    for entry in root.iterdir():
        number = backup_number(entry.name)
        if number is not None and entry.is_dir() and not entry.is_symlink():
            found.append((number, entry))
    return [path for _, path in sorted(found, reverse=True)]


def _finish(look: Look, owing: list[Path]) -> None:
    findings, backup = look.findings, owing[0]
    where = f"{backup.name}/{OWED}"
    if not findings.wants(Kind.FINISH_SWAP):
        why = "a repair was killed before it had written it: that comes before all else"
        findings.fault(MANIFEST, why, f"fsdp-ckpt repair {shlex.quote(look.shown)} --apply")
        return
    try:
        old, new = _read(backup / PREVIOUS), _read(backup / OWED)
        data = write_manifest(replace(new, files=_entries(look, old, new)))
    except FsdpCkptError as error:
        findings.fault(MANIFEST, f"a repair was killed, and cannot be finished: {error.message}")
        return
    except OSError as error:
        findings.fault(MANIFEST, f"a repair was killed, and cannot be finished: {error.strerror}")
        return
    findings.write(Kind.FINISH_SWAP, MANIFEST, data, "a repair was killed before it had written it", source=where)
    for folder in owing:
        for file in (OWED, PREVIOUS):
            if (folder / file).is_file():
                why = "of no use once the manifest is there"
                findings.drop(Kind.FINISH_SWAP, f"{folder.name}/{file}", why)


def _read(path: Path) -> Manifest:
    manifest = read_manifest(Folder(LocalStore(path.parent)))
    if manifest is None:
        raise MalformedFile(f"{path} is missing")
    return manifest


def _entries(look: Look, old: Manifest, new: Manifest) -> dict[str, _Entry]:
    """Return for every file the entry that its bytes agree with; the old one where they agree with neither."""
    found: dict[str, _Entry] = {}
    for file in {**old.files, **new.files}:
        was, becomes = old.files.get(file), new.files.get(file)
        if was == becomes and was is not None:  # it was not to change, and is looked at afterwards
            found[file] = was
            continue
        have = look.root.store.size(file)
        if have is None and (was is None or becomes is None):  # not written yet, or set aside
            continue
        crc = None if have is None else _checksum(look, file, have)
        fitting = (entry for entry in (becomes, was) if entry is not None and (have, crc) == _numbers(entry))
        kept = next(fitting, was or becomes)
        assert kept is not None
        found[file] = kept
    return found


def _numbers(entry: _Entry) -> tuple[int, int]:
    return entry[0], int(entry[1], 16)


def _checksum(look: Look, file: str, size: int) -> int | None:
    try:
        with look.root.store.opened(file) as source:
            return checksum_range(source, 0, size)
    except OSError:  # a bad sector: told of once the manifest is there
        return None


def _bring_back(look: Look, backups: list[Path]) -> bool:
    """Plan to bring back a manifest that lists, to the last byte, what is here; return whether there is one."""
    tried: list[str] = []
    for backup in backups:
        where = f"{backup.name}/{MANIFEST}"
        if not (backup / MANIFEST).is_file():
            continue
        try:
            manifest = _read(backup / MANIFEST)
            other = _difference(look, manifest)
        except FsdpCkptError as error:
            tried.append(f"that of {where} is of no use: {error.message}")
            continue
        if other is None:
            why = "missing; this one lists what is here to the last byte"
            look.findings.write(Kind.FINISH_SWAP, MANIFEST, write_manifest(manifest), why, source=where)
            return True
        tried.append(f"that of {where} does not list what is here: {other}")
    if tried and look.replica is None:
        hint = f"fsdp-ckpt repair {shlex.quote(look.shown)} --replica BACKUP"
        look.findings.fault(MANIFEST, f"missing; {'; '.join(tried)}", hint)
    return False


def _difference(look: Look, manifest: Manifest) -> str | None:
    """Return the first file that is not as it is listed."""
    for file, entry in manifest.files.items():
        have = look.root.store.size(file)
        if have != entry[0] or (have, _checksum(look, file, have)) != _numbers(entry):
            return file
    return None
