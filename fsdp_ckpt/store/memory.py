"""How much memory this process may still take, and when it is not worth looking for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["available_memory", "no_gc"]

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Return the bytes that are free for use: of the machine, or of the control group if that has less.

    Returns:
        Bytes; None where the system does not tell (anything but Linux).
    """
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, max(int(limit) - used, 0)) if limit.isdigit() else free


@contextmanager
def no_gc() -> Iterator[None]:
    """Leave the garbage collector out while millions of small objects are made: collecting triples the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
