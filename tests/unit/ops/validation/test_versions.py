from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.validation.versions import check_torch, check_versions, torch_sentence
from tests.build import rows, save_dcp
from tests.compat.samples import EDGES, FIXTURES, REALS, SAMPLES, SHARED, Sample, sample_id
from tests.unit.ops.validation.made import codes, found, full

HERE = [sample for sample in SAMPLES if sample.folder.is_relative_to(FIXTURES)]
FOLDERS = sorted(
    [folder for sample in HERE for folder in sample.dcp_folders()]
    # In `nontensor` there is an object of the script that wrote it, which no version of torch can make here.
    + [folder for folder in EDGES if (folder / ".metadata").exists() and folder.name != "nontensor"]
)
SIX = "each tensor has six properties"


def label(folder: Path) -> str:
    return str(folder.relative_to(FIXTURES))


def torch_reads(folder: Path) -> bool:
    """Whether the torch that is installed reads a checkpoint, all of it."""
    state: dict[str, Any] = {}
    try:
        _load_state_dict(
            state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    except (dcp.api.CheckpointException, Exception):  # noqa: BLE001  # whatever it stops with
        return False
    return bool(state)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("folder", FOLDERS, ids=label)
def test_torch_itself_says_the_same(folder: Path) -> None:
    here = read_checkpoint(folder)
    problems = list(check_torch(here, torch.__version__))
    too_new_python = "needs-python-3.13" in [problem.code for problem in check_versions(here)]
    readable = not problems and not (too_new_python and sys.version_info < (3, 13))
    assert torch_reads(folder) is readable


@pytest.mark.parametrize("sample", HERE, ids=sample_id)
def test_what_torch_wrote_gets_notes_at_most(sample: Sample, tmp_path: Path) -> None:
    problems = list(check_versions(read_checkpoint(sample.copy(tmp_path / "ck"))))
    assert codes(problems) == []
    notes = {"dcp_nocollectives_w2": ["metadata-per-rank"], "dcp_safetensors_w2": ["safetensors-items"]}
    assert [problem.code for problem in problems] == notes.get(sample.variant, [])


@pytest.mark.parametrize("folder", EDGES, ids=sample_id)
def test_the_corners_of_the_format(folder: Path) -> None:
    expected = {
        "no_collectives": [("N", "metadata-per-rank", "__0.metadata")],
        "py313_style": [("N", "needs-python-3.13", ".metadata")],
        "safetensors_fmt": [("N", "safetensors-items", ".metadata")],
        "torch215_hand2": [("N", "needs-torch-2.15", ".metadata")],
        "torch215_hand4": [("N", "needs-torch-2.15", ".metadata")],
    }
    assert found(check_versions(read_checkpoint(folder))) == expected.get(folder.name, [])


@pytest.mark.skipif(not REALS, reason="no ../shared/real here")
def test_megatron_puts_classes_of_its_own_into_them() -> None:
    notes = {folder.name: found(check_versions(read_checkpoint(folder))) for folder in REALS}
    assert notes == {
        "LionRock-Research+Megatron-LM": [],
        "Lizixuan05+Megatron-LM": [("N", "foreign-classes", ".metadata")],
    }
    (problem,) = check_torch(read_checkpoint(SHARED / "real/Lizixuan05+Megatron-LM"), "2.15")
    assert "classes of Megatron-core" in problem.message


def edge(name: str) -> Path:
    return FIXTURES / "edge" / name


@pytest.mark.parametrize(
    ("name", "version", "reasons"),
    [
        ("torch215_hand2", "2.14", [SIX]),
        ("torch215_hand2", "2.15", []),
        ("torch215_hand2", "2.15.0a0+git1234", []),
        ("torch215_hand2", "3.0", []),
        ("torch213_hand2", "2.4", []),
        ("torch213_hand2", "2.3.1", ["StorageMeta"]),
        ("no_collectives", "2.8", ["metadata of its own"]),
        ("no_collectives", "2.9.1+cu128", []),
        ("zstd", "2.6", ["zstd"]),
        ("zstd", "2.7", []),
        ("safetensors_fmt", "2.15", ["writes but does not read"]),
        ("dtypes", "2.8", []),
        ("dtypes", "2.7", ["no float4_e2m1fn_x2; torch 2.8 has"]),
        ("dtypes", "2.6", ["float8_e8m0fnu", "float4_e2m1fn_x2"]),
    ],
)
def test_reasons(name: str, version: str, reasons: list[str]) -> None:
    problems = list(check_torch(read_checkpoint(edge(name)), version))
    assert len(problems) == len(reasons)
    for problem, reason in zip(problems, reasons, strict=True):
        # Only metadata can be written anew.
        kind = "torch-lacks-items" if name in ("zstd", "safetensors_fmt", "dtypes") else "torch-too-old"
        assert (problem.code, problem.severity) == (kind, "error")
        assert reason in problem.message


@pytest.mark.parametrize(("variant", "oldest"), [("2.1.2", "2.1"), ("2.3.1", "2.3"), ("2.5.1", "2.4"), ("2.13", "2.4")])
def test_the_oldest_torch_for_what_each_version_wrote(variant: str, oldest: str, tmp_path: Path) -> None:
    (sample, *_) = (
        one
        for one in HERE
        if one.variant in ("fsdp1_sharded_w2", "fsdp2_sharded_w2") and str(one.row["torch"]).startswith(variant)
    )
    here = read_checkpoint(sample.copy(tmp_path / "ck"))
    assert list(check_torch(here, oldest)) == []
    major, minor = map(int, oldest.split("."))
    if minor > 1:
        # Model and optimizer, each with metadata of its own.
        wanted = [f"{folder}/.metadata" for folder in ("pytorch_model_fsdp_0", "optimizer_0")]
        assert [problem.where for problem in check_torch(here, f"{major}.{minor - 1}")] == [
            where for where in wanted if (tmp_path / "ck" / where).exists()
        ]


@pytest.mark.parametrize(("version", "kind"), [("2.2", "torch-lacks-items"), ("2.3", "torch-too-old")])
def test_repair_writes_metadata_for_torch_2_3_and_newer(version: str, kind: str) -> None:
    assert codes(check_torch(read_checkpoint(edge("torch213_hand2")), version)) == [kind]


@pytest.mark.parametrize(
    ("wrote", "oldest"), [("torch-2.3.1", (2, 2)), ("torch-2.5.1", (2, 5)), ("torch-2.9.1", (2, 5))]
)
def test_dtensors_in_files_of_ranks(wrote: str, oldest: tuple[int, int]) -> None:
    here = read_checkpoint(FIXTURES / wrote / "rank_files_fsdp2_w2")
    major, minor = oldest
    problems = list(check_torch(here, f"{major}.{minor - 1}"))
    assert {problem.code for problem in problems} == {"torch-lacks-items"}
    assert f"torch {major}.{minor} can: its tensors are DTensor" in problems[0].message
    assert list(check_torch(here, f"{major}.{minor}")) == []


def test_plain_tensors_in_files_of_ranks_need_no_certain_torch() -> None:
    assert list(check_torch(read_checkpoint(FIXTURES / "torch-2.13.0/rank_files_fsdp1_w2"), "1.13")) == []


def test_the_answer_in_a_line() -> None:
    here = read_checkpoint(edge("torch213_hand2"))
    assert torch_sentence("2.9.1+cu128", check_torch(here, "2.9.1+cu128")) == "torch 2.9 can read it"
    assert torch_sentence("2.2", check_torch(here, "2.2")) == ""


@pytest.mark.parametrize("version", ["", "2", "two", "2.x", "-2.9", "2.9 or so", "0.4"])
def test_versions_that_make_no_sense(version: str) -> None:
    with pytest.raises(UsageError, match="no version of torch"):
        list(check_torch(read_checkpoint(edge("tied")), version))


def test_a_tensor_of_such_a_name_is_no_class(tmp_path: Path) -> None:
    state = {
        "x.pathlib._local": rows(torch.ones(4), 2),
        "megatron.core.dist_checkpointing.strategies.torch.w": torch.ones(2),
    }
    save_dcp(tmp_path / "ck", {"model": state})
    assert list(check_versions(read_checkpoint(tmp_path / "ck"))) == []


def test_a_name_across_the_window_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_ckpt.ops.validation.pickled_names._WINDOW_BYTES", 7)
    assert codes(check_versions(read_checkpoint(edge("tied")))) == []
    assert [problem.code for problem in check_versions(read_checkpoint(edge("py313_style")))] == ["needs-python-3.13"]


def test_safetensors_need_no_torch(tmp_path: Path) -> None:
    here = read_checkpoint(full(tmp_path / "model.safetensors", {"a.weight": (2, 2)}))
    assert [*check_versions(here), *check_torch(here, "2.1")] == []
