"""Real signals to real ranks: all of them save the same step and leave with one code, which arrives at the shell."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt import inspect
from fsdp_ckpt.layouts.registry import list_checkpoints
from tests.cases.launch import build_once, run_module
from tests.cli.tool import TOOL, environment
from tests.dist.preemption_ranks import OUTCOMES, PLAYS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_once(
        tmp_path_factory, "preemption", lambda folder: run_module("tests.dist.preemption_ranks", str(folder))
    )


def outcome(out: Path, name: str) -> Any:
    return json.loads((out / OUTCOMES).read_text())[name]


def seen(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((out / name / f"seen.{rank}").read_text()) for rank in range(PLAYS[name].ranks)]


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [
        ("term_to_one", signal.SIGTERM, 143),
        ("usr1_to_one", signal.SIGUSR1, 138),
        ("term_to_all", signal.SIGTERM, 143),
        ("different", signal.SIGTERM, 143),  # the higher number
        ("own_code", signal.SIGUSR1, 85),
        ("every_7th", signal.SIGTERM, 143),
        ("interrupted", signal.SIGINT, 130),
        ("alone", signal.SIGTERM, 143),
    ],
)
def test_all_ranks_save_one_step_and_leave_with_one_code(out: Path, name: str, number: int, code: int) -> None:
    ranks = PLAYS[name].ranks
    assert outcome(out, name) == [code] * ranks
    first, *others = seen(out, name)
    assert all(other == first for other in others)
    assert (first["signal"], first["again"], first["restored"]) == (number, True, True)
    assert first["asked"] == first["step"]
    ((step, folder),) = list_checkpoints(out / name / "run")
    assert step == first["step"] > 1
    report = inspect(folder)
    assert (report.complete, report.step, report.world_size) == (True, step, ranks)


@pytest.mark.parametrize(("name", "every"), [("every_7th", 7), ("different", 150)])
def test_ranks_are_asked_at_every_nth_step(out: Path, name: str, every: int) -> None:
    assert {one["step"] % every for one in seen(out, name)} == {0}


def test_a_signal_that_was_not_asked_for_does_what_it_did(out: Path) -> None:
    assert outcome(out, "not_asked_for") == [-signal.SIGUSR1]


def test_a_job_that_hangs_is_ended_by_the_second_signal(out: Path) -> None:
    assert outcome(out, "stuck") == {"alive": True, "code": -signal.SIGTERM}


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from fsdp_ckpt import Checkpointer, Preemption

code, myself = int(sys.argv[1]) or None, sys.argv[2] == "myself"
dist.init_process_group("gloo")
with Checkpointer("run", torch.nn.Linear(2, 2)) as checkpointer, Preemption(exit_code=code) as preemption:
    for step in range(1, 100_000):
        time.sleep(0.005)
        if step == 5:
            Path(f"began.{os.environ['RANK']}").touch()
            if myself and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        if preemption.requested():
            checkpointer.save(step)
            break
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(preemption.exit_code)
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with (folder / "stderr.txt").open("wb") as stderr:
        return subprocess.Popen(
            [TOOL, *arguments], cwd=folder, env=environment(GLOO_SOCKET_IFNAME="lo"), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=stderr,
        )  # fmt: skip


def wait_for(*paths: Path, text: str = "") -> None:
    limit = time.monotonic() + 90
    while not all(path.exists() and text in path.read_text() for path in paths):
        assert time.monotonic() < limit, "the job did not begin"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("code", "sent", "arrives"),
    [
        ("0", "myself", 143),  # to one rank
        ("85", "myself", 85),
        ("85", signal.SIGTERM, 85),  # to the launcher, as Kubernetes does
        ("0", signal.SIGUSR1, 138),
    ],
)
def test_the_code_arrives_at_the_shell(code: str, sent: Any, arrives: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = start(tmp_path, "launch", "-n", "2", "--cpu", "train.py", code, str(sent))
    try:
        wait_for(tmp_path / "began.0", tmp_path / "began.1")
        if sent != "myself":
            job.send_signal(sent)
        assert job.wait(timeout=60) == arrives, (tmp_path / "stderr.txt").read_text()
    finally:
        job.kill()
        job.wait()
    ((step, folder),) = list_checkpoints(tmp_path / "run")
    assert step >= 5
    assert inspect(folder).complete
    said = (tmp_path / "stderr.txt").read_text()
    assert "Traceback" not in said
    assert re.search(rf"rank \d ended with exit code {arrives}", said) or sent == signal.SIGTERM


def test_train_saves_upon_sigusr1(tmp_path: Path) -> None:
    job = start(tmp_path, "train", "run", "--steps", "100000", "--digits", "3", "--cpu")
    try:
        wait_for(tmp_path / "run" / "log.jsonl", text="stepped")
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == 138, (tmp_path / "stderr.txt").read_text()
    finally:
        job.kill()
        job.wait()
    ((step, folder),) = list_checkpoints(tmp_path / "run")
    assert inspect(folder).complete
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["step"], last["signal"]) == ("stopped", step, signal.SIGUSR1)
    assert f"stopped after step {step}, which was saved" in (tmp_path / "stderr.txt").read_text()
