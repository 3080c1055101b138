"""``launch``: what a script finds, and how its end comes through."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.tool import TOOL, assert_refused, environment, run

# As Accelerate's own documentation writes one: nothing in it knows of fsdp-ckpt.
SCRIPT = """\
import json, os, sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model, optimizer = torch.nn.Linear(4, 1), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4) / 32, batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state("saved")
facts = {"world": accelerator.num_processes, "precision": accelerator.mixed_precision, "arguments": sys.argv[1:]}
facts["fsdp"] = os.environ.get("ACCELERATE_USE_FSDP")
facts["strategy"] = os.environ.get("FSDP_SHARDING_STRATEGY")
with open(f"rank{accelerator.process_index}.json", "w") as file:
    json.dump(facts, file)
accelerator.wait_for_everyone()
accelerator.end_training()
"""
CONFIG = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_version: 1
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_sync_module_states: false  # Accelerate refuses this one without a GPU
"""
ENDING = """\
import os, signal, sys, time
rank = int(os.environ["RANK"])
how = sys.argv[1]
if rank == 1:
    if how == "raise":
        raise ValueError("broken on purpose")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))
time.sleep(600)  # far beyond the limit of the command: nobody waits for this rank
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "ending.py").write_text(ENDING)
    (tmp_path / "job.yaml").write_text(CONFIG)
    return tmp_path


def test_an_unmodified_script_of_accelerate_runs_on_two_ranks(folder: Path) -> None:
    done = run("launch", "--config", "job.yaml", "--cpu", "script.py", "--epochs", "3", "-n", "7", cwd=folder)
    assert done.code == 0, done.err
    for rank in range(2):
        facts = json.loads((folder / f"rank{rank}.json").read_text())
        assert facts == {
            "world": 2,
            "precision": "bf16",
            "arguments": ["--epochs", "3", "-n", "7"],
            "fsdp": "true",
            "strategy": "SHARD_GRAD_OP",  # Accelerate's own launcher sets FULL_SHARD here
        }
    assert (folder / "saved" / "random_states_1.pkl").is_file()


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("7", 7), ("kill", 137)])
def test_the_end_of_a_rank_is_the_end_of_the_job(folder: Path, how: str, code: int) -> None:
    done = run("launch", "-n", "2", "--cpu", "ending.py", how, cwd=folder)
    assert done.code == code, done.err
    assert re.search(r"fsdp-ckpt: rank 1 (ended with exit code \d|was killed by SIGKILL)", done.err)
    assert ("ValueError: broken on purpose" in done.err) == (how == "raise")


def test_sigterm_reaches_the_ranks(folder: Path) -> None:
    (folder / "wait.py").write_text(
        "import os, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "def end(*_):\n"
        "    open(f'ended{rank}', 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "open(f'began{rank}', 'w').close()\n"
        "time.sleep(60)\n"
    )
    job = subprocess.Popen([TOOL, "launch", "-n", "2", "--cpu", "wait.py"], cwd=folder, env=environment())
    try:
        limit = time.monotonic() + 50
        while not all((folder / f"began{rank}").exists() for rank in range(2)):
            assert time.monotonic() < limit, "the ranks never began"
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=40) == 143
    finally:
        job.kill()
        job.wait()
    assert all((folder / f"ended{rank}").exists() for rank in range(2))


def test_a_module_is_started_as_python_does(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__main__.py").write_text("import sys; open('came', 'w').write(' '.join(sys.argv[1:]))\n")
    assert run("launch", "-n", "1", "--cpu", "-m", "package", "a", "b", cwd=folder).code == 0
    assert (folder / "came").read_text() == "a b"


def test_dry_run_starts_nothing(folder: Path) -> None:
    plan = json.loads(run("launch", "--config", "job.yaml", "--dry-run", "--json", "script.py", "x", cwd=folder).out)
    assert plan["schema"] == "fsdp-ckpt/launch/1"
    assert plan["command"][-2:] == ["script.py", "x"]
    assert plan["environment"]["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP"
    assert plan["num_processes"] == 2
    assert not (folder / "rank0.json").exists()
    words = run("launch", "--config", "job.yaml", "--dry-run", "script.py", cwd=folder).out
    assert "FSDP_VERSION=1" in words


def test_several_machines_meet_at_machine_0(folder: Path) -> None:
    common = ["launch", "--dry-run", "--json", "-n", "8", "--num-machines", "2", "--machine-rank", "1"]
    refused = run(*common, "script.py", cwd=folder)
    assert_refused(refused, 2)
    assert "main_process_ip" in refused.err
    plan = json.loads(run(*common, "--main-process-ip", "10.0.0.1", "script.py", cwd=folder).out)
    shown = " ".join(plan["command"])
    for part in ("--nproc-per-node 4", "--nnodes 2", "--node-rank 1", "--master-addr 10.0.0.1", "--master-port 29500"):
        assert part in shown
    refused = run(*common[:3], "-n", "7", *common[5:], "--main-process-ip", "10.0.0.1", "script.py", cwd=folder)
    assert_refused(refused, 2)
    assert "does not divide" in refused.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.py"], "there is no such file"),
        (["--config", "missing.yaml", "script.py"], "cannot be read"),
        (["--set", "shard=1", "script.py"], "there is no such option"),
        (["--set", "offload_params=perhaps", "script.py"], "allowed: true, false"),
        (["--mixed-precision", "bf8", "script.py"], "allowed: no, fp16, bf16, fp8"),
        (["--json", "script.py"], "--dry-run"),
        (["--set", "fsdp_version=2", "--set", "sharding_strategy=NO_SHARD", "script.py"], "FSDP2 always shards"),
    ],
)
def test_mistakes_are_found_before_anything_starts(folder: Path, arguments: list[str], said: str) -> None:
    refused = run("launch", *arguments, cwd=folder)
    assert_refused(refused, 2)
    assert said in refused.err


def test_a_port_that_is_taken_is_found_before_anything_starts(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        refused = run("launch", "-n", "2", "--main-process-port", port, "script.py", cwd=folder)
    assert_refused(refused, 2)
    assert f"{port} is in use" in refused.err


def test_deepspeed_is_left_to_accelerate(folder: Path) -> None:
    (folder / "ds.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 2}\n"
    )
    refused = run("launch", "--config", "ds.yaml", "script.py", cwd=folder)
    assert_refused(refused, 2)
    assert refused.hint is not None
    assert "accelerate launch" in refused.hint
