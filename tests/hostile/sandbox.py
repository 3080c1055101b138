"""Run fsdp-ckpt on files that nobody vouches for: many times, quickly, each time in a child with limits.

A small server imports the package once and forks; a child costs milliseconds where a new interpreter costs a quarter
of a second. A child has its own exit status, little address space, a time-out, and an audit hook that sees which
files Python opens and whether anything dangerous is called. The server is a fresh interpreter, as the peak memory of a
child that is forked from a test run with torch in it would be that of torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cli.tool import ROOT, environment

LIMIT_BYTES = 1 << 30
PEAK_BYTES = 300 << 20
"""What no run may exceed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change to a file for the time of one case: bytes overwritten at an offset, or the file cut to a size."""

    path: str
    offset: int = 0
    data: str = ""
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command, what is to be changed before it (and back afterwards), and the output folder to look at.

    ``out`` is removed after each case; its digest tells whether two cases wrote the same. With ``direct`` the command's
    function is called, which saves the parsing; ``argv`` may then hold paths and flags only.
    """

    argv: Sequence[str]
    edits: Sequence[Edit] = ()
    out: str | None = None
    direct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a case did.

    Attributes:
        code: Exit code.
        out: What it printed to stdout.
        err: What it printed to stderr.
        digest: SHA-256 of names and contents of the output folder; None when there is none.
        hidden: Entries beside the output folder whose names begin with a dot.
        opened: Files that Python opened, outside of its own installation.
        danger: Audit events that reading a checkpoint must never cause.
        peak_bytes: Largest resident set of the child that ran it.
    """

    code: int
    out: str
    err: str
    digest: str | None = None
    hidden: Sequence[str] = ()
    opened: Sequence[str] = ()
    danger: Sequence[str] = ()
    peak_bytes: int = 0


@dataclass
class Sandbox:
    """The client; ``close`` ends the server."""

    _process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.sandbox_server"],
            cwd=ROOT,
            env=environment(PYTHONPATH=str(ROOT), PYTHONHASHSEED="0"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the server."""
        self._process.communicate(timeout=10)
        assert self._process.returncode == 0

    def run(
        self, *argv: object, cwd: Path | None = None, limit_bytes: int = LIMIT_BYTES, timeout_s: int = 30
    ) -> Outcome:
        """Run one command."""
        case = Case(argv=[str(argument) for argument in argv])
        return self.many([case], cwd=cwd, limit_bytes=limit_bytes, timeout_s=timeout_s)[0]

    def many(
        self,
        cases: Iterable[Case],
        *,
        cwd: Path | None = None,
        limit_bytes: int = LIMIT_BYTES,
        timeout_s: int = 100,
    ) -> list[Outcome]:
        """Run cases one after the other in one child; each must end by itself, within the time for all of them."""
        request = {
            "cases": [asdict(case) for case in cases],
            "cwd": None if cwd is None else str(cwd),
            "limit_bytes": limit_bytes,
            "timeout_s": timeout_s,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        done: list[dict[str, Any]] = answer["done"]
        if len(done) < len(request["cases"]):  # type: ignore[arg-type]
            which = request["cases"][len(done)]["argv"]  # type: ignore[index]
            raise AssertionError(f"{which}: ended by signal {answer['signal']} (14: took too long)\n{answer['err']}")
        return [Outcome(**item, peak_bytes=answer["peak_bytes"]) for item in done]
