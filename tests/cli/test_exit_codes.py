"""Every class of exit code, the message, and the hint: what it suggests works when it is typed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.tool import (
    ACCELERATE,
    DCP,
    EXPECTED,
    FIXTURES,
    TOOL,
    assert_refused,
    environment,
    flip,
    run,
    tensors,
)
from tests.hostile.forge_dcp import Forged
from tests.hostile.forge_pickle import Call, Glob, dump
from tests.hostile.sandbox import Sandbox

LOCAL = FIXTURES / "torch-2.13.0/local_state_dict_w2"


def _damaged(folder: Path) -> Path:
    target = shutil.copytree(DCP, folder / "damaged")
    flip(target / "__1_0.distcp")
    return target


def _cut(folder: Path) -> Path:
    target = shutil.copytree(DCP, folder / "cut off")
    (target / ".metadata").unlink()
    return target


def _short(folder: Path) -> Path:
    target = shutil.copytree(DCP, folder / "short")
    with open(target / "__0_0.distcp", "r+b") as file:
        file.truncate(1000)
    return target


def _flat(folder: Path) -> Path:
    """Beside it the shapes are written that the hint asks for."""
    units = json.loads((LOCAL / "layout.json").read_text())["flat_params"]["0"]
    shapes = [
        [f"{unit}.{name}".removeprefix("."), shape]
        for unit, held in units.items()
        for name, shape in zip(held["fqns"], held["shapes"], strict=True)
    ]
    (folder / "shapes.json").write_text(json.dumps(shapes))
    return LOCAL


def _unsafe(folder: Path) -> Path:
    target = folder / "unsafe"
    target.mkdir()
    (target / ".metadata").write_bytes(dump(Call(Glob("os", "system"), ("true",))))
    return target


def _two_models(folder: Path) -> Path:
    for name in ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1"):
        shutil.copytree(DCP, folder / "two models" / name)
    return folder / "two models"


def _run_folder(folder: Path) -> Path:
    (folder / "my run/checkpoint-5").mkdir(parents=True)
    shutil.copy(DCP / "__0_0.distcp", folder / "my run/checkpoint-5")
    return folder / "my run"


def _accelerate(folder: Path) -> Path:
    return shutil.copytree(ACCELERATE, folder / "save state", ignore=shutil.ignore_patterns("expected*", "layout*"))


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _texts(folder: Path) -> Path:
    (folder / "texts").mkdir()
    (folder / "texts/notes.txt").write_text("hello")
    return folder / "texts"


def _optimizer(folder: Path) -> Path:
    return _accelerate(folder) / "optimizer_0"


def _full_destination(folder: Path) -> Path:
    (folder / "out").mkdir()
    (folder / "out/model.safetensors").write_bytes(b"old")
    return DCP


def _foreign_destination(folder: Path) -> Path:
    (folder / "out").mkdir()
    (folder / "out/thesis.tex").write_text("mine")
    return DCP


def _complex(folder: Path) -> Path:
    return FIXTURES / "edge/dtypes"


Make = Callable[[Path], Path]

CASES: dict[str, tuple[int, Make, list[str]]] = {
    "dtype": (2, lambda _: DCP, ["--dtype", "int8"]),
    "format": (2, lambda _: DCP, ["--format", "gguf"]),
    "size": (2, lambda _: DCP, ["--max-shard-size", "many"]),
    "size-zero": (2, lambda _: DCP, ["--max-shard-size", "0"]),
    "jobs": (2, lambda _: DCP, ["--jobs", "0"]),
    "jobs-text": (2, lambda _: DCP, ["--jobs", "x"]),
    "rename": (2, lambda _: DCP, ["--rename", "nothing"]),
    "rename-regex": (2, lambda _: DCP, ["--rename", "s/(/x/"]),
    "include": (2, lambda _: DCP, ["--include", "zzz*"]),
    "part": (2, lambda _: DCP, ["--part", "ema"]),
    "share": (2, lambda _: DCP, ["--part", "4/3"]),
    "option": (2, lambda _: DCP, ["--frmat", "bin"]),
    "two-models": (2, _two_models, []),
    "missing": (3, lambda folder: folder / "nothing here", []),
    "empty": (3, _empty, []),
    "texts": (3, _texts, []),
    "a-text": (3, lambda folder: _texts(folder) / "notes.txt", []),
    "optimizer": (3, _optimizer, []),
    "damaged": (4, _damaged, []),
    "no-metadata": (4, _cut, []),
    "run-of-incomplete": (4, _run_folder, []),
    "short": (4, _short, []),
    "unsafe": (4, _unsafe, []),
    "destination-full": (5, _full_destination, []),
    "destination-foreign": (5, _foreign_destination, []),
    "destination-foreign-overwrite": (5, _foreign_destination, ["--overwrite"]),
    "flat": (8, _flat, []),
    "collision": (8, lambda _: DCP, ["--rename", "s/.*/same/"]),
    "dtype-not-in-format": (8, _complex, []),
}


SUGGESTS = {
    "two-models", "optimizer", "no-metadata", "run-of-incomplete", "short", "destination-full"
}  # fmt: skip
"""What can be mended by another command, so that the hint must be one."""


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_has_its_code_leaves_nothing_and_suggests_what_works(name: str, tmp_path: Path) -> None:
    code, make, options = CASES[name]
    source = make(tmp_path)
    result = run("merge", source, tmp_path / "out", *options)
    assert_refused(result, code)
    assert result.out == ""
    if not name.startswith("destination"):
        assert not (tmp_path / "out").exists()
    assert not [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")]
    if not result.err.startswith("Usage:"):
        assert result.err.startswith("error: ")
        assert all(line.startswith(("error: ", "hint: ")) for line in result.err.splitlines()), result.err

    found = re.search(r"fsdp-ckpt .*?(?=\s{2,}|$)", result.hint or "")
    assert found or name not in SUGGESTS, result.err
    if found:
        _type(found[0], name, tmp_path)


def _type(command: str, name: str, folder: Path) -> None:
    """Type a command that a hint suggests; it must do what it promises, with the paths filled in."""
    typed = command.replace("fsdp-ckpt", shlex.quote(TOOL), 1)
    done = subprocess.run(
        ["bash", "-c", typed], cwd=folder, env=environment(), capture_output=True, timeout=60, check=False
    )
    if command.split()[1] == "inspect":
        # To look at it is what is suggested: it is shown, and that it is not whole; unless it cannot be read at all.
        assert done.returncode in (0, 4), (command, done.stderr.decode())
        assert done.stdout or name in ("unsafe", "run-of-incomplete"), command
        return
    if command.split()[1] == "validate":
        assert done.returncode == 1, (command, done.stderr.decode())
        assert b"error E" in done.stdout, command
        return
    assert done.returncode == 0, (command, done.stderr.decode())
    (made,) = [path for path in folder.rglob("model.safetensors") if "." not in path.parent.name]
    assert tensors(made) == tensors(EXPECTED)
    assert "…" not in str(made), f"the destination was not filled in: {command}"


def test_what_comes_next_works_when_typed(tmp_path: Path) -> None:
    short = _short(tmp_path)
    for code, result in ((0, run("merge", DCP, tmp_path / "my out")), (4, run("inspect", short))):
        assert result.code == code
        found = re.search(r"^next: (fsdp-ckpt .*)$", result.out, re.MULTILINE)
        assert found, result.out
        _type(found[1], "next", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["mrege"], 2),
        (["merge"], 2),
        (["merge", "a"], 2),
        (["merge", "a", "b", "c"], 3),
        (["inspect"], 2),
        (["inspect", "nothing-here"], 3),
        (["inspect", str(DCP)], 0),
        (["inspect", str(LOCAL)], 0),
        (["--version"], 0),
        (["--help"], 0),
        (["merge", "-h"], 0),
        (["merge", "ftp://host/x", "out"], 2),
        (["merge", str(DCP), "ftp://host/x"], 2),
        (["merge", str(DCP), "hf://me"], 2),
        (["merge", str(DCP), "out.safetensors"], 2),
    ],
)
def test_usage(arguments: list[str], code: int, tmp_path: Path, sandbox: Sandbox) -> None:
    result = sandbox.run(*arguments, cwd=tmp_path)
    assert result.code == code, result.err
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_slip_of_the_finger_is_understood(tmp_path: Path) -> None:
    assert "merge" in run("mrege", cwd=tmp_path).err.partition("No such command")[2]
    assert "--format" in run("merge", "--frmat", "x", cwd=tmp_path).err


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    code, make, _ = CASES["damaged"]
    source = make(tmp_path)
    for extra in ({"env": environment(FSDP_CKPT_DEBUG="1")}, {}):
        first = [] if extra else ["--debug"]
        result = run(*first, "merge", source, tmp_path / "out", **extra)  # type: ignore[arg-type]
        assert result.code == code
        assert "Traceback" in result.err
        assert "error: " in result.err


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    forged = Forged()
    for number in range(4):
        forged.tensor(f"layers.{number}.weight", (8, 8), rows=(4, 4))
    source = forged.write(tmp_path / "ckpt")
    flip(source / "__1_0.distcp", 2)
    result = run("merge", source, tmp_path / "out")
    assert_refused(result, 4)
    assert "`layers.2.weight`" in result.err
    assert "__1_0.distcp" in result.err
