"""What of a checkpoint is converted, and what is refused before anything is written."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdp_ckpt import convert, reshard
from fsdp_ckpt.errors import (
    AmbiguousPart,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    NoModelWeights,
    UsageError,
)
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.conversion.chosen import Chosen, choose_parts
from tests.build import Sharded, rows, save_dcp

TENSOR = torch.arange(40.0).reshape(8, 5)
GROUPS = [{"lr": 0.1, "params": ["w"]}]


def choose(path: Path, wanted: str, *, several: bool = True) -> Chosen:
    return choose_parts(read_checkpoint(path), wanted, several=several, paths=[str(path)], out="out", command="convert")


def names(chosen: Chosen) -> tuple[list[str], list[str], list[str]]:
    return (
        [part.name for part in chosen.models],
        [part.name for part in chosen.optimizers],
        [part.name for part in chosen.others],
    )


@pytest.fixture
def src(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    save_dcp(folder / "pytorch_model_fsdp_0", {"model": {"w": rows(TENSOR, 2)}})
    save_dcp(folder / "optimizer_0", {"optimizer": {"state": {"w": {"m": rows(TENSOR, 2)}}, "param_groups": GROUPS}})
    torch.save({"last_epoch": 3}, folder / "scheduler.bin")
    return folder


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("all", (["pytorch_model_fsdp_0"], ["optimizer_0"], ["scheduler"])),
        ("model", (["pytorch_model_fsdp_0"], [], [])),
        ("optimizer", ([], ["optimizer_0"], [])),
        ("optimizer_0", ([], ["optimizer_0"], [])),
        ("pytorch_model_fsdp_0", (["pytorch_model_fsdp_0"], [], [])),
    ],
)
def test_parts(wanted: str, expected: object, src: Path) -> None:
    assert names(choose(src, wanted)) == expected


def test_what_is_not_there(src: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nobody"):
        choose(src, "nobody")
    save_dcp(tmp_path / "model", {"model": {"w": TENSOR}})
    with pytest.raises(NoModelWeights, match="no optimizer"):
        choose(tmp_path / "model", "optimizer")
    with pytest.raises(NoModelWeights):
        choose(src / "optimizer_0", "model")
    assert names(choose(src / "optimizer_0", "all"))[:2] == ([], ["optimizer_0"])


def test_several_models(tmp_path: Path) -> None:
    for number in range(2):
        save_dcp(tmp_path / "src" / f"pytorch_model_fsdp_{number}", {"model": {"w": TENSOR + number}})
    assert names(choose(tmp_path / "src", "all"))[0] == ["pytorch_model_fsdp_0", "pytorch_model_fsdp_1"]
    with pytest.raises(AmbiguousPart):
        choose(tmp_path / "src", "all", several=False)
    assert names(choose(tmp_path / "src", "pytorch_model_fsdp_1", several=False))[0] == ["pytorch_model_fsdp_1"]


def test_a_copy_beside_what_fsdp_saved_is_left_aside_and_named(src: Path) -> None:
    save_file({"w": TENSOR}, src / "model.safetensors")
    chosen = choose(src, "all")
    assert names(chosen)[0] == ["pytorch_model_fsdp_0"]
    assert chosen.notes == ["left aside: model; choose with --part"]


def lose(folder: Path, key: str) -> None:
    """Take a chunk out of the metadata of a folder."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    gone = metadata.state_dict_metadata[key].chunks.pop(0)
    for index in list(metadata.storage_data):
        if index.fqn == key and index.offset == gone.offsets:
            del metadata.storage_data[index]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("head", ["model", "optim", "dataloader", "anything"])
def test_a_hole_in_any_part_that_is_written_is_refused(head: str, tmp_path: Path) -> None:
    """It would be zeros in the result, or another row's values."""
    folder = tmp_path / "src"
    state = {
        "model": {"w": rows(TENSOR, 2)},
        "optim": {"state": {"w": {"m": rows(TENSOR, 2)}}, "param_groups": GROUPS},
        "dataloader": {"w": rows(TENSOR, 2)},
        "anything": {"w": rows(TENSOR, 2)},
    }
    save_dcp(folder, state)
    lose(folder, "optim.state.w.m" if head == "optim" else f"{head}.w")
    for convert_it in (reshard, partial(convert, to="dcp")):
        with pytest.raises(IncompleteCheckpoint, match="20 of 40 elements are in no shard"):
            convert_it(folder, tmp_path / "out", world_size=3)
        assert not (tmp_path / "out").exists()
    if head not in ("model", "optim"):
        convert(folder, tmp_path / "out", to="dcp", part="model", fsync=False)


@pytest.mark.parametrize("state", [{"w": rows(TENSOR, 2)}, {"a": rows(TENSOR, 2), "b": rows(TENSOR + 1, 2)}])
def test_shards_that_claim_the_same_bytes_are_refused(state: dict[str, Sharded], tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "src", {"model": state})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    first, *_, last = sorted(metadata.storage_data, key=lambda index: (str(index.fqn), index.offset))
    metadata.storage_data[last] = metadata.storage_data[first]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpoint, match="claim the same bytes"):
        reshard(folder, tmp_path / "out", 3)
