from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.ties import find_aliases, tie
from fsdp_ckpt.plan.merge import Selection, select_tensors
from fsdp_ckpt.plan.output import LowRank, Window
from fsdp_ckpt.run.sources import Sources
from tests.build import Sharded, rows, save_dcp

WEIGHT = torch.arange(12.0).reshape(4, 3)


def select(folder: Path) -> Selection:
    return select_tensors(list(read_checkpoint(folder).parts[0].tensors.values()))


def tied(folder: Path, *, asked: bool = True) -> tuple[dict[str, str], list[str]]:
    with Sources(read_checkpoint(folder).root) as sources:
        selection, warnings = tie(select(folder), sources, asked=asked)
    names = [tensor.name for tensor in selection.tensors]
    assert not set(names) & set(selection.tied)
    return dict(selection.tied), warnings


def dcp(folder: Path, **state: Any) -> Path:
    return save_dcp(folder, {"model": {key.replace("_WEIGHT", ".weight"): value for key, value in state.items()}})


def full(folder: Path, **state: torch.Tensor) -> Path:
    folder.mkdir()
    torch.save({key.replace("_WEIGHT", ".weight"): value for key, value in state.items()}, folder / "pytorch_model.bin")
    return folder


def test_equal_shards_of_two_names(tmp_path: Path) -> None:
    # Case P14: DCP stores a tied tensor twice.
    path = dcp(tmp_path / "x", embed_WEIGHT=rows(WEIGHT, 2), mid_WEIGHT=WEIGHT, lm_head_WEIGHT=rows(WEIGHT.clone(), 2))
    assert tied(path) == ({"lm_head.weight": "embed.weight"}, [])


@pytest.mark.parametrize("asked", [False, True])
def test_values_that_differ_are_not_tied(asked: bool, tmp_path: Path) -> None:
    other = WEIGHT.clone()
    other[3, 2] += 1
    path = dcp(tmp_path / "x", embed_WEIGHT=rows(WEIGHT, 2), lm_head_WEIGHT=rows(other, 2))
    found, (warning,) = tied(path, asked=asked)
    assert not found
    assert "`embed.weight` and `lm_head.weight` differ: both are written" in warning
    assert ("--tie" in warning) is asked


@pytest.mark.parametrize("differ", [False, True])
def test_other_shards_of_equal_values_are_compared_by_their_bytes(differ: bool, tmp_path: Path) -> None:
    other = WEIGHT.clone()
    other[0, 0] -= float(differ)
    columns = Sharded(other, [((0, 0), (4, 1)), ((0, 1), (4, 2))], [0, 1])
    path = dcp(tmp_path / "x", embed_WEIGHT=rows(WEIGHT, 2), lm_head_WEIGHT=columns)
    assert tied(path)[0] == ({} if differ else {"lm_head.weight": "embed.weight"})


@pytest.mark.parametrize("differ", [False, True])
def test_other_strides_of_equal_values(differ: bool, tmp_path: Path) -> None:
    other = WEIGHT.t().contiguous().t()
    other[1, 1] += float(differ)
    path = full(tmp_path / "x", embed_WEIGHT=WEIGHT, lm_head_WEIGHT=other)
    assert tied(path)[0] == ({} if differ else {"lm_head.weight": "embed.weight"})


def test_equal_bytes_read_by_other_strides_differ(tmp_path: Path) -> None:
    square = torch.arange(16.0).reshape(4, 4)
    path = full(tmp_path / "x", embed_WEIGHT=square, lm_head_WEIGHT=square.clone().t())
    assert tied(path)[0] == {}


@pytest.mark.parametrize("name", ["conj", "neg"])
def test_equal_bytes_of_which_one_is_conjugated_differ(name: str, tmp_path: Path) -> None:
    base = torch.tensor([[1 + 2j, 3 - 4j]])
    other = base.clone().conj() if name == "conj" else torch._neg_view(base.clone())
    path = full(tmp_path / "x", embed_WEIGHT=base, lm_head_WEIGHT=other)
    assert tied(path)[0] == {}


@pytest.mark.parametrize("name", ["conj", "neg", "transposed"])
def test_one_storage_read_in_two_ways_is_no_alias(name: str, tmp_path: Path) -> None:
    base = torch.tensor([[1 + 2j, 3 - 4j], [5 + 6j, 7 - 8j]])
    other = {"conj": base.conj(), "neg": torch._neg_view(base), "transposed": base.t()}[name]
    assert not torch.equal(base, other)
    path = full(tmp_path / "x", embed_WEIGHT=base, lm_head_WEIGHT=other)
    assert find_aliases(select(path).tensors) == {}
    assert tied(path)[0] == {}


def test_one_storage_under_several_names(tmp_path: Path) -> None:
    # Case P15: full files keep ties as a shared storage, whatever the names are.
    big = torch.arange(40.0).reshape(4, 10)
    path = full(
        tmp_path / "x", zeta_WEIGHT=WEIGHT, alpha_WEIGHT=WEIGHT, lm_head_WEIGHT=WEIGHT, embed_WEIGHT=WEIGHT,
        a_WEIGHT=big[:2], b_WEIGHT=big[2:], whole_WEIGHT=big,
    )  # fmt: skip
    kept = "embed.weight"
    assert find_aliases(select(path).tensors) == dict.fromkeys(["zeta.weight", "alpha.weight", "lm_head.weight"], kept)
    assert tied(path)[0] == dict.fromkeys(["zeta.weight", "alpha.weight", "lm_head.weight"], kept)


def test_empty_tensors_are_no_aliases(tmp_path: Path) -> None:
    empty = torch.zeros(0, 3)
    assert find_aliases(select(full(tmp_path / "x", a_WEIGHT=empty, b_WEIGHT=empty)).tensors) == {}


def test_other_dtypes_of_one_storage_are_no_aliases(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "x").mkdir()
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, tmp_path / "x" / "model.safetensors")
    assert find_aliases(select(tmp_path / "x").tensors) == {}, "two copies of equal values are two tensors"


def test_nothing_to_tie(tmp_path: Path) -> None:
    path = dcp(tmp_path / "x", embed_WEIGHT=WEIGHT, mid_WEIGHT=WEIGHT)
    assert tied(path, asked=False) == ({}, [])
    found, (warning,) = tied(path, asked=True)
    assert not found
    assert "nothing is tied" in warning


def test_an_adapter_in_one_of_a_pair_parts_them(tmp_path: Path) -> None:
    # What is written of the embedding is another matrix then, though both are the same bytes of the source.
    for path in (
        dcp(tmp_path / "twice", embed_WEIGHT=rows(WEIGHT, 2), lm_head_WEIGHT=rows(WEIGHT.clone(), 2)),
        full(tmp_path / "once", embed_WEIGHT=WEIGHT, lm_head_WEIGHT=WEIGHT),
    ):
        tensors = {tensor.name: tensor for tensor in select(path).tensors}
        head = tensors["lm_head.weight"]
        addition = LowRank(up=head.source, down=head.source, scale=1.0)
        folded = [replace(tensors["embed.weight"], addition=addition), head]
        with Sources(read_checkpoint(path).root) as sources:
            found, warnings = tie(Selection(tensors=folded), sources, asked=True)
        assert not found.tied
        assert "differ: both are written" in warnings[0]


def test_windows_of_one_tensor_are_no_aliases(tmp_path: Path) -> None:
    (stack,) = select(dcp(tmp_path / "x", layers_WEIGHT=rows(WEIGHT, 2))).tensors
    layers = [
        replace(stack, name=f"layers.{number}.weight", window=Window(offsets=(number, 0), lengths=(1, 3), shape=(3,)))
        for number in range(4)
    ]
    assert find_aliases(layers) == {}
    assert find_aliases([stack, replace(stack, name="again")]) == {"again": stack.name}
