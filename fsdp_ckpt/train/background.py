"""Saves that go on while training does: one at a time per process, in a thread, over process groups of their own."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.report import SaveReport
from fsdp_ckpt.train.snapshot import HostMemory

__all__ = ["PendingSave", "background_ranks", "finish_pending", "flush_pending", "host_memory", "start_save"]

_FLUSH_EVERY_S = 0.02

_log = logging.getLogger("fsdp_ckpt")

host_memory = HostMemory()
"""What snapshots go into. One suffices, as one save is under way at a time."""

_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Process groups for background saves, by that of the job. Tearing down torch.distributed ends both."""

_pending: PendingSave | None = None


class PendingSave:
    """A save whose state is captured, and whose files are being written.

    Args:
        path: The checkpoint that it will be.
        step: Its step.
        stopped_s: Seconds for which the training loop was stopped.
        write: Writes and publishes it.
        committed: Called in the same thread when it is in its place.
        waited_for: Called in the thread that waits; None where nobody has anything to do then.

    Attributes:
        path: As given.
        step: As given.
        stopped_s: As given.
    """

    def __init__(
        self,
        path: str,
        step: int | None,
        stopped_s: float,
        *,
        write: Callable[[], SaveReport],
        committed: Callable[[SaveReport], None],
        waited_for: Callable[[SaveReport], None] | None,
    ) -> None:
        self.path = path
        self.step = step
        self.stopped_s = stopped_s
        self._write: Callable[[], SaveReport] | None = write
        self._committed = committed
        self._waited_for = waited_for
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._is_written = False
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
        _flush_on_sigterm()  # a handler of the caller's may be gone by now
        self._ended.wait()
        if _pending is self:
            _pending = None
        _stop_flushing()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        waited_for, self._waited_for = self._waited_for, None
        if waited_for is not None:
            waited_for(self._report)
        return self._report

    def start(self) -> None:
        """Begin writing."""
        self._thread.start()

    def flush(self) -> None:
        """Wait until it is written or has failed, and do no more. Takes no lock: signal handlers may call it."""
        while not self._is_written and not self._ended.is_set():
            time.sleep(_FLUSH_EVERY_S)

    def end(self) -> None:
        """Wait until nothing of it goes on in the background any more; raises nothing."""
        self._ended.wait()

    def is_own_thread(self) -> bool:
        """Tell whether it is what calls."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        assert self._write is not None
        try:
            self._report = self._write()
            self._is_written = True
            self._committed(self._report)
        except BaseException as error:  # noqa: BLE001 - raised by wait(), which may never be called
            self._error = error
            _log.error("the save of %s in the background failed: %s", self.path, error)
        finally:
            self._write = None  # and with it what it holds of the model
            self._ended.set()


def start_save(save: PendingSave) -> None:
    """Let a save go on in the background; ``finish_pending`` has been called before."""
    global _pending  # noqa: PLW0603 - see above
    _wait_at_exit()
    save.start()
    _pending = save
    _flush_on_sigterm()


@functools.cache
def _wait_at_exit() -> None:
    """Let the end of the process wait for the save while threads may still be started, which uploads need.

    The interpreter joins the save's own thread in any case, but only after it has forbidden that.
    """
    import concurrent.futures.thread  # noqa: F401 - what is registered after it is called before it

    threading._register_atexit(_end_pending)  # type: ignore[attr-defined]  # as concurrent.futures does


def _end_pending() -> None:
    if _pending is not None:
        _pending.end()


def finish_pending() -> None:
    """Wait for the save that is under way, if any.

    Raises:
        FsdpCkptError: It failed, and nobody was told yet.
    """
    if _pending is not None and not _pending.is_own_thread():
        _pending.wait()


def flush_pending() -> None:
    """Wait until the save that is under way is written or has failed, and leave all else for later."""
    if _pending is not None:
        _pending.flush()


def background_ranks(ranks: Ranks, doing: str) -> Ranks:
    """Return the same ranks over a gloo group of their own. A collective the first time.

    What a thread sends must not meet what the training loop sends, and reaches host memory only.

    Raises:
        UsageError: The ranks are some of all, and have made different numbers of process groups: torch would not find
            them to be the same group.
    """
    if ranks.size == 1:
        return Ranks(ranks.group)
    parent = ranks.group or dist.distributed_c10d._get_default_group()
    if parent not in _groups:
        members = dist.get_process_group_ranks(parent)
        is_part = len(members) < dist.get_world_size()
        if is_part:
            ranks.demand_same(
                len(dist.distributed_c10d._world.pg_names),
                "the number of process groups that were made before the first asynchronous save",
                doing,
            )
        _groups[parent] = dist.new_group(
            members, timeout=_timeout_of(parent), backend="gloo", use_local_synchronization=is_part
        )
    return Ranks(_groups[parent])


def _timeout_of(group: Any) -> timedelta | None:
    """Return how long a group waits for its ranks; None where it does not tell."""
    for device in group._device_types:
        found = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


def _flush_on_sigterm() -> None:
    """Let SIGTERM wait for the save before it ends the process, where nobody else handles it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _die_after_save)


def _stop_flushing() -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _die_after_save:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die_after_save(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    flush_pending()
    os.kill(os.getpid(), number)


def _forget() -> None:
    """In a forked child no thread writes anything."""
    global _pending  # noqa: PLW0603 - see above
    _pending = None


os.register_at_fork(after_in_child=_forget)
