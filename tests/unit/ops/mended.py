"""The way of every repair: said first, done, judged from outside, found whole, and undone to the last byte."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp_ckpt.layouts.manifest import MANIFEST, read_manifest, write_manifest
from fsdp_ckpt.ops.repair import RepairReport, repair
from fsdp_ckpt.store.leftovers import staging_name
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.publish import place_identity
from tests.build import assert_same
from tests.cli.tool import snapshot
from tests.compat.judges import read_with_torch

Tree = dict[str, tuple[int, bytes | str]]


def tree(folder: Path) -> Tree:
    """Return kind and mode, and content, of everything below a folder; times do not count."""
    found: Tree = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            found[str(path.relative_to(folder))] = (mode, os.readlink(path))
        else:
            found[str(path.relative_to(folder))] = (mode, path.read_bytes() if path.is_file() else "")
    return found


def kinds(report: RepairReport) -> list[tuple[str, str, str]]:
    """Return kind, what is done, and file of all actions."""
    return [(action.kind.value, action.what, action.file) for action in report.actions]


def mend(folder: Path, judge: Callable[[Path], None], **options: Any) -> RepairReport:
    """Mend a checkpoint and check all that holds for every repair.

    Args:
        folder: A damaged checkpoint.
        judge: Raises when the folder is not what it should be after the repair.
        **options: Of ``repair``.

    Returns:
        What was said before anything was done.
    """
    before, old = snapshot(folder.parent), tree(folder)
    said = repair(folder, **options)
    assert snapshot(folder.parent) == before, "a dry run has changed something"
    assert said.actions
    assert not said.whole
    assert not said.applied

    done = repair(folder, apply=True, **options)
    assert done.applied
    assert done.whole, done.faults
    assert set(kinds(said)) <= set(kinds(done))
    judge(folder)
    assert not [name for name in os.listdir(folder.parent) if ".fsdp-ckpt-" in name]
    assert not [name for name in tree(folder) if name.endswith(".fsdp-ckpt-repair") and ".before-repair-" not in name]

    again = repair(folder, **options)
    assert kinds(again) == []
    assert again.whole

    _undo(done, folder, old)
    return said


def _undo(done: RepairReport, folder: Path, old: Tree) -> None:
    if not done.undo:  # nothing in it was changed
        assert done.backup is None
        return
    assert (done.backup is None) is (done.drop_backup is None)
    kept = folder.with_name(folder.name + "-mended")
    shutil.copytree(folder, kept, symlinks=True)
    for command in done.undo:
        subprocess.run(["bash", "-ec", command], check=True, timeout=20)
    assert tree(folder) == old, "the undo commands do not give the old folder"
    shutil.rmtree(folder)
    kept.rename(folder)


def unchanged(folder: Path, **options: Any) -> RepairReport:
    """Check that a repair is refused, with and without ``apply``, and leaves everything as it is."""
    before = tree(folder.parent)
    said = repair(folder, **options)
    done = repair(folder, apply=True, **options)
    assert tree(folder.parent) == before
    assert kinds(said) == kinds(done) == []
    assert said.faults
    assert [fault.why for fault in said.faults] == [fault.why for fault in done.faults]
    return said


def copy(source: Path, target: Path) -> Path:
    """Copy a checkpoint."""
    return Path(shutil.copytree(source, target))


def is_read(expected: dict[str, Tensor]) -> Callable[[Path], None]:
    """Return a judge: torch reads these tensors from the folder, bit by bit."""
    return lambda folder: assert_same(read_with_torch(folder), expected)


def moved_away(path: Path) -> Path:
    """Move a checkpoint away as a save does on a file system that cannot exchange two names."""
    return path.rename(path.with_name(staging_name(path.name, place_identity(path)) + ".old"))


def relist(path: Path, **changes: Any) -> None:
    """Change fields of our manifest."""
    manifest = read_manifest(Folder(LocalStore(path)))
    assert manifest is not None
    (path / MANIFEST).write_bytes(write_manifest(replace(manifest, **changes)))


def renamed(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return tensors with a prefix in front of their names."""
    return {prefix + key: value for key, value in tensors.items()}


_KILLED = """
import json, os, sys
from fsdp_ckpt.ops.repair import repair
path, options, left, within = json.loads(sys.argv[1])
real = os.replace
def replace(source, target):
    global left
    real(source, target)
    left -= (".before-repair-" in str(target)) is within
    if left == 0:
        os._exit(9)
os.replace = replace
repair(path, apply=True, **options)
"""


def killed(folder: Path, *, after: int, within_backup: bool = False, **options: Any) -> None:
    """Kill a repair once so many files have taken their names in the checkpoint, or in its backup."""
    given = {name: str(value) for name, value in options.items()}
    words = json.dumps([str(folder), given, after, within_backup])
    done = subprocess.run([sys.executable, "-c", _KILLED, words], timeout=60, check=False)
    assert done.returncode == 9
    for name in os.listdir(folder.parent):
        if ".fsdp-ckpt-" in name:  # the folder with the lock, which the next one would take over
            shutil.rmtree(folder.parent / name)
