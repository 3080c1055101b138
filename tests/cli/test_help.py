"""Help is complete and light: nothing heavy is imported to show it, or to look at a checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.tool import ACCELERATE, DCP, TOOL, environment, run

HEAVY = {"torch", "numpy", "transformers", "accelerate", "safetensors", "huggingface_hub", "ml_dtypes", "fsspec"}


def _commands() -> list[str]:
    listing = run("--help").out.partition("Commands:")[2].partition("\n\n")[0]
    return re.findall(r"^  (\S+)", listing, re.MULTILINE)


def _imported(*arguments: str | Path) -> set[str]:
    """Return the packages that a run imports, as ``-X importtime`` reports them."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", TOOL, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    names = re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s*(\S+)", done.stderr, re.MULTILINE)
    assert "fsdp_ckpt" in names  # the report was read right
    return {name.partition(".")[0] for name in names}


def test_the_commands_are_listed() -> None:
    assert {"inspect", "merge"} <= set(_commands())


@pytest.mark.parametrize("command", ["inspect", "merge"])
def test_every_command_has_examples_that_are_right(command: str) -> None:
    text = run(command, "--help").out
    assert text == run(command, "-h").out
    assert "Examples:" in text
    examples = re.findall(rf"^ +(?:torchrun .*)?fsdp-ckpt {command} (.*)$", text, re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        for option in re.findall(r"--[\w-]+", example):
            assert option in text.partition("Examples:")[0], f"{option} of an example does not exist"


def test_every_listed_command_has_help_and_examples() -> None:
    for command in _commands():
        result = run(command, "--help")
        assert result.code == 0
        assert "Examples:" in result.out, command


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["inspect", "--help"], ["merge", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert _imported(*arguments) & (HEAVY | {"rich"}) == set()


def test_looking_and_merging_import_no_torch(tmp_path: Path) -> None:
    assert _imported("inspect", ACCELERATE) & HEAVY == set()
    assert _imported("inspect", ACCELERATE, "--objects", "--json") & HEAVY == set()
    assert _imported("merge", DCP, tmp_path / "out") & {"torch", "transformers", "accelerate"} == set()
    assert (
        _imported("merge", DCP, tmp_path / "bin", "--format", "bin", "--dtype", "float16")
        & {
            "torch",
            "transformers",
            "accelerate",
        }
        == set()
    )


def test_importing_the_package_costs_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import fsdp_ckpt, sys; print(*sys.modules)"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert set(done.stdout.split()) & (HEAVY | {"rich", "typer", "click"}) == set()


def test_the_aliases_of_other_tools_work(tmp_path: Path) -> None:
    for number, alias in enumerate(("merge-weights", "consolidate")):
        result = run(alias, DCP, tmp_path / str(number), "-q")
        assert result.code == 0, result.err
        assert alias not in _commands()
