"""Where one may save: to local paths, over a checkpoint, and never over anything else."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp_ckpt.errors import DestinationExists, UsageError
from fsdp_ckpt.layouts.composite import looks_composite
from fsdp_ckpt.layouts.manifest import MANIFEST, read_manifest
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.publish import is_staging

__all__ = ["check_replaceable", "local_path"]


_STEMS = (
    "pytorch_model", "model", "optimizer", "scheduler", "sampler", "dl_state", "scaler.", "random_states_",
    "custom_checkpoint_",
)  # fmt: skip
"""What the names of parts begin with, see accelerate/utils/constants.py."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path, without ``file://``.

    Raises:
        UsageError: It is a URL; pathlib would make a local folder called ``gs:`` of it.
    """
    text = os.fspath(path).removeprefix("file://")
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
        raise DestinationExists(f"`{destination}` exists", hint="pass overwrite=True to replace it in one step")
    stranger = _stranger(folder)
    if stranger is not None:
        raise DestinationExists(
            f"`{destination}` holds `{stranger}`, which is no part of a checkpoint: it will not be replaced",
            hint=f"save to a folder of its own, such as {destination / 'step-1'}",
        )


def _stranger(folder: Folder) -> str | None:
    """Return a name in the folder that saving there would destroy for good; None when there is none."""
    names = _names(folder)
    manifest = read_manifest(folder)
    if manifest is not None:
        parts = {path.partition("/")[0] for path in manifest.files if "/" in path}
        known = {*manifest.files, *parts, MANIFEST}
        names += [f"{part}/{name}" for part in sorted(parts & folder.folders) for name in _names(folder.sub(part))]
        return next((name for name in names if name not in known), None)
    if not looks_composite(folder):
        return names[0]
    return next((name for name in names if not _is_part(name)), None)


def _names(folder: Folder) -> list[str]:
    """Return what is in a folder: files, folders, then links to nothing, pipes and the like."""
    others = set(os.listdir(folder.path)) - folder.files.keys() - set(folder.folders)
    return [name for name in (*folder.files, *folder.folders, *sorted(others)) if not is_staging(name)]


def _is_part(name: str) -> bool:
    return name.startswith(_STEMS)
