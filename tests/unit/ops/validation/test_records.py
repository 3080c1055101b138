from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_ckpt.ops.validate import validate
from tests.cli.tool import FIXTURES, tensor_ranges
from tests.unit.ops.validation.broken import faults, item, message, model, patch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model(tmp_path / "ckpt", extra={"lr": 0.5})


def test_all_bytes_are_compared(folder: Path) -> None:
    checked = validate(folder, level="deep").checked
    assert checked.verified_bytes > checked.num_bytes == 48 * 4 + 32 * 8
    assert checked.unverified_bytes == 0
    assert validate(folder).checked.verified_bytes == 0


def test_a_changed_byte_names_its_tensor(folder: Path) -> None:
    file, start, _ = item(folder, "model.b", 1)
    places = [place for place, _ in tensor_ranges(file.read_bytes()) if place >= start]
    patch(file, places[0] + 5)
    assert faults(folder, "headers") == []
    assert faults(folder, "deep") == [("E301", "model.b")]
    told = message(folder, "E301", "deep")
    assert file.name in told
    assert "have CRC-32" in told


def test_a_changed_object_is_named(folder: Path) -> None:
    file, start, stop = item(folder, "extra.lr")
    patch(file, file.read_bytes().index(b"little", start, stop))
    assert set(faults(folder, "deep")) == {("E301", "extra.lr")}


def test_tensors_of_a_full_file(tmp_path: Path) -> None:
    """One archive with many records: each has a checksum and an owner."""
    state = {"a": torch.arange(8.0), "b": torch.arange(8.0) + 50}
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert faults(tmp_path, "deep") == []
    file = tmp_path / "pytorch_model.bin"
    data = file.read_bytes()
    patch(file, data.index(bytes(state["b"].numpy().tobytes())) + 2)
    assert faults(tmp_path, "deep") == [("E301", "b")]


def test_tied_tensors_of_a_full_file(tmp_path: Path) -> None:
    """Both are named."""
    weight = torch.arange(8.0)
    torch.save({"a": weight, "b": weight}, tmp_path / "pytorch_model.bin")
    file = tmp_path / "pytorch_model.bin"
    patch(file, file.read_bytes().index(bytes(weight.numpy().tobytes())) + 2)
    ((code, where),) = faults(tmp_path, "deep")
    assert (code, where) == ("E301", "a`, `b")


def test_safetensors_have_no_checksums(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    report = validate(tmp_path, level="deep")
    assert [one.code for one in report.findings] == ["N304"]
    assert report.checked.unverified_bytes == 16
    assert "model.safetensors" in report.findings[0].message


def test_archives_without_checksums(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "edge/nocrc", tmp_path / "c"))
    report = validate(folder, level="deep")
    assert "N304" in {one.code for one in report.findings}
    assert report.checked.verified_bytes == 0


@pytest.mark.parametrize("what", ["tensor", "object"])
def test_compressed_items(what: str, tmp_path: Path) -> None:
    """They are read as a whole, and every record of them compared."""
    folder = Path(shutil.copytree(FIXTURES / "torch-2.13.0/dcp_zstd_w2/dcp", tmp_path / "c"))
    report = validate(folder, level="deep")
    assert report.checked.unverified_bytes == 0
    assert report.checked.verified_bytes > report.checked.num_bytes
    key = "extra.note" if what == "object" else "model.embed.weight"
    file, start, _ = item(folder, key)
    patch(file, start + 21, 0x20)
    found = faults(folder, "deep")
    assert {where for _, where in found} == {key}
    assert {code for code, _ in found} <= {"E301", "E302"}


@pytest.mark.parametrize("jobs", [1, 2, 3, 4])
def test_threads_make_no_difference(jobs: int, folder: Path) -> None:
    file, start, _ = item(folder, "model.a.weight")
    for place, _ in tensor_ranges(file.read_bytes()):
        if place >= start:
            patch(file, place)
    reports = [validate(folder, level="deep", jobs=number) for number in (1, jobs)]
    assert reports[0] == reports[1]
    assert reports[0].errors == 2


def test_a_listener_hears_of_all_bytes(folder: Path) -> None:
    heard: list[Any] = []
    validate(folder, level="deep", listener=heard.append, jobs=1)
    assert heard
    assert heard[-1].done_bytes <= heard[-1].total_bytes
    assert [one.done_bytes for one in heard] == sorted(one.done_bytes for one in heard)
