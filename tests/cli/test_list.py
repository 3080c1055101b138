"""``list``: a table that people read, a report that programs read, a path that scripts take."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import TOOL, assert_refused, environment, run, snapshot, strict_json
from tests.unit.layouts.made_runs import DATA, DCP, FILES, INDEX, MANIFEST, change, flip, own, trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run: two whole ones of ours, a damaged and a cut off one, and one of the Trainer's."""
    place = tmp_path / "run"
    own(place, 900, {"loss": 0.25, "tokens": 12})
    own(place, 1000, {"loss": 0.125})
    (own(place, 1100) / DATA).unlink()
    flip(own(place, 1200) / INDEX)
    trainer(place, 500, {"step": 500, "eval_loss": 1.5})
    own(place, 1300, name=".step-1300.fsdp-ckpt-0123456789abcdef")
    return place


def rows(text: str) -> list[str]:
    """Return the first column."""
    return re.findall(r"^((?:step|checkpoint)-\d+) ", text, re.MULTILINE)


def test_the_table(folder: Path) -> None:
    before = snapshot(folder)
    result = run("list", folder)
    assert (result.code, result.err) == (0, "")
    assert rows(result.out) == ["step-1200", "step-1100", "step-1000", "step-900", "checkpoint-500", "step-1300"]
    lines = {line.split()[0]: line for line in result.out.splitlines() if line.strip()}
    assert "complete" in lines["step-1000"]
    assert [name for name, line in lines.items() if "resume takes this" in line] == ["step-1000"]
    assert "loss 0.125" in lines["step-1000"]
    assert "loss 0.25; tokens 12" in lines["step-900"]
    assert "eval_loss 1.5" in lines["checkpoint-500"]
    assert f"incomplete   {DATA}: listed in the manifest, but not there" in lines["step-1100"]
    assert f"damaged      {INDEX}: its CRC-32 is" in lines["step-1200"]
    assert "unfinished" in lines["step-1300"]
    assert result.out.rstrip().splitlines()[-1].startswith("3 of 5 complete, ")
    assert snapshot(folder) == before, "a look changes nothing"
    assert run("ls", folder, "-q").out == f"{folder / 'step-1000'}\n"


def test_the_table_fits_80_columns_and_has_no_colour_in_a_pipe(folder: Path) -> None:
    (own(folder, 7 * 10**40) / DATA).unlink()
    result = run("list", folder, env=environment(COLUMNS="80", TERM="xterm-256color"))
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    assert "\x1b" not in result.out
    for word in ("step-900", "complete", "incomplete", "damaged", "resume takes this"):
        assert word in result.out


def test_json_is_the_same_report_in_exact_numbers(folder: Path) -> None:
    begun = time.time()
    result = run("list", folder, "--json")
    assert (result.code, result.err) == (0, "")
    report = strict_json(result.out)
    assert report["schema"] == "fsdp-ckpt/list/1"
    assert report["latest"] == str(folder / "step-1000")
    assert report["num_complete"] == 3
    found = {item["name"]: item for item in report["checkpoints"]}
    assert [item["step"] for item in report["checkpoints"]] == [1200, 1100, 1000, 900, 500]
    assert {name: item["state"] for name, item in found.items()} == {
        "step-1200": "damaged", "step-1100": "incomplete", "step-1000": "complete", "step-900": "complete",
        "checkpoint-500": "complete",
    }  # fmt: skip
    assert [name for name, item in found.items() if item["latest"]] == ["step-1000"]
    assert found["step-900"]["values"] == {"loss": 0.25, "tokens": 12}
    assert [item["own"] for item in report["checkpoints"]] == [True, True, True, True, False]
    sizes = sum(map(len, FILES.values()))
    assert found["step-900"]["num_bytes"] == sizes + (folder / "step-900" / MANIFEST).stat().st_size
    assert report["num_bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert 0 <= found["step-900"]["age_s"] - (begun - 1767323045) < 60
    (left,) = report["leftovers"]
    assert left["path"] == str(folder / ".step-1300.fsdp-ckpt-0123456789abcdef")


def test_quiet_prints_what_a_script_resumes_from(folder: Path) -> None:
    result = run("list", folder, "-q")
    assert (result.code, result.out, result.err) == (0, f"{folder / 'step-1000'}\n", "")
    result = run("list", ".", "-q", cwd=folder)
    assert result.out == "step-1000\n"


def test_deep_finds_a_flipped_bit_and_passes_over_that_checkpoint(folder: Path) -> None:
    flip(folder / "step-1000" / DATA)
    assert run("list", folder, "-q").out == f"{folder / 'step-1000'}\n"
    assert run("list", folder, "-q", "--deep").out == f"{folder / 'step-900'}\n"
    result = run("list", folder, "--deep")
    assert result.code == 0
    (line,) = [line for line in result.out.splitlines() if line.startswith("step-1000")]
    assert f"damaged      {DATA}: its CRC-32 is" in line
    report = strict_json(run("list", folder, "--deep", "--json").out)
    assert report["latest"] == str(folder / "step-900")
    assert [item["name"] for item in report["checkpoints"] if item["compared"]] == ["step-900"]
    assert report["deep"] is True


def test_deep_reads_every_block(tmp_path: Path) -> None:
    """A file of several blocks of 1 MiB, of which the last one is short."""
    files = {"big.bin": os.urandom((3 << 20) + 17)}
    own(tmp_path, 1, files=files)
    assert run("list", tmp_path, "-q", "--deep").code == 0
    data = bytearray(files["big.bin"])
    data[-1] ^= 1
    (tmp_path / "step-1" / "big.bin").write_bytes(data)
    result = run("list", tmp_path, "-q", "--deep")
    assert_refused(result, 4)
    assert "big.bin: its CRC-32 is" in result.err


def test_without_a_whole_one_it_is_still_a_look(tmp_path: Path) -> None:
    (own(tmp_path, 5) / DATA).unlink()
    result = run("list", tmp_path)
    assert result.code == 0
    assert "0 of 1 complete" in result.out
    assert f"fsdp-ckpt validate {tmp_path / 'step-5'}" in result.out
    assert strict_json(run("list", tmp_path, "--json").out)["latest"] is None
    result = run("list", tmp_path, "-q")
    assert_refused(result, 4)
    assert DATA in result.err
    assert result.out == ""
    assert result.hint == f"fsdp-ckpt list {tmp_path}"


def test_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "step-5").write_text("a file")
    for flags in ([], ["-q"], ["--json"], ["--deep"]):
        for place in (tmp_path, tmp_path / "logs", tmp_path / "missing"):
            result = run("list", place, *flags)
            assert_refused(result, 3)
            assert result.hint
            assert result.out == ""
    own(tmp_path, 1, name=".step-1.fsdp-ckpt-0a")
    result = run("list", tmp_path)
    assert_refused(result, 3)
    assert "1 unfinished" in result.err


def test_what_is_no_run_folder_is_a_slip(folder: Path) -> None:
    for place in (folder / "step-900", DCP, folder / "step-900" / MANIFEST, "xyz://bucket/run"):
        result = run("list", place)
        assert_refused(result, 2)
        assert result.hint
    assert run("list", folder / "step-900").hint == f"fsdp-ckpt inspect {folder / 'step-900'}"
    assert_refused(run("list"), 2)


def test_values_and_names_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    path = own(tmp_path, 1, {"\x1b[31mred": 1.0, "[bold]x[/bold]": 2.0, "text": "\x1b[2J"})
    (path / "scheduler.bin").unlink()
    change(path, files={"\x1b]0;title\x07.bin": {"bytes": 1, "crc32": "0"}})
    own(tmp_path, 2, {"[bold]x[/bold]": 2.0, "\x1b[31mred": 1.0})
    (tmp_path / "\x1b[31m-step-3").mkdir()
    result = run("list", tmp_path)
    assert result.code == 0, result.err
    assert "\x1b" not in result.out
    assert "\x07" not in result.out
    assert "[bold]x[/bold] 2" in result.out
    assert "-step-3" in result.out


def test_not_a_number_is_still_json(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    values = {"a": float("nan"), "b": float("inf"), "c": [float("-inf")], "deep": deep, "n": None, "i": 10**400}
    own(tmp_path, 1, values)
    result = run("list", tmp_path, "--json")
    assert result.code == 0, result.err
    found = strict_json(result.out)["checkpoints"][0]["values"]
    assert (found["a"], found["b"], found["c"], found["n"], found["i"]) == ("nan", "inf", ["-inf"], None, 10**400)
    assert found["deep"] == [[[[[["…"]]]]]], "cut off where nobody reads on"
    assert run("list", tmp_path).code == 0
    assert "nan" in json.dumps(values).lower(), "Python writes what JSON lacks"


def test_a_link_to_something_precious_is_not_followed_into(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    own(tmp_path / "run", 1)
    (tmp_path / "run" / "step-2").symlink_to(tmp_path / "home")
    shutil.copytree(tmp_path / "home", tmp_path / "run" / "step-3")
    result = run("list", tmp_path / "run", "--json")
    found = {item["name"]: (item["state"], item["why"]) for item in strict_json(result.out)["checkpoints"]}
    assert set(found) == {"step-1", "step-3"}, "the link's target says no step"
    assert found["step-3"] == ("incomplete", "nothing in it is known: thesis.tex")


def test_looking_imports_nothing_heavy(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", TOOL, "list", folder], env=environment(), capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    names = {name.partition(".")[0] for name in re.findall(r"^import time:.*\|\s*(\S+)$", done.stderr, re.MULTILINE)}
    assert "fsdp_ckpt" in names
    assert names & {"torch", "numpy", "transformers", "accelerate", "safetensors", "huggingface_hub"} == set()
