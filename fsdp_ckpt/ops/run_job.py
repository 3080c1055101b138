"""Run a planned job in the background, and follow it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_ckpt.ops.launch import LaunchPlan

__all__ = ["JobEnd", "run_job"]

_POLL_S = 0.1
_PATIENCE_S = 60.0
_TAIL_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended.

    Attributes:
        exit_code: That of the rank that failed first, or 128 + the signal that killed it; 0 when all is well.
        tail: The last lines that its ranks wrote to stdout and stderr.
    """

    exit_code: int
    tail: tuple[str, ...]


def run_job(plan: LaunchPlan, *, poll: Callable[[], None]) -> JobEnd:
    """Run a job to its end.

    When this process is interrupted, the ranks are asked to stop by SIGTERM. torchrun gives them 30 seconds to save,
    and ends them; interrupted once more, this process ends all of them at once. SIGUSR1 is passed on, for them to save
    and stop in their own time.

    Args:
        plan: The job.
        poll: Called some times a second while it runs, and once more after its end.
    """
    with tempfile.TemporaryFile() as output:
        # A session of its own: Ctrl-C reaches the ranks by this process alone, in order.
        job = subprocess.Popen(
            list(plan.command), env={**os.environ, **plan.environment}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            with _stopped_when_interrupted(job), _told_of_sigusr1(job):
                while job.poll() is None:
                    poll()
                    time.sleep(_POLL_S)
        finally:
            poll()
        output.seek(0)
        lines = deque(output.read().decode(errors="replace").splitlines(), maxlen=_TAIL_LINES)
    code = job.returncode
    return JobEnd(exit_code=128 - code if code < 0 else code, tail=tuple(lines))


@contextmanager
def _stopped_when_interrupted(job: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        job.terminate()
        try:
            job.wait(timeout=_PATIENCE_S)
        finally:
            if job.poll() is None:
                for pid in [job.pid, *_descendants(job.pid)]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                job.wait()
        raise


@contextmanager
def _told_of_sigusr1(job: subprocess.Popen[bytes]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # where signals never come
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda number, _: job.send_signal(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if before is None else before)


def _descendants(pid: int) -> list[int]:
    """Return the processes below one: torchrun gives every rank a session of its own, so no group has them all."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                text = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
                children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
