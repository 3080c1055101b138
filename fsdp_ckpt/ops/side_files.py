"""Find what a model folder needs beside its weights: config, tokenizer, generation settings."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_ckpt.errors import MalformedFile
from fsdp_ckpt.layouts.composite import SIDE_FILES
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.store.remote.mirrors import materialise

__all__ = ["SideFiles", "find_side_files", "load_config"]

_MAX_BYTES = 200_000_000
_MAX_CONFIG_BYTES = 4_000_000
_STEP_FOLDER = re.compile(
    r"(checkpoint|step|global_step|iter|epoch)[-_]?\d+|pytorch_model.*|actor|sharded|dcp", re.IGNORECASE
)
_WANTED = ("config.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFiles:
    """Files to copy, by name, and the names of important ones that were not found.

    Attributes:
        files: Path by name.
        missing: Of config.json and tokenizer_config.json.
        config: The parsed config.json; empty without one.
    """

    files: Mapping[str, Path] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


def find_side_files(*sources: Path) -> SideFiles:
    """Look in a folder, beside it, and above it while folders are named like steps or parts; the nearest file wins.

    Args:
        *sources: The folder, on each node that has it; of files that are equally near, the first one is taken.
    """
    found: dict[str, Path] = {}
    for folder in itertools.chain.from_iterable(itertools.zip_longest(*map(_places, sources))):
        for name, path in _candidates(folder) if folder is not None else ():
            if name not in found and (name != "config.json" or _is_model_config(path)):
                found[name] = path
    config = load_config(found["config.json"]) if "config.json" in found else {}
    return SideFiles(files=found, missing=tuple(name for name in _WANTED if name not in found), config=config)


def _candidates(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield files of a folder by their names; links that lead out of it are left alone."""
    if not folder.is_dir():
        return
    store = LocalStore(folder)
    for name in sorted(os.listdir(folder)):
        if SIDE_FILES.fullmatch(name):
            try:
                size = store.size(name)
            except MalformedFile:
                continue
            if size is not None and size <= (_MAX_CONFIG_BYTES if name == "config.json" else _MAX_BYTES):
                yield name, Path(store.path(name))


def _places(source: Path) -> Iterator[Path]:
    here = source.resolve()
    yield here
    yield here / "huggingface"
    while _STEP_FOLDER.fullmatch(here.name):
        here = here.parent
        yield here
        yield here / "huggingface"


def _is_model_config(path: Path) -> bool:
    config = load_config(path)
    return bool({"model_type", "architectures", "auto_map", "hidden_size", "tie_word_embeddings"} & config.keys())


def load_config(path: Path) -> dict[str, Any]:
    """Return what a JSON file says; nothing where it is no object."""
    try:
        value = json.loads(materialise(path).read_bytes())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
