"""Folders for temporary files that may be large: what a process leaves that is killed, a later one removes."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from fsdp_ckpt.store.leftovers import LOCK, NO_LOCKS, is_at, open_lock, remove_if_idle

__all__ = ["make_temporary", "remove_temporary"]

_PREFIX = "fsdp-ckpt-"
_KINDS = ("mirror", "save")
_locks: dict[Path, int] = {}
_owners: dict[Path, int] = {}
"""Which process made a folder: those that it forks read in it, and leave it alone."""


def make_temporary(kind: str) -> Path:
    """Make a folder in the system's folder for temporary files, or in that of TMPDIR.

    Args:
        kind: ``mirror`` or ``save``.

    Returns:
        Its path, links resolved. There is a lock in it, of the name ``leftovers.LOCK``.
    """
    assert kind in _KINDS
    _remove_old(tempfile.gettempdir())
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-")).resolve()
        try:
            lock = open_lock(folder)
        except FileNotFoundError:  # another process took it for a dead one's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(lock)
                continue
        if is_at(lock, folder / LOCK):
            _locks[folder] = lock
            _owners[folder] = os.getpid()
            return folder
        os.close(lock)


def remove_temporary(folder: Path) -> None:
    """Remove such a folder; one that is gone is none too few, and one of the process that forked this one stays."""
    if _owners.pop(folder, os.getpid()) != os.getpid():
        _locks.pop(folder, None)
        return
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


@functools.cache
def _remove_old(parent: str) -> None:
    """Remove what dead processes of this user have left; once per process, as a killed job begins anew in others."""
    prefixes = tuple(f"{_PREFIX}{kind}-" for kind in _KINDS)
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if not entry.name.startswith(prefixes) or not entry.is_dir(follow_symlinks=False):
                continue
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    remove_if_idle(Path(entry.path))
