"""Several folders as one: what nodes with disks of their own wrote in one save, and how to tell that it was one.

What two of them have must be the same in both: manifests and ``.metadata`` in every byte, as they say which save it
was; other files in size and content. Large files, which only a copy can have brought to two places, are compared at
both ends.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fsdp_ckpt.errors import Incompatible, UsageError
from fsdp_ckpt.layouts.composite import SIDE_FILES
from fsdp_ckpt.layouts.dcp import looks_like_dcp
from fsdp_ckpt.layouts.manifest import MANIFEST, read_manifest
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["demand_equal_copies", "demand_one_save"]

_PART_NAMES = ("pytorch_model", "optimizer", "sharded")
_ENDINGS = (".distcp", ".metadata", ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OF_A_PROCESS = re.compile(r"training_args\.bin|dl_state_dict(_\d+)?\.bin")
"""Files in which the Trainer and Accelerate note the place of one process of each node."""

_PLACES = ("is_local_process_zero", "is_world_process_zero")
"""What the Trainer writes into every node's ``trainer_state.json``, which may differ."""

_WHOLE_BYTES = 64 << 20
_EDGE_BYTES = 1 << 20


def demand_one_save(folder: Folder) -> None:
    """Make sure that the roots of a store hold pieces of one save; does nothing for a single root.

    Args:
        folder: A checkpoint, or one part of it.

    Raises:
        Incompatible: They hold different saves.
        UsageError: One is a part, another the folder above it.
        MalformedFile: A file leads out of its folder.
    """
    if len(folder.store.roots) == 1:
        return
    nodes = _each(folder)
    _demand_one_level(nodes)
    if folder.path.resolve().name.startswith(_PART_NAMES):  # its manifest, which names the save, lies above it
        _compare([Folder(LocalStore(node.path.resolve().parent)) for node in nodes], [MANIFEST], folders=nodes)
    manifest = read_manifest(folder)
    listed = set(manifest.files) if manifest is not None else set()
    for below in [folder, *(folder.sub(name) for name in sorted(folder.folders) if name.startswith(_PART_NAMES))]:
        known = [name for name in below.files if _belongs(name) or below.prefix + name in listed]
        _compare(_each(below), sorted(known, key=lambda name: (name != MANIFEST, name != ".metadata", name)))


def demand_equal_copies(store: LocalStore, file: str) -> None:
    """Make sure that a file is the same wherever it is, in every byte; does nothing where it is in one place only.

    Raises:
        Incompatible: It is not.
    """
    prefix, slash, name = file.rpartition("/")
    _compare(_each(Folder(store, prefix + slash)), [name], whole=True)


def _each(folder: Folder) -> list[Folder]:
    """Return a folder as it is on each node that has it."""
    nodes = [Folder(LocalStore(root), folder.prefix) for root in folder.store.roots]
    return [node for node in nodes if node.path.is_dir()]


def _demand_one_level(nodes: list[Folder]) -> None:
    parts = [node for node in nodes if looks_like_dcp(node)]
    others = [node for node in nodes if any(name.startswith(_PART_NAMES) for name in node.folders)]
    if parts and others and parts[0] not in others:
        part, whole = parts[0].path, others[0].path
        raise UsageError(
            f"`{part}` is one part of a checkpoint, `{whole}` is a folder with parts",
            hint=f"give the same folder of every node, such as {shlex.join([str(whole), str(part.parent)])}",
        )


def _belongs(name: str) -> bool:
    """Tell whether a file is one that readers look at. What else lies there (logs) may differ between nodes."""
    if _OF_A_PROCESS.fullmatch(name):
        return False
    return name in (MANIFEST, "trainer_state.json") or name.endswith(_ENDINGS) or bool(SIDE_FILES.fullmatch(name))


def _compare(
    nodes: list[Folder], names: list[str], *, folders: list[Folder] | None = None, whole: bool = False
) -> None:
    """Compare files that more than one node has.

    Args:
        nodes: A folder on each node.
        names: Files in it.
        folders: What to call the nodes in messages, where that is not the folder.
        whole: Compare large files from beginning to end.

    Raises:
        Incompatible: They differ.
    """
    shown = folders or nodes
    for name in names:
        having = [number for number, node in enumerate(nodes) if name in node.files]
        for number in having[1:]:
            first, other = nodes[having[0]], nodes[number]
            if not _is_same(first, other, name, whole=whole or name in (".metadata", MANIFEST)):
                raise _different(shown[having[0]], shown[number], _difference(first, other, name))


def _different(first: Folder, other: Folder, how: str) -> Incompatible:
    a, b = str(first.store.root), str(other.store.root)
    commands = (shlex.join(["fsdp-ckpt", "inspect", path]) for path in (a, b))
    return Incompatible(f"`{a}` and `{b}` are not of one save: {how}", hint="; ".join(commands))


def _difference(first: Folder, other: Folder, name: str) -> str:
    file = first.prefix + name
    if name == MANIFEST:
        manifests = [read_manifest(folder) for folder in (first, other)]
        shown = [f"step {found.step} of {found.created}" for found in manifests if found is not None]
        ids = [found.save_id for found in manifests if found is not None]
        return f"{' and '.join(shown)}, by their {file}" if ids[0] != ids[1] else f"their {file} differ"
    sizes = first.files[name], other.files[name]
    if sizes[0] != sizes[1]:
        return f"{file} has {sizes[0]} bytes in the first, {sizes[1]} in the second"
    return f"their {file} differ"


def _is_same(first: Folder, other: Folder, name: str, *, whole: bool) -> bool:
    file, size = first.prefix + name, first.files[name]
    if os.path.samefile(first.store.path(file), other.store.path(file)):
        return True
    if name == "trainer_state.json":
        return bool(_trainer_state(first, file) == _trainer_state(other, file))
    if size != other.files[name]:
        return False
    reads = [folder.store.reader(file) for folder in (first, other)]
    return all(len(set(pieces)) == 1 for pieces in _pieces(reads, size, whole=whole or size <= _WHOLE_BYTES))


def _pieces(reads: Sequence[Callable[[int, int], bytes]], size: int, *, whole: bool) -> Iterator[list[bytes]]:
    """Yield the same piece of each file: of all of it, or of its ends, where torch's archives keep their checksums."""
    starts = range(0, size, _EDGE_BYTES) if whole else (0, size - _EDGE_BYTES)
    for start, length in zip(starts, itertools.repeat(_EDGE_BYTES)):
        yield [read(start, min(length, size - start)) for read in reads]


def _trainer_state(folder: Folder, file: str) -> Any:
    data = folder.store.read(file)
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return {key: value for key, value in state.items() if key not in _PLACES} if isinstance(state, dict) else data
