"""stdout is data, stderr is everything else; JSON is exact; pipes, terminals and locales do not matter."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.tool import ACCELERATE, DCP, EXPECTED, FIXTURES, TOOL, environment, run, strict_json, tensors
from tests.hostile.forge_dcp import Forged
from tests.hostile.forge_zip import saved
from tests.hostile.sandbox import Sandbox

ESCAPE = "\x1b"


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    sizes = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1}
    total = sizes[dtype]
    for length in shape:
        total *= length
    return total


def test_inspect_json_has_its_schema_and_exact_numbers() -> None:
    result = run("inspect", DCP, "--json")
    assert result.code == 0
    assert result.err == ""
    report = strict_json(result.out)
    assert report["schema"] == "fsdp-ckpt/inspect/1"
    (part,) = report["parts"]
    expected = tensors(EXPECTED)
    assert {t["name"]: tuple(t["shape"]) for t in part["tensors"]} == {n: s for n, (_, s, _) in expected.items()}
    assert {t["name"]: t["num_bytes"] for t in part["tensors"]} == {n: len(b) for n, (_, _, b) in expected.items()}
    assert part["num_bytes"] == sum(_bytes(shape, dtype) for dtype, shape, _ in expected.values())
    assert part["file_bytes"] == sum(path.stat().st_size for path in DCP.iterdir())
    assert report["complete"] is True


@pytest.mark.parametrize("name", sorted(path.name for path in (FIXTURES / "edge").iterdir()))
def test_inspect_json_of_every_corner_is_strict(name: str, sandbox: Sandbox) -> None:
    result = sandbox.run("inspect", FIXTURES / "edge" / name, "--json", "--objects")
    assert result.code == 0, result.err
    assert strict_json(result.out)["schema"] == "fsdp-ckpt/inspect/1"


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--max-shard-size", "1KB"], ["--format", "bin"]])
def test_merge_json_has_its_schema_and_exact_numbers(options: list[str], tmp_path: Path) -> None:
    result = run("merge", ACCELERATE, tmp_path / "out", "--json", *options)
    assert result.code == 0
    report = strict_json(result.out)
    assert report["schema"] == "fsdp-ckpt/merge/1"
    expected = tensors(EXPECTED)
    assert report["num_tensors"] == len(expected)
    assert report["tensor_bytes"] == sum(len(content) for _, _, content in expected.values())
    assert report["destination"] == str(tmp_path / "out")
    assert report["dry_run"] is ("--dry-run" in options)
    if "--dry-run" not in options:
        sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir() if "index" not in path.name}
        assert report["files"] == sizes
        assert report["verified_bytes"] == report["tensor_bytes"]
    else:
        assert not (tmp_path / "out").exists()
    assert "reading pytorch_model_fsdp_0" in result.err  # what was chosen stands on stderr


def test_json_of_a_share_says_what_is_missing(tmp_path: Path) -> None:
    report = strict_json(run("merge", DCP, tmp_path / "out", "--part", "2/3", "--json").out)
    assert report["pending"] == [1, 3]


def test_not_a_number_in_an_object_is_still_json(tmp_path: Path) -> None:

    forged = Forged()
    forged.tensor("w", (2,))
    forged.item("loss", saved({"last": float("nan"), "best": float("inf"), "worst": float("-inf"), "fine": 0.5}))
    result = run("inspect", forged.write(tmp_path / "ckpt"), "--json", "--objects")
    assert result.code == 0
    assert "0.5" in json.dumps(strict_json(result.out)["parts"])


def test_quiet_prints_what_a_script_wants(tmp_path: Path) -> None:
    result = run("merge", DCP, tmp_path / "out", "-q")
    assert result.out == f"{tmp_path / 'out'}\n"
    result = run("inspect", DCP, "-q")
    assert result.out.count("\n") == 1
    assert "complete" in result.out
    assert result.err == ""


def test_progress_and_notes_never_reach_stdout(tmp_path: Path) -> None:
    result = run("merge", ACCELERATE, tmp_path / "out", "--json")
    assert result.out.startswith("{")
    assert result.out.rstrip().endswith("}")
    assert "left aside" not in result.out.partition('"notes"')[0]


@pytest.mark.parametrize("flags", [["--tree", "--shards", "--objects"], ["--tensors"], ["-q"], ["--json"]])
def test_no_colour_reaches_a_pipe(flags: list[str]) -> None:
    result = run("inspect", ACCELERATE, *flags, env=environment(TERM="xterm-256color", COLORTERM="truecolor"))
    assert result.code == 0, result.err
    assert ESCAPE not in result.out + result.err


def _terminal(*arguments: str | Path, columns: int = 80, **env: str) -> str:
    """Run the command on a terminal and return what it shows."""
    leader, follower = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [TOOL, *map(str, arguments)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(**({"TERM": "xterm-256color"} | env)),
        close_fds=True,
    )
    os.close(follower)
    shown, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        ready, _, _ = select.select([leader], [], [], 1)
        try:
            piece = os.read(leader, 65536) if ready else b""
        except OSError:  # the other side is gone
            break
        if ready and not piece:
            break
        shown += piece
    assert process.wait(10) == 0, shown.decode()
    os.close(leader)
    return shown.decode().replace("\r\n", "\n")


def test_a_terminal_gets_colour_unless_it_is_not_wanted(tmp_path: Path) -> None:
    colours = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38;[25])[;\dm]")
    assert colours.search(_terminal("inspect", DCP))
    assert not colours.search(_terminal("inspect", DCP, NO_COLOR="1"))
    assert ESCAPE not in _terminal("inspect", DCP, TERM="dumb")
    assert ESCAPE not in _terminal("inspect", DCP, "--json")
    assert "merged 16 tensors" in _terminal("merge", DCP, tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("terminal", []),
        ("terminal", ["--tensors"]),
        ("pipe", []),
        ("pipe", ["--tree"]),
        ("pipe", ["--tensors"]),
        ("pipe", ["--shards"]),
    ],
)
def test_eighty_columns_are_enough(kind: str, flags: list[str]) -> None:
    if kind == "terminal":
        text = re.sub(r"\x1b\[[\d;]*m", "", _terminal("inspect", DCP, *flags, NO_COLOR="1"))
    else:
        text = run("inspect", DCP, *flags, env=environment(COLUMNS="80")).out
    lines = [line for line in text.splitlines() if not line.startswith("  path")]
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    joined = re.sub(r"\s+", "", text)
    for word in ("pytorch_model_fsdp_0", "5.79kB", *(["__0_0.distcp"] if flags == ["--shards"] else ["37x8float32"])):
        assert word in joined, text


def test_help_fits_eighty_columns() -> None:
    for arguments in (["--help"], ["inspect", "--help"], ["merge", "--help"]):
        lines = run(*arguments, env=environment(COLUMNS="80")).out.splitlines()
        assert max(map(len, lines)) <= 80, max(lines, key=len)


def _shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", "set -o pipefail; " + command],
        env=environment(TOOL=TOOL, DCP=str(DCP), **env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("reader", ["head -1", "true"])
@pytest.mark.parametrize("flags", ["", "--json", "--tensors"])
def test_a_reader_that_leaves_early_is_no_error(reader: str, flags: str) -> None:
    done = _shell(f'"$TOOL" inspect "$DCP" {flags} | {reader}')
    assert done.stderr == ""
    assert done.returncode in (0, 141)


def test_a_reader_that_leaves_before_much_output_is_no_error(tmp_path: Path) -> None:

    forged = Forged()
    for number in range(2000):
        forged.tensor(f"layers.{number}.a.rather.long.name.so.that.a.pipe.overflows.weight", ())
    forged.write(tmp_path / "ckpt")
    for flags in ("--json", "--tensors"):
        done = _shell(f'"$TOOL" inspect "$CKPT" {flags} | head -1', CKPT=str(tmp_path / "ckpt"))
        assert done.stderr == ""
        assert done.returncode in (0, 141)
        assert len(done.stdout.splitlines()) == 1


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    for flags in ("", "--json", "-q"):
        done = _shell(f'"$TOOL" inspect "$DCP" {flags} > /dev/full')
        assert done.returncode == 6, done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_matter(closed: str, tmp_path: Path) -> None:
    done = _shell(f'"$TOOL" merge "$DCP" "$OUT" {closed}', OUT=str(tmp_path / "out"))
    assert "internal error" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert tensors(tmp_path / "out") == tensors(EXPECTED)
    if ">&-" in closed:
        assert _shell(f'"$TOOL" inspect "$DCP" {closed}').returncode in (0, 6)


@pytest.mark.parametrize(
    "locale",
    [
        {"LANG": "C"},
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"LC_ALL": "xx_XX.nothing"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
    ids=str,
)
def test_any_locale(locale: dict[str, str], tmp_path: Path) -> None:
    source = tmp_path / "ступень-層"

    forged = Forged()
    forged.tensor("layers.0.gewöhnlich.重み", (2,))
    forged.tensor("layers.1.gewöhnlich.重み", (2,))
    forged.write(source)
    env = environment(**locale)
    result = run("inspect", source, "--tree", "--shards", env=env)
    assert result.code == 0, result.err
    result = run("merge", source, tmp_path / "out", env=env)
    assert result.code == 0, result.err
    assert set(tensors(tmp_path / "out")) == {"layers.0.gewöhnlich.重み", "layers.1.gewöhnlich.重み"}


def test_messages_in_any_locale(tmp_path: Path) -> None:
    for locale in ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}):
        result = run("merge", tmp_path / "層", tmp_path / "out", env=environment(**locale))
        assert result.code == 3, result.err
        assert "does not exist" in result.err
        assert run("inspect", DCP, "--json", env=environment(**locale)).code == 0


def test_as_a_module(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "fsdp_ckpt"]
    result = run("inspect", DCP, "--json", command=module)
    assert result == run("inspect", DCP, "--json")
    assert run("--version", command=module).out == run("--version").out
    assert "fsdp-ckpt" in run("merge", command=module).err
    assert run("merge", DCP, tmp_path / "out", command=module).code == 0
