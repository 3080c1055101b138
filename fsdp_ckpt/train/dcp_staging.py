"""A folder of ``torch.distributed.checkpoint`` in the making: beside its destination, which it replaces in one step."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

from fsdp_ckpt.errors import DestinationExists, IncompleteCheckpoint
from fsdp_ckpt.store.leftovers import is_staging
from fsdp_ckpt.store.publish import Staging, place_identity
from fsdp_ckpt.store.syscalls import fsync_folder

__all__ = ["UnfinishedSave", "begin_save", "check_replaceable_dcp", "staging_candidates"]

_METADATA = ".metadata"
_HELD = "metadata.index.json"
"""Name of ``.metadata`` until everything else is in its place: ``Staging`` clears hidden files away, and moves an index
last."""

_OURS = re.compile(r"(__\d+)?\.metadata(\.tmp)?|\w*__\d+_\d+\.distcp")
_WAIT_S = 1.0
"""How long a thread that has finished its save may take to end."""


def check_replaceable_dcp(destination: Path, *, overwrite: bool) -> None:
    """Make sure that nothing but a folder of ``dcp.save``, or nothing at all, would be replaced.

    Such a folder holds ``.metadata`` and ``*.distcp`` files; a save that was cut off leaves some of them.

    Raises:
        DestinationExists: Something else is there, or ``overwrite`` is off.
    """
    if not destination.exists() and not destination.is_symlink():
        return
    if not destination.is_dir():
        raise DestinationExists(f"`{destination}` is a file", hint="save to a folder")
    names = sorted(name for name in os.listdir(destination) if not is_staging(name))
    if names and not overwrite:
        raise DestinationExists(f"`{destination}` exists", hint="pass overwrite=True to replace it in one step")
    for name in names:
        if not _OURS.fullmatch(name) or not (destination / name).is_file():
            raise DestinationExists(
                f"`{destination}` holds `{name}`, which dcp.save does not write: it will not be replaced",
                hint=f"save to a folder of its own, such as {destination / 'step-1'}",
            )


def staging_candidates(destination: Path) -> list[Path]:
    """Return where the folder in the making of a destination can lie: beside it, or in it (see ``Staging``)."""
    identity = place_identity(destination)
    return [
        destination.with_name(f".{destination.name}.fsdp-ckpt-{identity}"),
        destination / f"..fsdp-ckpt-{identity}",
    ]


def begin_save(destination: Path, *, overwrite: bool) -> UnfinishedSave:
    """Make the hidden folder for a save; what an earlier save of this process has left there is removed.

    Args:
        destination: The folder to publish, links resolved.
        overwrite: Whether a checkpoint there may be replaced.

    Raises:
        DestinationExists: Something else is there, or another save to it is under way.
    """
    old = _UNFINISHED.get(str(destination))
    if old is not None:
        if not old.is_over():
            raise DestinationExists(
                f"a save to `{destination}` is under way in another thread of this process",
                hint="wait for its future, or close() its writer",
            )
        old.discard()
    check_replaceable_dcp(destination, overwrite=overwrite)
    save = UnfinishedSave(destination, overwrite=overwrite)
    _UNFINISHED[str(destination)] = save
    return save


class UnfinishedSave:
    """The hidden folder of a save, and its lock; both go when nobody refers to it any more, or the process ends.

    torch tells a writer when a save has succeeded, and not when another rank has failed.

    Args:
        destination: The folder to publish, links resolved.
        overwrite: Whether a checkpoint there may be replaced.
    """

    def __init__(self, destination: Path, *, overwrite: bool) -> None:
        # One name for all saves to a place, those of save_state as well: the lock in it keeps two writers apart.
        self._staging = _Staging(destination, place_identity(destination), overwrite=overwrite)
        self._thread = threading.current_thread()
        self._discard = weakref.finalize(self, _discard, self._staging, os.getpid())

    @property
    def folder(self) -> Path:
        """Where ranks write."""
        return self._staging.path

    def is_over(self) -> bool:
        """Tell whether the thread that began this save is doing something else by now."""
        if self._thread is threading.current_thread():
            return True
        until = time.monotonic() + _WAIT_S
        while self._thread.is_alive() and time.monotonic() < until:  # join() is not for threads of other libraries
            time.sleep(0.01)
        return not self._thread.is_alive()

    def check_sizes(self, ends: Iterable[tuple[str, int]]) -> None:
        """Make sure that files are there and long enough.

        Args:
            ends: File name, and how many bytes it has at least.

        Raises:
            IncompleteCheckpoint: One is not: a rank wrote elsewhere, or somebody has been at the folder.
        """
        for name, end in ends:
            path = self.folder / name
            if not path.is_file() or path.stat().st_size < end:
                raise IncompleteCheckpoint(
                    f"`{path}` is not what a rank has written there; nothing was published",
                    hint="save to the same path on every rank, on a file system that all of them share",
                )

    def publish(self, metadata: bytes, *, durable: bool) -> None:
        """Add ``.metadata``, and put the folder in its place.

        Raises:
            DestinationExists: Something appeared at the destination in the meantime.
        """
        check_replaceable_dcp(self._staging.destination, overwrite=self._staging.overwrite)
        self._staging.add_file(_HELD, metadata, durable=durable)
        self._staging.is_durable = durable
        self._staging.publish(durable=durable)
        self._discard.detach()

    def discard(self) -> None:
        """Remove the folder, if that has not happened yet."""
        self._discard()


_UNFINISHED: weakref.WeakValueDictionary[str, UnfinishedSave] = weakref.WeakValueDictionary()
"""By destination. A failed save's writer often lives on, in the traceback of its exception."""


class _Staging(Staging):
    """Gives ``.metadata`` its name when all else is done."""

    is_durable = True

    def _rename(self) -> None:
        os.rename(self.path / _HELD, self.path / _METADATA)
        if self.is_durable:
            fsync_folder(self.path)
        super()._rename()

    def _move_up(self) -> None:
        super()._move_up()
        if self.is_durable:
            fsync_folder(self.destination)
        os.rename(self.destination / _HELD, self.destination / _METADATA)


def _discard(staging: Staging, pid: int) -> None:
    if os.getpid() == pid:  # a forked child ends without taking its parent's save along
        staging.discard()
