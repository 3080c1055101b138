"""Values get back to their places. Judge: state dicts that torch's optimizers give and take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_ckpt.errors import NameCollision
from fsdp_ckpt.ops.conversion.nesting import nest


def flat(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Take a state dict apart as readers do: groups are a list, everything else is named."""
    if isinstance(value, dict) and value:
        return {key: item for step, inner in value.items() for key, item in flat(inner, (*path, step)).items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {key: item for step, inner in enumerate(value) for key, item in flat(inner, (*path, step)).items()}
    return {path: value}


def test_an_optimizer_by_index_is_what_torch_loads() -> None:
    """Its parameters are numbered from 0 on, and its state is a dictionary all the same."""
    net = torch.nn.Linear(2, 3)
    groups: list[dict[str, Any]] = [{"params": [net.weight], "lr": 0.1}, {"params": [net.bias]}]
    optimizer = torch.optim.AdamW(groups)
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    found = nest(flat(state), where="optimizer")
    assert list(found["state"]) == [0, 1]
    assert isinstance(found["state"], dict)
    assert found["param_groups"] == state["param_groups"]
    fresh_groups: list[dict[str, Any]] = [{"params": [net.weight]}, {"params": [net.bias]}]
    fresh = torch.optim.AdamW(fresh_groups)
    fresh.load_state_dict(found)
    assert torch.equal(fresh.state[net.bias]["exp_avg"], optimizer.state[net.bias]["exp_avg"])
    assert fresh.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("items", "nested"),
    [
        ({}, {}),
        ({("w",): 1}, {"w": 1}),
        ({("a", "b.c"): 1, ("a", "d"): 2}, {"a": {"b.c": 1, "d": 2}}),
        ({("l", 0): "x", ("l", 1): "y"}, {"l": ["x", "y"]}),
        ({("l", 1): "y", ("l", 0): "x"}, {"l": ["x", "y"]}),
        ({("l", 1): "y", ("l", 2): "x"}, {"l": {1: "y", 2: "x"}}),
        ({("l", "0"): "x"}, {"l": {"0": "x"}}),
        ({("l", 0): "x", ("l", "n"): "y"}, {"l": {0: "x", "n": "y"}}),
        ({("l", True): "x"}, {"l": {True: "x"}}),
        ({("state", 0, "s", 0): 1}, {"state": {0: {"s": [1]}}}),
        ({("optimizer", "state", 0): 1}, {"optimizer": {"state": [1]}}),
        ({("empty",): {}, ("list",): []}, {"empty": {}, "list": []}),
        ({("milestones",): {0: 1, 1: 1}}, {"milestones": {0: 1, 1: 1}}),
    ],
)
def test_places(items: dict[tuple[str | int, ...], Any], nested: Any) -> None:
    found = nest(items, where="x")
    assert found == nested
    assert repr(found) == repr(nested), "dictionaries are plain, in order"


@pytest.mark.parametrize(
    "items",
    [
        {("a",): 1, ("a", "b"): 2},
        {("a", "b"): 2, ("a",): 1},
        {("a",): {"b": 1}, ("a", "b"): 2},
        {("a", 0): 1, ("a",): []},
    ],
)
def test_a_place_within_another_one_is_refused(items: dict[tuple[str | int, ...], Any]) -> None:
    with pytest.raises(NameCollision, match="the part"):
        nest(items, where="the part")
