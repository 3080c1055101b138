"""What `convert` and `reshard` write is loaded on three real ranks by torch, by Accelerate and by us, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt import latest_complete, validate
from fsdp_ckpt.ops.list_run import list_run
from tests.build import assert_same
from tests.dist.stage import outcomes, play

pytestmark = pytest.mark.dist

KINDS = ("FSDP1", "FSDP2")
NAMES = ("mlp", "rich")
PAIRS = [(kind, name) for kind in KINDS for name in NAMES]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory, "tests.dist.convert_ranks")


def _check(played: Path, rank: int, found: Mapping[str, Any], kind: str, name: str) -> None:
    """Everything is what was saved, and the next step is that of a job which loaded the unconverted checkpoint."""
    saved = outcomes(played, "saves")[0][kind, name]
    control = outcomes(played, "controls")[rank][kind, name]
    moments = [key for key in saved["tensors"] if key.startswith("state.")]
    assert len(moments) in (3 * 6, 3 * 3)
    loaders = {
        "FSDP2": {"torch", "accelerate", "ours"},
        "FSDP1": {"ours"} | ({"accelerate"} if name == "mlp" else set()),
    }
    assert found.keys() - {"rest"} == loaders[kind]
    for loader in loaders[kind]:
        assert_same(found[loader]["tensors"], saved["tensors"])
        assert _listed(found[loader]["groups"]) == _listed(saved["rest"]["groups"]), loader
        if (loader, kind) != ("accelerate", "FSDP1"):  # that job had a step before, which drew random numbers
            assert found[loader]["losses"] == control["losses"]
            assert_same(found[loader]["end"], control["end"])


def _listed(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: list(item) if isinstance(item, tuple) else item for key, item in group.items()} for group in groups]


def test_the_controls_are_what_was_saved(played: Path) -> None:
    saved = outcomes(played, "saves")[0]
    for found in outcomes(played, "controls"):
        for pair in PAIRS:
            assert_same(found[pair]["tensors"], saved[pair]["tensors"])


def test_accelerate_is_left_out_where_it_cannot_load_what_it_saved(played: Path) -> None:
    for found in outcomes(played, "accelerate_cannot", may_raise=True):
        assert "Missing key in checkpoint state_dict: optimizer.param_groups" in found.message


@pytest.mark.parametrize(("kind", "name"), PAIRS)
@pytest.mark.parametrize("scenario", ["resharded_of_accelerate", "resharded_of_ours"])
def test_resharded_checkpoints_load(played: Path, scenario: str, kind: str, name: str) -> None:
    for rank, found in enumerate(outcomes(played, scenario)):
        _check(played, rank, found[kind, name], kind, name)


@pytest.mark.parametrize("source", [*KINDS, "verl"])
def test_rank_files_become_a_sharded_checkpoint(played: Path, source: str) -> None:
    for rank, found in enumerate(outcomes(played, "rank_files")):
        _check(played, rank, found[source], "FSDP2" if source == "verl" else source, "mlp")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_full_files_become_a_sharded_checkpoint(played: Path, source: str, kind: str) -> None:
    saved = outcomes(played, "saves")[0]
    for found in outcomes(played, "full_files"):
        for loaded in found[source, kind].values():
            assert_same(loaded["tensors"], saved[source, "mlp"]["tensors"])


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_checkpoint_of_ours_stays_one(played: Path, kind: str, name: str) -> None:
    src = played / "saves" / "place" / "ours" / f"{kind}-{name}" / "step-2"
    run = played / "resharded_of_ours" / "place" / f"{kind}-{name}"
    report = validate(run / "step-2", level="deep")
    assert report.ok, report.findings
    assert [(finding.name, finding.severity) for finding in report.findings if finding.severity != "note"] == []
    assert latest_complete(run) == run / "step-2"
    (listed,) = list_run(run, deep=True).checkpoints
    assert (listed.state, listed.own, listed.compared, listed.latest) == ("complete", True, True, True)
    for rank in range(2):
        file = f"random_states_{rank}.pkl"
        assert (run / "step-2" / file).read_bytes() == (src / file).read_bytes()
    saved = outcomes(played, "saves")[0][kind, name]["rest"]
    for found in outcomes(played, "resharded_of_ours"):
        rest = found[kind, name]["rest"]
        assert (rest["scheduler"], rest["count"]) == (saved["scheduler"], saved["count"])


def test_the_ranks_that_saved_get_their_random_states_back(played: Path) -> None:
    saved = outcomes(played, "saves")
    for rank, found in enumerate(outcomes(played, "resharded_and_back")):
        expected = saved[rank]["FSDP2", "mlp"]
        assert_same(found["tensors"], expected["tensors"])
        for stream in ("python", "numpy", "torch", "scheduler", "count"):
            assert found["rest"][stream] == expected["rest"][stream]
