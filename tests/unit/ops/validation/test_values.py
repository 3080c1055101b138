"""Odd values are told, with their number; what is normal where it stands is not."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.catalog import Checkpoint, Problem, Role, Severity
from fsdp_ckpt.findings import KINDS
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.validation.values import TensorValues, check_values
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.run.sources import Sources
from tests.build import rows, save_dcp

NAN, INF = math.nan, math.inf
WARNING, NOTE, ERROR = Severity.WARNING, Severity.NOTE, Severity.ERROR


def check(
    checkpoint: Checkpoint, *, verify: bool = False, meter: Meter | None = None
) -> tuple[list[Problem], list[TensorValues]]:
    seen: list[TensorValues] = []
    with Sources(checkpoint.roots) as sources:
        found = check_values(checkpoint, sources, jobs=2, meter=meter, verify=verify, listener=seen.append)
        problems = list(found)
    return problems, seen


def save(folder: Path, model: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor] | None = None) -> Checkpoint:
    """Save as two ranks do, row by row."""
    parts = {"model": model} if optimizer is None else {"model": model, "optimizer": {"state": optimizer}}
    return read_checkpoint(save_dcp(folder, _cut(parts)))


def _cut(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _cut(value) if isinstance(value, dict) else rows(value, 2) if value.dim() else value
        for key, value in state.items()
    }


def told(problems: list[Problem]) -> list[tuple[Severity, str, str]]:
    return [(problem.severity, problem.code, problem.message) for problem in problems]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).abs() + 0.1


def put(tensor: torch.Tensor, *values: float) -> torch.Tensor:
    """Put values among a tensor's last ones."""
    tensor = tensor.clone()
    tensor.reshape(-1)[-len(values) :] = torch.tensor(values)
    return tensor


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("w.weight", normal(64, 64), None),
        ("w.weight", put(normal(64, 64), NAN, NAN, NAN), (WARNING, "nan-values", "3 of 4,096 values are NaN")),
        ("w.weight", put(normal(4, 2), NAN), (WARNING, "nan-values", "1 of 8 values is NaN")),
        ("w.weight", torch.full((4, 2), NAN), (WARNING, "nan-values", "all 8 values are NaN")),
        ("norm.weight", torch.full((1,), NAN), (WARNING, "nan-values", "its only value is NaN")),
        ("w.weight", put(normal(4, 2), INF, -INF), (WARNING, "inf-values", "2 of 8 values are infinite")),
        ("w.weight", put(normal(4, 2), -INF), (WARNING, "inf-values", "1 of 8 values is infinite")),
        ("w.bias", put(normal(8), -INF), (WARNING, "inf-values", "1 of 8 values is infinite")),
        (
            "attn.causal_mask", torch.full((4, 4), -INF).triu(1),
            (NOTE, "inf-values", "6 of 16 values are infinite, all below zero, as in a mask"),
        ),
        (
            "attn.bias", torch.full((4, 4), -INF).triu(1),
            (NOTE, "inf-values", "6 of 16 values are infinite, all below zero, as in a mask"),
        ),
        ("attn.mask", torch.full((4, 4), INF).triu(1), (WARNING, "inf-values", "6 of 16 values are infinite")),
        ("attn.mask.weight", put(normal(4, 2), -INF), (WARNING, "inf-values", "1 of 8 values is infinite")),
        ("w.weight", torch.zeros(64, 64), (WARNING, "all-zero", "all 4,096 values are zero")),
        ("w.weight", put(torch.zeros(4, 2), 1.0), None),
        ("w.bias", torch.zeros(64), None),
        ("norm.weight", torch.zeros(64), None),
        ("experts.bias", torch.zeros(8, 64), None),
        ("final_logits_bias", torch.zeros(1, 64), None),
        ("cls_token", torch.zeros(1, 1, 64), None),
        ("attn.mask", torch.zeros(8, 8), None),
        ("position", torch.zeros(8, 8, dtype=torch.int64), None),
        (
            "layers.0.q_proj.lora_B.default.weight", torch.zeros(64, 8),
            (NOTE, "all-zero", "all 512 values are zero, as before an adapter's first step"),
        ),
        (
            "layers.0.q_proj.lora_A.default.weight", torch.zeros(8, 64),
            (WARNING, "all-zero", "all 512 values are zero"),
        ),
        ("w.weight", torch.full((4, 2), 0.25), (NOTE, "constant", "all 8 values are 0.25")),
        ("norm.weight", torch.ones(64), None),
        ("w.weight", torch.full((4, 2), 1j), (NOTE, "constant", "all 16 values are the same")),
        ("w.weight", put(normal(10, 1, 2), 1e-40, -1e-40), None),
        (
            "w.weight", put(normal(10, 1, 2), 1e-40, 1e-40, 1e-40),
            (NOTE, "denormal", "3 of 20 values (15 %) are below the normal numbers of float32"),
        ),
        ("norm.weight", torch.full((8,), 1e-40), None),
    ],
)  # fmt: skip
def test_a_tensor_of_a_model(
    name: str, tensor: torch.Tensor, expected: tuple[Severity, str, str] | None, tmp_path: Path
) -> None:
    problems, _ = check(save(tmp_path, {name: tensor, "other": normal(4, 4)}))
    assert told(problems) == ([] if expected is None else [expected])
    assert all(problem.where == f"model.{name}" for problem in problems)
    assert all(problem.code in KINDS for problem in problems)


def test_moments_may_be_zero_and_tiny_but_not_nan(tmp_path: Path) -> None:
    moments = {
        "a.exp_avg": torch.zeros(8, 8), "b.exp_avg": torch.full((8, 8), 1e-40), "c.exp_avg": put(normal(8, 8), NAN),
        "d.exp_avg_sq": put(normal(8, 8), INF),
    }  # fmt: skip
    checkpoint = save(tmp_path, {"w.weight": normal(8, 8)}, moments)
    assert [part.role for part in checkpoint.parts] == [Role.MODEL, Role.OPTIMIZER]
    problems, _ = check(checkpoint)
    assert told(problems) == [
        (WARNING, "nan-values", "1 of 64 values is NaN"),
        (WARNING, "inf-values", "1 of 64 values is infinite"),
    ]


def test_nan_and_infinity_are_both_told(tmp_path: Path) -> None:
    problems, _ = check(save(tmp_path, {"attn.mask": put(normal(4, 4), NAN, -INF)}))
    assert told(problems) == [
        (WARNING, "nan-values", "1 of 16 values is NaN"),
        (WARNING, "inf-values", "1 of 16 values is infinite"),
    ]


def test_values_of_each_tensor(tmp_path: Path) -> None:
    weight = put(normal(6, 4), -2.5, NAN, INF, -INF, 0.0, 1e-40)
    half = put(normal(3, 4), 40.0).to(torch.bfloat16)
    checkpoint = save(tmp_path, {"a": weight, "b": half, "c": torch.arange(5)})
    meter = Meter(sum(part.num_bytes for part in checkpoint.parts), None)
    _, values = check(checkpoint, meter=meter)
    assert values == [
        TensorValues(
            part="model", name="a", dtype="float32", shape=(6, 4), count=24, nan=1, positive_inf=1, negative_inf=1,
            zeros=1, denormals=1, minimum=-2.5, maximum=float(weight[weight.isfinite()].max()), constant=False,
        ),
        TensorValues(
            part="model", name="b", dtype="bfloat16", shape=(3, 4), count=12, nan=0, positive_inf=0, negative_inf=0,
            zeros=0, denormals=0, minimum=float(half.float().min()), maximum=40.0, constant=False,
        ),
        TensorValues(
            part="model", name="c", dtype="int64", shape=(5,), count=5, nan=0, positive_inf=0, negative_inf=0,
            zeros=1, denormals=0, minimum=0, maximum=4, constant=False,
        ),
    ]  # fmt: skip
    assert meter.done_bytes == meter.total_bytes == 24 * 4 + 12 * 2 + 5 * 8


def test_checksums_are_compared_where_asked(tmp_path: Path) -> None:
    """torch.save records the CRC-32 of every storage."""
    checkpoint = save(tmp_path, {"a": normal(64, 64), "b": normal(8)})
    problems, values = check(checkpoint, verify=True)
    assert not problems
    assert [(one.verified_bytes, one.unverified_bytes) for one in values] == [(4 * 64 * 64, 0), (4 * 8, 0)]
    _, values = check(checkpoint)
    assert [(one.verified_bytes, one.unverified_bytes) for one in values] == [(0, 0), (0, 0)]


def test_damage_is_told_and_the_rest_still_looked_at(tmp_path: Path) -> None:
    tensor = put(normal(64, 64), NAN)
    checkpoint = save(tmp_path, {"a": tensor, "z": torch.zeros(4, 4)})
    path = tmp_path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    at = data.index(tensor[:32].numpy().tobytes())
    data[at + 77] ^= 1
    path.write_bytes(data)
    problems, _ = check(checkpoint, verify=True)
    assert [(problem.severity, problem.code, problem.where) for problem in problems] == [
        (ERROR, "wrong-checksum", "model.a"), (WARNING, "nan-values", "model.a"), (WARNING, "all-zero", "model.z")
    ]  # fmt: skip
    assert [problem.code for problem in check(checkpoint)[0]] == ["nan-values", "all-zero"]


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_what_is_not_there_is_passed_over(damage: str, tmp_path: Path) -> None:
    """It was reported with the files. Half of a tensor's values do not tell that all are zero."""
    checkpoint = save(tmp_path, {"z": torch.zeros(4, 4), "other": normal(4, 4), "c": torch.full((4, 4), 1j)})
    path = tmp_path / "__1_0.distcp"
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, 10)
    meter = Meter(256, None)
    problems, values = check(checkpoint, meter=meter)
    assert not problems  # and the constant `c` might have other values
    assert [(one.count, one.zeros) for one in values] == [(8, 8), (8, 0), (16, 8)]
    assert meter.done_bytes == 256


def test_an_item_that_is_none(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, {"a": normal(4, 4)})
    path = tmp_path / "__1_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    problems, _ = check(checkpoint)
    assert [(problem.severity, problem.code, problem.where) for problem in problems] == [
        (ERROR, "damaged-item", "model.a")
    ]


def test_numpy_is_not_imported_with_the_module() -> None:
    program = "import sys, fsdp_ckpt.ops.validation.values; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
