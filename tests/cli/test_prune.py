"""``prune`` removes checkpoints that no rule keeps, and never anything else."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import DCP, Result, assert_refused, environment, run, snapshot, strict_json
from tests.unit.layouts.made_runs import DATA, MANIFEST, change, flip, own, trainer


def steps(folder: Path) -> list[str]:
    """Return what is there, hidden things too."""
    return sorted(os.listdir(folder))


def many(folder: Path, *numbers: int, **values: Any) -> Path:
    for number in numbers:
        own(folder, number, {"loss": number / 10} | values)
    return folder


def test_the_last_ones_stay(tmp_path: Path) -> None:
    many(tmp_path, 9, 10, 11, 100)
    os.utime(tmp_path / "step-9")  # the latest by time is the oldest by step
    result = run("prune", tmp_path, "--keep", "2")
    assert (result.code, result.err) == (0, "")
    assert steps(tmp_path) == ["step-100", "step-11"]
    assert "removed 2, " in result.out
    assert run("prune", tmp_path, "--keep", "2").out.rstrip().endswith("nothing to remove")


def test_the_rules_add_up(tmp_path: Path) -> None:
    many(tmp_path, 0, 100, 150, 200, 250, 300, 350)
    own(tmp_path, 50, {"loss": float("nan"), "bleu": 9})
    own(tmp_path, 75, {"loss": 5, "bleu": 7.5})
    result = run(
        "prune", tmp_path, "--keep", "1", "--keep-every", "200", "--keep-best", "loss=2", "--keep-best", "bleu:max"
    )
    assert result.code == 0, result.err
    assert steps(tmp_path) == ["step-0", "step-200", "step-350", "step-50", "step-75"]


def test_a_dry_run_changes_nothing_and_says_what_would_go(tmp_path: Path) -> None:
    many(tmp_path, 1, 2, 3)
    before = snapshot(tmp_path)
    result = run("prune", tmp_path, "--keep", "1", "--dry-run")
    assert result.code == 0
    assert "would remove step-1 " in result.out
    assert "would remove step-2 " in result.out
    assert "would remove 2, " in result.out
    assert snapshot(tmp_path) == before
    report = strict_json(run("prune", tmp_path, "--keep", "1", "--dry-run", "--json").out)
    assert report["dry_run"] is True
    assert snapshot(tmp_path) == before
    run("prune", tmp_path, "--keep", "1")
    assert steps(tmp_path) == ["step-3"]


def test_json_says_what_was_freed_in_exact_bytes(tmp_path: Path) -> None:
    many(tmp_path, 1, 2, 3)
    (own(tmp_path, 4) / DATA).unlink()
    sizes = {n: sum(p.stat().st_size for p in (tmp_path / f"step-{n}").rglob("*") if p.is_file()) for n in (1, 2)}
    result = run("prune", tmp_path, "--keep", "1", "--json")
    assert (result.code, result.err) == (0, "")
    report = strict_json(result.out)
    assert report["schema"] == "fsdp-ckpt/prune/1"
    assert [(item["step"], item["num_bytes"]) for item in report["removed"]] == [(1, sizes[1]), (2, sizes[2])]
    assert report["freed_bytes"] == sum(sizes.values())
    assert report["latest"] == str(tmp_path / "step-3")
    assert report["kept"] == [{"step": 3, "path": str(tmp_path / "step-3"), "reasons": ["the newest"]}]
    assert [item["path"] for item in report["spared"]] == [str(tmp_path / "step-4")]
    assert report["failed"] == []


def test_quiet_prints_the_removed_folders(tmp_path: Path) -> None:
    many(tmp_path, 1, 2, 3)
    result = run("prune", tmp_path, "--keep", "1", "-q")
    assert (result.out, result.err) == (f"{tmp_path / 'step-1'}\n{tmp_path / 'step-2'}\n", "")
    assert run("prune", tmp_path, "--keep", "1", "-q").out == ""


def test_the_newest_complete_one_stays_when_newer_ones_are_not(tmp_path: Path) -> None:
    many(tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / "step-5" / DATA).unlink()
    (tmp_path / "step-4" / MANIFEST).write_text("{")
    result = run("prune", tmp_path, "--keep", "1")
    assert steps(tmp_path) == ["step-3", "step-4", "step-5"]
    assert f"leave   step-5  incomplete: {DATA}: " in result.out
    assert "leave   step-4  damaged: " in result.out
    assert run("prune", tmp_path, "--keep", "1", "--incomplete").code == 0
    assert steps(tmp_path) == ["step-3", "step-4", "step-5"], "they are newer: perhaps being copied"


def test_what_is_not_whole_does_not_count(tmp_path: Path) -> None:
    many(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-3" / DATA).unlink()
    run("prune", tmp_path, "--keep", "2")
    assert steps(tmp_path) == ["step-2", "step-3", "step-4"]


def test_deep_does_not_count_what_is_damaged(tmp_path: Path) -> None:
    many(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-3" / DATA)
    assert run("prune", tmp_path, "--keep", "1", "--deep").code == 0
    assert steps(tmp_path) == ["step-2", "step-3"]


def test_incomplete_ones_go_when_asked_for_but_damaged_ones_never(tmp_path: Path) -> None:
    many(tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / "step-1" / DATA).unlink()
    flip(tmp_path / "step-2" / "pytorch_model_fsdp_0/.metadata")
    (tmp_path / "step-3").joinpath(MANIFEST).write_text("{")
    own(tmp_path, 9, name=".step-9.fsdp-ckpt-00ff")
    (tmp_path / ".mine").mkdir()
    run("prune", tmp_path, "--keep", "9")
    assert len(steps(tmp_path)) == 7
    result = run("prune", tmp_path, "--keep", "9", "--incomplete", "--json")
    report = strict_json(result.out)
    assert [(item["step"], item["path"]) for item in report["removed"]] == [
        (1, str(tmp_path / "step-1")), (None, str(tmp_path / ".step-9.fsdp-ckpt-00ff")),
    ]  # fmt: skip
    assert steps(tmp_path) == [".mine", "step-2", "step-3", "step-4", "step-5"]


def test_a_save_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    many(tmp_path, 1, 2)
    staging = own(tmp_path, 3, name=".step-3.fsdp-ckpt-00ff")
    lock = os.open(staging / ".fsdp-ckpt-lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    result = run("prune", tmp_path, "--keep", "1", "--incomplete", "--json")
    os.close(lock)
    assert (staging / DATA).is_file()
    assert [item["path"] for item in strict_json(result.out)["spared"]] == [str(staging)]
    run("prune", tmp_path, "--keep", "1", "--incomplete")
    assert steps(tmp_path) == ["step-2"]


def test_a_checkpoint_that_a_dead_save_had_moved_away_is_put_back(tmp_path: Path) -> None:
    many(tmp_path, 1, 2)
    own(tmp_path, 3, name=".step-3.fsdp-ckpt-00ff.old")
    result = run("prune", tmp_path, "--keep", "9", "--incomplete", "--json")
    assert strict_json(result.out)["removed"] == []
    assert steps(tmp_path) == ["step-1", "step-2", "step-3"]


def test_where_nothing_is_whole_nothing_goes(tmp_path: Path) -> None:
    for step in (1, 2):
        (own(tmp_path, step) / DATA).unlink()
    before = snapshot(tmp_path)
    result = run("prune", tmp_path, "--keep", "1", "--incomplete")
    assert_refused(result, 4)
    assert result.hint == f"fsdp-ckpt list {tmp_path}"
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["--keep", "0"], ["--keep", "-1"], ["--keep", "x"], ["--keep", "1", "--keep-every", "0"],
        ["--keep", "1", "--keep-best", "bleu"], ["--keep", "1", "--keep-best", "loss=0"],
        ["--keep", "1", "--keep-best", ""], ["--keep", "1", "--keep-best", "loss", "--keep-best", "loss:max"],
    ],
)  # fmt: skip
def test_a_slip_removes_nothing(tmp_path: Path, arguments: list[str]) -> None:
    many(tmp_path, 1, 2, 3)
    before = snapshot(tmp_path)
    result = run("prune", tmp_path, *arguments)
    assert_refused(result, 2)
    assert result.hint or "Try 'fsdp-ckpt prune -h'" in result.err
    assert snapshot(tmp_path) == before


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    many(tmp_path / "run", 1, 2)
    (tmp_path / "empty").mkdir()
    before = snapshot(tmp_path)
    for place, code in (
        (tmp_path / "run/step-1", 2), (tmp_path / "run/step-1" / MANIFEST, 2), ("gs://x/run", 2),
        (tmp_path / "empty", 3), (tmp_path / "missing", 3),
    ):  # fmt: skip
        result = run("prune", place, "--keep", "1")
        assert_refused(result, code)
        assert result.hint
    assert snapshot(tmp_path) == before


def test_foreign_checkpoints_go_by_the_same_rule(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        trainer(tmp_path, step, {"step": step, "eval_loss": 400 - step if step < 300 else 900})
    result = run("prune", tmp_path, "--keep", "1", "--keep-best", "eval_loss")
    assert result.code == 0, result.err
    assert steps(tmp_path) == ["checkpoint-200", "checkpoint-400"]
    for step in (1, 2):
        shutil.copytree(DCP, tmp_path / f"step-{step}")
    assert run("prune", tmp_path, "--keep", "1", "-q").out == f"{tmp_path / 'step-1'}\n{tmp_path / 'checkpoint-200'}\n"


def test_names_that_differ_in_more_than_the_number_are_series_of_their_own(tmp_path: Path) -> None:
    many(tmp_path, 1, 10)
    trainer(tmp_path, 10)
    trainer(tmp_path, 5000)
    run("prune", tmp_path, "--keep", "1")
    assert steps(tmp_path) == ["checkpoint-5000", "step-10"]


def _add(name: str) -> Callable[[Path], None]:
    def add(path: Path) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("mine")

    return add


STRANGERS: dict[str, Callable[[Path], Any]] = {
    "a text": _add("thesis.tex"),
    "a program": _add("train.py"),
    "results": _add("results.json"),
    "something deep in it": _add("pytorch_model_fsdp_0/thesis.tex"),
    "a repository": _add(".git/HEAD"),
    "a hidden folder": _add(".mine/config.json"),
    "a run in it": _add("step-7/model.safetensors"),
    "a link": lambda path: (path / "model.safetensors").symlink_to("/etc/passwd"),
    "a link to a folder": lambda path: (path / "sharded").symlink_to("/etc"),
    "a dangling link": lambda path: (path / "latest.bin").symlink_to("/nowhere"),
    "a pipe": lambda path: os.mkfifo(path / "rng_state.pth"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_foreign_checkpoint_with_a_stranger_in_it_stays(tmp_path: Path, name: str) -> None:
    STRANGERS[name](trainer(tmp_path, 1))
    trainer(tmp_path, 2)
    before = snapshot(tmp_path)
    result = run("prune", tmp_path, "--keep", "1", "--incomplete")
    assert result.code == 0, result.err
    assert "leave   checkpoint-1 " in result.out
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("make", [own, trainer])
def test_what_a_repair_has_kept_goes_with_its_checkpoint(tmp_path: Path, make: Callable[[Path, int], Path]) -> None:
    kept = make(tmp_path, 1) / ".before-repair-1"
    kept.mkdir()
    (kept / "thesis.tex").write_text("as it was")
    make(tmp_path, 2)
    assert run("prune", tmp_path, "--keep", "1").code == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"{'step' if make is own else 'checkpoint'}-2"]


@pytest.mark.parametrize("name", ["my-step-1", "step-1.bak", "epoch-1", "Step-1", "step-1-old", "notes.step-1"])
def test_a_name_that_says_more_than_a_step_stays_and_does_not_count(tmp_path: Path, name: str) -> None:
    own(tmp_path, 1, name=name)
    own(tmp_path, 99999, name=name.replace("1", "99999"))
    many(tmp_path, 2, 3)
    run("prune", tmp_path, "--keep", "1", "--incomplete")
    assert steps(tmp_path) == sorted([name, name.replace("1", "99999"), "step-3"])


@pytest.mark.parametrize(
    "name", ["step-0001", "global_step_1", "iter-1", "epoch=0-step=1.ckpt", "ep0-ba1", "checkpoint-1"]
)
def test_names_of_other_tools_that_are_plainly_steps(tmp_path: Path, name: str) -> None:
    for number in "123":
        shutil.copytree(DCP, tmp_path / name.replace("1", number))
    result = run("prune", tmp_path, "--keep", "2")
    assert steps(tmp_path) == sorted([name.replace("1", "2"), name.replace("1", "3")]), result.out


def test_a_step_folder_that_is_a_link_to_somewhere_precious(tmp_path: Path) -> None:
    precious = own(tmp_path / "archive", 1)
    newest = own(tmp_path / "archive", 777)
    many(tmp_path / "run", 2, 3)
    (tmp_path / "run/step-1").symlink_to(precious)
    (tmp_path / "run/step-777").symlink_to(newest)
    (tmp_path / "run/step-5").write_text("a file")
    before = snapshot(tmp_path / "archive")
    result = run("prune", tmp_path / "run", "--keep", "1", "--incomplete")
    assert result.code == 0
    assert snapshot(tmp_path / "archive") == before
    assert steps(tmp_path / "run") == ["step-1", "step-3", "step-5", "step-777"]
    assert os.readlink(tmp_path / "run/step-1") == str(precious)
    assert "a link" in result.out


def test_links_in_a_checkpoint_of_ours_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("mine")
    many(tmp_path / "run", 1, 2)
    (tmp_path / "run/step-1/also").symlink_to(tmp_path / "home")
    result = run("prune", tmp_path / "run", "--keep", "1")
    assert steps(tmp_path / "run") == ["step-1", "step-2"], "it holds something that no save put there"
    assert "`also`" in result.out
    assert (tmp_path / "home/thesis.tex").read_text() == "mine"


def test_files_of_yours_in_a_checkpoint_of_ours_keep_it(tmp_path: Path) -> None:
    many(tmp_path / "run", 1, 2, 3)
    (tmp_path / "run/step-1/mine").mkdir()
    (tmp_path / "run/step-1/mine/thesis.tex").write_text("mine")
    result = run("prune", tmp_path / "run", "--keep", "1")
    assert result.code == 0
    assert steps(tmp_path / "run") == ["step-1", "step-3"]
    assert "`mine`" in result.out


def test_a_metric_that_no_checkpoint_has_removes_nothing(tmp_path: Path) -> None:
    many(tmp_path / "run", 1, 2, 3)
    result = run("prune", tmp_path / "run", "--keep", "1", "--keep-best", "eval_los:min")
    assert result.code == 2
    assert "eval_los" in result.err
    assert steps(tmp_path / "run") == ["step-1", "step-2", "step-3"]


def test_a_run_folder_that_is_a_link_is_the_folder(tmp_path: Path) -> None:
    many(tmp_path / "run", 1, 2)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert run("prune", tmp_path / "link", "--keep", "1").code == 0
    assert steps(tmp_path / "run") == ["step-2"]


def test_folders_that_are_no_checkpoints_stay(tmp_path: Path) -> None:
    many(tmp_path, 5)
    for name in ("step-1", "logs", "best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text("mine")
    (tmp_path / "step-2").mkdir()
    shutil.copytree(DCP, tmp_path / "step-3/step-30")
    run("prune", tmp_path, "--keep", "1")
    assert steps(tmp_path) == ["best", "logs", "step-1", "step-2", "step-3", "step-5"]
    run("prune", tmp_path, "--keep", "1", "--incomplete")
    assert steps(tmp_path) == ["best", "logs", "step-1", "step-3", "step-5"], "an empty folder holds nothing to lose"


def test_a_manifest_that_leads_out_removes_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    many(tmp_path / "run", 1, 2)
    change(tmp_path / "run/step-1", files={"../../precious": {"bytes": 4, "crc32": "0"}})
    run("prune", tmp_path / "run", "--keep", "1", "--incomplete")
    assert (tmp_path / "precious").read_text() == "mine"
    assert steps(tmp_path / "run") == ["step-1", "step-2"]


def _as_nobody(*arguments: str) -> Result:
    """Run as a user without rights, after a dry run has imported everything: Python may be closed to nobody."""
    program = (
        "import os, sys, fsdp_ckpt.cli.app as app;"
        "app.app([*sys.argv[1:], '--dry-run'], standalone_mode=False);"
        "os.getuid() or os.setuid(65534);"
        "app.run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment(), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)


def test_a_folder_that_cannot_be_written_to() -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own are closed to other users
        folder = many(Path(place, "run"), 1, 2)
        os.chmod(place, 0o755)
        folder.chmod(0o555)
        before = snapshot(folder)
        result = _as_nobody("prune", str(folder), "--keep", "1")
        assert snapshot(folder) == before
        folder.chmod(0o755)
        assert_refused(result, 2)
        assert "cannot be written to" in result.err
        assert result.hint == f"ls -ld {folder}"
        if os.getuid() == 0:  # the mode was the reason; now the folder may be renamed, but not what is in it deleted
            folder.chmod(0o777)
            result = _as_nobody("prune", str(folder), "--keep", "1")
            assert result.code == 1
            assert f"could not remove {folder / 'step-1'}: some of its files could not be deleted" in result.err
            (hidden,) = [name for name in steps(folder) if name != "step-2"]
            assert hidden.startswith(".step-1.fsdp-ckpt-")
            assert run("prune", folder, "--keep", "1", "--incomplete").code == 0
            assert steps(folder) == ["step-2"]


def test_what_cannot_be_removed_is_said_and_the_rest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_ckpt.ops.prune_run import prune_run

    many(tmp_path, 1, 2, 3)
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if Path(source).name == "step-1":
            raise PermissionError(13, "Permission denied", str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    report = prune_run(tmp_path, keep=1)
    assert [Path(item.path).name for item in report.removed] == ["step-2"]
    assert [(Path(item.path).name, item.why) for item in report.failed] == [("step-1", "Permission denied")]
    assert steps(tmp_path) == ["step-1", "step-3"]
