"""Cases of theme 5, output packaging and slips on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.cases.check import assert_same, load, load_file, merge_and_load, run
from tests.cases.models import Mlp, reference

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


def test_p19_small_shards_come_with_an_index(run_folder: Path, tmp_path: Path) -> None:
    """pytorch/torchtitan#2137, pytorch/pytorch#171885: from_pretrained needs model.safetensors.index.json.

    convert: test_convert.
    """
    out = tmp_path / "out"
    report, found = merge_and_load(run_folder, out, max_shard_size=200)
    assert_same(found, reference(Mlp()))
    total = len(report.files)
    assert total > 1
    assert sorted(report.files) == [f"model-{n:05}-of-{total:05}.safetensors" for n in range(1, total + 1)]
    assert sorted(path.name for path in out.iterdir()) == [*sorted(report.files), "model.safetensors.index.json"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 488
    assert sorted(index["weight_map"]) == sorted(reference(Mlp()))
    for name in report.files:
        tensors = load_file(out / name)
        assert sum(value.nbytes for value in tensors.values()) <= 200
        assert sorted(tensors) == sorted(key for key, file in index["weight_map"].items() if file == name)


def test_p19_one_file_leaves_no_stale_index(run_folder: Path, tmp_path: Path) -> None:
    """The folder is replaced as a whole."""
    out = tmp_path / "out"
    merge_and_load(run_folder, out, max_shard_size=200)
    _, found = merge_and_load(run_folder, out, max_shard_size="5GB", overwrite=True)
    assert_same(found, reference(Mlp()))
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


@pytest.fixture
def trainer_folder(run_folder: Path) -> Path:
    """P21's folder."""
    for name in MODEL_FILES:
        text = {"model_type": "llama"} if name == "config.json" else {"from": name}
        (run_folder / name).write_text(json.dumps(text))
    (run_folder / "trainer_state.json").write_text(json.dumps({"global_step": 2000, "epoch": 1.5}))
    return run_folder


def test_p21_the_merged_folder_is_a_model_folder(trainer_folder: Path, tmp_path: Path) -> None:
    """huggingface/transformers#37519, #24208, accelerate#2853, #1151, mlx#743: config, tokenizer, format=pt."""
    out = tmp_path / "out"
    report, _ = merge_and_load(trainer_folder / "pytorch_model_fsdp_0", out)
    assert sorted(path.name for path in out.iterdir()) == sorted(["model.safetensors", *MODEL_FILES])
    assert list(report.side_files) == sorted(MODEL_FILES)
    for name in MODEL_FILES:
        assert (out / name).read_bytes() == (trainer_folder / name).read_bytes()
    with safe_open(out / "model.safetensors", framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}


def test_p21_without_a_config_one_line_says_so(run_folder: Path, tmp_path: Path) -> None:
    """Exit 0, as the weights are right."""
    result = run("merge", run_folder / "pytorch_model_fsdp_0", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if "config.json" in line]
    assert len(lines) == 1
    assert "from_pretrained needs it" in lines[0]
    assert_same(load(tmp_path / "out"), reference(Mlp()))


def blank_data(folder: Path) -> None:
    """Overwrite all tensor data, so that whoever reads them notices."""
    for path in folder.rglob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))


def test_p22a_the_folder_above_is_understood(run_folder: Path, tmp_path: Path) -> None:
    """accelerate#2848: the only model in the folder is taken, and stderr says which."""
    result = run("merge", run_folder, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "pytorch_model_fsdp_0" in result.stderr
    assert_same(load(tmp_path / "out"), reference(Mlp()))


def test_p22b_an_optimizer_is_refused(run_folder: Path, tmp_path: Path) -> None:
    """accelerate#2852: no output folder is left, and the hint names the model beside it."""
    blank_data(run_folder)
    result = run("merge", run_folder / "optimizer_0", tmp_path / "out")
    assert result.returncode == 3
    assert "optimizer state, not model weights" in result.stderr
    assert str(run_folder / "pytorch_model_fsdp_0") in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [run_folder.name]


def test_p22c_missing_parents_are_made(run_folder: Path, tmp_path: Path) -> None:
    """accelerate#2854: not after the whole merge."""
    result = run("merge", run_folder / "pytorch_model_fsdp_0", tmp_path / "x/y/out")
    assert result.returncode == 0, result.stderr
    assert_same(load(tmp_path / "x/y/out"), reference(Mlp()))


def test_p22d_a_path_that_is_not_there_is_quoted(tmp_path: Path) -> None:
    """And nothing is made."""
    result = run("merge", "no such/nope", tmp_path / "out", cwd=tmp_path)
    assert result.returncode == 3
    assert "`no such/nope` does not exist" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_p22e_two_models_are_listed(run_folder: Path, tmp_path: Path) -> None:
    """Neither is guessed; the hint can be typed."""
    shutil.copytree(run_folder / "pytorch_model_fsdp_0", run_folder / "pytorch_model_fsdp_1")
    blank_data(run_folder)
    result = run("merge", run_folder, tmp_path / "out")
    assert result.returncode == 2
    assert "pytorch_model_fsdp_0" in result.stderr
    assert "pytorch_model_fsdp_1" in result.stderr
    assert "--part" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [run_folder.name]


def test_p22e_one_of_two_can_be_named(run_folder: Path, tmp_path: Path) -> None:
    """With --part."""
    shutil.copytree(run_folder / "pytorch_model_fsdp_0", run_folder / "pytorch_model_fsdp_1")
    blank_data(run_folder / "pytorch_model_fsdp_0")
    report, found = merge_and_load(run_folder, tmp_path / "out", part="pytorch_model_fsdp_1")
    assert report.part == "pytorch_model_fsdp_1"
    assert_same(found, reference(Mlp()))


def test_p22_inspect_tells_model_from_optimizer(run_folder: Path) -> None:
    """What the refusals above rest on."""
    result = run("inspect", run_folder, "--json")
    described: dict[str, Any] = json.loads(result.stdout)
    assert described["step"] == 2000
    assert [(part["name"], part["role"]) for part in described["parts"]] == [
        ("pytorch_model_fsdp_0", "model"),
        ("optimizer_0", "optimizer"),
    ]
