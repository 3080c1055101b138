"""What fails without a word in Accelerate 1.15 (facts/accelerate.md, sections 0 to 2) works here, or is said.

Scenarios run on real gloo ranks; where it is cheap they also show Accelerate's silence, so that the trap is a real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from fsdp_ckpt import load_state, save_state
from tests.build import assert_same, run_ranks
from tests.cases.models import Mlp
from tests.dist.silent_ranks import overwrite_and_die
from tests.dist.stage import outcomes, play

pytestmark = pytest.mark.dist

KINDS = ["FSDP1", "FSDP1-flat", "FSDP2"]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory, "tests.dist.silent_ranks")


def _assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert_same(found["tensors"], expected["tensors"])
    assert_same(found["locals"], expected["locals"])
    assert found["rest"] == expected["rest"]


def _moments(tensors: Mapping[str, Any]) -> list[str]:
    return [name for name in tensors if name.startswith("state.")]


def _assert_refused(one: Mapping[str, Any], kind: str, *words: str) -> None:
    """The load raised this, naming that, and the job is as it was; it had moments that could have been changed."""
    assert one["error"][0] == kind, one["error"]
    assert all(word in one["error"][1] for word in words), one["error"]
    assert _moments(one["before"]["tensors"])
    _assert_same_state(one["after"], one["before"])


def test_finding_1_fsdp1_moments_are_loaded_into_a_fresh_optimizer(played: Path) -> None:
    for found in outcomes(played, "finding_1"):
        assert list(found) == KINDS[:2]
        for pair in found.values():
            assert len(_moments(pair["expected"]["tensors"])) == 9
            _assert_same_state(pair["found"], pair["expected"])


def test_finding_2_gradients_do_not_keep_moments_from_being_loaded(played: Path) -> None:
    for found in outcomes(played, "finding_2"):
        assert found["accelerate"] == []
        assert len(_moments(found["expected"]["tensors"])) == 18
        _assert_same_state(found["found"], found["expected"])
        assert len(found["kept"]) == 6
        assert any(bool(grad.any()) for grad in found["kept"])
        for kept, grad in zip(found["kept"], found["grads"], strict=True):
            assert torch.equal(kept, grad)


def test_finding_3_a_resumed_run_goes_on_with_its_numbers(played: Path) -> None:
    """Steps count as numbers (10 is newer than 9), a stray folder changes nothing, and no newer work is pruned."""
    for found in outcomes(played, "finding_3"):
        assert found["after_first"] == ["notes of checkpoint", "step-10", "step-9"]
        assert found["resumed"] == (10, {"lr": 1.0})
        assert_same(found["resumed_state"], found["saved"][10])
        assert found["after_second"] == ["notes of checkpoint", "step-10", "step-11"]
        assert found["resumed_again"] == 11
        assert_same(found["resumed_again_state"], found["newest"])
        assert found["after_going_back"] == ["notes of checkpoint", "step-10", "step-11", "step-5"]


def test_finding_3_pruning_comes_after_the_commit(played: Path) -> None:
    for found in outcomes(played, "finding_3_prunes_last"):
        assert found["error"][0] == "NotEnoughSpace"
        assert "rank 1" in found["error"][1]
        assert found["after_failure"] == ["step-1", "step-2"]
        assert found["after"] == ["step-2", "step-3"]


def test_finding_4_local_state_and_rank_files_can_be_loaded(played: Path) -> None:
    for found in outcomes(played, "finding_4"):
        assert list(found) == [(kind, name) for kind in KINDS[:2] for name in ("mlp", "rich")]
        for one in found.values():
            assert one["accelerate"] == ["UnpicklingError", "UnpicklingError"]
            _assert_same_state(one["local"], one["expected"])
            for part in ("tensors", "locals"):
                assert_same(one["no_dcp"][part], one["expected"][part])
            assert one["no_dcp"]["rest"]["groups"] == one["expected"]["rest"]["groups"]
            assert one["fsdp2"]["error"][0] == "FlatParameters"
            _assert_same_state(one["fsdp2"]["after"], one["fsdp2"]["before"])


def test_finding_5_the_sharding_strategy_is_recorded_and_kept(played: Path) -> None:
    """The half of the checkpoint; that a configuration file says SHARD_GRAD_OP is for the command that reads those.

    Parameters that a forward pass has left gathered must not outlive the load.
    """
    for found in outcomes(played, "finding_5"):
        assert list(found) == KINDS
        for kind, one in found.items():
            assert one["manifest"]["kind"] == kind.removesuffix("-flat")
            if kind == "FSDP2":
                assert one["live"] == "False"
            else:
                assert one["manifest"]["facts"] == {"sharding_strategy": "SHARD_GRAD_OP"}
                assert one["live"] == "SHARD_GRAD_OP"
            assert one["found"] == one["expected"]


def test_finding_6_flipped_bytes_stop_every_rank_before_anything_has_changed(played: Path) -> None:
    for found in outcomes(played, "finding_6"):
        assert len(found) == 4
        for one in found.values():
            assert one["accelerate"] == ("", "")
            assert one["wrong"]
            _assert_refused(one, "ChecksumMismatch", "rank 1", "up.weight")


def test_finding_7_a_failed_overwrite_leaves_the_old_checkpoint(played: Path) -> None:
    for found in outcomes(played, "finding_7_a_rank_fails"):
        assert found["error"][0] == "NotEnoughSpace"
        assert found["step"] == 2
        _assert_same_state(found["found"], found["expected"])
        assert found["names"] == ["saved"]


@pytest.mark.parametrize("dying", [0, 1])
def test_finding_7_a_rank_that_dies_leaves_the_old_checkpoint(tmp_path: Path, dying: int) -> None:
    """What the first rank leaves when it dies lies beside the checkpoint, and the next save removes it."""
    # Either end may be noticed first: that of the rank that dies, or of the one that is told.
    with pytest.raises((mp.ProcessExitedException, mp.ProcessRaisedException), match=r"exit code 9|RankFailed"):
        run_ranks(overwrite_and_die, 2, str(tmp_path), dying, timeout_s=60)
    expected = torch.load(tmp_path / "expected_0.pt", weights_only=True)
    model = Mlp()
    groups: list[dict[str, Any]] = [{"params": [*model.parameters()][:2]}, {"params": [*model.parameters()][2:]}]
    optimizer = torch.optim.AdamW(groups)
    report = load_state(tmp_path / "saved", model, optimizer, rng=False)
    found = {name: value.detach() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"state.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    assert_same(found, expected)
    assert report.step == 2
    assert dying == 1 or [path.name for path in tmp_path.iterdir() if "fsdp-ckpt" in path.name]
    save_state(tmp_path / "saved", model, optimizer, step=4)
    assert not [path.name for path in tmp_path.iterdir() if "fsdp-ckpt" in path.name]
    assert load_state(tmp_path / "saved", model).step == 4


def test_finding_8_whole_files_work_without_a_gpu(played: Path) -> None:
    for found in outcomes(played, "finding_8"):
        assert list(found) == [(kind, name) for kind in KINDS for name in ("mlp", "rich")]
        for pair in found.values():
            assert {value.device.type for value in pair["found"]["locals"].values()} == {"cpu"}
            _assert_same_state(pair["found"], pair["expected"])


def test_broken_random_states_are_not_swallowed(played: Path) -> None:
    for rank, found in enumerate(outcomes(played, "broken_random_states")):
        for damage in ("garbage", "truncated", "other", "other state"):
            assert found[damage]["accelerate"] == ("", "")
            _assert_refused(found[damage], "MalformedFile", "random_states_1.pkl", "rank 1")
        missing = found["missing"]
        assert missing["accelerate"] == ("", "")
        assert missing["rng"].startswith("this rank" if rank == 0 else "this rank had none")
        assert [
            "random states" in warning and "those without any (1)" in warning for warning in missing["warnings"]
        ] == [True]
        kept = [
            missing["after"]["rest"][name] == missing["before"]["rest"][name] for name in ("python", "numpy", "torch")
        ]
        assert kept == [rank == 1] * 3
        _assert_refused(found["missing of ours"], "IncompleteCheckpoint", "random_states_1.pkl")


def test_objects_are_found_by_name(played: Path) -> None:
    for found in outcomes(played, "objects_by_name"):
        assert (found["samples"], found["epochs"], found["only"]) == (500, 3, 500)
        assert found["unknown"][0] == "CheckpointNotFound"
        assert "`sample`" in found["unknown"][1]


PARTS = ["custom_checkpoint_0", "optimizer_0", "pytorch_model_fsdp_0", "random_states", "scheduler"]


def test_hooks_see_and_change_what_is_saved(played: Path) -> None:
    """Accelerate calls them when the files are written already, with no weights."""
    for rank, found in enumerate(outcomes(played, "hooks_on_save")):
        assert (found["parts"], found["existed"]) == (PARTS, False)
        assert (found["skipped"], found["reports"]) == (["optimizer_0", "random_states"], 1)
        assert found["names"] == [
            "config.json", "custom_checkpoint_0.pkl", "fsdp_ckpt.json", "pytorch_model_fsdp_0", "scheduler.bin",
        ]  # fmt: skip
        assert_same(found["found"], found["expected"])
        assert found["veto"][0] == "Vetoed"
        assert "not now" in found["veto"][1]
        assert found["after_veto"] == (["saved"], 0), rank
        assert found["unknown"][0] == "UsageError"
        assert "optimiser_0" in found["unknown"][1]
        assert found["loads_skipped"][0] == "CheckpointNotFound"


def test_hooks_see_and_change_what_is_loaded(played: Path) -> None:
    for found in outcomes(played, "hooks_on_load"):
        expected, before, skipped = found["expected"], found["before_skip"], found["skipped"]
        assert (found["parts"], found["reports"]) == (PARTS, 1)
        moments = _moments(expected["tensors"])
        for name, value in skipped["tensors"].items():
            assert torch.equal(value, (before if name in moments else expected)["tensors"][name])
            assert not torch.equal(before["tensors"][name], expected["tensors"][name]) or name.endswith("step")
        kept = ("groups", "scheduler", "python", "numpy", "torch")
        assert [skipped["rest"][name] for name in kept] == [before["rest"][name] for name in kept]
        assert skipped["rest"]["count"] == expected["rest"]["count"]
        assert_same(found["replaced"]["tensors"], expected["tensors"] | found["replacement"])
        assert found["replaced"]["rest"] == expected["rest"]
        assert_same(found["replaced_fsdp1"], expected["tensors"] | found["replacement"])
        for tensors in found["replaced_by_dtensors"]:
            assert_same(tensors, expected["tensors"])
        _assert_refused(found["veto"], "Vetoed", "not this one")


@pytest.mark.parametrize(
    ("wrong", "kind", "word"),
    [
        ("optimizer", "UsageError", "optimizer_0"),
        ("scheduler", "UsageError", "scheduler"),
        ("lacking", "StateMismatch", "up.bias"),
        ("extra", "StateMismatch", "more.bias"),
        ("shape", "StateMismatch", "up.bias"),
    ],
)
def test_a_replacement_that_cannot_be_loaded_is_refused(played: Path, wrong: str, kind: str, word: str) -> None:
    for found in outcomes(played, "hooks_on_load"):
        _assert_refused(found[f"wrong {wrong}"], kind, word)


def test_schedulers_are_there_or_missed(played: Path) -> None:
    for found in outcomes(played, "schedulers"):
        assert found["expected"]["last_epoch"] == 2
        assert found["found"] == found["expected"]
        _assert_refused(found["lacking"], "CheckpointNotFound", "scheduler")
        assert found["left"] == ["scheduler_1"]


def test_optimizers_belong_to_models_by_their_parameters(played: Path) -> None:
    """Two models have the same names, so a wrong pairing would raise nothing; Accelerate pairs by order alone."""
    for found in outcomes(played, "pairs_optimizers"):
        assert found["members"] == [["1"], ["0"]]
        for folder in ("ours", "accelerate"):
            for order in ("saved", "other"):
                for have, want in zip(found[folder, order], found["expected"], strict=True):
                    assert_same(have, want)
            assert_same(found[folder, "second alone"][0], found["expected"][1])


def test_names_that_only_a_sharded_checkpoint_has_are_told(played: Path) -> None:
    extra = ["extra", "more.bias", "more.weight"]
    for found in outcomes(played, "extra_names"):
        _assert_refused(found["strict"], "StateMismatch", *extra)
        assert found["lists"] == {"missing": [], "unexpected": extra, "mismatched": []}
        assert found["loose"] == extra
        assert_same(found["found"], found["expected"])


def test_conversions_of_dtype_are_told(played: Path) -> None:
    for found in outcomes(played, "other_dtype"):
        cast = {name for name in found["expected"] if not name.endswith(".step")}
        assert {name: str(text) for name, text in found["cast"].items()} == dict.fromkeys(cast, "float32 -> bfloat16")
        wanted = {name: value.bfloat16() if name in cast else value for name, value in found["expected"].items()}
        assert_same(found["found"], wanted)


def test_saving_before_the_first_step_leaves_the_optimizer_alone(played: Path) -> None:
    """And it is loaded as what it was: an optimizer without state, also into one that has some."""
    for found in outcomes(played, "before_the_first_step"):
        assert list(found) == KINDS
        for one in found.values():
            assert one["untouched"] == {}
            assert one["grads"]
            assert (one["fresh"], one["trained"]) == ({}, {})
            assert one["optimizer_fresh"] == []  # nobody had any
            for state in one["found"]:
                assert_same(state["tensors"], one["expected"]["tensors"])
                assert state["rest"] == one["expected"]["rest"]
