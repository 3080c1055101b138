"""Run calls that take long, and cannot be told to stop, so that Ctrl-C ends them soon."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["Stop", "StoppedError", "run_all", "run_one"]

T = TypeVar("T")

_TICK_S = 0.2
_GRACE_S = 3.0


class StoppedError(BaseException):
    """Somebody asked to stop; no library takes it for a failure to try again."""


class Stop:
    """Asks threads to stop; whatever they call to say how far they are asks for it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ask(self) -> None:
        """Ask for it."""
        self._event.set()

    def check(self) -> None:
        """Return, unless it was asked for.

        Raises:
            StoppedError: It was.
        """
        if self._event.is_set():
            raise StoppedError


def run_one(call: Callable[[], T], stop: Stop) -> T:
    """Return what a call returns. On Ctrl-C it is asked to stop, and not waited for beyond three seconds."""
    results: list[T] = []
    run_all([lambda: results.append(call())], stop, num_threads=1)
    return results[0]


def run_all(calls: Iterable[Callable[[], None]], stop: Stop, *, num_threads: int) -> None:
    """Make all calls, several at a time; the first that fails stops the others.

    Args:
        calls: Taken one after the other.
        stop: What calls look at.
        num_threads: How many at a time.

    Raises:
        BaseException: What a call raised, or KeyboardInterrupt.
    """
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    for call in calls:
        waiting.put(call)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors:
                stop.check()
                waiting.get_nowait()()
        except queue.Empty:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again by who waits
            errors.append(error)
            stop.ask()

    # Daemons: the process must not wait at its end for a server that is silent.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(num_threads, waiting.qsize()))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_TICK_S)
    except BaseException:
        stop.ask()
        for thread in threads:
            thread.join(_GRACE_S / len(threads))
        raise
    real = [error for error in errors if not isinstance(error, StoppedError)]
    if real:
        raise real[0]
