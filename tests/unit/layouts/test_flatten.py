"""State dicts are flattened as torch.distributed.checkpoint flattens them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from fsdp_ckpt.catalog import DTYPES
from fsdp_ckpt.codec.pickles import Record
from fsdp_ckpt.codec.tensors import StorageRef, TensorRef
from fsdp_ckpt.errors import FsdpCkptError, MalformedFile
from fsdp_ckpt.layouts.flatten import flatten

F32 = DTYPES["float32"]
REF = TensorRef(StorageRef("0", F32, 1), F32, 0, (1,), (1,))
TENSOR = torch.zeros(1)

STATES: dict[str, Any] = {
    "plain": {"a": REF, "b": REF},
    "nested": {"model": {"a": REF, "deep": {"b": REF}}, "step": 7},
    "dotted": {"model": {"a.b": REF}, "x.y": {"z": REF}},
    "lists of tensors": {"a": [REF, REF], "b": [{"c": REF}]},
    "lists of values": {"a": [1, 2], "b": [], "t": (REF, REF)},
    "numbers as keys": {"state": {0: {"exp_avg": REF}, 12: {"exp_avg": REF}}},
    "values": {"lr": 0.1, "name": "x", "none": None, "betas": (0.9, 0.95)},
}


def with_tensors(value: Any) -> Any:
    if value is REF:
        return TENSOR
    if isinstance(value, dict):
        return {key: with_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(with_tensors, value))
    return value


@pytest.mark.parametrize("name", STATES)
def test_keys_and_paths_are_those_of_torch(name: str) -> None:
    judge, paths = flatten_state_dict(with_tensors(STATES[name]))
    found = dict(flatten(STATES[name], where="f"))
    # torch turns the numbers that are keys of dictionaries into text in the path, not those of lists.
    assert {".".join(map(str, path)) for path in found} == set(judge)
    assert {tuple(map(str, path)) for path in found} == {tuple(map(str, path)) for path in paths.values()}
    tensors = {".".join(map(str, path)) for path, value in found.items() if value is REF}
    assert tensors == {key for key, value in judge.items() if value is TENSOR}


def test_records_that_hold_tensors_are_looked_into() -> None:
    record = Record("x.Y", (), {"w": REF, "n": 1})
    assert flatten({"a": record, "b": Record("x.Z", (), {"n": 1})}, where="f")[:2] == [
        (("a", "w"), REF),
        (("a", "n"), 1),
    ]


def nest(kind: str, value: Any) -> Any:
    return {"dict": {"a": value}, "list": [value, REF], "record": Record("x.Y", (), {"a": value, "w": REF})}[kind]


@pytest.mark.parametrize("kind", ["dict", "list", "record"])
def test_nesting_has_an_end(kind: str) -> None:
    value: Any = {"w": REF}
    for _ in range(5000):
        value = nest(kind, value)
    with pytest.raises(MalformedFile, match="nested"):
        flatten({"a": value}, where="f")


def test_a_list_that_contains_itself() -> None:
    loop: list[Any] = [REF]
    loop.append({"again": loop})
    with pytest.raises(MalformedFile):
        flatten({"a": loop}, where="f")


def test_a_dict_that_contains_itself_many_times() -> None:
    loop: dict[str, Any] = {}
    loop.update({str(i): loop for i in range(30)})
    with pytest.raises(MalformedFile):
        flatten(loop, where="f")


KEYS: dict[str, Any] = {
    "long": 10**5000, "long and negative": -(10**5000), "long in a tuple": (10**5000,), "record": Record("x.Y"),
    "float": 1.5, "none": None, "bytes": b"x", "bool": True,
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_any_kind(name: str) -> None:
    try:
        found = flatten({KEYS[name]: REF}, where="f")
    except FsdpCkptError:
        return
    assert ".".join(map(str, found[0][0]))
