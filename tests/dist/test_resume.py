"""Train k, save, load in new processes, train k: bit for bit the run that nothing interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases.launch import build_once, run_module
from tests.dist.matrix_job import HALF
from tests.dist.matrix_variants import MOVES, TARGETS, VARIANTS
from tests.dist.stage import outcomes

pytestmark = [pytest.mark.dist, pytest.mark.timeout(280)]

_FIRST = [*(f"trained_{name}" for name in VARIANTS), "trained_pairs", "trained_common"]
_SECOND = [
    *(f"resumed_{name}" for name in VARIANTS), *(f"moved_{old}_to_{new}" for old, new in MOVES),
    "resumed_pairs", "resumed_pairs_of_files", "resumed_common",
]  # fmt: skip


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both launches: what the second one knows of the first lies in the folder."""

    def build(folder: Path) -> None:
        run_module("tests.dist.matrix_ranks", str(folder), *_FIRST, timeout_s=130)
        run_module("tests.dist.matrix_ranks", str(folder), *_SECOND, timeout_s=130)

    return build_once(tmp_path_factory, "matrix_ranks", build)


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape), name
        assert torch.equal(found[name], want), name


@pytest.mark.parametrize("name", VARIANTS)
def test_resuming_in_new_processes_equals_the_uninterrupted_run(played: Path, name: str) -> None:
    first, second = outcomes(played, f"trained_{name}"), outcomes(played, f"resumed_{name}")
    assert len(first) == len(second) == VARIANTS[name].ranks
    for before, after in zip(first, second, strict=True):
        assert before["begun"] == before["control"][: 2 * HALF]
        assert len(set(before["control"])) == 4 * HALF  # no two steps are alike
        assert after["losses"] == before["control"][2 * HALF :]
        assert after["end"] == before["end"]


@pytest.mark.parametrize("name", VARIANTS)
def test_an_asynchronous_save_holds_the_values_at_the_call(played: Path, name: str) -> None:
    """Training went on at once; every file has the bytes of the synchronous save of that moment."""
    for rank in outcomes(played, f"trained_{name}"):
        assert rank["behind"] == []
        assert rank["went_on"] != rank["begun"]


@pytest.mark.parametrize("name", VARIANTS)
def test_saving_changes_nothing_in_the_run_that_goes_on(played: Path, name: str) -> None:
    for rank in outcomes(played, f"trained_{name}"):
        assert rank["went_on"] == rank["control"][2 * HALF :]
        assert rank["went_on_end"] == rank["end"]


@pytest.mark.parametrize("name", VARIANTS)
def test_everything_is_loaded_bit_for_bit_and_the_report_says_so(played: Path, name: str) -> None:
    first, second = outcomes(played, f"trained_{name}"), outcomes(played, f"resumed_{name}")
    for before, after in zip(first, second, strict=True):
        _same(after["loaded"], before["saved"])
        assert after["moved"], "the forward pass after loading used what was there before it"
        assert after["fits"] == ([], [], {})
        assert (after["step"], after["values"]) == (2, {"seen": [1, 2]})
        assert (after["rng"], after["data"]) == ("restored", "restored")


@pytest.mark.parametrize(("old", "new"), MOVES)
def test_another_number_of_ranks_or_wrapper_loads_the_same_bits(played: Path, old: str, new: str) -> None:
    saved = outcomes(played, f"trained_{old}")[0]
    moved = outcomes(played, f"moved_{old}_to_{new}")
    assert len(moved) == TARGETS[new].ranks
    for rank in moved:
        _compare(rank["loaded"], saved["saved"], 0.0)
        assert rank["groups"] == saved["groups"]


@pytest.mark.parametrize(("old", "new"), MOVES)
def test_the_next_step_there_is_the_same_within_rounding(played: Path, old: str, new: str) -> None:
    """Reductions over other numbers of ranks round differently; nothing else may differ."""
    expected = outcomes(played, f"trained_{old}")[0]["stepped"]
    changed = outcomes(played, f"trained_{old}")[0]["saved"]
    assert any(not torch.equal(expected[name], changed[name]) for name in changed)
    for rank in outcomes(played, f"moved_{old}_to_{new}"):
        _compare(rank["stepped"], expected, 1e-6)


def _compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compare by name.

    A parameter that no loss depends on has zeros as gradient in a flat parameter, and none elsewhere: the next step
    treats it in two ways.
    """
    for name in found.keys() | expected.keys():
        if name.startswith("unused ") or (name.startswith("unused.") and (tolerance or name not in expected)):
            assert name in expected or name.endswith(" step") or not found[name].any(), name
            continue
        have, want = found[name].double(), expected[name].double()
        assert (have.shape, found[name].dtype) == (want.shape, expected[name].dtype), name
        scale = want.abs().max().item() if want.numel() else 0.0
        assert (have - want).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("name", ["pairs", "pairs_of_files"])
def test_models_and_optimizers_are_found_by_name_in_any_order(played: Path, name: str) -> None:
    first, second = outcomes(played, "trained_pairs"), outcomes(played, f"resumed_{name}")
    for before, after in zip(first, second, strict=True):
        assert after == {"loss": before["loss"], "end": before["end"]}


def test_one_optimizer_over_equal_names_is_refused(played: Path) -> None:
    for rank in outcomes(played, "trained_pairs"):
        assert "inner.weight" in rank["refused"]
        assert "an optimizer of its own" in rank["refused"]
        assert rank["left"] == ["file", "pair"]


def test_one_optimizer_over_two_models(played: Path) -> None:
    first, second = outcomes(played, "trained_common"), outcomes(played, "resumed_common")
    found: list[Any] = [before == after for before, after in zip(first, second, strict=True)]
    assert found == [True, True]
