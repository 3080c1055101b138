"""The other side of ``corruption``: changes a checkpoint, asks the judge and ``validate``, changes it back.

A child does one trial after the other. A change may make a loader ask for all memory there is, or never end; then the
child dies, and the next one goes on with the trial behind.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.ops.validate import validate
from tests.hostile.loader_judge import judge
from tests.hostile.operations import Tree, apply

_MEMORY_BYTES = 512 << 20
"""Beside what torch takes."""
_LIMIT_S = 20


def _serve() -> None:
    torch.set_num_threads(1)
    _warm_up()
    for line in sys.stdin:
        answer = _answer(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _warm_up() -> None:
    """Import what loaders import when they are first called."""
    folder = Path(__file__).parents[2] / "fixtures/torch-2.13.0"
    for name in ("fsdp2_sharded_w2", "rank_files_fsdp2_w2", "rank_files_fsdp1_w2", "hf_sharded_w2", "dcp_zstd_w2"):
        judge(folder / name)
        validate(folder / name, level="deep", jobs=1)


def _answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    root, trials = Path(request["folder"]), request["trials"]
    times = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    before = {str(path.relative_to(root)): path.read_bytes() for path in times}
    done: list[dict[str, Any]] = []
    died: dict[str, Any] = {}
    while len(done) < len(trials):
        lines, status = _in_child(root, before, trials[len(done) :], times, died)
        done += [line for line in lines if "phase" not in line]
        if len(done) == len(trials):
            break
        phase = lines[-1]["phase"] if lines and "phase" in lines[-1] else "?"
        if phase != "judge" or died:
            done.append({"parts": {}, "findings": [], "raised": None, "crash": f"died in {phase}: {status}"} | died)
            died = {}
        else:
            died = {"parts": {"all": f"died: {status}"}}
        _write(root, before, times)
    return done


def _in_child(
    root: Path, before: Tree, trials: list[Any], times: dict[Path, int], died: dict[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    with tempfile.NamedTemporaryFile(prefix="corruption-") as report:
        pid = os.fork()
        if pid == 0:
            try:
                _limit()
                _try_all(root, before, trials, times, died=died, report=report.name)
            except BaseException:  # noqa: BLE001  # a child must not come back
                traceback.print_exc()
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        return [json.loads(line) for line in Path(report.name).read_text().splitlines()], status


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)


def _try_all(
    root: Path, before: Tree, trials: list[Any], times: dict[Path, int], *, died: dict[str, Any], report: str
) -> None:
    with open(report, "a") as out:
        for trial in trials:
            after = apply(before, trial)
            _write(root, after, times, before)
            out.write('{"phase": "judge"}\n')
            out.flush()
            signal.alarm(_LIMIT_S)
            parts = died.pop("parts") if died else judge(root)
            out.write('{"phase": "validate"}\n')
            out.flush()
            signal.alarm(_LIMIT_S)
            found = _validate(root)
            signal.alarm(0)
            _write(root, before, times, after)
            out.write(json.dumps({"parts": parts, **found}) + "\n")
            out.flush()


def _write(root: Path, files: Tree, times: dict[Path, int], have: Tree | None = None) -> None:
    """Make the folder's files these. In place: files that are cut and written anew are flushed by ext4 each time."""
    for file in {*files, *(have or ())}:
        path = root / file
        if file not in files:
            path.unlink()
        elif have is None or have.get(file) != files[file]:
            fd = os.open(path, os.O_RDWR | os.O_CREAT)
            os.pwrite(fd, files[file], 0)
            if os.fstat(fd).st_size != len(files[file]):
                os.ftruncate(fd, len(files[file]))
            os.close(fd)
            os.utime(path, ns=(times.get(path, 0), times.get(path, 0)))


def _validate(root: Path) -> dict[str, Any]:
    findings: list[tuple[str, ...]] = []
    raised, crash = None, None
    try:
        report = validate(root, level="deep", jobs=1)
        findings = [(one.severity, one.code, one.name, one.where, one.message) for one in report.findings]
    except FsdpCkptError as error:
        raised = (type(error).__name__, error.exit_code, error.message)
    except BaseException:  # noqa: BLE001  # anything else is a defect
        crash = traceback.format_exc()
    return {"findings": findings, "raised": raised, "crash": crash}


if __name__ == "__main__":
    _serve()
