"""From every framework into Accelerate's layout, optimizer included; torch's own loader says what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from fsdp_ckpt import convert
from fsdp_ckpt.errors import FsdpCkptError
from tests.build import assert_same
from tests.contract import test_frameworks
from tests.contract.suite import FIXTURES
from tests.contract.test_frameworks import FrameworkSuite

SUITES = [
    suite
    for suite in vars(test_frameworks).values()
    if isinstance(suite, type) and issubclass(suite, FrameworkSuite) and suite.__test__
]

LEARNING_RATES = {"TestLightningModelParallel": 1e-2 / 2, "TestTransformersDistributed": 0.0}
"""Where it is not that of AdamW after two steps of the tiny model's schedule."""


def source(suite: type[FrameworkSuite], folder: Path) -> Path:
    """Lay the checkpoint into a folder of its own."""
    folder.mkdir()
    suite().make(folder)
    return folder / suite.inner


def assert_accelerate(folder: Path, suite: type[FrameworkSuite]) -> None:
    """Load what lies in the folder as Accelerate does, and compare it."""
    model = {name: torch.empty_like(tensor) for name, tensor in suite().expected().items()}
    dcp.load({"model": model}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"), no_dist=True)
    assert_same(model, suite().expected())
    if not suite.has_optimizer:
        assert not (folder / "optimizer_0").exists()
        return
    expected = load_file(FIXTURES / suite.fixture / "expected_optim.safetensors")
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in expected.items():
        name, _, kind = key.rpartition(".")
        state.setdefault(name, {})[kind] = torch.empty_like(tensor)
    group: dict[str, Any] = {"params": None, "betas": None, "lr": None}
    saved = {"state": state} if suite is test_frameworks.TestMegatron else {"state": state, "param_groups": [group]}
    dcp.load({"optimizer": saved}, checkpoint_id=str(folder / "optimizer_0"), no_dist=True)
    if "param_groups" in saved and suite is not test_frameworks.TestTrainer:  # which has two
        assert (sorted(group["params"]), group["betas"]) == (sorted(state), (0.9, 0.999))
        assert group["lr"] == LEARNING_RATES.get(suite.__name__, 1e-2 * (1 / 3))
    assert_same({f"{name}.{kind}": value for name, kinds in state.items() for kind, value in kinds.items()}, expected)


@pytest.mark.parametrize(
    "suite", [suite for suite in SUITES if suite.layout != "trainer"], ids=lambda suite: suite.__name__
)
def test_model_and_optimizer_for_accelerate(suite: type[FrameworkSuite], tmp_path: Path) -> None:
    convert(source(suite, tmp_path / "src"), tmp_path / "out", to="accelerate", part="all", world_size=3)
    assert len(list((tmp_path / "out" / "pytorch_model_fsdp_0").glob("*.distcp"))) == 3
    assert_accelerate(tmp_path / "out", suite)


def test_an_optimizer_by_number_wants_names_where_shapes_do_not_tell(tmp_path: Path) -> None:
    """The Trainer puts weights that decay before those that do not: the model's order is not the optimizer's."""
    suite = test_frameworks.TestTrainer
    path = source(suite, tmp_path / "src")
    with pytest.raises(FsdpCkptError, match="which of them is index 0") as caught:
        convert(path, tmp_path / "out", to="accelerate", part="all", world_size=2)
    assert caught.value.exit_code == 8
    names = tmp_path / "names.json"
    names.write_text(json.dumps(suite.parameters))
    convert(path, tmp_path / "out", to="accelerate", part="all", world_size=2, param_names=str(names))
    assert_accelerate(tmp_path / "out", suite)


def test_an_optimizer_of_flat_slices_is_refused(tmp_path: Path) -> None:
    source_folder = FIXTURES / "frameworks" / "verl_fsdp1" / "global_step_2" / "actor"
    with pytest.raises(FsdpCkptError) as caught:
        convert(source_folder, tmp_path / "out", to="accelerate", part="all", world_size=2)
    assert caught.value.exit_code in (4, 8)
    assert not (tmp_path / "out").exists()
    convert(source_folder, tmp_path / "out", to="accelerate", part="model", world_size=2)
