"""``fsdp-ckpt repair`` as it is typed: what it prints, its exit codes, and what it leaves alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.tool import ACCELERATE, EXPECTED, FIXTURES, assert_refused, flip, run, snapshot, strict_json, tensors

EDGE = FIXTURES / "edge"


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def lost(run_folder: Path) -> Path:
    """Two checkpoints of one model; the metadata of the second one are gone."""
    copy(ACCELERATE, run_folder / "checkpoint-10")
    second = copy(ACCELERATE, run_folder / "checkpoint-20")
    (second / "pytorch_model_fsdp_0/.metadata").unlink()
    return second


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    checkpoint = copy(ACCELERATE, tmp_path / "checkpoint-10")
    before = snapshot(tmp_path)
    for arguments in ([], ["--apply"], ["--no-verify"]):
        result = run("repair", checkpoint, *arguments)
        assert result.code == 0, result.err
        assert result.out.startswith(f"nothing to mend in {checkpoint}")
    assert run("repair", checkpoint, "-q").out == ""
    assert snapshot(checkpoint) == {name[14:] or ".": item for name, item in before.items() if name != "."}


def test_from_a_lost_file_to_a_merge_by_what_is_printed(tmp_path: Path) -> None:
    """Only commands that are printed are typed."""
    checkpoint = lost(tmp_path / "run")
    said = run("repair", checkpoint)
    assert said.code == 4
    assert said.out.startswith(f"nothing that can be mended in {checkpoint}")
    assert said.hint is not None
    before = snapshot(tmp_path)
    words = said.hint.split()
    assert words[0] == "fsdp-ckpt"
    would = run(*words[1:])
    assert would.code == 1
    assert "would write pytorch_model_fsdp_0/.metadata  (rebuild-metadata, " in would.out
    assert "Nothing was changed: add --apply" in would.out
    assert "all names come from" in would.err
    assert snapshot(tmp_path) == before
    done = run(*words[1:], "--apply")
    assert done.code == 0, done.err
    assert "wrote pytorch_model_fsdp_0/.metadata" in done.out
    assert "all is whole now" in done.out
    merged = run("merge", checkpoint, tmp_path / "out", "--no-fsync")
    assert merged.code == 0, merged.err
    assert tensors(tmp_path / "out") == tensors(EXPECTED)
    assert run(*words[1:]).code == 0


def test_the_line_that_undoes_it(tmp_path: Path) -> None:
    folder = copy(EDGE / "stale", tmp_path / "a name with 'quotes' and spaces")
    before = {name: item[2] for name, item in snapshot(folder).items()}
    done = run("repair", folder, "--apply")
    assert done.code == 0, done.err
    assert {name: item[2] for name, item in snapshot(folder).items()} != before
    undo = re.search(r"^undo:   (.*)$", done.out, re.MULTILINE)
    assert undo is not None
    subprocess.run(["bash", "-ec", undo[1]], check=True, timeout=20)
    assert {name: item[2] for name, item in snapshot(folder).items()} == before


def test_the_line_that_drops_the_backup(tmp_path: Path) -> None:
    folder = copy(EDGE / "stale", tmp_path / "c")
    done = run("repair", folder, "--apply")
    drop = re.search(r"to drop it: (rm -r .*)\)$", done.out, re.MULTILINE)
    assert drop is not None
    subprocess.run(["bash", "-ec", drop[1]], check=True, timeout=20)
    assert sorted(os.listdir(folder)) == [".metadata", "__0_0.distcp"]


def test_json(tmp_path: Path) -> None:
    folder = copy(EDGE / "torch215_hand2", tmp_path / "c")
    said = strict_json(run("repair", folder, "--for-torch", "2.9", "--json").out)
    assert said["schema"] == "fsdp-ckpt/repair/1"
    (action,) = said["actions"]
    assert (action["kind"], action["what"], action["file"]) == ("metadata-for-torch", "write", ".metadata")
    assert (said["whole"], said["applied"], said["backup"], said["undo"]) == (False, False, None, [])
    old = (folder / ".metadata").read_bytes()
    done = strict_json(run("repair", folder, "--for-torch", "2.9", "--json", "--apply").out)
    assert (done["whole"], done["applied"], done["faults"]) == (True, True, [])
    assert (Path(done["backup"]) / ".metadata").read_bytes() == old
    assert action["num_bytes"] == done["num_bytes"] == (folder / ".metadata").stat().st_size


def test_quiet_prints_files_only(tmp_path: Path) -> None:
    folder = copy(EDGE / "stale", tmp_path / "c")
    said = run("repair", folder, "-q")
    assert (said.code, said.out, said.err) == (1, "__0_1.distcp\n__0_2.distcp\n", "")


def test_damage_that_nothing_mends(tmp_path: Path) -> None:
    checkpoint = copy(ACCELERATE, tmp_path / "run/checkpoint-10")
    flip(checkpoint / "pytorch_model_fsdp_0/__0_0.distcp")
    before = snapshot(tmp_path)
    for arguments in ([], ["--apply"]):
        said = run("repair", checkpoint, *arguments)
        assert said.code == 4
        assert "cannot be mended without help: pytorch_model_fsdp_0/__0_0.distcp" in said.err
        assert said.hint is not None
        assert f"fsdp-ckpt list {tmp_path}/run" in said.hint
    assert snapshot(checkpoint) == {name[18:] or ".": i for name, i in before.items() if name.startswith("run/check")}


def test_another_copy(tmp_path: Path) -> None:
    checkpoint, backup = copy(ACCELERATE, tmp_path / "checkpoint-10"), copy(ACCELERATE, tmp_path / "backup")
    good = (backup / "pytorch_model_fsdp_0/__0_0.distcp").read_bytes()
    flip(checkpoint / "pytorch_model_fsdp_0/__0_0.distcp")
    for given in (backup, backup / "pytorch_model_fsdp_0"):  # of the whole, or of the part
        assert run("repair", checkpoint, "--replica", given).code == 1
    assert run("repair", checkpoint / "pytorch_model_fsdp_0", "--replica", backup).code == 1
    assert run("repair", checkpoint, "--replica", backup, "--apply").code == 0
    assert (checkpoint / "pytorch_model_fsdp_0/__0_0.distcp").read_bytes() == good


def test_in_the_folder_itself(tmp_path: Path) -> None:
    checkpoint = lost(tmp_path / "run")
    said = run("repair", ".", cwd=checkpoint)
    assert said.code == 4
    assert said.hint == f"fsdp-ckpt repair . --like {tmp_path}/run/checkpoint-10"
    assert run("repair", ".", "--like", "../checkpoint-10", "--apply", cwd=checkpoint).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["nothing"], 3, "ls -A"),
        (["run"], 2, "fsdp-ckpt repair run/checkpoint-10"),
        (["run/checkpoint-10/pytorch_model_fsdp_0/.metadata"], 2, "fsdp-ckpt repair run/checkpoint-10/pytorch_model"),
        (["run/checkpoint-10", "--for-torch", "2.2"], 8, "2.3"),
        (["run/checkpoint-10", "--for-torch", "new"], 2, "--for-torch 2.9"),
        (["run/checkpoint-10", "--only", "all"], 2, "drop-stale"),
        (["run/checkpoint-10", "--like", "nothing"], 3, "ls"),
        (["run/checkpoint-10", "--replica", "run/checkpoint-10"], 2, "another"),
        (["s3://bucket/step-1"], 2, "copy"),
        ([""], 2, "copy"),
    ],
)
def test_slips(arguments: list[str], code: int, hint: str, tmp_path: Path) -> None:
    copy(ACCELERATE, tmp_path / "run/checkpoint-10")
    result = run("repair", *arguments, cwd=tmp_path)
    assert_refused(result, code)
    assert result.hint is not None
    assert hint in result.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    folder = copy(EDGE / "stale", tmp_path / "c")
    folder.chmod(0o555)
    try:
        assert run("repair", folder).code == 1
        assert_refused(run("repair", folder, "--apply"), 2)
    finally:
        folder.chmod(0o755)


def test_names_from_files_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    folder = copy(EDGE / "stale", tmp_path / "c")
    (folder / "__0_1.distcp").rename(folder / "__0_1\x1b[31m.distcp")
    said = run("repair", folder)
    assert said.code == 1
    assert "\x1b" not in said.out + said.err
    assert "\\x1b[31m" in said.out


def test_torch_is_not_imported(tmp_path: Path) -> None:
    folder = copy(EDGE / "torch215_hand2", tmp_path / "c")
    import sys

    from tests.cli.tool import TOOL, environment

    done = subprocess.run(
        [sys.executable, "-X", "importtime", TOOL, "repair", str(folder), "--for-torch", "2.9", "--apply"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    names = {name.partition(".")[0] for name in re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)}
    assert "fsdp_ckpt" in names
    assert not names & {"torch", "numpy", "safetensors", "transformers"}
