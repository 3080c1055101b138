from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.train.sharding.fsdp2 import check_torch
from fsdp_ckpt.train.sharding.precision import for_fsdp1, for_fsdp2, keep_full_precision
from fsdp_ckpt.train.sharding.units import Unit


def _config(**options: Any) -> FSDPConfig:
    return FSDPConfig.of(options)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_one_word_sets_all_dtypes(name: str, dtype: torch.dtype) -> None:
    first = for_fsdp1(_config(fsdp_version=1, mixed_precision=name))
    assert first is not None
    assert (first.param_dtype, first.reduce_dtype, first.buffer_dtype) == (dtype,) * 3
    second = for_fsdp2(_config(mixed_precision=name))
    assert (second.param_dtype, second.reduce_dtype, second.output_dtype) == (dtype,) * 3


def test_a_policy_replaces_it() -> None:
    config = _config(mixed_precision="bf16", mixed_precision_policy={"param_dtype": "fp16", "output_dtype": "fp32"})
    found = for_fsdp2(config)
    assert (found.param_dtype, found.reduce_dtype, found.output_dtype) == (torch.float16, None, torch.float32)


def test_none_is_none() -> None:
    assert for_fsdp1(_config(fsdp_version=1)) is None
    assert for_fsdp2(_config()).param_dtype is None


def _model() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(2, 2, dtype=torch.bfloat16) for _ in range(3)), nn.Linear(2, 2).double())
    model[0].bias.requires_grad_(False)
    model[1].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("options", "raised"),
    [
        ({}, []),
        ({"mixed_precision_policy": {"reduce_dtype": "bf16"}}, []),
        ({"mixed_precision": "bf16"}, ["0.weight", "2.weight", "2.bias"]),
        # A unit of FSDP1 has one dtype: the frozen bias goes with its weight.
        ({"mixed_precision": "bf16", "fsdp_version": 1}, ["0.weight", "0.bias", "2.weight", "2.bias"]),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_trained_is_float32(options: dict[str, Any], raised: list[str], device: str) -> None:
    model = _model().to(device)
    units = [Unit(name=str(index), module=model[index]) for index in range(3)]
    assert keep_full_precision(model, _config(**options), units) == raised
    for name, param in model.named_parameters():
        before = torch.float64 if name.startswith("3") else torch.bfloat16
        assert param.dtype == (torch.float32 if name in raised else before), name
        assert param.device.type == device


def test_what_is_ignored_stays_as_it_is() -> None:
    model = _model()
    assert keep_full_precision(model, _config(mixed_precision="bf16"), [], [model[2]]) == ["0.weight"]


def test_an_older_torch_cannot_leave_modules_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    check_torch([module])
    monkeypatch.setattr(torch, "__version__", "2.6.0+cu124")
    check_torch([])
    with pytest.raises(Incompatible, match=r"needs torch 2.7, this is 2.6.0\+cu124"):
        check_torch([module])
