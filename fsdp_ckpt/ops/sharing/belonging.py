"""Which files make up a checkpoint, or some parts of it: what is shared, and what is only lying there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fsdp_ckpt.catalog import Checkpoint, Part, Role
from fsdp_ckpt.errors import CorruptCheckpoint, UsageError
from fsdp_ckpt.layouts.composite import SIDE_FILES
from fsdp_ckpt.layouts.manifest import MANIFEST, manifest_of
from fsdp_ckpt.store.local import LocalStore

__all__ = ["ALL_PARTS", "Belonging", "choose_parts", "find_belonging", "foreign_names"]

ALL_PARTS = "all"
_SMALL_BYTES = 4 << 20
_JSON_BYTES = 64 << 20
_DESCRIBING = re.compile(r"\.?[A-Za-z][\w.-]*\.json|README\.md|LICENSE[\w.-]*|NOTICE[\w.-]*", re.IGNORECASE)
"""Small files that frameworks and people put beside weights: indices, configurations, a licence."""
_SECRET = re.compile(
    r".*(secret|credential|passw|api_?key|private_?key|service[-_]?account|auth|token(?!i[sz])).*\.json", re.IGNORECASE
)
"""Names of files that may hold what opens somebody's account; no framework puts such a name beside weights."""
_INNER = ("huggingface", ".hf_metadata")
"""Folders for such files, of verl and NeMo."""
_WEIGHTS = re.compile(
    r".*\.(distcp|safetensors)|(__\d+)?\.metadata|(adapter_|pytorch_)?model.*\.bin|pytorch_model(_fsdp)?_\d+"
    r"|optim(izer)?(_\d+)?(\.(bin|pt))?|scheduler(_\d+)?\.(bin|pt)|scaler\.pt|training_args\.bin|meta\.pt"
    r"|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt"
)
"""Names of files and folders in which weights and training states lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Belonging:
    """The files of a checkpoint, or of some of its parts.

    Attributes:
        files: Size in bytes by name, relative to the checkpoint's root, in order.
        all_files: Names of the files of all parts, also of those that were not chosen.
        is_whole: Whether all parts were chosen.
        left_out: Other files in the root, such as logs; at most the first thousand names.
    """

    files: dict[str, int]
    all_files: frozenset[str]
    is_whole: bool
    left_out: Sequence[str]


def choose_parts(checkpoint: Checkpoint, wanted: Sequence[str]) -> list[Part]:
    """Return the parts that names stand for.

    Args:
        checkpoint: The checkpoint.
        wanted: Names of parts, or what they are for (``model``, ``optimizer``); ``all``, or nothing, for all.

    Raises:
        UsageError: There is no such part.
    """
    if not wanted or ALL_PARTS in wanted:
        return list(checkpoint.parts)
    chosen: dict[int, Part] = {}
    for name in wanted:
        named = [part for part in checkpoint.parts if name in (part.name, part.folder or None)]
        found = named or [part for part in checkpoint.parts if part.role.value == name]
        if not found:
            names = ", ".join(dict.fromkeys([*(part.role.value for part in checkpoint.parts), *_names(checkpoint)]))
            raise UsageError(f"there is no part `{name}`", hint=f"choose among: {names}, all")
        chosen |= {id(part): part for part in found}
    return [part for part in checkpoint.parts if id(part) in chosen]


def _names(checkpoint: Checkpoint) -> Iterator[str]:
    return (part.name for part in checkpoint.parts)


def find_belonging(checkpoint: Checkpoint, parts: Sequence[Part], *, is_file: bool = False) -> Belonging:
    """Return the files that make up some parts of a checkpoint.

    A manifest of ours lists all files, so it goes with all parts only: with some, it would say that files are missing.

    Args:
        checkpoint: The checkpoint.
        parts: Those that were chosen.
        is_file: The checkpoint is a single file in a folder that is somebody else's.
    """
    store = LocalStore(checkpoint.roots)
    every = {file for part in checkpoint.parts for file in part.files}
    is_whole = len(parts) == len(checkpoint.parts)
    wanted = list(dict.fromkeys(file for part in parts for file in part.files))
    if not is_file:
        beside = [*checkpoint.side_files, *_beside(store, parts, every)]
        has_model = any(part.role is Role.MODEL for part in parts)
        wanted += [file for file in beside if has_model or not _describes_model(file)]
        if is_whole:
            wanted += _of_manifest(store)
    files = {}
    for file in sorted(dict.fromkeys(wanted)):
        size = store.size(file)
        if size is not None:
            files[file] = size
    others = [] if is_file else [name for name in _names_in(store, "") if name not in files and name not in every]
    store.close()
    return Belonging(files=files, all_files=frozenset(every | files.keys()), is_whole=is_whole, left_out=others[:1000])


def _of_manifest(store: LocalStore) -> list[str]:
    with suppress(CorruptCheckpoint):  # a validation says so
        manifest = manifest_of(store)
        if manifest is not None and store.size(MANIFEST) is not None:
            return [MANIFEST, *manifest.files]
    return []


def _describes_model(file: str) -> bool:
    base = file.rpartition("/")[2]
    return SIDE_FILES.fullmatch(base) is not None or base.endswith(".index.json")


def _beside(store: LocalStore, parts: Sequence[Part], taken: set[str]) -> Iterator[str]:
    """Yield what describes the checkpoint: in its folder, and in those of the parts."""
    folders = dict.fromkeys(["", *(os.path.dirname(file) for part in parts for file in part.files)])
    for folder in folders:
        for place in (folder, *(f"{folder}/{inner}".lstrip("/") for inner in _INNER)):
            for name in _names_in(store, place):
                base = name.rpartition("/")[2]
                if name in taken or name == MANIFEST or not _may_go(base):
                    continue
                with suppress(CorruptCheckpoint):  # a link that leads out
                    size = store.size(name)
                    if size is not None and size <= (_JSON_BYTES if base.endswith(".json") else _SMALL_BYTES):
                        yield name


def _may_go(base: str) -> bool:
    """Tell whether a name is one that describes a checkpoint, rather than somebody's keys."""
    if SIDE_FILES.fullmatch(base) is not None:
        return True
    return _DESCRIBING.fullmatch(base) is not None and _SECRET.fullmatch(base) is None


def _names_in(store: LocalStore, folder: str) -> Iterable[str]:
    """Return names of the files in one folder of the first root, sorted."""
    place = store.root / folder if folder else store.root
    if not place.is_dir() or (place.is_symlink() and folder):
        return []
    prefix = f"{folder}/" if folder else ""
    with os.scandir(place) as entries:
        return sorted(prefix + entry.name for entry in entries if entry.is_file())


def foreign_names(names: Iterable[str]) -> list[str]:
    """Return the names, of those in a folder, that no checkpoint has: replacing the folder would take them away."""
    own = (_WEIGHTS, SIDE_FILES, _DESCRIBING)
    return [name for name in names if name not in _INNER and not any(one.fullmatch(name) for one in own)]
