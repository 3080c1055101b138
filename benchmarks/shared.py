"""Merge a checkpoint of our own writer on a file system that can share blocks, beside a copy of it."""

import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cases import TOOL, Case, Settings
from benchmarks.compare import Comparison, compare
from benchmarks.inputs import FOLDER_NAME, checkpoint_input
from benchmarks.llama import Llama
from benchmarks.measure import Command
from fsdp_ckpt.units import format_size

__all__ = ["COPY", "KINDS", "MERGE", "play"]

KINDS = {"shared-xfs": "xfs", "shared-btrfs": "btrfs"}
"""File system by name of its case."""

COPY, MERGE = "cp -r --reflink=never", "fsdp-ckpt merge, blocks shared"
_ROOM = 4


def play(name: str, settings: Settings, *, log: Path, tell: Callable[[str], None]) -> Comparison | None:
    """Run one case; None where such a file system cannot be mounted (that needs root and its mkfs)."""
    kind, model = KINDS[name], Llama.fit(settings.size_bytes // 2)
    payload = 2 * model.num_elements
    with _disk(kind, settings.work, _ROOM * payload) as disk:
        if disk is None:
            tell(f"{name}: not measured, as {kind} cannot be mounted here")
            return None
        source, copied, merged = disk / "source", disk / "copied", disk / "merged"
        part = str(source / FOLDER_NAME)
        case = Case(
            title=f"Merge {format_size(payload)} that our writer saved, on {kind} in a file",
            inputs=(checkpoint_input(source, model, "bfloat16", ours=True),),
            commands=(
                Command(name=COPY, argv=("cp", "-r", "--reflink=never", part, str(copied)), output=copied),
                Command(name=MERGE, argv=(TOOL, "merge", part, str(merged / "out")), output=merged),
            ),
            ratios=((MERGE, COPY),),
            rounds=settings.rounds,
            payload_bytes=payload,
        )
        taken = 0

        def measure() -> None:
            nonlocal taken
            before = _used(disk)
            subprocess.run([TOOL, "merge", part, str(disk / "once")], check=True, capture_output=True, timeout=300)
            taken = _used(disk) - before
            shutil.rmtree(disk / "once")

        found = compare(case, log=log, tell=tell, before_inputs_go=measure)
        return dataclasses.replace(found, disk_bytes=taken)


def _used(disk: Path) -> int:
    """Return the bytes in use, once they no longer change: file systems free blocks in the background."""
    before = -1
    for _ in range(40):
        os.sync()
        status = os.statvfs(disk)
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        if used == before:
            break
        before = used
        time.sleep(1)
    return used


@contextmanager
def _disk(kind: str, work: Path, num_bytes: int) -> Iterator[Path | None]:
    """Lend a new file system in a sparse file; None where that cannot be."""
    make = shutil.which(f"mkfs.{kind}") or shutil.which(f"mkfs.{kind}", path="/usr/sbin:/sbin")
    image, folder = work / f"{kind}.image", work / kind
    if make is None or os.getuid() != 0:
        yield None
        return
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(num_bytes)
    try:
        subprocess.run([make, str(image)], check=True, capture_output=True, timeout=60)
        mount = ["mount", "-o", "loop", str(image), str(folder)]
        if subprocess.run(mount, check=False, capture_output=True, timeout=60).returncode:
            yield None
            return
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True, timeout=120)
    finally:
        image.unlink()
