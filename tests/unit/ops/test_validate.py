"""How far ``validate`` looks, at how many checkpoints, and what it answers for all of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.errors import CheckpointNotFound, Incompatible, UsageError
from fsdp_ckpt.ops import validate as module
from fsdp_ckpt.ops.validate import validate, validate_each
from fsdp_ckpt.ops.validation.report import Level
from tests.cli.tool import FIXTURES, flip, snapshot
from tests.unit.ops.validation.broken import model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model(tmp_path / "run/step-10")


@pytest.fixture
def run(folder: Path) -> Path:
    """A run of three: the newest is damaged, one of them is empty."""
    shutil.copytree(folder, folder.with_name("step-30"))
    flip(folder.with_name("step-30") / "__0_0.distcp")
    folder.with_name("step-20").mkdir()
    return folder.parent


def test_the_report_says_what_was_looked_at(folder: Path) -> None:
    report = validate(folder, level="deep")
    assert (report.ok, report.errors, report.warnings, list(report.findings)) == (True, 0, 0, [])
    assert (report.layout, report.step, report.world_size) == ("dcp", 10, 2)
    assert (report.path, report.root) == (str(folder), str(folder))
    checked = report.checked
    assert (checked.level, checked.num_files, checked.num_tensors, checked.num_items) == ("deep", 3, 2, 4)


@pytest.mark.parametrize(
    ("given", "level"),
    [(None, "headers"), ("geometry", "geometry"), (Level.DEEP, "deep"), ("headers", "headers")],
)
def test_levels(given: Any, level: str, folder: Path) -> None:
    assert validate(folder, level=given).checked.level == level


def test_many_items_are_not_looked_at_unless_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY_ITEMS", 3)
    report = validate(folder)
    assert (report.checked.level, report.checked.num_items, report.ok) == ("geometry", 0, True)
    assert [(one.severity, one.code) for one in report.findings] == [("note", "N305")]
    assert "--level headers" in report.findings[0].next
    report = validate(folder, level="headers")
    assert (report.checked.num_items, list(report.findings)) == (4, [])


def test_nothing_is_changed(folder: Path) -> None:
    before = snapshot(folder.parent)
    validate(folder, level="deep", values=True, world_size=3, torch="2.9")
    after = snapshot(folder.parent)
    assert before == after


def test_data_that_cannot_be_read_are_not_needed_for_geometry(folder: Path) -> None:
    """Nor are they opened: here they are no files any more, only as long as they were."""
    for file in folder.glob("*.distcp"):
        size = file.stat().st_size
        file.write_bytes(b"")
        os.truncate(file, size)
    assert validate(folder, level="geometry").ok
    assert not validate(folder).ok


def test_strict_counts_warnings(folder: Path) -> None:
    shutil.copy(folder / "__1_0.distcp", folder / "__2_0.distcp")
    lenient, strict = validate(folder), validate(folder, strict=True)
    assert (lenient.ok, strict.ok) == (True, False)
    assert lenient.findings == strict.findings
    assert (strict.errors, strict.warnings) == (0, 1)


def test_notes_never_count() -> None:
    report = validate(FIXTURES / "torch-2.13.0/hf_w1/hf", level="deep", strict=True)
    assert report.ok
    assert {one.severity for one in report.findings} == {"note"}


@pytest.mark.parametrize("jobs", [1, 2, 3, 4, None])
def test_threads_make_no_difference(jobs: int | None, run: Path) -> None:
    assert validate(run / "step-30", level="deep", jobs=jobs) == validate(run / "step-30", level="deep", jobs=1)


@pytest.mark.parametrize(
    "options",
    [{"level": "bogus"}, {"level": ""}, {"jobs": 0}, {"jobs": -1}, {"world_size": 0}],
)
def test_requests_that_make_no_sense(options: dict[str, Any], folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        validate(folder, **options)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_no_path_at_all() -> None:
    with pytest.raises(UsageError, match="no checkpoint was given"):
        validate([])


@pytest.mark.parametrize("what", ["missing", "empty", "other"])
def test_what_is_no_checkpoint(what: str, tmp_path: Path) -> None:
    place = tmp_path / what
    if what != "missing":
        place.mkdir()
    if what == "other":
        (place / "readme.txt").write_text("?")
    with pytest.raises(CheckpointNotFound):
        validate(place)
    with pytest.raises(CheckpointNotFound):
        validate_each([place])


def test_a_single_file(folder: Path) -> None:
    """A data file or the metadata stand for their folder, as everywhere."""
    assert validate(folder / ".metadata", level="deep").checked == validate(folder, level="deep").checked
    full = FIXTURES / "torch-2.13.0/full_w2/pytorch_model_fsdp.bin"
    report = validate(full, level="deep")
    assert report.ok
    assert report.checked.num_files == 1


def test_the_newest_complete_one_of_a_run(run: Path) -> None:
    """As for inspect, where one is asked for."""
    assert validate(run).step == 30


def test_all_of_a_run(run: Path) -> None:
    found = validate_each([run], level="deep")
    assert [Path(one.path).name for one in found.checkpoints] == ["step-30", "step-20", "step-10"]
    assert [one.ok for one in found.checkpoints] == [False, False, True]
    assert (found.ok, found.errors, found.warnings) == (False, 2, 0)
    damaged, empty, _ = found.checkpoints
    assert [one.code for one in damaged.findings] == ["E301"]
    assert [(one.code, one.where) for one in empty.findings] == [("E109", ".")]


def test_several_paths(run: Path) -> None:
    whole, damaged = run / "step-10", run / "step-30"
    found = validate_each([whole, damaged, whole], level="headers")
    assert [one.path for one in found.checkpoints] == [str(whole), str(damaged), str(whole)]
    assert found.ok
    assert not validate_each([whole, damaged], level="deep").ok


def test_one_that_is_missing_is_an_error_beside_others(run: Path) -> None:
    """It is no checkpoint, but the others are looked at."""
    found = validate_each([run / "step-10", run / "step-99"])
    assert not found.ok
    codes = [[finding.code for finding in one.findings if finding.severity == "error"] for one in found.checkpoints]
    assert codes == [[], ["E109"]]
    with pytest.raises(CheckpointNotFound):
        validate_each([run / "step-99"])


@pytest.fixture
def nodes(folder: Path) -> Iterator[list[Path]]:
    """The same, on the disks of two nodes."""
    places = [folder.parents[1] / name for name in ("node0", "node1")]
    for number, place in enumerate(places):
        place.mkdir()
        shutil.copy(folder / f"__{number}_0.distcp", place)
    shutil.copy(folder / ".metadata", places[0])
    yield places
    assert [place.name for place in places] == ["node0", "node1"]


def test_the_folders_of_nodes_as_one(nodes: list[Path]) -> None:
    report = validate(nodes, level="deep", strict=True)
    assert report.ok
    assert (report.path, list(report.other_paths)) == (str(nodes[0]), [str(nodes[1])])
    assert report.checked.num_items == 4
    alone = validate(nodes[0])
    assert {one.code for one in alone.findings} == {"E102", "N119"}


def test_folders_that_are_not_of_one_save(nodes: list[Path], folder: Path) -> None:
    shutil.copy(folder / "__1_0.distcp", nodes[1] / ".metadata")
    with pytest.raises(Incompatible):
        validate(nodes)


def test_a_part_of_a_checkpoint() -> None:
    """Told by its folder alone."""
    report = validate(FIXTURES / "torch-2.13.0/fsdp2_sharded_w2/optimizer_0", level="deep")
    assert report.ok
    assert report.checked.unverified_bytes == 0
