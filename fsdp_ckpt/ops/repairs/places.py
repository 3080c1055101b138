"""From a path to the checkpoint that is to be mended, even where it has been moved away."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from fsdp_ckpt.errors import CheckpointNotFound, FsdpCkptError, UnknownLayout, UsageError
from fsdp_ckpt.layouts.composite import looks_composite, step_of
from fsdp_ckpt.layouts.dcp import looks_like_dcp
from fsdp_ckpt.layouts.frameworks import looks_nested
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.layouts.registry import list_checkpoints
from fsdp_ckpt.store.leftovers import leftovers
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["Place", "find_other", "find_place"]

_PARTS = ("pytorch_model", "optimizer", "sharded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a checkpoint is.

    Attributes:
        root: Its folder, links resolved; it may be gone, when a copy lies beside it.
        shown: What to call it in commands.
        chosen: What was given, where that was a folder above or below.
    """

    root: Path
    shown: str
    chosen: str | None = None


def find_place(path: str | os.PathLike[str]) -> Place:
    """Find the checkpoint that a path means.

    Raises:
        CheckpointNotFound: Nothing is there, nor anything that was moved away from there.
        UsageError: A URL, a file, or the folder of a run.
        UnknownLayout: A folder that holds no checkpoint.
    """
    text, local = _local(path)
    text = text.rstrip("/") or "/"
    if not local.exists():
        root = Path(os.path.realpath(local))
        if root.parent.is_dir() and any(left.suffix == ".old" for left in leftovers(root)):
            return Place(root=root, shown=text)
        raise CheckpointNotFound(
            f"`{text}` does not exist, and no run has left a copy of it beside",
            hint=f"ls -A {shlex.quote(_parent(local))}",
        )
    if not local.is_dir():
        raise UsageError(f"`{text}` is a file", hint=f"fsdp-ckpt repair {shlex.quote(_parent(local))}    (the folder)")
    root = Path(os.path.realpath(local))
    above = root.parent
    if root.name.startswith(_PARTS) and (above / MANIFEST).is_file():  # its manifest lists the part's files
        return Place(root=above, shown=_parent(Path(os.path.abspath(local))), chosen=text)
    folder = Folder(LocalStore(root))
    if _is_checkpoint(folder):
        return Place(root=root, shown=text)
    return _inner(folder, text)


def find_other(path: str | os.PathLike[str], place: Place, option: str) -> Path:
    """Return another checkpoint's folder, of the same level as the one that is to be mended.

    Args:
        path: What was given: a checkpoint, or the same part of it.
        place: The checkpoint that is to be mended.
        option: With what it was given.

    Raises:
        CheckpointNotFound: There is none.
        UsageError: A URL, or the checkpoint itself.
    """
    text, local = _local(path)
    if not local.is_dir():
        raise CheckpointNotFound(f"{option}: there is no folder `{text}`", hint=f"ls {shlex.quote(_parent(local))}")
    other = Path(os.path.realpath(local))
    if other != place.root and place.root.is_dir():
        levels = [looks_like_dcp(Folder(LocalStore(folder))) for folder in (place.root, other)]
        if levels == [True, False] and (other / place.root.name).is_dir():
            other = other / place.root.name
        elif levels == [False, True] and (place.root / other.name).is_dir():
            other = other.parent
    if other == place.root:
        raise UsageError(f"{option} is the checkpoint itself", hint="give another one")
    return other


def _local(path: str | os.PathLike[str]) -> tuple[str, Path]:
    text = os.fspath(path).removeprefix("file://")
    if not text or "://" in text:
        raise UsageError(f"`{text}` is no local folder", hint="copy the checkpoint to a local or mounted folder")
    return text, Path(text)


def _parent(path: Path) -> str:
    return str(path.parent)


def _is_checkpoint(folder: Folder) -> bool:
    return looks_like_dcp(folder) or looks_composite(folder) or looks_nested(folder)


def _inner(folder: Folder, text: str) -> Place:
    """Step into the one folder below that is a checkpoint; a run has several, one of which has to be named."""
    steps = [path for _, path in list_checkpoints(folder.path)]
    lost = [
        left.name
        for left in folder.path.iterdir()
        if left.suffix == ".old" and left.name.startswith(".") and left.is_dir() and ".fsdp-ckpt-" in left.name
    ]
    if steps or lost:
        name = lost[0][1:].rpartition(".fsdp-ckpt-")[0] if lost else steps[0].name
        raise UsageError(
            f"`{text}` is the folder of a run: name one checkpoint",
            hint=f"fsdp-ckpt list {shlex.quote(text)}; fsdp-ckpt repair {shlex.quote(os.path.join(text, name))}",
        )
    inner = [name for name in sorted(folder.folders) if not name.startswith(".") and _has_checkpoint(folder, name)]
    if len(inner) == 1:
        return Place(root=folder.path / inner[0], shown=os.path.join(text, inner[0]), chosen=text)
    if inner:
        raise UsageError(
            f"`{text}` holds several checkpoints: {', '.join(inner[:8])}",
            hint=f"fsdp-ckpt repair {shlex.quote(os.path.join(text, inner[0]))}",
        )
    names = ", ".join([*sorted(folder.folders), *folder.files][:8]) or "nothing"
    raise UnknownLayout(f"`{text}` is no checkpoint; it holds: {names}", hint=f"fsdp-ckpt inspect {shlex.quote(text)}")


def _has_checkpoint(folder: Folder, name: str) -> bool:
    below = folder.sub(name)
    try:
        return not (folder.path / name).is_symlink() and step_of(below) is None and _is_checkpoint(below)
    except FsdpCkptError:
        return False
