"""``merge_fsdp_weights`` into a folder that has files of its own, as Accelerate's function is often called."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

import fsdp_ckpt

SAMPLE = Path(__file__).parents[3] / "fixtures/torch-2.13.0/fsdp2_sharded_w2"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    part = shutil.copytree(SAMPLE / "pytorch_model_fsdp_0", tmp_path / "ckpt/pytorch_model_fsdp_0")
    (part / "config.json").write_text('{"model_type": "llama"}')
    return part


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mine"}')
    (folder / "notes.txt").write_text("mine")
    return folder


def test_files_of_the_folder_stay_as_they_are(source: Path, target: Path) -> None:
    fsdp_ckpt.merge_fsdp_weights(source, target)
    assert (target / "config.json").read_text() == '{"model_type": "mine"}'
    assert (target / "notes.txt").read_text() == "mine"
    assert {path.name for path in target.iterdir()} == {"config.json", "notes.txt", "model.safetensors"}
    found, wanted = load_file(target / "model.safetensors"), load_file(SAMPLE / "expected.safetensors")
    assert found.keys() == wanted.keys()
    assert all(equal(found[name], wanted[name]) for name in wanted)


def test_what_is_missing_is_brought_along(source: Path, target: Path) -> None:
    (target / "config.json").unlink()
    fsdp_ckpt.merge_fsdp_weights(source, target)
    assert (target / "config.json").read_text() == '{"model_type": "llama"}'


def test_a_failure_at_the_last_step_keeps_the_source(source: Path, target: Path) -> None:
    (target / "model.safetensors").mkdir()
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(OSError, match="directory"):
        fsdp_ckpt.merge_fsdp_weights(source, target, remove_checkpoint_dir=True)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert (target / "notes.txt").read_text() == "mine"
