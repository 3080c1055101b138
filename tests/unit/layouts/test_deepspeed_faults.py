"""DeepSpeed's files that lack something, contradict each other, or are cut in ways that are not read."""

from __future__ import annotations

import shutil
import sys
import types
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.catalog import Severity
from fsdp_ckpt.codec.known import PLAIN
from fsdp_ckpt.codec.pickles import Constructor, loads
from fsdp_ckpt.errors import CorruptCheckpoint, Incompatible, IncompleteCheckpoint, MalformedFile, UnsafePickle
from fsdp_ckpt.layouts.registry import read_checkpoint
from tests.build import assert_same
from tests.unit.codec.raw_pickle import call, dump, global_
from tests.unit.layouts.made_deepspeed import (
    FIRST,
    MODEL,
    SECOND,
    SHAPES,
    A,
    B,
    faults,
    numbers,
    part,
    save_model,
    save_rank,
    values,
    zero2,
    zero3,
)  # fmt: skip


@pytest.mark.parametrize("make", [zero2, zero3])
def test_a_missing_rank(make: Any, tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / SECOND).unlink()
    found = read_checkpoint(tmp_path)
    for name in ("model", "optimizer"):
        assert faults(part(found, name).problems)[:2] == [
            ("error", "missing-rank", SECOND), ("note", "ranks-elsewhere", "."),
        ]  # fmt: skip
    assert ("error", "missing-shard", "b") in faults(part(found, "model").problems)
    assert part(found, "model").tensors["b"].shape == (3,)


def test_a_model_file_without_which_nothing_is_lost(tmp_path: Path) -> None:
    zero3(tmp_path)
    gone = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    (tmp_path / gone).unlink()
    found = read_checkpoint(tmp_path)
    assert_same(values(found), {"a": A, "b": B})
    assert faults(part(found, "model").problems)[0] == ("warning", "missing-rank", gone)
    (tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match="names and shapes"):
        read_checkpoint(tmp_path)


def test_ranks_of_two_saves(tmp_path: Path) -> None:
    zero2(tmp_path)
    save_rank(tmp_path, 2, 3, [B])
    with pytest.raises(CorruptCheckpoint, match=r"of a save of 3 ranks with ZeRO-2, .* of one of 2"):
        read_checkpoint(tmp_path)
    save_rank(tmp_path, 2, 2, [B])
    with pytest.raises(MalformedFile, match="is of rank 2, and says that there were 2"):
        read_checkpoint(tmp_path)
    (tmp_path / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    save_rank(tmp_path, 1, 2, [B], step=4)
    optimizer = part(read_checkpoint(tmp_path), "optimizer")
    assert faults(optimizer.problems) == [("error", "mixed-saves", SECOND)]


@pytest.mark.parametrize("size", [2, 8])
def test_vectors_of_another_size(size: int, tmp_path: Path) -> None:
    zero2(tmp_path)
    save_rank(tmp_path, 1, 2, [torch.zeros(size)])
    with pytest.raises(MalformedFile, match=r"mp_rank_00_optim_states.pt: group 0"):
        read_checkpoint(tmp_path)
    (problem,) = part(read_checkpoint(tmp_path, tolerant=True), "model").problems
    assert (problem.severity, problem.code) == (Severity.ERROR, "unreadable")


def test_a_vector_of_a_rank_in_zero3_that_is_too_short(tmp_path: Path) -> None:
    zero3(tmp_path)
    save_rank(tmp_path, 1, 2, [numbers(4, 5, 6, 9)], stage=3)
    with pytest.raises(MalformedFile, match="rank 1 has 4 elements of its parameters, 5 are expected"):
        read_checkpoint(tmp_path)


def test_more_vectors_than_the_model_file_knows(tmp_path: Path) -> None:
    save_model(tmp_path, module={"a": A}, shapes=[{"a": (2, 3)}])
    save_rank(tmp_path, 0, 1, [A.flatten(), B])
    with pytest.raises(MalformedFile, match="2 flat vectors, not 1"):
        read_checkpoint(tmp_path)


def test_stages_that_contradict_each_other(tmp_path: Path) -> None:
    zero2(tmp_path)
    zero3(tmp_path / "three")
    for name in (FIRST, SECOND):
        shutil.copy(tmp_path / "three" / name, tmp_path / name)
    with pytest.raises(CorruptCheckpoint, match="of different ZeRO stages"):
        read_checkpoint(tmp_path)
    shutil.copy(tmp_path / "three/zero_pp_rank_0_mp_rank_00_model_states.pt", tmp_path)
    with pytest.raises(MalformedFile, match="two saves in one folder"):
        read_checkpoint(tmp_path)


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    zero2(tmp_path)
    shutil.copy(tmp_path / FIRST, tmp_path / f"bf16_{FIRST}")
    with pytest.raises(MalformedFile, match="are both of rank 0"):
        read_checkpoint(tmp_path)


def test_a_moment_that_is_not_one_number_per_weight(tmp_path: Path) -> None:
    save_model(tmp_path, module={"b": B}, shapes=[{"b": (3,)}])
    base = {"state": {0: {"quantiles": torch.zeros(2), "exp_avg": B}}, "param_groups": [{"params": [0]}]}
    save_rank(tmp_path, 0, 1, [B], base_optimizer_state=base)
    optimizer = part(read_checkpoint(tmp_path), "optimizer")
    assert list(optimizer.tensors) == ["state.b.exp_avg"]
    assert faults(optimizer.problems) == [("error", "moment-shape", "quantiles")]


def test_moments_that_one_rank_lacks(tmp_path: Path) -> None:
    zero2(tmp_path)
    base = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0]}]}
    save_rank(tmp_path, 1, 2, [B], base_optimizer_state=base)
    with pytest.raises(MalformedFile, match="keeps step of vector 0, the first rank exp_avg, step"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("base", "says"),
    [
        ({"state": {}, "param_groups": [{"params": [1]}]}, "do not list each of the 1 vectors once"),
        ({"state": {}, "param_groups": [{"params": [0]}, {"params": [0]}]}, "do not list each of the 1 vectors once"),
        ({"state": [], "param_groups": []}, "`state` is list"),
        ([], "moments of 0 vectors, 1 are expected"),
        (7, "the optimizer's state is int"),
    ],
)
def test_an_optimizer_of_another_form(base: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedFile, match=says):
        read_checkpoint(zero2(tmp_path, base_optimizer_state=base))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"partition_count": [2, 4]}, "cut for different numbers of ranks"),
        ({"single_partition_of_fp32_groups": None}, "a DeepSpeed too old"),
        ({"ds_zero_partition_groups": [{"partition_count": 1}]}, "experts have partitions of their own"),
    ],
)
def test_optimizers_that_cut_in_another_way(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(Incompatible, match=says):
        read_checkpoint(zero2(tmp_path, **more))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"partition_count": 1 << 40}, "`partition_count` is missing or absurd"),
        ({"partition_count": None}, "`partition_count` is missing or absurd"),
        ({"zero_stage": 9}, "an unknown ZeRO stage"),
        ({"single_partition_of_fp32_groups": [torch.zeros(2, 3)]}, "is no flat tensor"),
        ({"single_partition_of_fp32_groups": [torch.zeros(12)[::2]]}, "is no flat tensor"),
        ({"single_partition_of_fp32_groups": [7]}, "is no flat tensor"),
        ({"param_alignment_paddings": [[1 << 40, 0]]}, "are no numbers"),
        ({"param_alignment_paddings": [[0]]}, "are of other parameters"),
    ],
)
def test_rank_files_that_are_none(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedFile, match=says):
        read_checkpoint(zero2(tmp_path, **more))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"module": None}, "`module` and `buffer_names` are missing"),
        ({"param_shapes": None}, "`param_shapes` is missing"),
        ({"param_shapes": [{"a": (2, -3)}]}, "a shape that is none"),
        ({"param_shapes": [{"a": (1 << 40, 1 << 40)}]}, "a shape of"),
        ({"param_shapes": [{7: (2, 3)}]}, "whose name is no text"),
        ({"param_shapes": [{"a": (2, 3)}, {"a": (2, 3)}]}, "flat vectors, not 2|stands in two flat vectors"),
    ],
)
def test_model_files_that_are_none(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    zero2(tmp_path)
    save_model(tmp_path, **({"module": {"a": A, "b": B}, "shapes": [SHAPES]} | more))
    with pytest.raises(MalformedFile, match=says):
        read_checkpoint(tmp_path)


def test_model_parallel_ranks_pipelines_and_experts_are_refused(tmp_path: Path) -> None:
    names = (
        "mp_rank_01_model_states.pt", "mp_rank_00_003_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "layer_03-model_states.pt", "layer_03-model_00-model_states.pt", "expp_rank_1_mp_rank_00_optim_states.pt",
        "layer_0_expert_3_mp_rank_00_model_states.pt",
    )  # fmt: skip
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        zero2(folder)
        shutil.copy(folder / MODEL, folder / name)
        with pytest.raises(Incompatible, match=name) as caught:
            read_checkpoint(folder)
        assert caught.value.hint
    zero2(tmp_path / "of two")
    save_model(tmp_path / "of two", module={}, shapes=[SHAPES], mp_world_size=2)
    with pytest.raises(Incompatible, match="one of 2 model-parallel ranks"):
        read_checkpoint(tmp_path / "of two")
    save_model(tmp_path / "of two", module={}, shapes=[SHAPES], ds_autoep_layers=[{}])
    with pytest.raises(Incompatible, match="cuts experts"):
        read_checkpoint(tmp_path / "of two")


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"b": (0, 3)}, None),
        ({"b": (0, 3), "a": (3, 0)}, None),
        ({"b": (1, 2)}, r"elements 1 to 3 of vector 0 are `b`; by the shapes in the model file, elements 0 to 3 are"),
        ({}, r"no elements of vector 0 are `b`; .* elements 0 to 3 are"),
        ({"b": (0, 3), "a": (3, 3)}, r"elements 3 to 6 of vector 0 are `a`; .* no elements are"),
    ],
)
def test_addresses_that_ranks_wrote(
    second: dict[str, tuple[int, int]], says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = ["deepspeed", "deepspeed.utils", "deepspeed.utils.tensor_fragment"]
    for name in modules:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    address = make_dataclass("fragment_address", ["numel", "start"], namespace={"__module__": modules[-1]})
    monkeypatch.setattr(sys.modules[modules[-1]], "fragment_address", address, raising=False)
    zero2(tmp_path)
    addresses = {place: address(start=start, numel=numel) for place, (start, numel) in second.items()}
    save_rank(tmp_path, 1, 2, [B], param_slice_mappings=[addresses])
    if says is None:
        assert read_checkpoint(tmp_path).is_complete
        return
    with pytest.raises(MalformedFile, match=says):
        read_checkpoint(tmp_path)
    config = {"zero_optimization": {"round_robin_gradients": True}}
    state = torch.load(tmp_path / SECOND, weights_only=False)
    torch.save(state | {"ds_config": config}, tmp_path / SECOND)
    assert_same(values(read_checkpoint(tmp_path)), {"a": A, "b": B})  # with which addresses are wrong


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


def test_pickles_that_ask_for_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero2(tmp_path, loss_scaler=Evil())
    with pytest.raises(UnsafePickle, match=r"print"):
        read_checkpoint(tmp_path)
    assert capsys.readouterr().out == ""


def test_stages_as_early_python_311_pickles_them() -> None:
    stage = global_("deepspeed.runtime.zero.config", "ZeroStageEnum")
    found = loads(dump(call("builtins", "getattr", stage, "gradients"), 2), PLAIN, where="x")
    assert isinstance(found, Constructor)
    assert found.name == "deepspeed.runtime.zero.config.ZeroStageEnum.gradients"
    with pytest.raises(UnsafePickle, match="mro"):
        loads(dump(call("builtins", "getattr", stage, "mro"), 2), PLAIN, where="x")
