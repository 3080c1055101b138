from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from fsdp_ckpt.train.full import nest


def test_places_become_dictionaries_and_lists() -> None:
    flat: dict[Any, Any] = {
        ("groups", 1, "lr"): 0.2,
        ("groups", 0, "lr"): 0.1,
        ("state", "a.b", "step"): 3,
        ("lone",): None,
    }
    assert nest(flat) == {"groups": [{"lr": 0.1}, {"lr": 0.2}], "state": {"a.b": {"step": 3}}, "lone": None}


@pytest.mark.parametrize(
    ("flat", "expected"),
    [
        ({}, {}),
        ({("a", 1): "x"}, {"a": {1: "x"}}),  # not counted from 0: keys
        ({("a", 0): "x", ("a", 2): "y"}, {"a": {0: "x", 2: "y"}}),
        ({("a", "0"): "x"}, {"a": {"0": "x"}}),  # a text is no index
        ({("a",): {}, ("b",): []}, {"a": {}, "b": []}),  # values stay as they are
        ({("a", True): "x"}, {"a": {True: "x"}}),
        ({("a", 0, 0): 1, ("a", 0, 1): 2}, {"a": [[1, 2]]}),
    ],
)
def test_edges(flat: dict[Any, Any], expected: Any) -> None:
    found = nest(flat)
    assert found == expected
    assert type(found) is type(expected)


_LEAVES = st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.none() | st.booleans()
_DICTS: Any = st.recursive(
    st.dictionaries(st.text(min_size=1, max_size=3), _LEAVES, min_size=1, max_size=3),
    lambda inner: (
        st.dictionaries(st.text(min_size=1, max_size=3), inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=12,
)


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(st.dictionaries(st.text(min_size=1, max_size=3), _DICTS, min_size=1, max_size=3))
def test_nesting_undoes_what_torch_flattens(state: dict[str, Any]) -> None:
    flat, paths = flatten_state_dict(state)
    assert unflatten_state_dict(flat, paths) == state  # torch can do it
    assert nest({paths[key]: value for key, value in flat.items()}) == state
