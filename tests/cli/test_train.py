"""``train`` and ``generate``: save, die, go on, merge, ask."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal
from tests.cli.tool import TOOL, Result, assert_refused, environment, run

SMALL = ("--digits", "3", "--steps", "120", "--save-every", "40", "--cpu")


def _train(folder: Path, *arguments: str) -> Result:
    return run("train", "run", *arguments, cwd=folder, timeout_s=150)


def _losses(folder: Path) -> dict[int, list[float]]:
    """Return the losses of every step, of all attempts, from the log."""
    found: dict[int, list[float]] = {}
    for line in (folder / "run" / "log.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "stepped":
            found.setdefault(event["step"], []).append(event["loss"])
    return found


@pytest.mark.slow
def test_a_killed_run_goes_on_and_learns(tmp_path: Path) -> None:
    killed = _train(tmp_path, *SMALL, "--kill-at", "80")
    assert killed.code == 137, killed.err
    assert "in the middle of its save" in killed.err
    assert "last good checkpoint: run/step-40" in killed.err
    assert "fsdp-ckpt train run --resume auto" in killed.err
    assert sorted(p.name for p in (tmp_path / "run").glob("[a-z]*")) == ["log.jsonl", "step-40", "train.json"]

    refused = _train(tmp_path, "--cpu")
    assert_refused(refused, 5)
    assert refused.hint is not None
    assert "--resume auto" in refused.hint

    done = _train(tmp_path, "--resume", "auto", "--nproc", "4", "--cpu", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["schema"] == "fsdp-ckpt/train/1"
    assert (report["resumed_from"], report["first_step"], report["world_size"]) == ("run/step-40", 41, 4)
    assert (report["step"], report["ended"], report["last_checkpoint"]) == (120, "finished", "run/step-120")
    # Options that were not given again are those of the run: 3 digits, 120 steps.
    assert report["answer_accuracy"] > 0.9
    losses = _losses(tmp_path)
    assert sorted(losses) == list(range(1, 121))
    twice = {step: values for step, values in losses.items() if len(values) == 2}
    assert sorted(twice) == list(range(41, 81))
    for first, second in twice.values():  # on 2 ranks, then on 4
        assert second == pytest.approx(first, rel=2e-2)
    assert losses[41][1] == pytest.approx(losses[41][0], rel=1e-5)

    assert run("merge", "run/step-120", "merged", cwd=tmp_path).code == 0
    said = run("generate", "merged", "314", "--held-out", "200", "--json", cwd=tmp_path)
    report = json.loads(said.out)
    assert report["answers"] == [["314", "134", True]]
    assert report["accuracy"] > 0.9
    again = run("generate", "merged/model.safetensors", "314", cwd=tmp_path)
    assert again.out == "314 > 134  right\n"
    sharded = run("generate", "run/step-120", "314", cwd=tmp_path)
    assert sharded.out == "314 > 134  right\n"
    refused = run("generate", "merged", "3141", cwd=tmp_path)
    assert_refused(refused, 2)
    assert "trained on numbers of 3" in refused.err


def test_a_configuration_and_settings_are_followed(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\n"
        "fsdp_config:\n  fsdp_version: 1\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
    )
    done = _train(tmp_path, "--config", "fsdp.yaml", "--steps", "3", "--cpu", "--set", "sharding_strategy=2", "-q")
    assert done.code == 0, done.err
    assert done.out == "run/step-3\n"
    assert (tmp_path / "run" / "step-3" / "pytorch_model_fsdp.bin").is_file()  # as FULL_STATE_DICT says
    assert json.loads((tmp_path / "run" / "train.json").read_text())["fsdp"]["sharding_strategy"] == "SHARD_GRAD_OP"


@pytest.mark.slow
def test_a_resume_keeps_the_sharding_and_takes_a_new_learning_rate(tmp_path: Path) -> None:
    first = ("--steps", "4", "--save-every", "2", "--digits", "3", "--cpu", "-q")
    sharding = ("--set", "fsdp_version=1", "--set", "state_dict_type=FULL_STATE_DICT")
    assert _train(tmp_path, *first, *sharding).code == 0
    assert _train(tmp_path, "--resume", "auto", "--steps", "8", "--lr", "1e-5", "--cpu", "-q").code == 0
    assert (tmp_path / "run" / "step-8" / "pytorch_model_fsdp.bin").is_file()
    events = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    started = [event for event in events if event["kind"] == "started"]
    assert [event["fsdp"].startswith("FSDP1") for event in started] == [True, True]
    rates = {event["step"]: event["lr"] for event in events if event["kind"] == "stepped"}
    # Warm-up over 20 steps: (done + 1) / 21 of the highest rate, which is another one since step 5.
    assert rates[4] == pytest.approx(3e-3 * 4 / 21)
    assert rates[5] == pytest.approx(1e-5 * 5 / 21)
    assert rates[8] == pytest.approx(1e-5 * 8 / 21)

    refused = _train(tmp_path, "--resume", "auto", "--steps", "9", "--batch-size", "5", "--cpu")
    assert_refused(refused, 2)
    kept = json.loads((tmp_path / "run" / "train.json").read_text())
    assert (kept["batch_size"], kept["steps"], kept["lr"]) == (64, 8, 1e-5)
    assert not list((tmp_path / "run").glob(".train-*"))


def test_ctrl_c_twice_leaves_no_rank_behind(tmp_path: Path) -> None:
    terminal = Terminal(["train", "run", "--steps", "100000", "--cpu"], tmp_path, limit_s=120)
    terminal.wait_for("loss")
    terminal.type("\x03")
    time.sleep(0.2)
    terminal.type("\x03")
    assert terminal.end() == 130, terminal.screen
    assert _ranks_are_gone(tmp_path)


def test_a_closed_terminal_stops_the_ranks(tmp_path: Path) -> None:
    terminal = Terminal(["train", "run", "--steps", "100000", "--cpu"], tmp_path, limit_s=120)
    terminal.wait_for("loss")
    terminal.hang_up()
    assert _ranks_are_gone(tmp_path)
    assert list((tmp_path / "run").glob("step-*"))


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    terminal = Terminal(["train", "run", "--steps", "100000", "--cpu"], tmp_path, limit_s=120)
    terminal.wait_for("loss")
    terminal.type("\x03")
    assert terminal.end() == 130, terminal.screen
    assert "which was saved" in terminal.screen
    assert "fsdp-ckpt train run --resume auto" in terminal.screen
    (saved,) = (tmp_path / "run").glob("step-*")
    assert run("inspect", saved).code == 0
    assert _ranks_are_gone(tmp_path)


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=["TERM", "KILL"])
def test_signals_that_end_it_make_the_ranks_save(signal_number: int, code: int, tmp_path: Path) -> None:
    """Also one of which it never hears: the ranks would go on, beside those of the next start."""
    job = subprocess.Popen(
        [TOOL, "train", "run", "--steps", "100000", "--cpu"], cwd=tmp_path, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        limit = time.monotonic() + 90
        while "stepped" not in _text(tmp_path / "run" / "log.jsonl"):
            assert time.monotonic() < limit, "no step was ever done"
            time.sleep(0.1)
        job.send_signal(signal_number)
        assert job.wait(timeout=60) == code
    finally:
        job.kill()
        job.wait()
    assert _ranks_are_gone(tmp_path)
    assert list((tmp_path / "run").glob("step-*"))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _ranks_are_gone(folder: Path) -> bool:
    """Tell whether no process works in a folder any more; ranks may take a moment to end."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        places = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                places.append(os.readlink(process / "cwd"))
            except OSError:
                continue
        if str(folder.resolve()) not in places:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--resume", "nothing"], 3, "no checkpoint to resume from"),
        (["--kill-at", "500"], 2, "kill_at"),
        (["--config", "nothing.yaml"], 2, "cannot be read"),
        (["--set", "fsdp_version=4"], 2, "fsdp_version"),
        (["--lr", "0"], 2, "lr"),
        (["--steps", "0"], 2, "steps"),
        (
            ["--batch-size", "5", "--cpu"],
            2,
            "batch_size: 5 is not possible on 2 ranks; allowed: multiples of 2, such as 4 or 6",
        ),
        (["--set", "ignored_modules=lm_head"], 2, "ignored_modules"),
    ],
)
def test_mistakes_are_found_before_ranks_start(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    refused = _train(tmp_path, *arguments)
    assert_refused(refused, code)
    assert said in refused.err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_is_no_internal_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/run"):
        refused = run("train", folder, "--steps", "2", cwd=tmp_path)
        assert_refused(refused, 2)
        assert "cannot be written to" in refused.err


@pytest.mark.slow
def test_flat_parameters_are_resumed_on_as_many_ranks(tmp_path: Path) -> None:
    local = ("--set", "fsdp_version=1", "--set", "state_dict_type=LOCAL_STATE_DICT", "--steps", "2", "--cpu", "-q")
    assert _train(tmp_path, *local, "--digits", "3").code == 0
    again = _train(tmp_path, "--resume", "auto", "--steps", "4", "--cpu", "-q")
    assert again.code == 0, again.err
    assert again.out == "run/step-4\n"


def test_what_only_ranks_can_tell_comes_through_as_one_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 3}')
    refused = _train(tmp_path, "--model", "config.json", "--cpu", "--steps", "2")
    assert_refused(refused, 2)
    assert refused.err.count("has vocab_size 3; allowed for this task: 16 or more") == 1


@pytest.mark.slow
def test_generate_says_what_is_missing(tmp_path: Path) -> None:
    assert_refused(run("generate", "nothing", "3141", cwd=tmp_path), 3)
    assert_refused(run("generate", "nothing", cwd=tmp_path), 2)
    assert_refused(run("generate", "nothing", "12a4", cwd=tmp_path), 2)
