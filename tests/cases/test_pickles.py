"""Cases of theme 8: pickles that run code, and files per rank that torch cannot open offline."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_ckpt
from fsdp_ckpt.errors import IncompleteCheckpoint
from tests.cases.check import assert_same, merge_and_load, run


class Touch:
    """Pickles into a call of os.system."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.mark}'",)


def in_metadata(folder: Path, built: Path, evil: Touch) -> None:
    """A real checkpoint whose .metadata runs code."""
    shutil.copytree(built / "p22/pytorch_model_fsdp_0", folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data["x"] = evil
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_rank_file(folder: Path, built: Path, evil: Touch) -> None:
    """verl's files, the second of which runs code."""
    shutil.copytree(built / "p01/verl", folder)
    file = folder / "model_world_size_2_rank_1.pt"
    torch.save(torch.load(file, weights_only=False) | {"x": evil}, file)


def in_full_file(folder: Path, _: Path, evil: Touch) -> None:
    """Accelerate's full file."""
    folder.mkdir()
    torch.save({"w": torch.ones(2), "x": evil}, folder / "pytorch_model_fsdp.bin")


PLACES = pytest.mark.parametrize(
    ("place", "file"),
    [
        (in_metadata, ".metadata"),
        (in_rank_file, "model_world_size_2_rank_1.pt"),
        (in_full_file, "pytorch_model_fsdp.bin"),
    ],
)


@PLACES
@pytest.mark.parametrize("command", ["inspect", "merge", "convert"])
def test_p47_code_in_a_pickle_is_refused_by_name(
    command: str, place: Any, file: str, built: Path, tmp_path: Path
) -> None:
    """pytorch/pytorch#189308: looking at a downloaded checkpoint must not run what is in it.

    validate: test_validate. load_state: test_state_model.
    """
    folder, mark = tmp_path / "ck", tmp_path / "MARK"
    place(folder, built, Touch(mark))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    options: dict[str, list[str | Path]] = {
        "inspect": [],
        "merge": [tmp_path / "out"],
        "convert": [tmp_path / "out", "--to", "dcp"],
    }
    result = run(command, folder, *options[command])
    assert result.returncode == 4
    assert "posix.system" in result.stderr
    assert file in result.stderr
    assert not mark.exists()
    assert not (tmp_path / "out").exists()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_p47_stock_unpickling_runs_it(built: Path, tmp_path: Path) -> None:
    """So the test above is about something."""
    in_metadata(tmp_path / "ck", built, Touch(tmp_path / "MARK"))
    pickle.loads((tmp_path / "ck/.metadata").read_bytes())
    assert (tmp_path / "MARK").exists()


def test_p48_sharded_tensors_without_a_process_group(built: Path, tmp_path: Path) -> None:
    """mosaicml/llm-foundry#419, #1220, allenai/OLMo#292: 'Need to initialize default process group'."""
    assert not torch.distributed.is_initialized()
    _, found = merge_and_load(built / "p48", tmp_path / "out")
    assert_same(found, {"w": torch.arange(12.0).reshape(6, 2), "buf": torch.tensor(3)})
    (part,) = fsdp_ckpt.inspect(built / "p48").parts
    assert (part.world_size, part.complete) == (4, True)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_p48_a_missing_rank_is_named(rank: int, built: Path, tmp_path: Path) -> None:
    """No hole is filled with zeros."""
    shutil.copytree(built / "p48", tmp_path / "ck")
    (tmp_path / f"ck/ep10-ba50000-rank{rank}.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match=f"missing: rank {rank}"):
        fsdp_ckpt.merge(tmp_path / "ck", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_p48_the_last_ranks_are_missed_as_well(built: Path, tmp_path: Path) -> None:
    """File names alone do not tell that ranks 2 and 3 existed; the shards' metadata do."""
    shutil.copytree(built / "p48", tmp_path / "ck")
    for rank in (2, 3):
        (tmp_path / f"ck/ep10-ba50000-rank{rank}.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match="4 of 12 elements"):
        fsdp_ckpt.merge(tmp_path / "ck", tmp_path / "out")
    assert not (tmp_path / "out").exists()
