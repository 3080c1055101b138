"""Checks before the first byte is written: is the destination free, and is there room?"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from fsdp_ckpt.catalog import Checkpoint
from fsdp_ckpt.errors import CorruptCheckpoint, DestinationExists, NotEnoughSpace, UsageError
from fsdp_ckpt.layouts.composite import SIDE_FILES
from fsdp_ckpt.layouts.manifest import read_manifest
from fsdp_ckpt.ops.destination import is_unfinished, place_in_words, target_of
from fsdp_ckpt.store.leftovers import is_staging, leftovers
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.remote.urls import is_url, local_path
from fsdp_ckpt.units import format_size

__all__ = ["check_destination", "check_space"]

_FILE_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
_CHECKPOINT = re.compile(
    r"\.metadata|__\d+_\d+\.distcp|pytorch_model_fsdp(_\d+)?(\.bin)?|optimizer(_\d+)?(\.bin)?|scheduler(_\d+)?\.(bin|pt)"
    r"|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|adapter_model\.safetensors|trainer_state\.json|fsdp_ckpt\.json"
    r"|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin|dl_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|scaler\.pt|meta\.pt"
    r"|training_args\.bin|recipe_state\.pt"
)
"""What a conversion to a training checkpoint makes, which another one may replace when it is told to."""


def check_destination(
    destination: Path,
    checkpoint: Checkpoint,
    *,
    sources: Sequence[str],
    out: str,
    overwrite: bool,
    into: bool = False,
    resume: bool = False,
    command: str = "merge",
    replaces_checkpoints: bool = False,
    writes: Collection[str] = (),
) -> None:
    """Refuse a destination that is in the way or would destroy something.

    Args:
        destination: The folder to make, links resolved.
        checkpoint: The source.
        sources: As the user typed them.
        out: Likewise.
        overwrite: Whether an earlier result may be replaced.
        into: Whether the folder may have files of its own.
        resume: Whether an unfinished result at a URL may be taken up.
        command: The command that was typed, with options it cannot do without, for messages.
        replaces_checkpoints: Whether an earlier result may be a training checkpoint.
        writes: Files that will be written; those of the same names may be replaced.

    Raises:
        UsageError: It is a file name, no name, or lies within the source, or around it.
        DestinationExists: It has content that may not be replaced.
    """
    quoted = f"fsdp-ckpt {command} {shlex.join(sources)}"
    verb = command.partition(" ")[0]
    other = f"-{verb}{'d' if verb.endswith('e') else 'ed'}"
    if not out:
        raise UsageError("the output folder has no name", hint=f"{quoted} OUT")
    elsewhere = f"{quoted} {shlex.quote(_beside(destination, out, other))}"
    if destination.suffix in (".safetensors", ".bin", ".pt") and not destination.is_dir():
        folder = shlex.quote(out.rstrip("/").removesuffix(destination.suffix))
        raise UsageError(f"`{out}` looks like a file; the output is a folder", hint=f"{quoted} {folder}")
    place, roots = place_in_words(destination), [place_in_words(root) for root in checkpoint.roots]
    if any(place == root or (place in root.parents and not into) for root in roots):
        raise UsageError(f"`{out}` holds the checkpoint itself", hint=elsewhere)
    if not into and any(root in place.parents for root in roots) and not any(map(_is_file, sources)):
        aside = shlex.quote(f"{roots[0]}{other}")
        raise UsageError(f"`{out}` lies within the checkpoint itself", hint=f"{quoted} {aside}")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise DestinationExists(f"`{out}` exists and is not a folder", hint=elsewhere)
    names = sorted(entry.name for entry in destination.iterdir() if not is_staging(entry.name))
    if not names or into:
        return
    own = [_WEIGHTS, SIDE_FILES, *([_CHECKPOINT] if replaces_checkpoints else [])]
    known = {name.partition("/")[0] for name in writes} | (_in_manifest(destination) if replaces_checkpoints else set())
    foreign = [name for name in names if name not in known and not any(pattern.fullmatch(name) for pattern in own)]
    unfinished = is_unfinished(destination)
    if (overwrite or (resume and unfinished)) and not foreign:
        return
    if foreign:
        more = "; --overwrite would replace the whole folder" if overwrite else ""
        raise DestinationExists(
            f"`{out}` holds `{foreign[0]}`, which is not part of a {verb} result{more}", hint=elsewhere
        )
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    if unfinished:
        raise DestinationExists(
            f"`{out}` holds what an interrupted run left: {shown}",
            hint=f"{quoted} {shlex.quote(out)} --resume, or --overwrite to begin anew",
        )
    target = target_of(destination)
    in_one_step = target is None or target.scheme == "hf"
    how = "replaces it in one step" if in_one_step else "not in one step: it stops being complete at the start"
    raise DestinationExists(
        f"`{out}` is not empty: it holds {shown}", hint=f"{quoted} {shlex.quote(out)} --overwrite    ({how})"
    )


def _beside(destination: Path, out: str, suffix: str) -> str:
    """Return a destination that is not in the way, as it is typed."""
    if is_url(out) or Path(out).name not in ("", ".."):
        return out.rstrip("/") + suffix
    return os.path.normpath(os.path.join(out, "..", (destination.name or "OUT") + suffix))  # it is `.`, or the like


def _is_file(source: str) -> bool:
    return source.endswith(_FILE_ENDINGS) if is_url(source) else Path(local_path(source)).is_file()


def _in_manifest(folder: Path) -> set[str]:
    """Return what a manifest of ours lists in a folder, top-level names alone; nothing where there is none."""
    try:
        manifest = read_manifest(Folder(LocalStore(folder)))
    except CorruptCheckpoint:
        manifest = None
    return {name.partition("/")[0] for name in manifest.files} if manifest is not None else set()


def check_space(destination: Path, needed_bytes: int, num_files: int, *, casts: bool = True) -> int | None:
    """Return the free bytes at the destination, None where they cannot be told.

    Args:
        destination: The folder to make.
        needed_bytes: Bytes to write; for a URL, bytes that are on the local disk at a time.
        num_files: Files to write.
        casts: Whether the command has ``--dtype``, for messages.

    Raises:
        NotEnoughSpace: Bytes or inodes do not suffice.
    """
    target = target_of(destination)
    place = destination if target is None else target.top.parent
    while not place.exists():
        place = place.parent
    try:
        status = os.statvfs(place)
    except OSError:
        return None
    free = status.f_bavail * status.f_frsize + sum(map(_allocated, leftovers(destination)))
    if needed_bytes > free and target is not None:
        raise NotEnoughSpace(
            f"files on their way to `{target.url}` need {format_size(needed_bytes)} here, {format_size(free)} are free "
            f"at `{place}`",
            hint="set TMPDIR to a folder on a larger disk"
            + ("" if target.scheme == "hf" else ", or take smaller files or fewer --jobs at a time"),
        )
    if needed_bytes > free:
        raise NotEnoughSpace(
            f"the result needs {format_size(needed_bytes)}, {format_size(free)} are free at `{place}`",
            hint="choose a destination on another disk"
            + (", or --dtype bfloat16 for a float32 checkpoint" if casts else ""),
        )
    if status.f_files and status.f_favail < num_files + 8:
        raise NotEnoughSpace(f"`{place}` has only {status.f_favail} inodes left; nothing was written")
    return free


def _allocated(folder: Path) -> int:
    """Return the bytes that the files of an unfinished result take: they are taken up again, or removed."""
    return sum(entry.stat().st_blocks * 512 for entry in folder.rglob("*") if entry.is_file())
