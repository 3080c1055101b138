from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, _recursive_wrap, size_based_auto_wrap_policy

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import Incompatible, UsageError
from fsdp_ckpt.train.sharding.units import Unit, check_units, choose_units, ignored_modules, recomputed


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)  # 288 parameters
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))  # 288 + 264


class SpecialLayer(Layer):
    pass


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)  # 400
        self.first = nn.ModuleList([Layer(), SpecialLayer()])
        self.named = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 40)})  # 72, 360
        self.head = nn.Linear(8, 50)  # 450


def _config(**options: Any) -> FSDPConfig:
    return FSDPConfig.of(options)


class Wrapped(nn.Module):
    """What torch's policies put around modules."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.inner = module


def _by_torch(model: nn.Module, policy: Any, ignored: set[nn.Module]) -> set[str]:
    params = {param for module in ignored for param in module.parameters()}
    _recursive_wrap(
        module=model, auto_wrap_policy=policy, wrapper_cls=Wrapped, ignored_modules=ignored, ignored_params=params,
        only_wrap_children=True,
    )  # fmt: skip
    return {
        name.replace("inner.", "").removesuffix(".inner")
        for name, module in model.named_modules()
        if isinstance(module, Wrapped)
    }


@pytest.mark.parametrize("ignore", [None, r"first\.0\.mlp", "named|head"])
@pytest.mark.parametrize("size", [0, 1, 72, 73, 264, 265, 288, 300, 401, 500, 552, 553, 841, 1000, 3000])
def test_sizes_make_the_units_of_torch(size: int, ignore: str | None) -> None:
    model, other = Stack(), Stack()
    config = _config(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=size)
    found = choose_units(model, config, ignored_modules(model, ignore))
    wanted = _by_torch(
        other, partial(size_based_auto_wrap_policy, min_num_params=size), set(ignored_modules(other, ignore))
    )
    assert {unit.name for unit in found} == wanted
    assert all(unit.module is model.get_submodule(unit.name) for unit in found)


@pytest.mark.parametrize("classes", [(Layer,), (SpecialLayer,), (Layer, nn.Embedding), (nn.Linear, nn.Sequential)])
@pytest.mark.parametrize("ignore", [None, r"first\.0"])
def test_classes_make_the_units_of_torch(classes: tuple[type[nn.Module], ...], ignore: str | None) -> None:
    model, other = Stack(), Stack()
    config = _config(transformer_layer_cls_to_wrap=tuple(cls.__name__ for cls in classes))
    found = choose_units(model, config, ignored_modules(model, ignore))
    wanted = _by_torch(other, ModuleWrapPolicy(classes), set(ignored_modules(other, ignore)))
    assert {unit.name for unit in found} == wanted


def test_inner_units_come_first() -> None:
    found = choose_units(Stack(), _config(transformer_layer_cls_to_wrap="Layer,Sequential,Linear"))
    names = [unit.name for unit in found]
    assert names.index("first.0.mlp.0") < names.index("first.0.mlp") < names.index("first.0")


def test_a_model_names_its_layers_and_some_that_it_does_not_have() -> None:
    model: Any = Stack()
    model._no_split_modules = {"Layer", "VisionLayer"}
    assert [unit.name for unit in choose_units(model, _config())] == ["first.0", "first.1"]
    model._no_split_modules = ["VisionLayer"]
    with pytest.raises(UsageError, match=r"none of its _no_split_modules \(VisionLayer\) is in it.*Embedding, GELU"):
        choose_units(model, _config())


def test_a_size_that_nothing_reaches_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack()
    with caplog.at_level(logging.WARNING, "fsdp_ckpt"):
        assert choose_units(model, _config(auto_wrap_policy="SIZE_BASED_WRAP")) == []
    [message] = caplog.messages
    assert "100000000" in message
    assert str(sum(param.numel() for param in model.parameters())) in message


def _choose_and_check(model: nn.Module, ignore: str | None = None, **options: Any) -> list[Unit]:
    config = _config(**options)
    ignored = ignored_modules(model, ignore)
    units = choose_units(model, config, ignored)
    check_units(model, units, config, ignored)
    return units


@pytest.mark.parametrize("version", [1, 2])
def test_tied_weights_may_be_in_one_unit_only(version: int) -> None:
    model = Stack()
    model.head.weight = model.embed.weight
    _choose_and_check(model, fsdp_version=version, transformer_layer_cls_to_wrap="Layer")
    _choose_and_check(model, fsdp_version=version, auto_wrap_policy="NO_WRAP")
    _choose_and_check(model, "embed|head", fsdp_version=version, transformer_layer_cls_to_wrap="Embedding,Layer")
    with pytest.raises(UsageError, match=r"`embed.weight` and `head.weight`.* `embed` and the model itself"):
        _choose_and_check(model, fsdp_version=version, transformer_layer_cls_to_wrap="Embedding")
    with pytest.raises(UsageError, match=r"`embed.weight` and `head.weight`.* `embed` and `head`"):
        _choose_and_check(model, fsdp_version=version, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=400)


def test_a_module_that_is_used_twice_may_be_a_unit_but_not_in_two() -> None:
    model = Stack()
    model.first.append(model.first[0])
    assert [unit.name for unit in _choose_and_check(model, transformer_layer_cls_to_wrap="Layer")] == [
        "first.0",
        "first.1",
    ]
    model = Stack()
    model.first[1].mlp = model.first[0].mlp
    with pytest.raises(UsageError, match=r"`first.0.mlp.0.weight` and `first.1.mlp.0.weight` are one parameter"):
        _choose_and_check(model, transformer_layer_cls_to_wrap="Layer")


def test_frozen_parameters_and_dtypes_may_be_mixed_where_torch_can() -> None:
    model = Stack()
    model.first[0].mlp.requires_grad_(False)
    _choose_and_check(model, transformer_layer_cls_to_wrap="Layer")
    _choose_and_check(model, transformer_layer_cls_to_wrap="Layer", fsdp_version=1)
    with pytest.raises(UsageError, match="only one of them is trained"):
        _choose_and_check(model, transformer_layer_cls_to_wrap="Layer", fsdp_version=1, use_orig_params=False)
    model.first[0].mlp.bfloat16()
    _choose_and_check(model, transformer_layer_cls_to_wrap="Layer")
    with pytest.raises(Incompatible, match="FSDP 1 cannot hold together"):
        _choose_and_check(model, transformer_layer_cls_to_wrap="Layer", fsdp_version=1)


def test_units_without_others_in_them_are_computed_again() -> None:
    model: Any = Stack()
    units = choose_units(model, _config(transformer_layer_cls_to_wrap="Layer,Sequential"))
    assert [unit.name for unit in recomputed(model, units)] == ["first.0.mlp", "first.1.mlp"]
    model._no_split_modules = ["Layer"]
    assert [unit.name for unit in recomputed(model, [])] == ["first.0", "first.1"]
    assert [unit.name for unit in recomputed(model, [], ignored_modules(model, r"first\.1"))] == ["first.0"]
