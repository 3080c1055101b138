"""safetensors folders whose files, index and headers contradict each other; sound ones are read in tests/contract."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_ckpt import merge
from fsdp_ckpt.catalog import Problem, Severity
from fsdp_ckpt.errors import CorruptCheckpoint, MalformedFile
from fsdp_ckpt.layouts.registry import read_checkpoint
from tests.build import assert_same, read_safetensors

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4), "c": torch.ones(5)}
NAMES = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def index(folder: Path, weight_map: Any, **metadata: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, (key, tensor) in zip(NAMES, STATE.items(), strict=True):
        save_file({key: tensor}, folder / name)
    size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in STATE.values())
    index(folder, dict(zip(STATE, NAMES, strict=True)), total_size=size)
    return folder


def problems(folder: Path) -> dict[str, Problem]:
    return {problem.code: problem for part in read_checkpoint(folder).parts for problem in part.problems}


def test_a_sound_folder(saved: Path, tmp_path: Path) -> None:
    assert not problems(saved)
    merge(saved, tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), STATE)


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_missing_file(number: int, with_index: bool, saved: Path) -> None:
    (saved / NAMES[number]).unlink()
    if not with_index:
        (saved / "model.safetensors.index.json").unlink()
    problem = problems(saved)["missing-file"]
    assert (problem.severity, problem.where) == (Severity.ERROR, NAMES[number])


def test_a_tensor_that_is_not_where_the_index_says(saved: Path) -> None:
    index(saved, {**dict(zip(STATE, NAMES, strict=True)), "gone": NAMES[0]})
    problem = problems(saved)["missing-tensor"]
    assert (problem.severity, problem.where) == (Severity.ERROR, "gone")


def test_a_tensor_that_the_index_does_not_know(saved: Path) -> None:
    index(saved, {"a": NAMES[0], "b": NAMES[1]})
    problem = problems(saved)["not-in-index"]
    assert problem.severity is Severity.WARNING
    assert "`c`" in problem.message


def test_a_total_size_that_is_wrong(saved: Path) -> None:
    index(saved, dict(zip(STATE, NAMES, strict=True)), total_size=7)
    assert "76 bytes" in problems(saved)["wrong-total-size"].message  # 24 + 32 + 20


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"weight_map": 5}', '{"weight_map": []}', "[" * 100_000, "\xff"])
def test_an_index_that_is_none(text: str, saved: Path, tmp_path: Path) -> None:
    (saved / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    assert problems(saved)["bad-index"].severity is Severity.WARNING
    merge(saved, tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), STATE)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "\x00"])
def test_an_index_that_leads_out(name: str, saved: Path) -> None:
    index(saved, {**dict(zip(STATE, NAMES, strict=True)), "x": name})
    assert problems(saved)["missing-file"].severity is Severity.ERROR


def test_one_tensor_in_two_files(saved: Path, tmp_path: Path) -> None:
    save_file({"b": STATE["b"], "a": STATE["a"]}, saved / NAMES[1])
    problem = problems(saved)["duplicate-tensor"]
    assert (problem.severity, problem.where) == (Severity.WARNING, "a")
    merge(saved, tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), STATE)


def test_one_tensor_in_two_files_in_two_ways(saved: Path) -> None:
    save_file({"b": STATE["b"], "a": STATE["a"].double()}, saved / NAMES[1])
    with pytest.raises(CorruptCheckpoint):
        merge(saved, saved.parent / "out")
    assert not (saved.parent / "out").exists()


def shard(folder: Path, number: int, tensor: torch.Tensor, info: Any) -> None:
    text = info if isinstance(info, str) else json.dumps(info)
    name = f"shard-0000{number}-model-00001-of-00001.safetensors"
    save_file({"w": tensor}, folder / name, metadata={"DCP_SHARDING_INFO": text, "DCP_VERSION": "1.0"})


def test_pieces_of_torchs_writer(tmp_path: Path) -> None:
    whole = torch.arange(21.0).reshape(7, 3)
    src = tmp_path / "src"
    src.mkdir()
    shard(src, 1, whole[:4].clone(), {"w": {"saved_offsets": [0, 0]}})
    shard(src, 2, whole[4:].clone(), {"w": {"saved_offsets": [4, 0]}})
    assert not problems(src)
    merge(src, tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), {"w": whole})
    (src / "shard-00001-model-00001-of-00001.safetensors").unlink()
    assert {problem.severity for problem in problems(src).values()} == {Severity.ERROR}


INFO: dict[str, Any] = {
    "no JSON": "{",
    "a list": [],
    "a number": {"w": 5},
    "no offsets": {"w": {}},
    "offsets are a number": {"w": {"saved_offsets": 5}},
    "offsets are nothing": {"w": {"saved_offsets": None}},
    "infinity": '{"w": {"saved_offsets": [1e400, 0]}}',
    "not a number": '{"w": {"saved_offsets": [NaN, 0]}}',
    "a long number": '{"w": {"saved_offsets": [' + "9" * 5000 + ", 0]}}",
    "one too few": {"w": {"saved_offsets": [0]}},
    "one too many": {"w": {"saved_offsets": [0, 0, 0]}},
    "deep": '{"w": ' + "[" * 100_000,
}


@pytest.mark.parametrize("name", INFO)
def test_broken_sharding_info(name: str, tmp_path: Path) -> None:
    shard(tmp_path, 1, torch.zeros(4, 3), INFO[name])
    with pytest.raises(MalformedFile):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("offsets", [[-4, 0], [4, 0], [0, 2**62], [2**63, 0], [10**30, 0]])
def test_offsets_that_leave_holes(offsets: list[int], tmp_path: Path) -> None:
    shard(tmp_path, 1, torch.zeros(4, 3), {"w": {"saved_offsets": offsets}})
    with pytest.raises(CorruptCheckpoint):
        merge(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
