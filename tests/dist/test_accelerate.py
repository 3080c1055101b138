"""Checkpoints go to and fro between Accelerate 1.15 and us: every value, every moment, and the training that follows.

Both sides run on real gloo ranks; ``accelerate_job`` calls Accelerate's own functions, and reads with torch what jobs
hold. Accelerate cannot save FSDP1 with FULL_STATE_DICT on the CPU (it crashes), nor load LOCAL_STATE_DICT at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fsdp_ckpt import load_state
from tests.build import assert_same, read_safetensors
from tests.cases.models import Mlp
from tests.dist.stage import outcomes, play

pytestmark = pytest.mark.dist

RNG = ("python", "numpy", "torch")
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
KINDS = ("FSDP1", "FSDP1-flat", "FSDP2")
NAMES = ("mlp", "rich")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory, "tests.dist.accelerate_ranks")


def _without(rest: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in rest.items() if name not in names}


def _check_resumed(pair: Mapping[str, Any], *, is_fresh: bool = True) -> None:
    """Everything that the saved job had is in the other one, and the two go on as one."""
    before, expected, found = pair["before"], pair["expected"], pair["found"]
    moments = {name for name in expected["tensors"] if name.startswith("state.")}
    assert len(moments) in (3 * 6, 3 * 3)  # exp_avg, exp_avg_sq and step of each parameter
    # It was another job before: no value is there by chance.
    assert any(name.startswith("state.") for name in before["tensors"]) != is_fresh
    assert not any(torch.equal(before["tensors"][name], expected["tensors"][name]) for name in _params(before))
    assert all(before["rest"][name] != expected["rest"][name] for name in ("scheduler", "count", *RNG))
    assert_same(found["tensors"], expected["tensors"])
    assert_same(found["locals"], expected["locals"])
    assert _listed(found["rest"]) == _listed(expected["rest"])
    assert pair["found_losses"] == pair["expected_losses"]
    assert_same(pair["found_end"]["tensors"], pair["expected_end"]["tensors"])
    assert _listed(pair["found_end"]["rest"]) == _listed(pair["expected_end"]["rest"])
    assert pair["expected_end"]["rest"]["count"] == 4


def _listed(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Where torch loads a whole optimizer file, the pair of betas becomes a list."""
    return {**rest, "groups": [{**group, "betas": list(group["betas"])} for group in rest["groups"]]}


def _params(state: Mapping[str, Any]) -> list[str]:
    return [name for name in state["tensors"] if name.endswith(("weight", "bias"))]


@pytest.mark.parametrize(
    ("scenario", "pairs"),
    [
        ("accelerate_saves_sharded", [(kind, name) for kind in KINDS for name in NAMES]),
        ("accelerate_saves_without_dcp", [(kind, name) for kind in KINDS for name in NAMES]),
        ("accelerate_saves_local", [(kind, name) for kind in KINDS[:2] for name in NAMES]),
        ("accelerate_saves_full", [("FSDP2", name) for name in NAMES]),
    ],
)
def test_what_accelerate_saves_resumes_to_the_bit(played: Path, scenario: str, pairs: list[tuple[str, str]]) -> None:
    for found in outcomes(played, scenario):
        assert list(found) == pairs
        for pair in found.values():
            _check_resumed(pair)
            report = pair["report"]
            assert (report.missing, report.unexpected, report.optimizer_fresh, report.cast) == ([], [], [], {})
            assert (report.saved_world_size, report.world_size, report.rng) == (2, 2, "restored")


def test_fsdp1_moments_that_accelerate_cannot_load(played: Path) -> None:
    """Its load_fsdp_optimizer restores the rate of each group and not one moment, and says nothing; ours has all."""
    for found in outcomes(played, "accelerate_loses_fsdp1_moments"):
        assert found["moments"] == []
        assert [group["lr"] for group in found["groups"]] == [
            group["lr"] for group in found["expected"]["rest"]["groups"]
        ]
        _check_resumed(found)


@pytest.mark.parametrize("scenario", ["we_save_sharded", "we_save_full"])
def test_what_we_save_resumes_to_the_bit_with_accelerate(played: Path, scenario: str) -> None:
    for found in outcomes(played, scenario):
        assert list(found) == [(kind, name) for kind in KINDS for name in NAMES]
        for (kind, _), pair in found.items():
            _check_resumed(pair, is_fresh=kind == "FSDP2")
            assert pair["report"] == {"step": 2}


def test_wrappers_can_be_changed(played: Path) -> None:
    for found in outcomes(played, "crosses_wrappers"):
        assert len(found) == 2 * 4 * 2
        for pair in found.values():
            assert_same(pair["found"]["tensors"], pair["expected"]["tensors"])
            assert _uncounted(pair["found"]["rest"]) == _uncounted(pair["expected"]["rest"])
            assert (pair["report"].optimizer_fresh, pair["report"].warnings) == ([], [])


def _uncounted(rest: Mapping[str, Any]) -> dict[str, Any]:
    """FSDP1's flat parameters are fewer than the named ones."""
    return {**rest, "groups": [_without(group, "count") for group in rest["groups"]]}


def test_two_ranks_saved_and_three_load(played: Path) -> None:
    saved = outcomes(played, "saves_for_other_sizes")
    loaded = outcomes(played, "loads_on_three")
    assert len(loaded) == 3
    for rank, found in enumerate(loaded):
        assert len(found) == 3 * 2 * 4 + 2 * 2
        for (_, _, kind, name), one in found.items():
            expected = saved[min(rank, 1)][kind, name]
            assert_same(one["found"]["tensors"], expected["tensors"])
            assert _without(one["found"]["rest"], *RNG) == _without(expected["rest"], *RNG)
            kept = expected["rest"] if rank < 2 else one["before"]
            assert {key: one["found"]["rest"][key] for key in RNG} == {key: kept[key] for key in RNG}
            assert (one["report"].saved_world_size, one["report"].world_size) == (2, 3)
            assert [
                "of 2 ranks were saved, now there are 3: those without any (2) keep" in warning
                for warning in one["report"].warnings
            ] == [True]


def test_accelerate_loads_on_three_ranks_what_we_saved_on_two(played: Path) -> None:
    saved = outcomes(played, "saves_for_other_sizes")[0]
    for found in outcomes(played, "accelerate_loads_on_three"):
        for name in NAMES:
            assert_same(found[name]["tensors"], saved["FSDP2", name]["tensors"])
            assert found[name]["rest"]["groups"] == saved["FSDP2", name]["rest"]["groups"]


@pytest.fixture
def saved(played: Path) -> Path:
    """The folder that holds ``WRITER-STYLE-KIND-MODEL``, saved on two ranks."""
    outcomes(played, "saves_for_other_sizes")
    return played / "saves_for_other_sizes" / "place"


def _expected(played: Path, kind: str, name: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = outcomes(played, "saves_for_other_sizes")[0][kind, name]["tensors"]
    return tensors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("origin", [f"ours-{SHARDED}", f"ours-{FULL}", f"accelerate-{SHARDED}"])
def test_one_process_loads_without_a_process_group(played: Path, saved: Path, kind: str, origin: str) -> None:
    expected = _expected(played, kind, "mlp")
    model = Mlp()
    groups = [[*model.up.parameters()], [*model.down.parameters(), *model.norm.parameters()]]
    optimizer = torch.optim.AdamW([{"params": row, "lr": 5.0} for row in groups])
    report = load_state(saved / f"{origin}-{kind}-mlp", model, optimizer, rng=False)
    found = {name: value.detach() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"state.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    assert_same(found, expected)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02 * 0.81, 0.01 * 0.81])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert (report.saved_world_size, report.world_size) == (2, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_torch_reads_our_folders_in_one_process(played: Path, saved: Path, kind: str, name: str) -> None:
    folder = saved / f"ours-{SHARDED}-{kind}-{name}"
    expected = _expected(played, kind, name)
    model: dict[str, Any] = {key: torch.full_like(value, -1) for key, value in expected.items() if "state." not in key}
    names = [key for key in expected if key.startswith("state.")]
    moments: dict[str, Any] = {}
    for path in names:
        _, fqn, key = path[:6], *path[6:].rsplit(".", 1)
        moments.setdefault(fqn, {})[key] = torch.full_like(expected[path], -1)
    groups: list[dict[str, Any]] = [{"lr": 0.0, "params": []}, {"lr": 0.0, "params": []}]
    optimizer = {"optimizer": {"state": moments, "param_groups": groups}}
    if name == "rich":
        model["lm_head.weight"] = torch.full((16, 4), -1.0)
    dcp.load({"model": model}, storage_reader=dcp.FileSystemReader(folder / "pytorch_model_fsdp_0"))
    dcp.load(optimizer, storage_reader=dcp.FileSystemReader(folder / "optimizer_0"))
    if name == "rich":
        assert torch.equal(model.pop("lm_head.weight"), expected["embed.weight"])
    found = model | {f"state.{fqn}.{key}": value for fqn, kinds in moments.items() for key, value in kinds.items()}
    assert_same(found, expected)
    assert [group["lr"] for group in groups] == pytest.approx([0.02 * 0.81, 0.01 * 0.81])
    first = "up" if name == "mlp" else "mid"
    assert sorted(groups[0]["params"]) == [f"{first}.bias", f"{first}.weight"]
    assert sorted(groups[0]["params"] + groups[1]["params"]) == sorted(moments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_torch_loads_our_whole_files_with_weights_only(played: Path, saved: Path, kind: str, name: str) -> None:
    folder = saved / f"ours-{FULL}-{kind}-{name}"
    expected = _expected(played, kind, name)
    model = torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True)
    optimizer = torch.load(folder / "optimizer.bin", weights_only=True)
    if name == "rich":
        head = model.pop("lm_head.weight")
        assert head.untyped_storage().data_ptr() == model["embed.weight"].untyped_storage().data_ptr()
    state = optimizer["state"]
    found = model | {f"state.{fqn}.{key}": value for fqn, kinds in state.items() for key, value in kinds.items()}
    assert_same(found, expected)
    assert [(group["lr"], group["betas"]) for group in optimizer["param_groups"]] == [
        (pytest.approx(0.02 * 0.81), (0.9, 0.999)),
        (pytest.approx(0.01 * 0.81), (0.9, 0.999)),
    ]
    assert sorted(fqn for group in optimizer["param_groups"] for fqn in group["params"]) == sorted(state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_accelerate_merges_our_shards(played: Path, saved: Path, tmp_path: Path, kind: str, name: str) -> None:
    from accelerate.state import PartialState
    from accelerate.utils import merge_fsdp_weights

    PartialState(cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merge_fsdp_weights(str(saved / f"ours-{SHARDED}-{kind}-{name}" / "pytorch_model_fsdp_0"), str(tmp_path))
    expected = {key: value for key, value in _expected(played, kind, name).items() if not key.startswith("state.")}
    if name == "rich":
        expected["lm_head.weight"] = expected["embed.weight"]
    assert_same(read_safetensors(tmp_path), expected)


def test_a_folder_of_the_trainer_resumes_to_the_bit(played: Path) -> None:
    """Given the run's folder: the step comes from trainer_state.json, each rank's streams from its rng_state file."""
    for found in outcomes(played, "trainer_folder"):
        assert list(found) == [("FSDP1", SHARDED), ("FSDP2", SHARDED), ("FSDP2", FULL)]
        for (_, style), pair in found.items():
            _check_resumed(pair)
            report = pair["report"]
            assert (report.step, report.rng) == (20, "restored")
            assert len(report.left) == (style == FULL)  # the weights that are there twice
            assert Path(report.path).name == ("kept" if style == FULL else "checkpoint-20")


def test_wrappers_of_accelerate_are_looked_through(played: Path) -> None:
    """Its scheduler takes as many steps at a time as there are processes, which another world size changes."""
    for found in outcomes(played, "prepared_by_accelerate"):
        for origin in ("ours", "accelerate"):
            assert_same(found[origin]["found"]["tensors"], found["expected"]["tensors"])
            assert found[origin]["found"]["rest"] == found["expected"]["rest"]
            assert found[origin]["warnings"] == []
    for found in outcomes(played, "prepared_for_three"):
        for origin in ("ours", "accelerate"):
            (warning,) = [text for text in found[origin]["warnings"] if "scheduler" in text]
            assert "saved on 2 ranks, now there are 3" in warning
