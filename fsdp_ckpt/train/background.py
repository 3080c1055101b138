"""Saves that go on while training does: one at a time per process, in a thread, over process groups of their own."""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.report import SaveReport
from fsdp_ckpt.train.snapshot import HostMemory

__all__ = ["PendingSave", "background_ranks", "finish_pending", "host_memory", "start_save"]

_log = logging.getLogger("fsdp_ckpt")

host_memory = HostMemory()
"""What snapshots go into. One suffices, as one save is under way at a time."""

_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Process groups for background saves, by that of the job. Tearing down torch.distributed ends both."""

_pending: PendingSave | None = None


class PendingSave:
    """A save whose state is captured, and whose files are being written.

    Attributes:
        path: The checkpoint that it will be.
        step: Its step.
        stopped_s: Seconds for which the training loop was stopped.
    """

    def __init__(
        self,
        path: str,
        step: int | None,
        stopped_s: float,
        write: Callable[[], SaveReport],
        afterwards: Callable[[SaveReport], None] | None,
    ) -> None:
        self.path = path
        self.step = step
        self.stopped_s = stopped_s
        self._write: Callable[[], SaveReport] | None = write
        self._afterwards = afterwards
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()  # a signal while waiting for a thread makes CPython 3.11 forget the thread
        # No daemon: a process that comes to its end waits for the save.
        self._thread = threading.Thread(target=self._run, name=f"fsdp-ckpt save of {path}")

    def __repr__(self) -> str:
        """Show how far it is."""
        state = "being written" if not self.is_done() else "failed" if self._error else "done"
        return f"PendingSave({self.path!r}, step={self.step}, {state})"

    def is_done(self) -> bool:
        """Tell whether it has ended, well or not. Not a collective; ranks may see different answers."""
        return self._ended.is_set()

    def wait(self) -> SaveReport:
        """Wait for the end. Every rank has to call it, or save again, or close its Checkpointer.

        Returns:
            What was saved.

        Raises:
            FsdpCkptError: As ``save_state``; the checkpoint is not there, and what was there before is as it was.
        """
        global _pending  # noqa: PLW0603 - what is under way belongs to the process
        self._ended.wait()
        if _pending is self:
            _pending = None
        if self._error is not None:
            raise self._error
        assert self._report is not None
        afterwards, self._afterwards = self._afterwards, None
        if afterwards is not None:
            afterwards(self._report)
        return self._report

    def start(self) -> None:
        """Begin writing."""
        self._thread.start()

    def flush(self) -> None:
        """Wait for the end, without a word about how it went."""
        self._ended.wait()

    def _run(self) -> None:
        assert self._write is not None
        try:
            self._report = self._write()
        except BaseException as error:  # noqa: BLE001 - raised by wait(), which may never be called
            self._error = error
            _log.error("the save of %s in the background failed: %s", self.path, error)
        finally:
            self._write = None  # and with it what it holds of the model
            self._ended.set()


def start_save(save: PendingSave) -> None:
    """Let a save go on in the background; ``finish_pending`` has been called before."""
    global _pending  # noqa: PLW0603 - see above
    _flush_on_sigterm()
    _pending = save
    save.start()


def finish_pending() -> None:
    """Wait for the save that is under way, if any.

    Raises:
        FsdpCkptError: It failed, and nobody was told yet.
    """
    if _pending is not None:
        _pending.wait()


def background_ranks(ranks: Ranks) -> Ranks:
    """Return the same ranks over a gloo group of their own. A collective the first time.

    What a thread sends must not meet what the training loop sends, and reaches host memory only.
    """
    if ranks.size == 1:
        return Ranks(ranks.group)
    parent = ranks.group or dist.distributed_c10d._get_default_group()
    if parent not in _groups:
        members = dist.get_process_group_ranks(parent)
        _groups[parent] = dist.new_group(members, backend="gloo", use_local_synchronization=ranks.group is not None)
    return Ranks(_groups[parent])


def _flush_on_sigterm() -> None:
    """Let SIGTERM wait for the save before it ends the process, where nobody else handles it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _die_after_save)


def _die_after_save(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    if _pending is not None:
        _pending.flush()
    os.kill(os.getpid(), number)
