"""Checks before the first byte is written: is the destination free, and is there room?"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from fsdp_ckpt.catalog import Checkpoint
from fsdp_ckpt.errors import DestinationExists, NotEnoughSpace, UsageError
from fsdp_ckpt.layouts.composite import SIDE_FILES
from fsdp_ckpt.store.leftovers import is_staging, leftovers
from fsdp_ckpt.units import format_size

__all__ = ["check_destination", "check_space"]

_WEIGHTS = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
_CHECKPOINT = re.compile(
    r"\.metadata|__\d+_\d+\.distcp|pytorch_model_fsdp(_\d+)?(\.bin)?|optimizer(_\d+)?(\.bin)?|scheduler(_\d+)?\.(bin|pt)"
    r"|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|adapter_model\.safetensors|trainer_state\.json"
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
    command: str = "merge",
    replaces_checkpoints: bool = False,
) -> None:
    """Refuse a destination that is in the way or would destroy something.

    Args:
        destination: The folder to make, links resolved.
        checkpoint: The source.
        sources: As the user typed them.
        out: Likewise.
        overwrite: Whether an earlier result may be replaced.
        into: Whether the folder may have files of its own.
        command: The command that was typed, for messages.
        replaces_checkpoints: Whether an earlier result may be a training checkpoint.

    Raises:
        UsageError: It is a file name, or lies within the source, or around it.
        DestinationExists: It has content that may not be replaced.
    """
    quoted = f"fsdp-ckpt {command} {shlex.join(sources)}"
    other = f"-{command}{'d' if command.endswith('e') else 'ed'}"
    if "://" in out:
        raise UsageError(f"`{out}` is not a local folder", hint=f"{quoted} FOLDER")
    if destination.suffix in (".safetensors", ".bin", ".pt") and not destination.is_dir():
        folder = shlex.quote(str(Path(out).parent / Path(out).stem))
        raise UsageError(f"`{out}` looks like a file; the output is a folder", hint=f"{quoted} {folder}")
    roots = [root.resolve() for root in checkpoint.roots]
    if any(destination == root or (destination in root.parents and not into) for root in roots):
        raise UsageError(
            f"`{out}` holds the checkpoint itself", hint=f"{quoted} {shlex.quote(out.rstrip('/') + other)}"
        )
    if not destination.exists():
        return
    if not destination.is_dir():
        raise DestinationExists(f"`{out}` exists and is not a folder")
    names = sorted(entry.name for entry in destination.iterdir() if not is_staging(entry.name))
    if not names or into:
        return
    own = [_WEIGHTS, SIDE_FILES, *([_CHECKPOINT] if replaces_checkpoints else [])]
    foreign = [name for name in names if not any(pattern.fullmatch(name) for pattern in own)]
    elsewhere = f"{quoted} {shlex.quote(out.rstrip('/') + other)}"
    if overwrite and not foreign:
        return
    if foreign:
        more = "; --overwrite would replace the whole folder" if overwrite else ""
        raise DestinationExists(
            f"`{out}` holds `{foreign[0]}`, which is not part of a {command} result{more}", hint=elsewhere
        )
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    raise DestinationExists(
        f"`{out}` is not empty: it holds {shown}",
        hint=f"{quoted} {shlex.quote(out)} --overwrite    (replaces it in one step)",
    )


def check_space(destination: Path, needed_bytes: int, num_files: int) -> int | None:
    """Return the free bytes at the destination, None where they cannot be told.

    Raises:
        NotEnoughSpace: Bytes or inodes do not suffice.
    """
    place = destination
    while not place.exists():
        place = place.parent
    try:
        status = os.statvfs(place)
    except OSError:
        return None
    free = status.f_bavail * status.f_frsize + sum(map(_allocated, leftovers(destination)))
    if needed_bytes > free:
        raise NotEnoughSpace(
            f"the result needs {format_size(needed_bytes)}, {format_size(free)} are free at `{place}`",
            hint="choose a destination on another disk, or --dtype bfloat16 for a float32 checkpoint",
        )
    if status.f_files and status.f_favail < num_files + 8:
        raise NotEnoughSpace(f"`{place}` has only {status.f_favail} inodes left; nothing was written")
    return free


def _allocated(folder: Path) -> int:
    """Return the bytes that the files of an unfinished result take: they are taken up again, or removed."""
    return sum(entry.stat().st_blocks * 512 for entry in folder.rglob("*") if entry.is_file())
