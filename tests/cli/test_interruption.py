"""Ctrl-C, SIGTERM, SIGKILL, two writers at once: nothing half-written, and --resume goes on where it stopped."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.hook import Hooked
from tests.cli.tool import (
    DCP,
    EXPECTED,
    TOOL,
    assert_refused,
    environment,
    flip,
    leftovers,
    run,
    snapshot,
    tensors,
)

MANY = ("--max-shard-size", "1KB")
FINISH = r"\.part'"


def _hidden(parent: Path) -> Path:
    (name,) = leftovers(parent)
    return parent / name


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_signal_leaves_nothing_half_written(number: int, code: int, overwrite: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--overwrite"] if overwrite else []
    if overwrite:
        assert run("merge", DCP, out).code == 0
    before = snapshot(out) if overwrite else None
    hooked = Hooked(tmp_path / "hook", ("merge", DCP, out, *MANY, *options, "--jobs", "1"), "os.rename", FINISH, 3)
    hooked.wait_until_there()
    hooked.signal(number)
    hooked.go_on()
    result = hooked.result()
    assert result.code == code, result
    assert "Traceback" not in result.err
    assert result.out == ""
    assert (snapshot(out) if out.exists() else None) == before
    for name in leftovers(tmp_path):
        assert not list((tmp_path / name).glob("*.part"))
    if number == signal.SIGINT:
        assert result.hint is not None
        typed = re.search(r"fsdp-ckpt .*", result.hint)
        assert typed, result.hint
        done = subprocess.run(
            ["bash", "-c", typed[0].replace("fsdp-ckpt", shlex.quote(TOOL), 1)],
            env=environment(), timeout=60, check=False, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, (typed[0], done.stderr.decode())
    else:
        assert run("merge", DCP, out, *MANY, *options).code == 0
    assert tensors(out) == tensors(EXPECTED)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("module", ["typer", "fsdp_ckpt.ops.merge", "fsdp_ckpt.layouts.registry", "json"])
def test_ctrl_c_while_it_starts_makes_no_trace(module: str, tmp_path: Path) -> None:
    hooked = Hooked(tmp_path / "hook", ("merge", DCP, tmp_path / "out"), "import", rf"^\('{re.escape(module)}'")
    hooked.wait_until_there()
    hooked.signal(signal.SIGINT)
    hooked.go_on()
    result = hooked.result()
    assert result.code in (130, -signal.SIGINT)
    assert "Traceback" not in result.err, result.err
    assert not (tmp_path / "out").exists()


def test_resume_after_a_kill_keeps_what_was_finished(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("merge", DCP, out, *MANY, "--jobs", "1")
    hooked = Hooked(tmp_path / "hook", arguments, "os.rename", FINISH, 4, "kill")
    assert hooked.result().code == -signal.SIGKILL
    assert not out.exists()
    kept = {path.name: path.stat() for path in _hidden(tmp_path).glob("*.safetensors")}
    assert len(kept) == 3
    result = run(*arguments, "--resume")
    assert result.code == 0, result.err
    for name, status in kept.items():
        now = (out / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns), f"{name} was written again"
    assert tensors(out) == tensors(EXPECTED)
    assert leftovers(tmp_path) == []


def test_resume_gives_the_very_files_of_a_merge_in_one_go(tmp_path: Path) -> None:
    assert run("merge", DCP, tmp_path / "whole", *MANY).code == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    for count in (2, len(whole) - 1):
        out = tmp_path / f"out{count}"
        hooked = Hooked(tmp_path / "hook", ("merge", DCP, out, *MANY), "os.rename", FINISH, count, "kill")
        assert hooked.result().code == -signal.SIGKILL
        assert run("merge", DCP, out, *MANY, "--resume").code == 0
        assert {path.name: path.read_bytes() for path in out.iterdir()} == whole


@pytest.mark.parametrize("change", ["options", "source", "nothing"])
def test_without_resume_or_for_something_else_it_begins_anew(change: str, tmp_path: Path) -> None:
    source, out = shutil.copytree(DCP, tmp_path / "ckpt"), tmp_path / "out"
    hooked = Hooked(tmp_path / "hook", ("merge", source, out, *MANY), "os.rename", FINISH, 4, "kill")
    assert hooked.result().code == -signal.SIGKILL
    # What it left is not what is asked for now; a resume that took it would give these bytes out as tensors.
    for path in _hidden(tmp_path).glob("*.safetensors"):
        path.write_bytes(b"\xff" * path.stat().st_size)
    if change == "source":
        shutil.rmtree(source)
        shutil.copytree(DCP, source)
        (source / "__0_0.distcp").touch()  # written again: another time, perhaps other values
    options = {"options": ["--max-shard-size", "2KB", "--resume"], "source": [*MANY, "--resume"], "nothing": MANY}
    result = run("merge", source, out, *options[change])
    assert result.code == 0, result.err
    assert tensors(out) == tensors(EXPECTED)
    assert leftovers(tmp_path) == []


def test_a_second_writer_is_refused_and_does_not_disturb_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = Hooked(tmp_path / "hook", ("merge", DCP, out, *MANY), "os.rename", FINISH, 2)
    first.wait_until_there()
    for options in ([], ["--resume"], ["--overwrite"]):
        second = run("merge", DCP, out, *MANY, *options)
        assert_refused(second, 5)
        assert "another process" in second.err
    first.go_on()
    assert first.result().code == 0
    assert tensors(out) == tensors(EXPECTED)
    assert leftovers(tmp_path) == []


def test_a_second_writer_of_something_else_does_not_disturb_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = Hooked(tmp_path / "hook", ("merge", DCP, out, *MANY), "os.rename", FINISH, 2)
    first.wait_until_there()
    second = run("merge", DCP, out, "--dtype", "float16")
    first.go_on()
    done = first.result()
    assert sorted([done.code, second.code]) == [0, 5], (done, second)
    assert "Traceback" not in done.err + second.err
    found = tensors(out)
    assert found["embed.weight"][0] == ("F16" if second.code == 0 else "F32")
    assert set(found) == set(tensors(EXPECTED))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("event", ["os.rename", "os.remove"])
def test_a_second_writer_at_the_very_end(event: str, tmp_path: Path) -> None:
    """The first one is about to rename its folder (or has just given up its lock) when the second one begins."""
    out = tmp_path / "out"
    pattern = rf"{re.escape(str(out))}'" if event == "os.rename" else r"lock'"
    first = Hooked(tmp_path / "hook", ("merge", DCP, out), event, pattern)
    first.wait_until_there()
    second = run("merge", DCP, out)
    first.go_on()
    done = first.result()
    assert sorted([done.code, second.code]) == [0, 5], (done, second)
    assert "Traceback" not in done.err + second.err
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert tensors(out) == tensors(EXPECTED)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("event", ["os.mkdir", "open"])
def test_a_second_writer_at_the_very_beginning(event: str, tmp_path: Path) -> None:
    """The first one has not yet made its folder, or not yet its lock, when the second one comes and goes."""
    out = tmp_path / "out"
    pattern = r"fsdp-ckpt-[0-9a-f]+'" if event == "os.mkdir" else r"lock'"
    first = Hooked(tmp_path / "hook", ("merge", DCP, out), event, pattern)
    first.wait_until_there()
    second = run("merge", DCP, out)
    first.go_on()
    done = first.result()
    assert sorted([done.code, second.code]) == [0, 5], (done, second)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert tensors(out) == tensors(EXPECTED)
    assert leftovers(tmp_path) == []


def test_many_writers_at_once(tmp_path: Path) -> None:
    for attempt in range(2):
        out = tmp_path / f"out{attempt}"
        runs = [
            subprocess.Popen(
                [TOOL, "merge", str(DCP), str(out), "-q", "--no-fsync"],
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        errors = [process.communicate(timeout=60)[1] for process in runs]
        codes = sorted(process.returncode for process in runs)
        assert set(codes) <= {0, 5}, (codes, errors)
        assert codes.count(0) == 1, codes
        assert [path.name for path in out.iterdir()] == ["model.safetensors"]
        assert tensors(out) == tensors(EXPECTED)
    assert leftovers(tmp_path) == []


def test_the_source_is_removed_only_after_success(tmp_path: Path) -> None:
    source, out = tmp_path / "run/pytorch_model_fsdp_0", tmp_path / "out"
    shutil.copytree(DCP, source)
    flip(source / "__1_0.distcp", 3)
    before = snapshot(source)
    assert_refused(run("merge", source, out, "--remove-source"), 4)
    assert snapshot(source) == before

    shutil.rmtree(source)
    shutil.copytree(DCP, source)
    before = snapshot(source)
    for event, pattern in (("os.rename", FINISH), ("os.rename", rf"{re.escape(str(out))}'"), ("os.remove", "lock")):
        hooked = Hooked(tmp_path / "hook", ("merge", source, out, "--remove-source"), event, pattern, 1, "kill")
        assert hooked.result().code == -signal.SIGKILL
        assert snapshot(source) == before

    (source.parent / "README").write_text("mine")
    result = run("merge", source, out, "--remove-source")
    assert result.code == 0, result.err
    assert not source.exists()
    assert (source.parent / "README").read_text() == "mine"
    assert tensors(out) == tensors(EXPECTED)


def test_a_result_that_reads_back_wrong_keeps_the_source(tmp_path: Path) -> None:
    source, out = shutil.copytree(DCP, tmp_path / "ckpt"), tmp_path / "out"
    hooked = Hooked(
        tmp_path / "hook", ("merge", source, out, "--remove-source"), "open", rf"{re.escape(str(out))}/model"
    )
    hooked.wait_until_there()  # about to read back what was published
    with open(out / "model.safetensors", "r+b") as file:
        file.seek(-8, 2)
        file.write(b"\xa5" * 8)
    hooked.go_on()
    result = hooked.result()
    assert_refused(result, 4)
    assert "source was kept" in result.err
    assert snapshot(source)["__0_0.distcp"][2] == (DCP / "__0_0.distcp").read_bytes()
