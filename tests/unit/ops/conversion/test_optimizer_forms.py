"""From the form by name back into the others: what comes out is what torch itself makes, and loads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.ops.conversion.optimizer_forms import by_index, flattened, group_params
from fsdp_ckpt.plan.output import OutputObject, OutputPart, OutputTensor
from tests.unit.ops.conversion.saved_optimizers import (
    FORMS,
    OPTIMIZERS,
    Unlike,
    assert_equal,
    by_name,
    canonical,
    content,
    flat,
    save,
    train,
)


def trained(kind: str) -> tuple[Unlike, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Unlike()
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("form", ["by index", "by name"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_by_index_is_what_load_state_dict_takes(kind: str, form: str, tmp_path: Path) -> None:
    model, optimizer = trained(kind)
    state = {"model": model.state_dict(), "optimizer": FORMS[form](model, optimizer)}
    saved = canonical(save(tmp_path / "x", state, "dcp"))
    found = content(by_index(saved.found.part), saved.checkpoint)
    expected = optimizer.state_dict()
    fresh = OPTIMIZERS[kind](Unlike())
    fresh.load_state_dict(copy.deepcopy(found))
    expected["state"] = {index: kinds for index, kinds in expected["state"].items() if kinds != {}}
    assert_equal(found, expected)
    again = fresh.state_dict()
    again["state"] = {index: kinds for index, kinds in again["state"].items() if kinds != {}}
    assert_equal(again, expected)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if "empty" not in kind])
def test_flattened_is_what_torch_flattens(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained(kind)
    saved = canonical(save(tmp_path / "x", {"optimizer": by_name(model, optimizer)}, "dcp"))
    found = flat(flattened(saved.found.part), saved.checkpoint)
    expected: dict[Any, Any] = {(key,): value for key, value in by_name(model, optimizer, flatten=True).items()}
    assert_equal(found, expected)


@pytest.mark.parametrize("form", FORMS)
def test_flattened_and_back(form: str, tmp_path: Path) -> None:
    model, optimizer = trained("AdamW, two groups")
    state = {"model": model.state_dict(), "optimizer": FORMS[form](model, optimizer)}
    saved = canonical(save(tmp_path / "x", state, "file"))
    found = flat(flattened(saved.found.part), saved.checkpoint)
    again = {"optimizer": {path[0]: value for path, value in found.items()}}
    second = canonical(save(tmp_path / "y", again, "dcp"))
    assert_equal(content(second.found.part, second.checkpoint), content(saved.found.part, saved.checkpoint))


def test_a_group_without_parameters_cannot_be_flattened(tmp_path: Path) -> None:
    model, optimizer = trained("AdamW, three groups, one of them empty")
    saved = canonical(save(tmp_path / "x", {"optimizer": by_name(model, optimizer)}, "dcp"))
    assert [len(params) for params in group_params(saved.found.part)] == [3, 3, 0]
    with pytest.raises(Incompatible, match="group 2 has no parameters"):
        flattened(saved.found.part)


def test_state_of_a_parameter_in_no_group_has_no_number(tmp_path: Path) -> None:
    state = {"state": {"w": {"m": torch.ones(2)}}, "param_groups": [{"params": ["v"], "lr": 0.1}]}
    saved = canonical(save(tmp_path / "x", {"optimizer": state}, "dcp"))
    with pytest.raises(Incompatible, match="`w` has state, but is in no group"):
        by_index(saved.found.part)


def test_keys_that_would_become_one_are_refused(tmp_path: Path) -> None:
    state = {"state": {"w": {"m": torch.ones(2)}}, "param_groups": [{"params": ["w"], "lr": 0.1}]}
    part = canonical(save(tmp_path / "x", {"optimizer": state}, "dcp")).found.part
    (tensor,) = part.tensors
    other = OutputTensor(name="state.w.m", dtype=tensor.dtype, source=tensor.source, path=("state", "w.m"))
    objects: list[OutputObject] = list(part.objects)
    with pytest.raises(Incompatible, match=r"both be `state\.w\.m`"):
        flattened(OutputPart(name="o", role=part.role, tensors=[tensor, other], objects=objects))
