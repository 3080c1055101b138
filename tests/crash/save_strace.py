"""Faults at the n-th system call of a rank that runs already: strace is attached for the time of one save.

``strace.py`` starts the process that it disturbs; a rank of a job cannot be started a thousand times. As there, a first
save is only watched. What it calls below the run's folder are the points. A call that a rank makes nowhere else in a
save is counted whatever its path; of ``openat``, ``write`` and the like, those on the point's path are.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.save_yard import Rank
from tests.crash.strace import STRACE, Fault, Point, skip_without_strace

__all__ = [
    "Fault", "Point", "Trace", "go_on", "hold", "points_of", "repeated", "skip_without_attaching", "strike", "watching",
]  # fmt: skip

CALLS = (
    "openat", "write", "pwrite64", "pwritev", "writev", "fsync", "fdatasync", "sync_file_range", "fallocate", "rename",
    "renameat", "renameat2", "link", "linkat", "symlink", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat",
    "ftruncate", "truncate", "flock", "close", "chmod", "fchmod", "copy_file_range", "sendfile",
)  # fmt: skip
_READY_S = 10


def skip_without_attaching() -> None:
    """Skip the test where strace may not attach to a process."""
    skip_without_strace()
    with subprocess.Popen(["sleep", "20"]) as sleeper:
        try:
            with tracing(sleeper.pid, [], Path(os.devnull)):
                pass
        except AssertionError as error:
            pytest.skip(f"strace may not attach here: {error}")
        finally:
            sleeper.kill()


@dataclass(slots=True)
class Trace:
    """What strace wrote, which is complete when its ``with`` block has ended."""

    log: Path
    text: str = ""
    is_over: bool = False
    """Whether the process has died, so that strace ends by itself."""

    def struck(self, what: str) -> bool:
        """Tell whether the fault was put in."""
        if what.startswith("error"):
            return "(INJECTED)" in self.text
        return f"killed by SIG{what.removeprefix('signal=')} " in self.text

    def stops(self, rank: Rank) -> bool:
        """Wait until the rank has stopped, which it stays when strace is gone; False when it has answered instead."""
        limit = time.monotonic() + _READY_S
        while "--- SIGSTOP {" not in self.log.read_text(errors="replace"):
            if rank.link.poll(0.002):
                return False
            assert time.monotonic() < limit, f"not stopped: {self.log.read_text(errors='replace')[-2000:]}"
        return True


@contextmanager
def tracing(pid: int, options: Sequence[str], log: Path) -> Iterator[Trace]:
    """Let strace watch a process and its threads while the block runs."""
    command = [STRACE, "-f", "-y", "-s", "200", "-o", str(log), *options, "-p", str(pid)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    trace = Trace(log)
    try:
        said = process.stderr.readline()
        assert "attached" in said, f"{said}{process.stderr.read() if process.poll() is not None else ''}"
        yield trace
    finally:
        if not trace.is_over:
            process.terminate()  # strace lets go of the process
        try:
            process.communicate(timeout=_READY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    trace.text = log.read_text(errors="replace") if log.is_file() else ""


def strike(fault: Fault, rank: Rank, log: Path) -> AbstractContextManager[Trace]:
    """Return a ``with`` block in which a rank comes to a fault; ``error=ENOSPC+`` is there to stay."""
    point = fault.point
    options = ["-P", point.path] if point.path else []
    what, when = (fault.what[:-1], f"{point.number}+") if fault.what.endswith("+") else (fault.what, f"{point.number}")
    options += ["-e", f"trace={point.call}", "-e", f"inject={point.call}:{what}:when={when}"]
    return tracing(rank.pid, options, log)


def watching(rank: Rank, log: Path) -> AbstractContextManager[Trace]:
    """Return a ``with`` block in which a rank's calls are written down, for ``points_of``."""
    options = ["-e", "trace=" + ",".join(f"?{call}" for call in CALLS)]
    return tracing(rank.pid, options, log)


def hold(point: Point, rank: Rank, log: Path, begin: Callable[[], object]) -> bool:
    """Stop a rank right after a call of what it is made to do; return whether it has come to it."""
    with strike(Fault(point, "signal=STOP"), rank, log) as trace:
        begin()
        return trace.stops(rank)


def go_on(rank: Rank) -> None:
    """Let a rank that was stopped go on."""
    rank.kill(signal.SIGCONT)


def repeated(first: Sequence[Point], second: Sequence[Point]) -> list[Point]:
    """Return the points of two saves alike; the others have names that are drawn at random."""
    both = [point for point in first if point in second]
    assert len(both) >= 0.75 * max(len(first), len(second)), f"{len(first)} and {len(second)}, both {len(both)}"
    return both


@dataclass(frozen=True, slots=True)
class _Line:
    thread: str
    call: str
    path: str
    fails: bool


def points_of(trace: Trace, where: Path) -> list[Point]:
    """Return the calls of a watched save on paths below a folder, in order; without most that fail anyhow."""
    lines = list(_lines(trace.text, str(where)))
    elsewhere = {(line.thread, line.call) for line in lines if not line.path}
    counts: Counter[tuple[str, ...]] = Counter()
    seen: defaultdict[str, set[str]] = defaultdict(set)
    points: list[Point] = []
    for line in lines:
        if not line.path:
            continue
        path = line.path if (line.thread, line.call) in elsewhere else ""
        counts[line.thread, line.call, path] += 1
        seen[line.call].add(line.thread)
        if not line.fails or line.call == "rename":  # onto a folder with content
            points.append(Point(line.call, path, counts[line.thread, line.call, path]))
    return list(dict.fromkeys(points))


def _lines(text: str, where: str) -> Iterator[_Line]:
    for row in text.splitlines():
        match = re.match(r"(\d+) +(\w+)\((.*)", row)
        if match is None or match[2] not in CALLS:
            continue
        quoted = re.findall(r'"(/[^"]*)"', match[3])[:1]  # of rename, strace looks at the first name only
        described = re.findall(r"\d<(/[^>]*)>", match[3])
        inside = [name for name in [*quoted, *described] if name.startswith(where)]
        yield _Line(match[1], match[2], inside[0] if inside else "", " = -1 E" in row and "(INJECTED)" not in row)
