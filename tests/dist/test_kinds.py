"""Kinds of models, optimizers and failures: each rank gets back what was its own, or all ranks are told why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.stage import outcomes, play

pytestmark = pytest.mark.dist

SOON_S = 10
STYLES = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory, "tests.dist.kinds_ranks", timeout_s=120)


def _all_raised(found: list[dict[str, Any]], kind: str, text: str) -> None:
    assert [rank["kind"] for rank in found] == [kind] * len(found)
    assert len({rank["message"] for rank in found}) == 1
    for rank in found:
        assert text in rank["message"]
        assert rank["seconds"] < SOON_S


@pytest.mark.parametrize("name", ["DDP", "FSDP1", "FSDP2"])
def test_all_ranks_get_the_buffers_of_the_first_one(played: Path, name: str) -> None:
    first, second = (rank[name] for rank in outcomes(played, "buffers_differ"))
    assert len(first["had"]) == 9  # three statistics of three layers
    assert not any(map(torch.equal, first["had"], second["had"])), "the ranks do not differ: nothing is tested"
    for got in (first["got"], second["got"]):
        assert all(map(torch.equal, got, first["had"]))


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("FSDP1", "UsageError", "object `ema` (FullyShardedDataParallel) is a sharded module"),
        ("FSDP2", "UsageError", "object `ema` (FSDPLinear) is a sharded module"),
        ("FSDP1 within", "UsageError", "object `ema` (Sequential) is a sharded module"),
        ("FSDP2 within", "UsageError", "object `ema` (Sequential) is a sharded module"),
        ("DTensor", "Incompatible", "the state of Plain `own` holds a DTensor"),
        ("ShardedTensor", "Incompatible", "the state of Plain `own` holds a ShardedTensor"),
    ],
)
def test_shards_are_no_objects(played: Path, name: str, kind: str, text: str) -> None:
    found = outcomes(played, "sharded_objects")
    _all_raised([rank[name] for rank in found], kind, text)
    for rank in found:
        assert "model={...: module}" in rank[name]["hint"]
        assert rank["left"] == []


def test_the_state_of_an_object_may_be_a_collective(played: Path) -> None:
    assert outcomes(played, "a_collective_state_dict") == [{"all": [0, 10]}] * 2


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("ZeRO", "UsageError", "ZeroRedundancyOptimizer keeps its state in an optimizer of its own"),
        ("FSDP1", "Incompatible", ".history` is a list that holds tensors, for a parameter that is sharded"),
        ("FSDP2", "Incompatible", ".history` is a list that holds tensors, for a parameter that is sharded"),
    ],
)
def test_optimizer_state_whose_sharding_cannot_be_told_is_refused(
    played: Path, name: str, kind: str, text: str
) -> None:
    found = outcomes(played, "refused_optimizers")
    _all_raised([rank[name] for rank in found], kind, text)
    assert [rank["left"] for rank in found] == [[], []]


def test_optimizers_under_ddp_go_on_bit_by_bit(played: Path) -> None:
    assert outcomes(played, "plain_optimizers_under_ddp") == [{"Adafactor": True, "LBFGS": True, "lists": True}] * 2


@pytest.mark.parametrize("name", ["compile(DDP)", "DDP(compile)", "compile(FSDP2)", "FSDP1(compile)", "compile(FSDP1)"])
def test_names_tell_nothing_of_compiling_and_wrapping(played: Path, name: str) -> None:
    first, second = outcomes(played, "compiled")
    assert first[name] == first["plain"]
    assert second[name] == []
    assert first[f"{name}: saved"] == second[f"{name}: saved"] == []


@pytest.mark.parametrize("way", [*STYLES, "whole", "export"])
def test_ranks_with_different_values_of_one_name_are_told(played: Path, way: str) -> None:
    found = outcomes(played, "experts_of_one_name")
    text = "expert` at (0, 0) with other values than an earlier rank"
    _all_raised([rank[f"different {way}"] for rank in found], "Incompatible", text)
    for rank in found:
        assert rank[f"equal {way}"]["kind"] == "nothing", rank[f"equal {way}"]
        assert not [name for name in rank["left"] if name.startswith("different")]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("after_save", "RankFailed", "(the checkpoint is in its place) failed: rank 1: OSError: upload failed"),
        ("after_load", "RankFailed", "(everything is loaded) failed: rank 0: KeyError: 'lost'"),
        ("writing a full file", "RankFailed", "rank 0: OSError: [Errno 5] Input/output error"),
        ("writing a model", "RankFailed", "rank 0: OSError: [Errno 5] Input/output error"),
        ("no memory", "RankFailed", "rank 0: RuntimeError: DefaultCPUAllocator: can't allocate memory"),
        ("option SHARDED_STATE_DICT", "Incompatible", "the state of param_groups.0.option cannot be pickled"),
        ("option FULL_STATE_DICT", "Incompatible", "a builtins.function in the state cannot be stored"),
        ("object", "Incompatible", "rank 0: the state of Plain `own` cannot be pickled"),
        ("data loader", "Incompatible", "rank 1: the state of the data loaders cannot be pickled"),
    ],
)
def test_what_fails_on_one_rank_is_soon_known_on_all(played: Path, name: str, kind: str, text: str) -> None:
    found = outcomes(played, "failures_beside_the_data")
    _all_raised([rank[name] for rank in found], kind, text)
    assert [rank["left"] for rank in found] == [["hooks"], ["hooks"]]  # that one was in its place already


def test_hooks_leave_out_the_scaler_and_random_states(played: Path) -> None:
    for rank in outcomes(played, "skipping"):
        assert not [name for name in rank["files"] if name.startswith(("scaler", "random_states"))]
        assert (rank["all"], rank["one"]) == ((2.0, True), (2.0, True))


def test_without_hooks_the_scaler_and_the_random_states_of_known_ranks_are_loaded(played: Path) -> None:
    assert [rank["loaded"] for rank in outcomes(played, "skipping")] == [(8.0, False), (8.0, True)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("inside", ["", " with checkpoint_wrapper"])
@pytest.mark.parametrize("name", ["FSDP1", "FSDP2"])
def test_extra_state_under_wrappers_comes_back(played: Path, name: str, inside: str, style: str) -> None:
    extra = {"scale": 3, "by": {"a": [1, 2]}}
    first, second = (rank[f"{name}{inside} {style}"] for rank in outcomes(played, "extra_state"))
    assert first == (extra, extra, [4.0, 4.0], [], extra)  # wrapped, bare, a buffer of such a name, unmatched, whole
    assert second == (extra, extra, [4.0, 4.0], [])


def test_a_wrapped_module_of_fsdp1_may_have_two_names(played: Path) -> None:
    found = outcomes(played, "odd_fsdp1_models")
    assert found[0]["names"] == found[0]["plain names"] == ["a.bias", "a.weight", "b.bias", "b.weight"]
    for rank in found:
        assert rank["shared into plain"]
        assert rank["plain into shared"]


def test_parameters_of_fsdp1_may_have_no_elements(played: Path) -> None:
    first = outcomes(played, "odd_fsdp1_models")[0]
    assert first["empty"] == {"weight": ((2, 2), True), "bias": ((2,), True), "none": ((0, 3), True)}


@pytest.mark.parametrize("option", ["include", "exclude", "resize"])
def test_nothing_can_be_chosen_from_flat_parameters(played: Path, option: str) -> None:
    found = outcomes(played, "choosing_from_flat_parameters")
    _all_raised([rank[option] for rank in found], "UsageError", "`pytorch_model_fsdp` holds flat parameters")
    for rank in found:
        assert rank["same"]
        assert "SHARDED_STATE_DICT" in rank[option]["hint"]


@pytest.mark.parametrize("style", STYLES)
def test_pipelines_load_what_each_rank_had(played: Path, style: str) -> None:
    for rank in outcomes(played, "pipeline"):
        assert rank[style] == {
            "model": True, "moments": True, "lr": 0.1, "fresh": [], "whole": [], "into one": True,
        }  # fmt: skip


def test_of_two_processes_that_save_to_one_path_the_second_is_told(played: Path) -> None:
    first, second = outcomes(played, "two_processes_at_one_path")
    assert first["kind"] == "nothing", first
    assert second["kind"] == "DestinationExists"
    assert "another process is writing to" in second["message"]
    assert (first["step"], second["step"]) == (0, 0)
