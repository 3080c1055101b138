"""Files that belong to no checkpoint any more, and indexes of safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_ckpt.ops.repair import repair
from tests.build import rows, save_dcp
from tests.cli.tool import snapshot
from tests.compat.judges import read_with_torch
from tests.compat.samples import EDGE, FIXTURES
from tests.unit.ops.made_shards import A, B, C, edit, loads_by_index, shards
from tests.unit.ops.mended import copy, is_read, kinds, mend, tree, unchanged


def test_files_of_an_earlier_save(tmp_path: Path) -> None:
    said = mend(copy(EDGE / "stale", tmp_path / "c"), is_read(read_with_torch(EDGE / "stale")))
    assert kinds(said) == [("drop-stale", "set aside", f"__0_{n}.distcp") for n in (1, 2)]
    assert not list((tmp_path / "c").glob("__0_[12].distcp"))
    assert len(list((tmp_path / "c/.before-repair-1").iterdir())) == 2


def test_unfinished_metadata_beside_good_ones(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "c", {"w": rows(torch.ones(6, 2), 2)})
    expected = read_with_torch(folder)
    (folder / ".metadata.tmp").write_bytes(b"half")
    assert kinds(mend(folder, is_read(expected))) == [("drop-stale", "set aside", ".metadata.tmp")]


def test_nothing_is_stale_in_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    """What the metadata do not refer to may be what is missing, under another name."""
    folder = copy(EDGE / "stale", tmp_path / "c")
    (folder / "__0_0.distcp").rename(folder / "__0_3.distcp")
    (fault,) = unchanged(folder).faults
    assert fault.where == "__0_0.distcp"


def test_empty_files_are_left(tmp_path: Path) -> None:
    """torch writes them for threads without items."""
    folder = copy(EDGE / "tied", tmp_path / "c")
    (folder / "__0_1.distcp").touch()
    before = snapshot(folder)
    assert repair(folder, apply=True).whole
    assert snapshot(folder) == before


def test_a_shard_that_no_index_lists(tmp_path: Path) -> None:
    shards(tmp_path / "c", A, B)
    save_file(A | B, tmp_path / "c/model-00001-of-00001.safetensors")
    said = mend(tmp_path / "c", lambda folder: loads_by_index(folder, A | B))
    assert kinds(said) == [("drop-stale", "set aside", "model-00001-of-00001.safetensors")]


def test_a_shard_that_alone_has_a_tensor_is_not_stale(tmp_path: Path) -> None:
    shards(tmp_path / "c", A, B)
    save_file(A | C, tmp_path / "c/model-00001-of-00001.safetensors")
    before = tree(tmp_path)
    repair(tmp_path / "c", apply=True)
    assert tree(tmp_path) == before


INDEX_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "cut off": lambda path: path.write_text(path.read_text()[:-5]),
    "a list": lambda path: path.write_text("[]"),
    "numbers for names": lambda path: edit(path, lambda data: data["weight_map"].update(a=5)),
    "a tensor is not listed": lambda path: edit(path, lambda data: data["weight_map"].pop("b")),
    "another file": lambda path: edit(path, lambda data: data["weight_map"].update(a=data["weight_map"]["b"])),
    "a file that is not there": lambda path: edit(path, lambda data: data["weight_map"].update(a="x.safetensors")),
}


@pytest.mark.parametrize("name", INDEX_DAMAGE)
def test_an_index_is_made_from_headers(name: str, tmp_path: Path) -> None:
    shards(tmp_path / "c", A, B, C)
    INDEX_DAMAGE[name](tmp_path / "c/model.safetensors.index.json")
    said = mend(tmp_path / "c", lambda folder: loads_by_index(folder, A | B | C))
    assert kinds(said) == [("rebuild-index", "write", "model.safetensors.index.json")]


def test_a_wrong_sum_alone_is_told_and_left(tmp_path: Path) -> None:
    shards(tmp_path / "c", A, B, C)
    edit(tmp_path / "c/model.safetensors.index.json", lambda data: data["metadata"].update(total_size=7))
    before = tree(tmp_path)
    report = repair(tmp_path / "c", apply=True)
    assert (report.actions, report.whole) == ([], True)
    assert any("total_size is 7" in note for note in report.notes)
    assert tree(tmp_path) == before


def test_half_a_character_in_an_index(tmp_path: Path) -> None:
    """JSON can say it, UTF-8 cannot."""
    shards(tmp_path / "c", A, B)
    index = tmp_path / "c/model.safetensors.index.json"
    edit(index, lambda data: (data["metadata"].update(x="\ud800"), data["weight_map"].pop("a")))
    mend(tmp_path / "c", lambda folder: loads_by_index(folder, A | B))
    assert json.loads(index.read_text())["metadata"]["x"] == "\ud800"


def test_what_else_an_index_says_is_kept(tmp_path: Path) -> None:
    shards(tmp_path / "c", A, B)
    index = tmp_path / "c/model.safetensors.index.json"
    edit(index, lambda data: (data["metadata"].update(total_parameters=9), data["weight_map"].pop("a")))
    repair(tmp_path / "c", apply=True)
    assert json.loads(index.read_text())["metadata"] == {"total_parameters": 9, "total_size": 36}


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a number is missing": (lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(), "00002-of-00003"),
    "a tensor twice": (lambda folder: save_file(A | B, folder / "model-00002-of-00003.safetensors"), "stands in"),
    "a broken file": (lambda folder: (folder / "model-00002-of-00003.safetensors").write_bytes(b"x" * 99), "00002"),
    "two saves": (lambda folder: shards(folder, A, B, C, A, total=4, index=False), "two saves"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_index_is_made_of_what_is_ambiguous(name: str, tmp_path: Path) -> None:
    shards(tmp_path / "c", A, B, C, index=False)
    REFUSED[name][0](tmp_path / "c")
    assert any(REFUSED[name][1] in fault.why + fault.where for fault in unchanged(tmp_path / "c").faults)


def test_an_index_that_lists_a_lost_tensor_is_evidence(tmp_path: Path) -> None:
    """A file was replaced by one that lacks a tensor: a new index would hide the loss."""
    shards(tmp_path / "c", A, B | C)
    save_file(B, tmp_path / "c/model-00002-of-00002.safetensors")
    assert any("`c`" in fault.why + fault.where for fault in unchanged(tmp_path / "c").faults)


def test_rank_shards_of_torch_need_no_index(tmp_path: Path) -> None:
    folder = copy(FIXTURES / "torch-2.13.0/hf_sharded_w2", tmp_path / "c")
    before = snapshot(folder)
    assert repair(folder, apply=True).whole
    assert snapshot(folder) == before
