"""The checkpoints of ../shared/cases.md, written once per session by real gloo ranks. Tests copy before they damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cases.launch import build_once, run_module
from tests.dist.stage import play


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one folder per case."""
    return build_once(tmp_path_factory, "cases", lambda out: run_module("tests.cases.ranks", str(out)))


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for what is too large for every run."""
    return build_once(tmp_path_factory, "large", lambda out: run_module("tests.cases.ranks", str(out), "--large"))


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came out of the scenarios in which ranks save and load."""
    return play(tmp_path_factory, "tests.cases.state_ranks")


@pytest.fixture
def run_folder(built: Path, tmp_path: Path) -> Path:
    """P22's checkpoint, to be changed: `checkpoint-2000` with a model of six tensors and an optimizer."""
    folder = tmp_path / "checkpoint-2000"
    shutil.copytree(built / "p22", folder)
    return folder


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    """P25's run folder: only step-100 is complete."""
    folder = tmp_path / "root"
    for step in (100, 200):
        shutil.copytree(built / "p22/pytorch_model_fsdp_0", folder / f"step-{step}")
    (folder / "step-200/.metadata").rename(folder / "step-200/.metadata.tmp")
    (folder / "step-300").mkdir()
    (folder / "step-400").mkdir()
    shutil.copy(folder / "step-100/.metadata", folder / "step-400/.metadata")
    return folder
