"""``validate`` on the command line: exit codes, what is printed, and what other programs get."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import ACCELERATE, DCP, FIXTURES, TOOL, Result, assert_refused, environment, flip, run, strict_json

FIELDS = {
    "path", "root", "ok", "errors", "warnings", "layout", "title", "step", "world_size", "checked", "findings",
    "resume", "fits", "values", "other_paths",
}  # fmt: skip


def copy(source: Path, place: Path) -> Path:
    return Path(shutil.copytree(source, place, ignore=shutil.ignore_patterns("expected*", "layout.json")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy(DCP, tmp_path / "step-10")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    found = copy(DCP, tmp_path / "step-20")
    flip(found / "__0_0.distcp")
    return found


@pytest.fixture
def stale(tmp_path: Path) -> Path:
    """One warning, no error."""
    found = copy(DCP, tmp_path / "step-30")
    shutil.copy(found / "__1_0.distcp", found / "__2_0.distcp")
    return found


def validate(*arguments: str | Path, **options: Any) -> Result:
    return run("validate", *arguments, **options)


def reports(result: Result) -> list[dict[str, Any]]:
    answer = strict_json(result.out)
    assert answer["schema"] == "fsdp-ckpt/validate/1"
    assert set(answer) == {"schema", "ok", "errors", "warnings", "checkpoints"}
    found: list[dict[str, Any]] = answer["checkpoints"]
    assert all(set(one) == FIELDS for one in found)
    return found


def test_a_whole_one(folder: Path) -> None:
    result = validate(folder, "--deep")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == f"{folder}  distributed checkpoint (DCP), step 10, 2 ranks"
    assert lines[-1] == "ok"
    assert "compared with their CRC-32" in lines[-2]


def test_without_deep_it_says_what_was_not_looked_at(damaged: Path) -> None:
    result = validate(damaged)
    assert result.code == 0
    assert "not the bytes (--deep)" in result.out


def test_a_damaged_one(damaged: Path) -> None:
    result = validate(damaged, "--deep")
    assert (result.code, result.err) == (1, "")
    assert "error E301 wrong-checksum" in result.out
    assert "  means: torch loads them without a word" in result.out
    assert f"  next:  fsdp-ckpt repair {damaged} --replica BACKUP" in result.out
    assert result.out.splitlines()[-1] == "1 error"
    assert validate(damaged, "--level", "deep").out == result.out


def test_a_warning_counts_when_it_is_asked_to(stale: Path) -> None:
    result = validate(stale)
    assert (result.code, result.out.splitlines()[-1]) == (0, "ok, 1 warning")
    result = validate(stale, "--strict")
    assert (result.code, result.out.splitlines()[-1]) == (1, "1 warning")


def test_quiet_prints_a_line_for_each(folder: Path, damaged: Path, stale: Path) -> None:
    result = validate(folder, damaged, stale, "-q", "--deep")
    assert result.code == 1
    assert result.out.splitlines() == [f"ok  {folder}", f"1 error  {damaged}", f"ok, 1 warning  {stale}"]
    assert validate(folder, "--quiet").out == f"ok  {folder}\n"


def test_json(damaged: Path) -> None:
    result = validate(damaged, "--deep", "--json")
    assert (result.code, result.err) == (1, "")
    (one,) = reports(result)
    assert (one["ok"], one["errors"], one["step"], one["world_size"]) == (False, 1, 20, 2)
    assert one["checked"]["level"] == "deep"
    (finding,) = [finding for finding in one["findings"] if finding["severity"] == "error"]
    assert set(finding) == {"severity", "code", "name", "where", "message", "meaning", "next"}
    assert (finding["code"], finding["severity"]) == ("E301", "error")


def test_json_of_a_whole_one(folder: Path) -> None:
    result = validate(folder, "--json")
    assert result.code == 0
    (one,) = reports(result)
    assert (one["ok"], one["findings"], one["resume"], one["values"]) == (True, [], None, [])


def test_a_run_is_a_table(folder: Path, damaged: Path, stale: Path) -> None:
    result = validate(folder.parent, "--deep", env=environment(COLUMNS="100"))
    assert result.code == 1
    rows = [line for line in result.out.splitlines() if "step-" in line]
    assert "step-30" in rows[0]
    assert "ok, 1 warning" in result.out
    assert "1 error" in result.out
    assert "E301" in result.out
    assert "2 of 3 checkpoints are ok" in result.out
    assert f"next: fsdp-ckpt validate {damaged}" in result.out
    found = reports(validate(folder.parent, "--json", "--deep"))
    assert [(one["step"], one["ok"]) for one in found] == [(30, True), (20, False), (10, True)]
    assert [Path(one["path"]) for one in found] == [stale, damaged, folder]


def test_the_folders_of_nodes_as_one(tmp_path: Path) -> None:
    nodes = [tmp_path / name for name in ("node1", "node2")]
    for number, node in enumerate(nodes):
        node.mkdir()
        shutil.copy(DCP / f"__{number}_0.distcp", node)
    shutil.copy(DCP / ".metadata", nodes[0])
    assert validate("--as-one", *nodes, "--deep").code == 0
    apart = validate(*nodes, "--json")
    assert apart.code == 1
    assert len(reports(apart)) == 2
    (one,) = reports(validate("--as-one", *nodes, "--json"))
    assert (one["path"], one["other_paths"]) == (str(nodes[0]), [str(nodes[1])])


def test_accelerates_folder_is_one_checkpoint() -> None:
    result = validate(ACCELERATE, "--deep", "--json")
    (one,) = reports(result)
    assert one["checked"]["num_files"] >= 6


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_what_is_no_checkpoint(path: str, tmp_path: Path) -> None:
    result = validate(path, cwd=tmp_path)
    assert_refused(result, 3)
    assert result.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--level", "bogus"], ["--deep", "--level", "geometry"], ["--jobs", "0"], ["--world-size", "0"],
        ["--world-size", "many"], ["--torch", "new"], ["--bogus"],
    ],
)  # fmt: skip
def test_wrong_requests(arguments: list[str], folder: Path) -> None:
    result = validate(folder, *arguments)
    assert result.code == 2, result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_no_path() -> None:
    assert validate().code == 2


def test_an_unknown_level_names_those_there_are(folder: Path) -> None:
    result = validate(folder, "--level", "bogus")
    assert all(level in result.err for level in ("bogus", "geometry", "headers", "deep"))


@pytest.mark.parametrize("variant", ["torch-2.13.0/full_w2", "edge/stale", "edge/nocrc", "torch-2.13.0/hf_w1/hf"])
def test_it_fits_eighty_columns(variant: str, tmp_path: Path) -> None:
    source = copy(FIXTURES / variant, tmp_path / "c")
    for arguments in (["--deep"], [source, "--deep"]):
        result = validate("c", *arguments, cwd=tmp_path, env=environment(COLUMNS="80"))
        lines = [
            line for line in result.out.splitlines() if str(tmp_path) not in line and not line.startswith("looked")
        ]
        assert max(map(len, lines)) <= 80, lines


def test_names_cannot_reach_the_terminal(tmp_path: Path) -> None:
    """Escape sequences in names of files are shown, not sent."""
    place = tmp_path / "a\x1b[31mb"
    shutil.copytree(DCP, place)
    (place / "__1_0.distcp").unlink()
    for arguments in ([], ["-q"]):
        result = validate(place, *arguments)
        assert result.code == 1
        assert "\x1b[31m" not in result.out


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(folder: Path) -> None:
    (folder / "__0_0.distcp").chmod(0)
    assert validate(folder, "--deep").code != 0


def test_what_comes_next_has_the_options_that_were_typed(folder: Path, damaged: Path) -> None:
    result = validate(folder.parent, "--deep", "--world-size", "2")
    (line,) = [line for line in result.out.splitlines() if line.startswith("next: ")]
    assert line == f"next: fsdp-ckpt validate {damaged} --deep --world-size 2"
    assert run(*line.split()[2:]).code == 1


def test_a_link_does_not_hide_the_name_of_a_step(folder: Path) -> None:
    (folder.parent / "latest").symlink_to(folder.name)
    (folder.parent / "step-3").symlink_to(folder.name)
    assert [one["path"] for one in reports(validate(folder.parent, "--json"))] == [str(folder)]


def test_one_bad_path_does_not_lose_the_others(folder: Path, tmp_path: Path) -> None:
    result = validate(folder, tmp_path / "nope", "--json")
    assert result.code == 1
    assert [(Path(one["path"]).name, one["ok"]) for one in reports(result)] == [("step-10", True), ("nope", False)]


def test_checkpoints_under_any_name_are_suggested(folder: Path) -> None:
    shutil.move(folder, folder.with_name("good one"))
    result = validate(folder.parent)
    assert_refused(result, 3)
    assert result.hint == f"fsdp-ckpt validate '{folder.with_name('good one')}'"


def _on_terminal(*arguments: str | Path, **env: str) -> bytes:
    screen, tool = pty.openpty()
    subprocess.run([TOOL, *arguments], stdout=tool, env=environment(TERM="xterm", **env), timeout=60, check=False)
    os.close(tool)
    shown = b""
    with suppress(OSError):  # at its end, a terminal that nobody writes to any more says EIO
        while piece := os.read(screen, 4096):
            shown += piece
    os.close(screen)
    return shown


def test_no_color_means_no_escape_codes_on_a_terminal(damaged: Path) -> None:
    assert b"\x1b[" in _on_terminal("validate", damaged, "--deep")
    plain = _on_terminal("validate", damaged, "--deep", NO_COLOR="1")
    assert b"E301" in plain
    assert b"\x1b[" not in plain


@pytest.mark.parametrize("command", ["validate", "inspect"])
def test_a_checkpoint_that_was_moved_away_can_be_put_back(folder: Path, command: str) -> None:
    folder.rename(folder.with_name(".step-10.fsdp-ckpt-0123abcd.old"))
    result = run(command, folder)
    assert_refused(result, 3)
    assert result.hint == f"fsdp-ckpt repair {folder}    (puts it back)"
    assert "had moved it away" in result.err
