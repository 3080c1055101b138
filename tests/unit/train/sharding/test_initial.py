from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.sharding.initial import make_values
from fsdp_ckpt.train.sharding.tensors import held_tensors


class Mixed(nn.Module):
    """Tensors of several dtypes, and two names for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 2))
        self.other = self.weight
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))


def _in_place(module: Any) -> None:
    module.weight.fill_(1.5)
    module.count.fill_(3)
    module.mask.fill_(False)  # what is there already


def _through_data(module: Any) -> None:
    """Writes that no version counter sees."""
    module.weight.data.fill_(1.5)
    module.count.data.fill_(3)
    module.mask.fill_(False)


def _by_new_ones(module: Any) -> None:
    module.other = nn.Parameter(torch.full((3, 2), 1.5))
    module.count = torch.full((2,), 3)
    module.mask = torch.zeros(2, dtype=torch.bool)


@pytest.mark.parametrize("fill", [_in_place, _through_data, _by_new_ones])
def test_values_are_made_however_they_are_written(fill: Callable[[Any], None]) -> None:
    model: Any
    with torch.device("meta"):
        model = Mixed()
    tensors = held_tensors(model)
    make_values(model, tensors, tensors, fill)
    assert torch.equal(model.weight, torch.full((3, 2), 1.5))
    assert model.weight is model.other
    assert torch.equal(model.count, torch.full((2,), 3))
    assert not model.mask.any()
    assert all(not held.is_meta for held in held_tensors(model))


@pytest.mark.parametrize("left", ["weight", "count", "mask"])
def test_what_is_not_filled_is_named(left: str) -> None:
    def fill(module: Any) -> None:
        for name in {"weight", "count", "mask"} - {left}:
            getattr(module, name).fill_(1)

    with torch.device("meta"):
        model = nn.Sequential(Mixed())
    tensors = held_tensors(model)
    with pytest.raises(UsageError, match=rf"`0.{left}` is on the meta device.* `0` \(Mixed\)"):
        make_values(model, tensors, tensors, fill)


def test_only_what_is_wanted_gets_values() -> None:
    model: Any
    with torch.device("meta"):
        model = nn.Sequential(Mixed(), nn.Linear(2, 2))
    tensors = held_tensors(model)
    seen: list[nn.Module] = []

    def fill(module: Any) -> None:
        seen.append(module)
        assert not module.weight.is_meta  # it may be needed to make the others
        module.mask.fill_(True)

    make_values(model, tensors, [held for held in tensors if held.name == "0.mask"], fill)
    assert seen == [model[0]]
    assert {held.name for held in held_tensors(model) if not held.is_meta} == {"0.mask"}
    assert model[0].weight is model[0].other


def test_real_tensors_are_left_alone() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = model[0].weight.detach().clone()
    model[1].to("meta")
    tensors = held_tensors(model)
    make_values(model, tensors, [held for held in tensors if held.is_meta], None)
    assert torch.equal(model[0].weight, before)
    assert model[1].weight.abs().max() <= 2**-0.5  # nn.Linear's rule


def test_a_model_that_knows_its_rules_goes_before_its_layers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known, self.unknown = nn.Linear(2, 2), nn.Bilinear(2, 2, 2)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.data.fill_(7)
                module.bias.data.zero_()

    with torch.device("meta"):
        model = Model()
    tensors = held_tensors(model)
    make_values(model, tensors, tensors, None)
    assert bool((model.known.weight == 7).all())
    assert bool((model.known.bias == 0).all())
    assert model.unknown.weight.abs().max() <= 2**-0.5
