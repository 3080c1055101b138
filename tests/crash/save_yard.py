"""Teams of real gloo ranks that save as a test tells them to, and a judge that uses nothing of fsdp_ckpt."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.cases.launch import REPOSITORY

__all__ = ["LIMIT_S", "ROWS", "Answer", "Rank", "Team", "Yard"]

LIMIT_S = 30
"""Whoever has not answered by then hangs."""
ROWS = 5
_START_S = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How an order ended on a rank.

    Attributes:
        kind: Class of the exception; empty when there was none.
        message: Its text.
        named: Whether it is one of fsdp_ckpt's.
        value: What the order gave.
        seconds: How long it took.
    """

    kind: str
    message: str
    named: bool
    value: Any
    seconds: float


@dataclass(slots=True)
class Rank:
    """A process."""

    number: int
    pid: int
    link: Connection
    is_gone: bool = False

    def send(self, do: str, **options: Any) -> None:
        """Give an order."""
        self.link.send((do, options))

    def receive(self, limit_s: float = LIMIT_S) -> Any:
        """Return what comes next from it; None when it has died.

        Raises:
            AssertionError: It hangs.
        """
        if not self.link.poll(limit_s):
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGABRT)  # faulthandler shows where it is
            raise AssertionError(f"rank {self.number} (process {self.pid}) has not answered within {limit_s} s")
        try:
            return self.link.recv()
        except (EOFError, ConnectionResetError):
            self.is_gone = True
            return None

    def answer(self, limit_s: float = LIMIT_S) -> Answer | None:
        """Return the answer to an order; None when the rank has died."""
        found = self.receive(limit_s)
        return None if found is None else Answer(**found)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless it is gone."""
        if not self.is_gone:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(slots=True)
class Team:
    """The ranks of a job."""

    ranks: list[Rank]

    def send(self, do: str, **options: Any) -> None:
        """Give all ranks an order."""
        for rank in self.ranks:
            rank.send(do, **options)

    def answers(self) -> list[Answer | None]:
        """Return the ranks' answers."""
        return [rank.answer() for rank in self.ranks]

    def order(self, do: str, **options: Any) -> list[Answer | None]:
        """Give all ranks an order and return their answers."""
        self.send(do, **options)
        return self.answers()

    def must(self, do: str, **options: Any) -> Any:
        """Give all ranks an order that has to succeed; return what the first one gives."""
        found = self.order(do, **options)
        assert all(one is not None and not one.kind for one in found), f"{do} {options}: {found}"
        values = [one.value for one in found if one is not None]
        assert values.count(values[0]) == len(values), f"{do} {options}: {values}"
        return values[0]

    def end(self) -> None:
        """End what is left of it."""
        for rank in self.ranks:
            with suppress(OSError):
                rank.link.send(("end", {}))
        for rank in self.ranks:
            if not rank.is_gone and not wait([rank.link], 5):
                rank.kill()
            rank.link.close()
            rank.is_gone = True


@dataclass
class Yard:
    """The server, and what it starts; ``close`` ends it all."""

    folder: Path = field(init=False)
    _teams: list[Team] = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="save-yard-"))  # short, as sockets want it
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(self.folder / "door"))
        self._door.listen(16)
        self.log = self.folder / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.save_server", str(self.folder / "door"), str(self.folder)],
                cwd=REPOSITORY,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._server = self._meet(_START_S)[2]
        except TimeoutError:
            self._end()
            raise AssertionError(f"the server does not start: {self.told()}") from None

    def told(self) -> str:
        """Return the end of what server and ranks have printed."""
        return self.log.read_text(errors="replace")[-6000:]

    def _meet(self, limit_s: float) -> tuple[str, int, Connection, int]:
        limit = time.monotonic() + limit_s
        while not select.select([self._door], [], [], 0.2)[0]:
            if time.monotonic() > limit or self._process.poll() is not None:
                raise TimeoutError
        plain, _ = self._door.accept()
        plain.setblocking(True)
        link = Connection(plain.detach())
        name, rank, pid = link.recv()
        return name, rank, link, pid

    def _ask(self, do: str, **options: Any) -> Any:
        self._server.send((do, options))
        assert self._server.poll(LIMIT_S), f"the server has not answered {do}: {self.told()}"
        outcome, value = self._server.recv()
        assert outcome == "done", f"{do} {options}: {value}"
        return value

    def team(self, *, ranks: int = 2, rows: int = ROWS) -> Team:
        """Start a job."""
        self._count += 1
        name = f"team-{self._count}"
        self._ask("fork", name=name, ranks=ranks, rows=rows)
        found: dict[int, Rank] = {}
        while len(found) < ranks:
            whose, rank, link, pid = self._meet(LIMIT_S)
            assert whose == name, whose
            found[rank] = Rank(rank, pid, link)
        team = Team([found[rank] for rank in range(ranks)])
        self._teams.append(team)
        return team

    def look(self, run: Path, *, rows: int = ROWS, ranks: int = 2) -> dict[str, Any]:
        """Return what lies in the folder of a run, judged by torch's own readers."""
        found: dict[str, Any] = self._ask("look", run=run, rows=rows, ranks=ranks)
        return found

    def judge(self, path: Path, *, rows: int = ROWS, ranks: int = 2) -> dict[str, Any]:
        """Return of which version a checkpoint is, or what is wrong with it."""
        found: dict[str, Any] = self._ask("judge", folder=path, rows=rows, ranks=ranks)
        return found

    def merged(self, path: Path, out: Path, version: int, *, rows: int = ROWS) -> str:
        """Merge a checkpoint and read the result with safetensors; return what is wrong with it."""
        found: str = self._ask("merged", path=path, out=out, version=version, rows=rows)
        return found

    def versions(self, path: Path) -> list[int] | str:
        """Return the versions in a folder of torch.distributed.checkpoint, or why torch does not load it."""
        found: list[int] | str = self._ask("versions", folder=path)
        return found

    def end_teams(self) -> None:
        """End all jobs."""
        for team in self._teams:
            team.end()
        self._teams.clear()

    def close(self) -> None:
        """End everything that was started."""
        self.end_teams()
        self._server.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        self._door.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
