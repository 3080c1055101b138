"""What lies beside the data of a checkpoint that is resharded: kept, or said to be left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fsdp_ckpt import convert, reshard
from fsdp_ckpt.errors import DestinationExists
from tests.build import rows, save_dcp


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_dcp(tmp_path / "src", {"model": {"w": rows(torch.arange(12.0).reshape(6, 2), 2)}}, ranks=2)


def test_files_of_deep_folders_are_kept(source: Path, tmp_path: Path) -> None:
    deep = Path("a/b/c/d/e/f/g.txt")
    (source / deep).parent.mkdir(parents=True)
    (source / deep).write_text("deep")
    reshard(source, tmp_path / "out", 3)
    assert (tmp_path / "out" / deep).read_text() == "deep"


def test_files_named_as_ours_are_kept(source: Path, tmp_path: Path) -> None:
    """While a result is written it has notes and unfinished files, which go; what the user calls so stays."""
    names = {"a.part", ".b.done", "sub/c.part", "sub/.d.done"}
    (source / "sub").mkdir()
    for name in names:
        (source / name).write_text(name)
    (source / ".fsdp-ckpt-lock").touch()  # of a run that died
    reshard(source, tmp_path / "out", 3)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    found = {path.relative_to(tmp_path / "out").as_posix(): path for path in files}
    assert found.keys() == {*names, ".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"}
    assert all(found[name].read_text() == name for name in names)


@pytest.mark.timeout(20)
def test_what_cannot_be_copied_is_left_with_a_word(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    os.mkfifo(source / "pipe")
    os.symlink("nowhere", source / "dangling")
    os.symlink("loop", source / "loop")
    os.symlink("../secret", source / "outside")
    os.symlink("notes.txt", source / "inside")
    (source / "notes.txt").write_text("notes")
    report = reshard(source, tmp_path / "out", 3)
    assert [line.partition(":")[0] for line in sorted(report.left)] == ["dangling", "loop", "outside", "pipe"]
    beside = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".distcp"}
    assert beside == {".metadata", "inside", "notes.txt"}


def test_a_checkpoint_within_it_is_left_with_a_word(source: Path, tmp_path: Path) -> None:
    save_dcp(source / "ema", {"w": rows(torch.arange(12.0), 2)}, ranks=2)
    report = reshard(source, tmp_path / "out", 3)
    assert report.left == ["ema: a folder that is no part of it"]
    assert not (tmp_path / "out" / "ema").exists()


def test_hints_can_be_typed(source: Path, tmp_path: Path) -> None:
    """Both commands refuse to run without an option, which the next command to type has to have, too."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(DestinationExists) as found:
        reshard(source, tmp_path / "out", mesh="1x3")
    assert found.value.hint == f"fsdp-ckpt reshard --mesh 1x3 {source} {tmp_path}/out-resharded"
    with pytest.raises(DestinationExists) as found:
        convert(source, tmp_path / "out", to="dcp")
    assert found.value.hint == f"fsdp-ckpt convert --to dcp {source} {tmp_path}/out-converted"
