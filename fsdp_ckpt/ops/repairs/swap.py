"""What a save that died has left beside a checkpoint: the old one moved away, the new one unfinished."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from fsdp_ckpt.errors import DestinationExists, FsdpCkptError
from fsdp_ckpt.layouts.manifest import Manifest, read_manifest
from fsdp_ckpt.layouts.verdict import OWN_LAYOUT, State, judge
from fsdp_ckpt.ops.repairs.actions import Findings, Kind
from fsdp_ckpt.store.leftovers import (
    LOCK,
    NO_LOCKS,
    is_at,
    leftovers,
    open_lock,
    recover,
    remove_if_idle,
    staging_name,
)
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.publish import place_identity

__all__ = ["find_swap", "hold_place"]


def find_swap(destination: Path, findings: Findings, *, mine: Path | None = None) -> None:
    """Plan to put back what is missing, and to remove what nobody is at.

    Args:
        destination: The checkpoint, links resolved; it may be gone.
        findings: Where to.
        mine: The folder whose lock this process holds.
    """
    if not findings.wants(Kind.FINISH_SWAP):
        return
    found = list(leftovers(destination))
    old = [path for path in found if path.suffix == ".old"]
    is_gone = not destination.exists()
    if is_gone and old:
        if not _is_idle(old[0]):
            hint = "wait for it; then try again"
            findings.fault(str(old[0]), "another process is replacing the checkpoint at this moment", hint)
            return
        why = f"a run that replaced `{destination.name}` died halfway; this is the one that was there before"
        findings.run(Kind.FINISH_SWAP, "put back", old[0], why, partial(_put_back, destination))
        found.remove(old[0])
    if is_gone:
        for path in found:
            if path != mine:
                findings.note(f"`{path}` stays as long as nothing is at `{destination}`")
        return
    for path in found:
        _find_leftover(path, destination, findings, mine)


def _find_leftover(path: Path, destination: Path, findings: Findings, mine: Path | None) -> None:
    if path == mine and not _has_content(path):
        return
    if path != mine and not _is_idle(path):
        findings.note(f"`{path}` stays: a run is at it")
        return
    if any(path.glob(".*.done")):
        findings.note(f"`{path}` stays: a merge has finished files in it, and goes on with --resume")
        return
    if _is_newer(path, destination):
        findings.note(
            f"`{path}` stays: it is a complete save that is newer than `{destination.name}`, and was never put in its "
            f"place; to look at it: fsdp-ckpt inspect {shlex.quote(str(path))}"
        )
        return
    if judge(destination).state is not State.COMPLETE:
        findings.note(f"`{path}` stays until the checkpoint is whole: there may be something to save in it")
        return
    run = partial(_clear, path) if path == mine else partial(remove_if_idle, path)
    findings.run(Kind.FINISH_SWAP, "remove", path, "left by a save that died, or by one that replaced this one", run)


def _put_back(destination: Path) -> None:
    recover(destination)
    if not destination.exists():
        raise DestinationExists(
            f"`{destination}` could not be put back: another process is at it", hint="wait for it; then try again"
        )


def _clear(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _has_content(path: Path) -> bool:
    return any(entry.name != LOCK for entry in path.iterdir())


def _is_newer(path: Path, destination: Path) -> bool:
    """Tell whether a leftover is a whole checkpoint of ours, of a later save than the one in place."""
    if judge(path).layout != OWN_LAYOUT or judge(path).state is not State.COMPLETE:
        return False
    manifests = [_manifest(path), _manifest(destination)]
    return manifests[0] is not None and (manifests[1] is None or manifests[0].created > manifests[1].created)


def _manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(Folder(LocalStore(path)))
    except FsdpCkptError:
        return None


def _is_idle(path: Path) -> bool:
    """Tell whether no process holds the lock of a folder, without making one."""
    try:
        fd = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in NO_LOCKS
    finally:
        os.close(fd)
    return True


@contextmanager
def hold_place(destination: Path) -> Iterator[Path | None]:
    """Keep saves, and other repairs, away from a place for a while; yield the folder that holds the lock.

    It is the staging folder of saves to this place: its name is the same for all of them. None where no such folder
    can be made: saves cannot replace the checkpoint there, either.

    Raises:
        DestinationExists: Another process is writing to the place.
    """
    inside = destination.is_dir() and (os.path.ismount(destination) or not os.access(destination.parent, os.W_OK))
    owner = "" if inside else destination.name
    path = (destination if inside else destination.parent) / staging_name(owner, place_identity(destination))
    with suppress(FileExistsError):
        path.mkdir()
    busy = DestinationExists(
        f"another process is writing to `{destination}`: nothing was changed", hint="wait for it, or stop it"
    )
    if path.is_symlink():
        raise DestinationExists(f"`{path}` is a link; nothing was changed", hint=f"rm {shlex.quote(str(path))}")
    try:
        lock = open_lock(path)
    except FileNotFoundError:
        raise busy from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        if not is_at(lock, path / LOCK):
            raise busy
        try:
            yield path
        finally:
            if not _has_content(path):
                shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
