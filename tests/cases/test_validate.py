"""Cases of themes 1, 6, 8 and 10, as validate sees them: geometry, damage, pickles and paths."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cases.check import run
from tests.cases.models import oddly_named
from tests.cases.test_damage import cut, delete, flip
from tests.cases.test_paths import ODD
from tests.cases.test_pickles import PLACES, Touch


def validate(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Return exit code and report of one checkpoint."""
    result = run("validate", "--json", *arguments)
    assert result.returncode in (0, 1), result.stderr
    (report,) = json.loads(result.stdout)["checkpoints"]
    return result.returncode, report


def faults(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return kind and place of what is more than a note."""
    return [(one["name"], one["where"]) for one in report["findings"] if one["severity"] != "note"]


@pytest.mark.parametrize("form", ["fsdp1", "fsdp2"])
def test_p05_shards_without_elements_are_no_error(form: str, built: Path) -> None:
    """pytorch/pytorch#108869: of six rows on four ranks, one rank has none."""
    code, report = validate(built / "p05" / form, "--deep", "--strict")
    assert (code, faults(report)) == (0, [])
    assert report["checked"]["unverified_bytes"] == 0


@pytest.mark.parametrize(
    ("step", "reasons"),
    [
        (200, [("missing-metadata", ".metadata"), ("unfinished-metadata", ".metadata.tmp")]),
        (400, [("missing-file", "__0_0.distcp"), ("missing-file", "__1_0.distcp")]),
    ],
)
def test_p25_unfinished_saves_say_why(step: int, reasons: list[tuple[str, str]], root: Path) -> None:
    """awsome-distributed-ai#190, Automodel#3261, transformers#26186."""
    code, report = validate(root / f"step-{step}")
    assert code == 1
    assert faults(report) == reasons


def test_p25_an_empty_folder_is_no_checkpoint(root: Path) -> None:
    """Exit 3 when it is asked for alone."""
    result = run("validate", root / "step-300")
    assert result.returncode == 3
    assert "step-300" in result.stderr


def test_p25_the_run_folder_tells_of_all(root: Path) -> None:
    """One report for each, newest first."""
    result = run("validate", "--json", root)
    assert result.returncode == 1
    reports = json.loads(result.stdout)["checkpoints"]
    assert [Path(one["path"]).name for one in reports] == ["step-400", "step-300", "step-200", "step-100"]
    assert [one["ok"] for one in reports] == [False, False, False, True]
    assert all(faults(one) for one in reports[:3])


@pytest.fixture
def mlp(built: Path, tmp_path: Path) -> Path:
    """P26's checkpoint, to be damaged."""
    return Path(shutil.copytree(built / "p22/pytorch_model_fsdp_0", tmp_path / "mlp"))


def test_p26_a_flipped_bit_is_found_and_its_tensor_named(mlp: Path) -> None:
    """pytorch/torchtitan#4011: stock torch loads it without a word; so do we when we are not to look at the bytes."""
    flip(mlp)
    code, report = validate(mlp, "--deep")
    (one,) = [one for one in report["findings"] if one["severity"] == "error"]
    assert (code, one["name"], one["where"]) == (1, "wrong-checksum", "model.up.weight")
    assert "__1_0.distcp" in one["message"]
    assert validate(mlp)[0] == 0


def test_p26_a_file_cut_short_is_named(mlp: Path) -> None:
    """By sizes alone."""
    cut(mlp)
    code, report = validate(mlp, "--level", "geometry")
    assert (code, faults(report)) == (1, [("short-file", "__1_0.distcp")])


def test_p26_a_deleted_file_is_named(mlp: Path) -> None:
    """And that it was rank 1's."""
    delete(mlp)
    code, report = validate(mlp, "--deep")
    assert (code, faults(report)) == (1, [("missing-file", "__1_0.distcp")])
    assert "rank 1" in report["findings"][0]["message"]


def test_p26_the_intact_copy_is_all_right(mlp: Path) -> None:
    """Every byte of the tensors was compared."""
    code, report = validate(mlp, "--deep", "--strict")
    assert (code, faults(report)) == (0, [])
    assert report["checked"]["verified_bytes"] >= report["checked"]["num_bytes"] == 488
    assert report["checked"]["unverified_bytes"] == 0


def test_p28_shards_of_an_earlier_save_are_named(built: Path) -> None:
    """pytorch-lightning#20012, VeOmni#1164: four ranks saved, then two, into one folder. Nothing is wrong with it."""
    code, report = validate(built / "p28", "--deep")
    assert (code, faults(report)) == (0, [("stale-file", "__2_0.distcp"), ("stale-file", "__3_0.distcp")])
    assert validate(built / "p28", "--strict")[0] == 1


@PLACES
@pytest.mark.parametrize("level", ["geometry", "deep"])
def test_p47_code_in_a_pickle_is_named_and_not_run(
    level: str, place: Any, file: str, built: Path, tmp_path: Path
) -> None:
    """pytorch/pytorch#189308."""
    folder, mark = tmp_path / "ck", tmp_path / "MARK"
    place(folder, built, Touch(mark))
    code, report = validate(folder, "--level", level)
    (one,) = [one for one in report["findings"] if one["name"] == "unsafe-pickle"]
    assert (code, one["severity"]) == (1, "error")
    assert "posix.system" in one["message"]
    assert file in one["message"]
    assert not mark.exists()


def test_p47_code_in_an_object_is_named_and_not_run(tmp_path: Path) -> None:
    """Beside tensors that are sound."""
    import torch.distributed.checkpoint as dcp

    mark = tmp_path / "MARK"
    dcp.save({"w": torch.ones(3), "x": Touch(mark)}, checkpoint_id=tmp_path / "ck", no_dist=True)
    code, report = validate(tmp_path / "ck")
    assert (code, faults(report)) == (1, [("unsafe-pickle", "x")])
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["dcp", "verl", "safetensors"])
def test_p54_odd_paths_and_names_change_nothing(kind: str, built: Path, tmp_path: Path) -> None:
    """ray-project/ray#15367, tensorflow/tensorflow#34290."""
    plain, odd = tmp_path / "plain", tmp_path / ODD
    if kind == "safetensors":
        plain.mkdir()
        save_file(oddly_named(), plain / "model.safetensors")
    else:
        shutil.copytree(built / "p54" / kind, plain)
    shutil.copytree(plain, odd)
    reports = [validate(folder, "--deep") for folder in (plain, odd)]
    assert [code for code, _ in reports] == [0, 0]
    assert faults(reports[1][1]) == []
    assert reports[0][1]["checked"] == reports[1][1]["checked"]
    assert reports[1][1]["step"] == 10


def test_p56_buffers_that_are_not_saved_are_not_missed(built: Path) -> None:
    """LlamaFactory#10820, lmms-engine#185: nobody can tell that there was `np_buf`, and nobody has to."""
    for form in ("dcp", "verl"):
        code, report = validate(built / "p01" / form, "--deep", "--strict")
        assert (code, faults(report)) == (0, [])
        assert "np_buf" not in json.dumps(report)
