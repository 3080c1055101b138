"""A real terminal for the command line: type when a prompt is there, and read the screen."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cli.tool import TOOL, environment

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """``fsdp-ckpt ARGUMENTS`` with a pseudo-terminal as stdin, stdout and stderr."""

    def __init__(self, arguments: Sequence[str], cwd: Path, limit_s: float = 60) -> None:
        self._ends = time.monotonic() + limit_s
        self._seen = 0
        self.screen = ""
        self._pid, self._descriptor = pty.fork()
        if self._pid == 0:
            os.chdir(cwd)
            os.execve(TOOL, ["fsdp-ckpt", *arguments], environment(TERM="xterm", COLUMNS="100"))

    def wait_for(self, text: str) -> None:
        """Read until the screen shows a text after what was waited for before."""
        while text not in self.screen[self._seen :]:
            if not self._read():
                raise AssertionError(f"{text!r} never came; the screen shows:\n{self.screen}")
        self._seen = self.screen.index(text, self._seen) + len(text)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._descriptor, text.encode())

    def answer(self, question: str, line: str) -> None:
        """Wait for a question and its prompt, and answer with a line."""
        self.wait_for(question)
        self.wait_for("] ")
        self.type(line + "\n")

    def end(self) -> int:
        """Read to the end, and return the exit code; a negative one is a signal."""
        while self._read():
            pass
        _, status = os.waitpid(self._pid, 0)
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(status)

    def hang_up(self) -> None:
        """Close the terminal, as closing its window does, and wait for the command to end."""
        os.close(self._descriptor)
        os.waitpid(self._pid, 0)

    def _read(self) -> bool:
        left = self._ends - time.monotonic()
        if left <= 0 or not select.select([self._descriptor], [], [], left)[0]:
            os.kill(self._pid, signal.SIGKILL)
            raise AssertionError(f"nothing came in time; the screen shows:\n{self.screen}")
        try:
            data = os.read(self._descriptor, 4096)
        except OSError:  # the other end is closed
            return False
        self.screen += _ESCAPES.sub("", data.decode(errors="replace")).replace("\r", "")
        return bool(data)
