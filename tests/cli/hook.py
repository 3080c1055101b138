"""Stop, signal or kill a run at an exact place, without touching the code under test.

A ``sitecustomize`` module in PYTHONPATH puts an audit hook into the new interpreter. Python raises audit events in
``os.rename``, ``os.mkdir``, ``open`` and others before it acts, so "at the second rename of a ``.part`` file" is an
exact place.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.cli.tool import TIMEOUT_S, TOOL, Result, environment

_SITE = """
import errno, os, re, signal, sys, time

event, pattern, count, action, marker = os.environ["TEST_HOOK"].split("\\x1f")
left = [int(count)]


def hook(name, arguments):
    if name != event or left[0] == 0 or not re.search(pattern, repr(arguments)):
        return
    left[0] -= 1
    if left[0]:
        return
    os.mkdir(marker)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action.startswith("E"):
        raise OSError(getattr(errno, action), os.strerror(getattr(errno, action)))
    deadline = time.monotonic() + 40
    while os.path.exists(marker) and time.monotonic() < deadline:
        time.sleep(0.005)


sys.addaudithook(hook)
"""


@dataclass
class Hooked:
    """A run that stops (or dies) when an audit event occurs for the n-th time.

    Args:
        folder: Where the hook may keep its files.
        arguments: Of ``fsdp-ckpt``.
        event: Name of the audit event.
        pattern: Regular expression that the event's arguments must match.
        count: Which of these events.
        action: ``wait`` until ``go_on`` is called, ``kill`` by SIGKILL, or let the call fail with an error.
    """

    folder: Path
    arguments: tuple[str | Path, ...]
    event: str
    pattern: str = ""
    count: int = 1
    action: Literal["wait", "kill", "ENOSPC", "EIO", "EMFILE", "EDQUOT", "EACCES"] = "wait"
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "sitecustomize.py").write_text(_SITE)
        self._marker = self.folder / "reached"
        if self._marker.exists():
            self._marker.rmdir()
        hook = "\x1f".join([self.event, self.pattern, str(self.count), self.action, str(self._marker)])
        self.process = subprocess.Popen(
            [TOOL, *map(str, self.arguments)],
            env=environment(PYTHONPATH=str(self.folder), TEST_HOOK=hook, **self.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait_until_there(self) -> None:
        """Return once the event has occurred."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self._marker.exists():
            assert self.process.poll() is None, f"it ended before {self.event}: {self.process.communicate()}"
            assert time.monotonic() < deadline, f"it never came to {self.event}"
            time.sleep(0.005)

    def go_on(self) -> None:
        """Let it go on."""
        self._marker.rmdir()

    def result(self) -> Result:
        """Return how it ended."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return Result(code=self.process.returncode, out=out.decode(), err=err.decode())

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, number)
