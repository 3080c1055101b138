"""Sharded models train as the unsharded one does, are cut as the configuration says, and begin with right values."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.dist.sharding_net import Decoder, build, reference, reference_bf16
from tests.dist.stage import outcomes, play

pytestmark = pytest.mark.dist

SOON_S = 10
FULL, LOW = 1e-5, 1e-3
"""Relative tolerance of losses in float32, and in bfloat16: one rank rounds gradients once, two round them twice."""

LAYERS = ["", "layers.0", "layers.1"]
BY_SIZE = ["", "embed", "layers.0", "layers.0.up", "layers.1", "layers.1.up", "head"]
"""Of 78 parameters, 148 with 70 of them in `up`, and 91; at least 68 make a unit, those of units in it left out."""
UNITS = {"layers": LAYERS, "size": BY_SIZE, "none": [""]}
NUM_PARAMS = {
    "layers": {"": 169, "layers.0": 148, "layers.1": 148},
    "size": {"embed": 78, "layers.0": 78, "layers.0.up": 70, "layers.1": 78, "layers.1.up": 70, "head": 91},
    "none": {"": 465},
}
POLICIES = ("layers", "size", "none")


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="1000000"):  # what is freed goes back at once
        return play(tmp_path_factory, "tests.dist.sharding_ranks", timeout_s=150)


def _check_fsdp1(found: dict[str, Any], policy: str, *, strategy: str, shards: int) -> None:
    assert found["kind"] == "FullyShardedDataParallel"
    assert sorted(found["units"]) == sorted(UNITS[policy])
    assert found["strategies"] == [strategy]
    assert set(found["groups"].values()) == {shards}
    assert found["losses"] == pytest.approx(reference(), rel=FULL)
    # A flat parameter is padded, and its parameters are aligned to 16 bytes: at most 3 elements before each of 12.
    assert found["local"].keys() == NUM_PARAMS[policy].keys()
    for name, count in NUM_PARAMS[policy].items():
        cut = 1 if strategy == "NO_SHARD" else shards
        assert count / cut - 1 < found["local"][name] < count / cut + 40 / cut + 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1_trains_as_the_unsharded_model_does(played: Path, strategy: str, policy: str) -> None:
    for rank in outcomes(played, "strategies"):
        found = rank[strategy, policy]
        _check_fsdp1(found, policy, strategy=strategy, shards=2)
        # torch never frees what the root holds between forward and backward.
        kept = {name: strategy != "FULL_SHARD" or name == "" for name in NUM_PARAMS[policy]}
        assert found["kept"] == kept


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_fsdp1_shards_within_a_node(played: Path, strategy: str, policy: str) -> None:
    for rank in outcomes(played, "hybrids"):
        found = rank[strategy, policy]
        enum = strategy if strategy == "HYBRID_SHARD" else "_HYBRID_SHARD_ZERO2"
        _check_fsdp1(found, policy, strategy=enum, shards=2)
        kept = {name: strategy != "HYBRID_SHARD" or name == "" for name in NUM_PARAMS[policy]}
        assert found["kept"] == kept


@pytest.mark.parametrize("how", ["sizes", "one node", "mesh"])
def test_fsdp1_shards_over_what_is_given(played: Path, how: str) -> None:
    for rank in outcomes(played, "hybrids"):
        _check_fsdp1(rank[how], "layers", strategy="HYBRID_SHARD", shards=4)


def _check_fsdp2(found: dict[str, Any], policy: str, *, mesh: tuple[int, ...]) -> None:
    assert found["kind"] == "FSDPDecoder"
    assert sorted(found["units"]) == sorted(UNITS[policy])
    assert found["placements"] == ["(Shard(dim=0),)" if len(mesh) == 1 else "(Replicate(), Shard(dim=0))"]
    assert (found["mesh"], found["plain"]) == ([mesh], [])
    assert found["losses"] == pytest.approx(reference(), rel=FULL)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("scenario", "mesh"), [("reshards", (2,)), ("copies", (2, 2))])
def test_fsdp2_trains_as_the_unsharded_model_does(
    played: Path, scenario: str, mesh: tuple[int, ...], reshard: bool, policy: str
) -> None:
    for rank in outcomes(played, scenario):
        found = rank[reshard, policy]
        _check_fsdp2(found, policy, mesh=mesh)
        # The root is kept, unless it is all that there is.
        kept = {name: not reshard or (name == "" and policy != "none") for name in NUM_PARAMS[policy]}
        assert found["kept"] == kept


def test_copies_that_are_not_cut_exchange_gradients(played: Path) -> None:
    for rank in outcomes(played, "copies"):
        _check_fsdp2(rank["whole copies"], "layers", mesh=(4, 1))


@pytest.mark.parametrize("name", ["tensor-parallel", "tensor-parallel, two dimensions"])
def test_a_tensor_parallel_model_is_sharded_over_the_mesh_that_is_given(played: Path, name: str) -> None:
    for rank in outcomes(played, "copies"):
        assert rank[name]["losses"] == pytest.approx(reference(), rel=FULL)


FACTS_OF_FSDP1: dict[str, dict[str, Any]] = {
    "flat": {"use_orig_params": False, "limit_all_gathers": True, "forward_prefetch": False},
    "post": {"prefetch": "BackwardPrefetch.BACKWARD_POST", "forward_prefetch": True, "limit_all_gathers": False},
    "no_prefetch": {"prefetch": "None", "use_orig_params": True},
    "remat": {"CheckpointWrapper": ["layers.0", "layers.1"], "prefetch": "BackwardPrefetch.BACKWARD_PRE"},
    "remat_flat": {"CheckpointWrapper": ["layers.0", "layers.1"], "use_orig_params": False},
    "remat_none": {"CheckpointWrapper": ["layers.0", "layers.1"], "units": [""]},
    "offload": {"units": LAYERS, "CheckpointWrapper": []},
    "bf16": {"precision": ["torch.bfloat16"] * 3},
    "bf16_remat": {"precision": ["torch.bfloat16"] * 3, "CheckpointWrapper": ["layers.0", "layers.1"]},
    "policy": {"precision": ["torch.bfloat16", "torch.float32", "None"]},
    "named": {"units": ["", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"]},
}
FACTS_OF_FSDP2: dict[str, dict[str, Any]] = {
    "remat": {"CheckpointWrapper": ["layers.0", "layers.1"], "OffloadWrapper": [], "offload": "OffloadPolicy"},
    "remat_offload": {"CheckpointWrapper": ["layers.0", "layers.1"], "OffloadWrapper": ["layers.0", "layers.1"]},
    "remat_none": {"CheckpointWrapper": ["layers.0", "layers.1"], "units": [""]},
    "offload": {"offload": "CPUOffloadPolicy"},
    "offload_bf16": {"offload": "CPUOffloadPolicy", "precision": ["torch.bfloat16"] * 3},
    "bf16": {"precision": ["torch.bfloat16"] * 3, "CheckpointWrapper": []},
    "policy": {"precision": ["torch.bfloat16", "torch.float32", "None"]},
    "named": {"units": ["", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"]},
}


@pytest.mark.parametrize(
    ("version", "name", "facts"),
    [(1, *item) for item in FACTS_OF_FSDP1.items()] + [(2, *item) for item in FACTS_OF_FSDP2.items()],
)
def test_options_do_what_they_say(played: Path, version: int, name: str, facts: dict[str, Any]) -> None:
    for rank in outcomes(played, f"options_of_fsdp{version}"):
        found = rank[name]
        assert {key: found[key] for key in facts} == facts
        low = "bf16" in name or name == "policy"
        wanted = reference_bf16() if low else reference()
        assert found["losses"] == pytest.approx(wanted, rel=LOW if low else FULL)
        # A layer runs once for each of 3 steps, and once more to be computed again.
        runs = 6 if "remat" in name else 3
        assert found["layer dtypes"] == ["torch.bfloat16" if low else "torch.float32"] * runs
        assert found["param dtypes"] == ["torch.float32"]


def test_offloading_on_the_cpu_is_said_to_be_nothing(played: Path) -> None:
    for rank in outcomes(played, "options_of_fsdp1"):
        assert rank["log"] == ["offload_params: the model is on the CPU already, there is nothing to offload"]


@pytest.mark.parametrize("version", [1, 2])
def test_ignored_modules_stay_whole(played: Path, version: int) -> None:
    for rank in outcomes(played, "left_whole"):
        assert rank[version]["units"] == ["", "layers.0"]
        assert rank[version]["whole"]
        assert torch.equal(rank[version]["values"], build(1).layers[1].up.weight)  # rank 0's


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_trained_is_kept_in_float32_with_mixed_precision(played: Path, version: int) -> None:
    for rank in outcomes(played, "low_precision"):
        assert set(rank[version, "no"]["dtypes"].values()) == {"torch.bfloat16"}
        assert rank[version, "no"]["log"] == []
        frozen = {"embed.weight": "torch.bfloat16"} if version == 2 else {}
        wanted = {name: frozen.get(name, "torch.float32") for name, _ in build(1).named_parameters()}
        assert rank[version, "bf16"]["dtypes"] == wanted
        assert "kept and saved in float32" in rank[version, "bf16"]["log"][0]


@pytest.mark.parametrize("version", [1, 2])
def test_batch_norms_compute_in_float32(played: Path, version: int) -> None:
    for rank in outcomes(played, "batch_norms"):
        found = rank[version]
        assert found["units"] == ["", "1"]
        assert found["inputs"] == {"0": "torch.bfloat16", "1": "torch.float32", "2": "torch.bfloat16"}
        assert found["output"] == "torch.bfloat16"
        names = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
        assert found["buffers"] == dict(zip(names, ("torch.float32", "torch.float32", "torch.int64"), strict=True))


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_saved_is_loaded(played: Path, version: int) -> None:
    for rank in outcomes(played, "round_trip"):
        assert rank[version]["losses"] == pytest.approx(reference(), rel=FULL)
        assert (rank[version]["missing"], rank[version]["step"]) == ([], 2)


# --- where values come from

KINDS = ("FSDP1", "FSDP1 flat", "FSDP2", "FSDP2 offload")


def _state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def _same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same bits, and the same names; a flat parameter has one of several names."""
    missing = wanted.keys() - found.keys()
    assert not found.keys() - wanted.keys()
    assert missing <= {"head.weight"}
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name
    assert "angles.angles" in found


def _check(found: dict[str, Any], model: Decoder, *, tied: bool) -> None:
    """Values and losses are those of an unsharded model, and tied weights are still the same after training."""
    from tests.dist.sharding_net import train

    _same(found["before"], _state(model))
    assert found["losses"] == pytest.approx(train(model), rel=FULL)
    if tied and "head.weight" in found["after"]:
        assert torch.equal(found["after"]["head.weight"], found["after"]["embed.weight"])
        assert not torch.equal(found["after"]["head.weight"], found["before"]["embed.weight"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", ["nothing", "some", "others"])
def test_all_ranks_get_the_values_of_rank_0(played: Path, kind: str, way: str, tied: bool) -> None:
    for rank in outcomes(played, "rank_0_has_values"):
        _check(rank[kind, way, tied], build(1, tied=tied), tied=tied)


@pytest.mark.parametrize("kind", ["FSDP1", "FSDP2"])
def test_all_copies_get_the_values_of_rank_0(played: Path, kind: str) -> None:
    for rank in outcomes(played, "rank_0_of_four_has_values"):
        _check(rank[kind], build(1, tied=True), tied=True)


@pytest.mark.parametrize("version", [1, 2])
def test_a_mesh_of_some_ranks_has_a_model_of_its_own(played: Path, version: int) -> None:
    for rank, found in enumerate(outcomes(played, "stages")):
        stage = rank // 2
        _same(found[version], _state(build(stage + 1, tied=bool(stage))))


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak memory from /proc")
@pytest.mark.parametrize("version", [1, 2])
def test_no_rank_but_rank_0_holds_the_whole_model(played: Path, version: int) -> None:
    first, second = (rank[version] / 2**20 for rank in outcomes(played, "memory"))
    assert first > 64  # what would be seen
    assert 32 <= second < 56  # its half, and a few layers of 4 MiB


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_sends_unless_told_to(played: Path, kind: str) -> None:
    """Each rank's part is its own: of every weight, or, under FSDP1, of the unit, in which `up` comes before `down`."""
    first, second = (build(seed).layers[0] for seed in (1, 2))
    for rank in outcomes(played, "each_rank_has_values"):
        up, down = (rank[kind][f"layers.0.{name}.weight"] for name in ("up", "down"))
        if "FSDP1" in kind:
            assert torch.equal(up, first.up.weight)
            assert torch.equal(down, second.down.weight)
        else:
            assert torch.equal(up, torch.cat([first.up.weight[:5], second.up.weight[5:]]))
            assert torch.equal(down, torch.cat([first.down.weight[:3], second.down.weight[3:]]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["meta", "cpu", "own"])
def test_each_rank_reads_its_part_of_a_file(played: Path, kind: str, way: str) -> None:
    for rank in outcomes(played, "each_rank_reads_values"):
        _check(rank[kind, way], build(9), tied=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_modules_make_their_values_as_without_sharding(played: Path, kind: str, tied: bool) -> None:
    wanted = build(0, tied=tied)
    torch.manual_seed(3)  # rank 0's
    for module in wanted.modules():
        if (
            next(module.parameters(recurse=False), None) is not None
            or next(module.buffers(recurse=False), None) is not None
        ):
            module.reset_parameters()  # type: ignore[operator]
    state = {name: value.detach().clone() for name, value in _state(wanted).items()}
    for rank in outcomes(played, "values_are_made"):
        _same(rank[kind, "modules", tied]["before"], state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_makes_values(played: Path, kind: str) -> None:
    for rank in outcomes(played, "values_are_made"):
        found = rank[kind, "function", True]
        assert len(found["before"]) >= 16
        assert all(bool((value == 0.125).all()) for value in found["before"].values())
        assert len({round(loss, 6) for loss in found["losses"]}) > 1


@pytest.mark.parametrize("version", [1, 2])
def test_a_transformers_model_is_read_and_made_by_its_own_rules(played: Path, version: int) -> None:
    for rank in outcomes(played, "llama"):
        read = rank[version]
        assert any(name.endswith("inv_freq") for name in rank["state"])  # not in the file
        assert read["state"].keys() == rank["state"].keys()
        for name, value in read["state"].items():
            assert torch.equal(value, rank["state"][name]), name
        assert read["loss"] == pytest.approx(rank["loss"], rel=FULL)
        made = rank[version, "made"]
        for name, value in made.items():
            if "proj" in name:  # initializer_range; a Linear's own rule would be uniform, up to 1/4
                assert float(value.std()) == pytest.approx(0.125, rel=0.25), name
            elif "norm" in name:
                assert bool((value == 1).all()), name
            elif "inv_freq" in name:
                assert torch.equal(value, rank["state"][name]), name
    first, second = outcomes(played, "llama")
    for name, value in first[version, "made"].items():
        assert torch.equal(value, second[version, "made"][name])


REFUSED = {
    "unknown class": ("UsageError", ("Layer is no class", "Block, Embedding, Gain, LayerNorm, Linear")),
    "no classes": ("UsageError", ("_no_split_modules", "Block, Embedding, Gain, LayerNorm, Linear")),
    "two units": ("UsageError", ("`layers.0.up.weight` and `layers.1.up.weight`", "`layers.0` and `layers.1`")),
    "nothing to recompute": ("UsageError", ("activation_checkpointing", "_no_split_modules")),
    "fp8": ("UsageError", ("fp8",)),
    "wrapped 1": ("UsageError", ("`layers.0`", "wrapped already (FullyShardedDataParallel)")),
    "wrapped 2": ("UsageError", ("`layers.0`", "wrapped already (FSDP2)")),
    "wrapped DDP": ("UsageError", ("wrapped already (DistributedDataParallel)",)),
    "ignored nothing": ("UsageError", ("ignored_modules: 'layer' matches no module",)),
    "ignored everything": ("UsageError", ("ignored_modules: '.*' matches the model itself",)),
    "rank 0 meta": ("UsageError", ("rank 0: `embed.weight` and 16 more tensors are on the meta device",)),
    "all meta": ("UsageError", ("rank 0: `embed.weight` and 16 more tensors are on the meta device",)),
    "partly meta": ("UsageError", ("rank 0: `layers.0.norm.weight` and 11 more",)),
    "rank 1 meta, nobody sends": ("UsageError", ("rank 1: `embed.weight`", "cpu_ram_efficient_loading is false")),
    "forgetful": ("UsageError", ("`gain.gain`", "(Forgetful)")),
    "forgetful function": ("UsageError", ("`embed.weight`", "initialize does not fill it")),
    "stray buffer": ("UsageError", ("`angles.angles`", "(Stray)")),
    "no weights": ("CheckpointNotFound", ("nowhere",)),
    "other weights": ("StateMismatch", ("head.weight is (13, 6) in the checkpoint, (14, 6) here",)),
    "ranks differ": ("UsageError", ("embed.weight = head.weight",)),
    "shapes differ": ("UsageError", ("head.weight parameter (14, 6)", "head.weight parameter (13, 6)")),
    "options differ": ("UsageError", ("min_num_params differs between ranks: 0 on rank 0, 1 on rank 1",)),
    "sizes": ("UsageError", ("1 x 3 = 3", "2 ranks")),
    "mesh dimensions": ("UsageError", ("3 dimensions (1 x 1 x 2)",)),
    "mesh device": ("UsageError", ("cpu devices", "meta")),
    "mesh size": ("UsageError", ("dp_shard_size: 1", "which is 2")),
    "only rank 1": ("UsageError", ("rank 1: fsdp_version: 3",)),
    "dtypes in one unit": ("Incompatible", ("`layers.1.norm.weight`", "`layers.1.down.weight`", "bfloat16")),
}
ONCE = {
    "frozen": ("UsageError", ("`layers.0.norm.weight` and `layers.0.up.weight`", "only one of them is trained")),
    "hybrid": ("UsageError", ("2 x 4 = 8", "2 ranks")),
    "hybrid mesh": ("UsageError", ("HYBRID_SHARD needs 2",)),
    "hybrid of one": ("UsageError", ("2 copies of 1 rank each",)),
    "hybrid mesh of one": ("UsageError", ("2 copies of 1 rank each",)),
    "copies": ("UsageError", ("4 x 1 = 4", "2 ranks")),
    "tp": ("UsageError", ("tp_size: 2",)),
    "cp": ("UsageError", ("cp_size: 2",)),
}
CASES = [((name, version), *wanted) for name, wanted in REFUSED.items() for version in (1, 2)]
CASES += [((name, 0), *wanted) for name, wanted in ONCE.items()]
CASES += [
    (("parallel meta", 1), "Incompatible", ("DTensor",)),
    (("parallel meta", 2), "UsageError", ("tensor-parallel",)),
]


@pytest.mark.parametrize(("case", "kind", "texts"), CASES)
def test_every_rank_says_what_is_wrong(played: Path, case: tuple[str, int], kind: str, texts: tuple[str, ...]) -> None:
    ranks = [rank[case] for rank in outcomes(played, "refusals")]
    assert [rank["kind"] for rank in ranks] == [kind] * 2
    assert len({rank["message"] for rank in ranks}) == 1
    for text in texts:
        assert text in ranks[0]["message"]
    assert all(rank["seconds"] < SOON_S for rank in ranks)


def test_all_refusals_are_looked_at(played: Path) -> None:
    for rank in outcomes(played, "refusals"):
        assert rank.keys() == {case for case, *_ in CASES}


def test_the_references_tell_models_apart() -> None:
    """Without that, the comparisons above would show nothing."""
    assert reference() != pytest.approx(reference(2), rel=3 * LOW)
    assert not math.isclose(reference()[0], reference()[-1], rel_tol=10 * FULL)
    assert reference_bf16() != pytest.approx(reference(), rel=FULL)
