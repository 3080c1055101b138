"""Optimizers that frameworks have written, by name: what the maker of each fixture has written down beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.ops.conversion.optimizer_forms import group_params
from fsdp_ckpt.plan.output import OutputPart
from tests.unit.ops.conversion.saved_optimizers import Saved, assert_equal, canonical, flat

FIXTURES = Path(__file__).parents[4] / "fixtures"


def state_of(saved: Saved) -> dict[str, object]:
    part = saved.found.part
    only = OutputPart(name=part.name, role=part.role, tensors=part.tensors)
    return {".".join(map(str, path[1:])): tensor for path, tensor in flat(only, saved.checkpoint).items()}


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("accelerate_ranks/checkpoint_2", "by name"),
        ("bytecheckpoint/global_step_2", "by name"),
        ("composer/ep0-ba2", "by name"),
        ("composer_folders/ep0-ba2", "by name"),
        ("composer_ranks", "by name"),
        ("fms_fsdp/step_2_ckp", "by name"),
        ("lightning_fsdp/epoch=0-step=2.ckpt", "by name"),
        ("lightning_model_parallel/epoch=0-step=2.ckpt", "by name"),
        ("nemo_automodel/epoch_0_step_2", "flattened"),
        ("olmo_core/step2", "by name"),
        ("torchtitan/checkpoint", "flattened"),
        ("torchtune/dist_epoch_0", "by index"),
        ("veomni/global_step_2", "by name"),
        ("verl_hsdp/global_step_2", "by index"),
        ("verl_tp/global_step_2", "by index"),
    ],
)
def test_frameworks(path: str, form: str) -> None:
    saved = canonical(FIXTURES / "frameworks" / path)
    assert saved.found.form == form
    expected = load_file(FIXTURES / "frameworks" / path.partition("/")[0] / "expected_optim.safetensors")
    assert_equal(state_of(saved), expected)
    listed = [name for params in group_params(saved.found.part) for name in params]
    assert sorted(listed) == sorted({name.rpartition(".")[0] for name in expected})


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("trainer/checkpoint-2", r"have the same shape \(11, 8\)"),  # two groups, and a model sorted by name
        ("verl_fsdp1/global_step_2", "which index is which cannot be told"),  # slices of flat parameters
    ],
)
def test_frameworks_that_do_not_say_which_parameter_is_which(path: str, reason: str) -> None:
    with pytest.raises(FsdpCkptError, match=reason) as caught:
        canonical(FIXTURES / "frameworks" / path)
    assert "--param-names" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["universal1_w2", "zero1_fp32_w2", "zero2_round_robin_w2", "zero3_bf16_w2"])
def test_deepspeed(name: str) -> None:
    saved = canonical(FIXTURES / "deepspeed" / name)
    expected = load_file(FIXTURES / "deepspeed" / name / "expected_optim.safetensors")
    found = {key: tensor for key, tensor in state_of(saved).items() if not key.endswith(".step")}
    assert_equal(found, expected)
