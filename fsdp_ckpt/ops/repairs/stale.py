"""Files that belong to no checkpoint any more: of an earlier save, of a save that died, of an earlier repair."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator

from fsdp_ckpt.codec.safetensors import read_header
from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.layouts.hf import is_rank_shard
from fsdp_ckpt.layouts.manifest import check_files
from fsdp_ckpt.ops.repairs.actions import Kind
from fsdp_ckpt.ops.repairs.fill import is_unfinished
from fsdp_ckpt.ops.repairs.look import Look
from fsdp_ckpt.store.leftovers import LOCKS
from fsdp_ckpt.store.local import Folder

__all__ = ["drop_foreign_items", "drop_stale_items", "drop_stale_shards", "drop_unfinished", "is_foreign"]

_NUMBERED = re.compile(r"(.*)-\d{5}-of-\d{5}\.safetensors")
_UNFINISHED = re.compile(r"\..*\.done|.*\.part")


def drop_stale_items(look: Look, folder: Folder, belonging: frozenset[str] | None) -> None:
    """Plan to set aside data files that the metadata do not refer to.

    Args:
        look: The look at the checkpoint.
        folder: A DCP folder.
        belonging: What the metadata refer to; None where that is not known or not whole: then nothing is stale.
    """
    stale = [name for name, size in folder.files.items() if name.endswith(".distcp") and size]
    stale = [name for name in stale if belonging is not None and name not in belonging]
    for name in stale:
        file = folder.prefix + name
        if look.manifest is None or file not in look.manifest.files:
            why = f"{folder.files[name]} bytes that the metadata do not refer to: left from an earlier save"
            look.findings.drop(Kind.DROP_STALE, file, why)
    done = [name for name in folder.files if re.fullmatch(r"__\d+\.metadata\.tmp", name)]
    for name in done:
        if belonging is not None and name.removesuffix(".tmp") in folder.files:
            look.findings.drop(Kind.DROP_STALE, folder.prefix + name, "left by a save that was cut off")


def is_foreign(look: Look, folder: Folder) -> bool:
    """Tell whether a folder of a checkpoint of ours is none of its parts, as far as ``.distcp`` files go."""
    if look.manifest is None:
        return False
    listed = (file.removeprefix(folder.prefix) for file in look.manifest.files if file.startswith(folder.prefix))
    return not any("/" not in name and name.endswith((".distcp", ".metadata")) for name in listed)


def drop_foreign_items(look: Look, folder: Folder) -> None:
    """Plan to set aside ``.distcp`` files in a folder of a checkpoint of ours that is none of its parts.

    Only where all that the manifest lists is there: otherwise they may be what is missing, under another name.
    """
    if look.manifest is None or check_files(look.root, look.manifest):
        return
    for name in folder.files:
        if name.endswith((".distcp", ".metadata", ".metadata.tmp")):
            look.findings.drop(Kind.DROP_STALE, folder.prefix + name, "no part of this checkpoint: not in its manifest")
    look.findings.covered.add(folder.prefix + ".metadata")


def drop_stale_shards(look: Look, folder: Folder) -> None:
    """Plan to set aside numbered safetensors files that an index does not list, and whose tensors stand in others."""
    for name in folder.files:
        if not name.endswith(".safetensors.index.json"):
            continue
        stem = name.removesuffix(".safetensors.index.json")
        weight_map = _weight_map(folder, name)
        if weight_map is None or set(weight_map.values()) - set(folder.files):
            continue
        for file in folder.files:
            match = _NUMBERED.fullmatch(file)
            if match is None or match[1] != stem or is_rank_shard(file) or file in weight_map.values():
                continue
            tensors = _names(folder, file)
            if tensors is None or not tensors <= weight_map.keys():
                continue
            why = f"not in {name}, and all of its {len(tensors)} tensors stand in files that are"
            look.findings.drop(Kind.DROP_STALE, folder.prefix + file, why)


def _weight_map(folder: Folder, name: str) -> dict[str, str] | None:
    """Return what an index says, if every file has the tensors that it says; None otherwise."""
    try:
        found = json.loads(folder.store.read(folder.prefix + name))["weight_map"]
        weight_map = {str(key): str(file) for key, file in found.items()}
    except (FsdpCkptError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    for file in set(weight_map.values()):
        names = _names(folder, file)
        if names is None or any(key not in names for key, home in weight_map.items() if home == file):
            return None
    return weight_map


def _names(folder: Folder, file: str) -> set[str] | None:
    path = folder.prefix + file
    if file not in folder.files:
        return None
    try:
        header = read_header(folder.store.reader(path), 0, folder.files[file], where=path)
    except FsdpCkptError:
        return None
    return {tensor.name for tensor in header.tensors}


def drop_unfinished(look: Look, folder: Folder) -> None:
    """Plan to set aside what writers of ours left unfinished: repairs anywhere, saves in checkpoints of ours."""
    for name in _unfinished(look, folder):
        look.findings.drop(Kind.DROP_STALE, folder.prefix + name, "left unfinished by a run of fsdp-ckpt that died")


def _unfinished(look: Look, folder: Folder) -> Iterator[str]:
    for name in folder.files:
        if is_unfinished(name):
            yield name
        elif look.manifest is None or folder.prefix + name in look.manifest.files:
            continue
        elif _UNFINISHED.fullmatch(name) or (name in LOCKS and _is_idle(folder, name)):
            yield name


def _is_idle(folder: Folder, name: str) -> bool:
    """Tell whether nobody holds a lock, without making or changing anything."""
    try:
        fd = os.open(folder.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
