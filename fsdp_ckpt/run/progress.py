"""Progress as a stream of events that anything may consume: a bar, a log, nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Listener", "Meter", "Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        done_bytes: Bytes of the result that are in place.
        total_bytes: Bytes of the whole result.
        elapsed_s: Seconds since the run began.
    """

    done_bytes: int
    total_bytes: int
    elapsed_s: float


Listener = Callable[[Progress], None]


class Meter:
    """Adds up bytes from several threads and tells a listener, at most ten times a second.

    Args:
        total_bytes: What 100 % is.
        listener: Told from whichever thread adds bytes; None for nobody.
    """

    def __init__(self, total_bytes: int, listener: Listener | None) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.started = time.monotonic()
        self._listener = listener
        self._last = 0.0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count bytes that are in place."""
        with self._lock:
            self.done_bytes += num_bytes
            now = time.monotonic()
            due = self._listener is not None and (now - self._last > 0.1 or self.done_bytes == self.total_bytes)
            if due:
                self._last = now
                assert self._listener is not None
                self._listener(
                    Progress(done_bytes=self.done_bytes, total_bytes=self.total_bytes, elapsed_s=now - self.started)
                )
