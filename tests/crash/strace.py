"""Faults at the n-th system call, put in by strace: the process is killed there, or the call fails.

A first run is only watched. Each call of it that touches the destination is a point: the call's name, the path, and
the how-manieth of its kind it is. strace counts per thread and path (``-P``), so a point is exact. Unfinished files are
called otherwise in every run; calls on those alone are counted per thread, whatever the path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.tool import TIMEOUT_S, TOOL, Result, environment

STRACE = shutil.which("strace") or ""
CALLS = (
    "write", "pwrite64", "fsync", "fdatasync", "sync_file_range", "ftruncate", "openat", "mkdir", "rename", "renameat2",
    "unlink", "unlinkat", "rmdir", "chmod", "sendfile", "copy_file_range", "flock", "ioctl", "getdents64",
)  # fmt: skip
BY_FILE = {
    "pwrite64", "rename", "fsync", "fdatasync", "ftruncate", "sync_file_range", "copy_file_range", "unlink", "unlinkat",
    "rmdir",
}  # fmt: skip
"""Calls that the interpreter itself never makes, so that their number says enough."""


def skip_without_strace() -> None:
    """Skip the test where strace is not there or may not trace."""
    if not STRACE:
        pytest.skip("strace is not installed")
    done = subprocess.run([STRACE, "-f", "-o", os.devnull, "true"], check=False, capture_output=True, timeout=20)
    if done.returncode:
        pytest.skip(f"strace may not trace here: {done.stderr.decode().strip()[-200:]}")


@dataclass(frozen=True, slots=True)
class Point:
    """A system call of a run: the n-th of this name on this path; on any path where that is empty."""

    call: str
    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.call} #{self.number} of {self.path or 'a thread'}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What to do at a point: ``signal=KILL`` or ``error=ENOSPC``."""

    point: Point
    what: str

    def __str__(self) -> str:
        return f"{self.what} at {self.point}"


def _run(options: list[str], arguments: list[str], log: Path) -> Result:
    # One worker and one seed, so that every run makes the same calls in the same order.
    command = [STRACE, "-f", "-qq", "-y", "-s", "4096", "-o", str(log), *options]
    done = subprocess.run(
        [*command, TOOL, *arguments, "--jobs", "1"],
        env=environment(PYTHONHASHSEED="0", PYTHONDONTWRITEBYTECODE="1"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Result(code=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())


def watch(arguments: list[str], where: Path, log: Path) -> list[Point]:
    """Run a command to its end and return its calls on paths below a folder, in order."""
    done = _run(["--seccomp-bpf", "-e", "trace=" + ",".join(f"?{call}" for call in CALLS)], arguments, log)
    assert done.code == 0, done.err
    points: list[Point] = []
    counts: Counter[tuple[str, str, str]] = Counter()
    made = ""
    for line in log.read_text(errors="replace").splitlines():
        match = re.match(r"(\d+) +(\w+)\((.*)", line)
        if match is None or match[2] not in CALLS:
            continue
        quoted = re.findall(r'"(/[^"]*)"', match[3])[:1]  # of rename, strace looks at the first name only
        described = re.findall(r"\d<(/[^>]*)>", match[3])
        counts[match[1], match[2], ""] += 1
        inside = [name for name in [*quoted, *described] if name.startswith(str(where))]
        made = made or next((name for name in inside if match[2] == "mkdir" and _HIDDEN.search(name)), "")
        path = next((name for name in inside if not name.endswith(".part") and _has_fixed_name(name, made)), "")
        if path:
            counts[match[1], match[2], path] += 1
        elif not inside or match[2] not in BY_FILE:
            continue
        if " = -1 E" not in line:  # a call that fails anyhow (a folder that is there) tells nothing
            points.append(Point(match[2], path, counts[match[1], match[2], path]))
    return list(dict.fromkeys(points))


_HIDDEN = re.compile(r"/\.[^/]*\.fsdp-ckpt-[0-9a-f]+")


def _has_fixed_name(path: str, made: str) -> bool:
    """Tell whether a path is called the same in every run; what is set aside to be removed is not."""
    return _HIDDEN.search(path) is None or bool(made and path.startswith(made))


def strike(fault: Fault, arguments: list[str], log: Path) -> tuple[Result, bool]:
    """Run a command with a fault; return how it ended, and whether it came to the fault."""
    point = fault.point
    options = ["-P", point.path] if point.path else []
    options += ["-e", f"trace={point.call}", "-e", f"inject={point.call}:{fault.what}:when={point.number}"]
    if fault.what.startswith("error"):  # strace 6.1 puts in no signals with it
        options.append("--seccomp-bpf")
    done = _run(options, arguments, log)
    text = log.read_text(errors="replace")
    struck = "(INJECTED)" in text if fault.what.startswith("error") else "killed by SIGKILL" in text
    return done, struck
