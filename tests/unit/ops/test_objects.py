"""Values beside the tensors, as plain values that JSON can hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_ckpt.ops.inspect import inspect
from tests.build import save_dcp
from tests.unit.codec.raw_pickle import Raw, call, dump
from tests.unit.codec.raw_zip import Entry, build_zip

VALUES: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "number": (7, 7),
    "float": (0.25, 0.25),
    "bool": (True, True),
    "text": ("größe", "größe"),
    "list": ([1, [2, "x"]], [1, [2, "x"]]),
    "dict": ({"lr": 0.1, 3: None}, {"lr": 0.1, "3": None}),
    "tuple": ((0.9, 0.95), [0.9, 0.95]),
    "dtype": (torch.bfloat16, "torch.bfloat16"),
    "bytes": (b"abc", "<3 bytes>"),
    "numpy number": (np.float64(1.5), 1.5),
    "size": (torch.Size([2, 3]), [2, 3]),
}


@pytest.mark.parametrize("where", ["dcp", "file"])
def test_values(where: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {name: value for name, (value, _) in VALUES.items()}
    if where == "dcp":
        wrapped = {name: [value] for name, value in values.items()}  # a list of values is one item, whatever is in it
        save_dcp(tmp_path / "x", {"model": {"w": torch.zeros(3)}, "extra": wrapped})
    else:
        (tmp_path / "x").mkdir()
        values |= {"tensor": torch.zeros(2, 3)}
        torch.save({"model": {"w": torch.zeros(3)}, "extra": values}, tmp_path / "x" / "pytorch_model.bin")
    report = inspect(tmp_path / "x", objects=True)
    found = {name: value for part in report.parts for name, value in part.objects.items()}
    for name, (_, expected) in VALUES.items():
        if name == "dict":  # flattened, as torch does
            prefix = "dict.0" if where == "dcp" else "dict"
            assert (found[f"{prefix}.lr"], found[f"{prefix}.3"]) == (0.1, None)
        else:
            assert found[name] == ([expected] if where == "dcp" else expected), name
    json.dumps(found, allow_nan=False)


ODD: dict[str, Any] = {
    "a long number": 10**5000,
    "a negative long number": -(10**5000),
    "a long number in a list": [10**5000],
    "a set": {1, 2},
    "infinity": float("inf"),
    "not a number": [float("nan")],
    "a complex number": 1 + 2j,
    "a range": range(10**9),
    "a long range": range(10**5000),
    "a slice": slice(1, 10**5000),
    "a long text": "x" * 10**6,
    "a surrogate": "a\ud800",
    "deep": Raw(b"]" * 100_000 + b"a" * 99_999),
    "wide": list(range(10**5)),
    "another class": call("my.module", "Thing", 1),
    "a class": torch.nn.Linear,
}


def value_folder(folder: Path, value: Any) -> Path:
    """A folder of rank files, of which one holds any value."""
    folder.mkdir()
    torch.save({"w": torch.zeros(3)}, folder / "model_world_size_1_rank_0.pt")
    (folder / "extra_state_world_size_1_rank_0.pt").write_bytes(
        build_zip([Entry("x/data.pkl", dump({"value": value}, 2)), Entry("x/version", b"3\n")])
    )
    return folder


@pytest.mark.parametrize("name", ODD)
def test_odd_values_are_shown_somehow(name: str, tmp_path: Path) -> None:
    report = inspect(value_folder(tmp_path / "x", ODD[name]), objects=True)
    found = {key: value for part in report.parts for key, value in part.objects.items()}
    text = json.dumps(found, allow_nan=False, ensure_ascii=False)
    assert 2 < len(text) < 20_000
    assert report.parts[0].num_tensors == 1


def test_code_is_named_and_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "sung"
    value = call("posix", "system", f"touch {canary}")
    report = inspect(value_folder(tmp_path / "x", value), objects=True)
    assert "posix.system" in json.dumps([dict(part.objects) for part in report.parts])
    assert not canary.exists()
