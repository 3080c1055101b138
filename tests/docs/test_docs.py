"""The documents say what the code does: their commands run, generated pages are fresh, links lead somewhere."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TOOL = Path(sys.executable).with_name("fsdp-ckpt")


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the README supposes it: the reader's checkpoints are in it."""
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        for name in ("checkpoint-1000", "checkpoint-2000"):
            shutil.copytree(ROOT / "fixtures/torch-2.13.0/fsdp2_sharded_w2" / part, tmp_path / name / part)
    shutil.copytree(ROOT / "fixtures/deepspeed/zero3_fp32_w3", tmp_path / "zero3-run")
    tiny = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    LlamaForCausalLM(tiny).save_pretrained(tmp_path / "Llama-3.2-1B")
    (tmp_path / "train.py").write_text("open('started', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readme_commands_run(folder: Path) -> None:
    lines = [line for block in blocks(ROOT / "README.md", "console") for line in block.splitlines()]
    commands = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if line.startswith("$ ")]
    assert len(commands) >= 3
    for command in commands:
        assert command[0] == "fsdp-ckpt"
        asks = command[1:3] == ["config", "init"]  # and there is no terminal here
        done = subprocess.run(
            [TOOL, *command[1:], *(["--yes"] if asks else [])], check=False, timeout=150, cwd=folder,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == (137 if "--kill-at" in command else 0), done.stderr
    assert (folder / "out/model.safetensors").is_file()
    assert (folder / "run/step-400/fsdp_ckpt.json").is_file()
    assert (folder / "started").is_file()
    assert (folder / "sharded/optimizer_0/__7_0.distcp").is_file()
    assert (folder / "start/pytorch_model_fsdp_0/__7_0.distcp").is_file()
    assert (folder / "on-six/optimizer_0/__5_0.distcp").is_file()


def test_readme_python_runs(folder: Path) -> None:
    programs = blocks(ROOT / "README.md", "python")
    assert programs
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-c", program], check=True, timeout=60, cwd=folder, capture_output=True, text=True
        )
        assert "(2, 4)" in done.stdout
        assert "True []" in done.stdout
    assert (folder / "merged/model.safetensors").is_file()


PROGRAMS = [*blocks(ROOT / "docs/training.md", "python"), *blocks(ROOT / "docs/running.md", "python")]
"""Complete programs; each ends by printing a line that begins with "began at step"."""


ABORTED_AT_EXIT = "terminate called without an active exception"
"""Now and then torch 2.13 dies of this when the interpreter of a gloo rank ends, also without any of our code."""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_training_programs_run(number: int, tmp_path: Path) -> None:
    """On two ranks where they set up torch.distributed, else on one."""
    program, path = PROGRAMS[number], tmp_path / "train.py"
    path.write_text(program)
    ranks = 2 if "init_process_group" in program else 1
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    for first in (1, 21) if "Checkpointer(" in program else (None,):
        done = subprocess.run(
            [sys.executable, *arguments, path],
            check=False,
            timeout=120,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0 or ABORTED_AT_EXIT in done.stderr, done.stderr[:4000]
        assert re.findall("^began at step", done.stdout, re.MULTILINE) == ["began at step"], done.stdout + done.stderr
        assert first is None or f"began at step {first}," in done.stdout


def test_all_training_programs_were_found() -> None:
    assert len(PROGRAMS) == 10


@pytest.mark.parametrize(
    ("script", "target"),
    [
        ("make_reference", "reference.md"),
        ("make_configuration", "configuration.md"),
        ("make_pictures", "images/inspect.svg"),
    ],
)
def test_generated_pages_are_fresh(script: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    rendered = runpy.run_path(str(ROOT / f"docs/{script}.py"))["render"]()
    assert (ROOT / "docs" / target).read_text() == rendered, f"run: python docs/{script}.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_command_is_in_the_reference() -> None:
    from fsdp_ckpt.cli.app import app

    text = (ROOT / "docs/reference.md").read_text()
    visible = [command.name for command in app.registered_commands if not command.hidden]
    assert visible
    for name in visible:
        assert f"## fsdp-ckpt {name}\n" in text
