"""Delete the source of a merge, after the result was read back and compared."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_ckpt.catalog import Checkpoint, Part
from fsdp_ckpt.errors import ChecksumMismatch, NotPermitted, UsageError
from fsdp_ckpt.layouts.nodes import demand_equal_copies
from fsdp_ckpt.ops.merge_plan import MergePlan
from fsdp_ckpt.run.checksum import checksum_range
from fsdp_ckpt.run.engine import OutputSpec
from fsdp_ckpt.store.local import LocalFile, LocalStore
from fsdp_ckpt.store.remote.mirrors import mirror_of

__all__ = ["check_removable", "refuse_remote", "refuse_unnamed", "remove_source", "verify_output"]


def check_removable(plan: MergePlan, destination: Path) -> None:
    """Refuse to promise a removal that would take more than the merged part with it.

    Raises:
        UsageError: Something would be lost: tensors that were left out, objects, other parts in the same files, or the
            destination itself.
        Incompatible: A file that two nodes have is not the same in both: the one that was not read would be lost.
    """
    checkpoint, part = plan.checkpoint, plan.part
    refuse_remote(checkpoint)
    if plan.selection.excluded or part.objects:
        what = (
            f"{len(plan.selection.excluded)} excluded tensors"
            if plan.selection.excluded
            else "values that are no tensors"
        )
        raise UsageError(f"--remove-source: {what} would be lost", hint="merge without --remove-source")
    others = [other.name for other in checkpoint.parts if other is not part and other.files.keys() & part.files.keys()]
    if others:
        raise UsageError(
            f"--remove-source: the files of {part.name} also hold {', '.join(others)}",
            hint="merge without --remove-source",
        )
    if any((root / part.folder).resolve() in destination.parents for root in checkpoint.roots):
        raise UsageError("--remove-source: the destination lies in the folder that would be removed")
    store = LocalStore(checkpoint.roots)
    for file in part.files:
        demand_equal_copies(store, file)


def refuse_remote(checkpoint: Checkpoint) -> None:
    """Refuse to promise the removal of what is not on a local disk.

    Raises:
        UsageError: It is not.
    """
    if any(mirror_of(root) is not None for root in checkpoint.roots):
        raise UsageError("--remove-source is for local checkpoints", hint="remove it with the tools of its store")


def verify_output(destination: Path, specs: Sequence[OutputSpec], crcs: Mapping[str, Mapping[str, int]]) -> None:
    """Read every tensor of the result and compare its CRC-32 with what was written.

    Raises:
        ChecksumMismatch: They differ; the source must be kept.
    """
    for spec in specs:
        fd = os.open(destination / spec.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for name, (start, stop) in spec.ranges.items():
                if checksum_range(LocalFile(fd), start, stop) != crcs[spec.name][name]:
                    raise ChecksumMismatch(
                        f"`{name}` in {destination / spec.name} is not what was written; the source was kept",
                        hint=f"fsdp-ckpt validate {shlex.quote(str(destination))} --deep    (the disk may be failing)",
                    )
        finally:
            os.close(fd)


def refuse_unnamed(checkpoint: Checkpoint, *, hint: str, out: str) -> None:
    """Refuse to promise the removal of a checkpoint that was chosen in a folder above it.

    Args:
        checkpoint: The source.
        hint: The command that was typed.
        out: The destination, likewise.

    Raises:
        UsageError: It was.
    """
    root = checkpoint.root
    if checkpoint.chosen is not None and os.path.realpath(checkpoint.chosen) != os.path.realpath(root):
        raise UsageError(
            f"--remove-source: `{checkpoint.chosen}` is a folder above the checkpoint that is read, `{root}`",
            hint=f"{hint} {shlex.join([*map(str, checkpoint.roots), out])} --remove-source",
        )


def remove_source(checkpoint: Checkpoint, parts: Sequence[Part], *, destination: Path) -> None:
    """Delete the files of parts, and their folders when nothing else is in them; on all nodes.

    Args:
        checkpoint: The source.
        parts: What of it was written.
        destination: The result, for messages.

    Raises:
        NotPermitted: Some of it could not be deleted; the rest is gone.
    """
    kept: list[OSError] = []
    for root in checkpoint.roots:
        for part in parts:
            try:
                _remove(root, part)
            except OSError as error:
                error.filename = error.filename or root / part.folder
                kept.append(error)
    if kept:
        raise NotPermitted(
            f"`{destination}` is whole, and was read back and compared; but `{os.fspath(kept[0].filename)}` could not "
            f"be removed: {kept[0].strerror}",
            hint=f"remove what is left of {shlex.join(map(str, checkpoint.roots))} yourself; it is not needed any more",
        )


def _remove(root: Path, part: Part) -> None:
    folder = root / part.folder
    if not folder.is_dir():
        return
    names = {file.rpartition("/")[2] for file in part.files}
    owned = part.folder == "" or part.dialect == "dcp"
    entries = set(os.listdir(folder))
    if owned and entries - names <= {".metadata.tmp"} | {name for name in entries if name.endswith(".distcp")}:
        shutil.rmtree(folder.resolve())
        if folder.is_symlink():
            folder.unlink()
        return
    for file in part.files:
        if os.path.lexists(root / file):
            (root / file).unlink()
