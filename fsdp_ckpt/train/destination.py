"""Where one may save: to local paths, over a checkpoint, and never over anything else."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fsdp_ckpt.errors import DestinationExists, MalformedFile, UsageError
from fsdp_ckpt.layouts.composite import SIDE_FILES, looks_composite
from fsdp_ckpt.layouts.manifest import MANIFEST, read_manifest
from fsdp_ckpt.store.leftovers import is_backup, is_staging
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.remote.mirrors import mirror_of

__all__ = ["check_replaceable", "check_replaceable_model", "is_part_name", "local_path"]


_STEMS = (
    "pytorch_model", "model", "optimizer", "scheduler", "sampler", "dl_state", "scaler.", "random_states_",
    "custom_checkpoint_",
)  # fmt: skip
"""What the names of parts begin with, see accelerate/utils/constants.py."""

_HUB = re.compile(r"README\.md|\.gitattributes|LICENSE(\.\w+)?")
"""What the Hub puts beside them."""

_WEIGHTS = re.compile(r"(.*\.safetensors|pytorch_model.*\.bin)(\.index\.json)?")
"""Weights in a model folder, and their index."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path, without ``file://``.

    Raises:
        UsageError: It is a URL; pathlib would make a local folder called ``gs:`` of it.
    """
    text = os.fspath(path).removeprefix("file://")
    if not text:
        raise UsageError("the path is empty")
    if "://" in text:
        raise UsageError(f"`{text}` is no local path", hint="save to a local or mounted folder")
    return Path(text)


def check_replaceable(destination: Path, *, overwrite: bool) -> None:
    """Make sure that nothing but a checkpoint, or nothing at all, would be replaced.

    A folder with our manifest may hold nothing that the manifest does not list; one without has to be laid out like
    Accelerate's, and nothing else may be in it.

    Raises:
        DestinationExists: Something else is there, or ``overwrite`` is off.
    """
    if not destination.exists() and not destination.is_symlink():
        return
    if not destination.is_dir():
        raise DestinationExists(f"`{destination}` is a file", hint="save to a folder")
    folder = Folder(LocalStore(destination))
    if not _names(folder):
        return
    if not overwrite:
        how = "" if mirror_of(destination) else " in one step"
        raise DestinationExists(f"`{destination}` exists", hint=f"pass overwrite=True to replace it{how}")
    stranger = _stranger(folder)
    if stranger is not None:
        raise DestinationExists(
            f"`{destination}` holds `{stranger}`, which is no part of a checkpoint: it will not be replaced",
            hint=f"save to a folder of its own, such as {destination / 'step-1'}",
        )


def check_replaceable_model(destination: Path, *, overwrite: bool) -> None:
    """Make sure that nothing but a model folder, or nothing at all, would be replaced.

    Raises:
        DestinationExists: Something else is there, or ``overwrite`` is off.
    """
    if not destination.exists() and not destination.is_symlink():
        return
    if not destination.is_dir():
        raise DestinationExists(f"`{destination}` is a file", hint="save to a folder")
    names = _names(Folder(LocalStore(destination)))
    if names and not overwrite:
        raise DestinationExists(f"`{destination}` is not empty", hint="pass overwrite=True, or another folder")
    stranger = next((name for name in names if not _is_model_file(destination / name)), None)
    if stranger is not None:
        raise DestinationExists(
            f"`{destination}` holds `{stranger}`, which is no part of a model folder: it will not be replaced",
            hint=f"save to a folder of its own, such as {destination / 'model'}",
        )


def _is_model_file(path: Path) -> bool:
    is_known = SIDE_FILES.fullmatch(path.name) or _WEIGHTS.fullmatch(path.name) or _HUB.fullmatch(path.name)
    return is_known is not None and path.is_file() and not path.is_symlink()


def _stranger(folder: Folder) -> str | None:
    """Return a name in the folder that saving there would destroy for good; None when there is none."""
    names = _names(folder)
    try:
        manifest = read_manifest(folder)
    except MalformedFile as error:
        raise DestinationExists(
            f"`{folder.path}` holds a manifest that cannot be read, so what would be replaced is not known: {error}",
            hint=f"fsdp-ckpt inspect {folder.path}; save to another folder, or move this one away",
        ) from None
    if manifest is not None:
        parts = {path.partition("/")[0] for path in manifest.files if "/" in path}
        known = {*manifest.files, *parts, MANIFEST}
        names += [f"{part}/{name}" for part in sorted(parts & folder.folders) for name in _names(folder.sub(part))]
        return next((name for name in names if name not in known), None)
    if not looks_composite(folder):
        return names[0]
    return next((name for name in names if not is_part_name(name)), None)


def _names(folder: Folder) -> list[str]:
    """Return what is in a folder: files, folders, then links to nothing, pipes and the like.

    What a repair has kept of an earlier state is nobody's part, and goes with the checkpoint.
    """
    others = set(os.listdir(folder.path)) - folder.files.keys() - set(folder.folders)
    names = (*folder.files, *folder.folders, *sorted(others))
    return [name for name in names if not is_staging(name) and not is_backup(name)]


def is_part_name(name: str) -> bool:
    """Tell whether a name in a checkpoint is that of a model, an optimizer or the like."""
    return name.startswith(_STEMS)
