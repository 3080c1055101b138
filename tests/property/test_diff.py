"""Whatever the shapes, dtypes and cuts on both sides: the statistics are those of NumPy on whole arrays."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.ops.diff import Change, TensorDiff, diff
from fsdp_ckpt.run.differences import ValueStats
from tests.build import Sharded, full_bits, save_dcp
from tests.property.tilings import shapes, tilings

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
OTHERS = ["int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"]


@dataclass(frozen=True)
class Pair:
    a: torch.Tensor
    b: torch.Tensor
    cut_a: Sharded
    cut_b: Sharded


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Two tensors of random bits, equal but for some elements; each cut in its own way."""
    name = draw(st.sampled_from(FLOATS + OTHERS))
    dtype = getattr(torch, name)
    shape = draw(shapes(max_dims=3, max_side=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def noise() -> torch.Tensor:
        raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator).to(torch.uint8)
        return (raw & 1 if dtype == torch.bool else raw).view(dtype).reshape(shape)

    a, other = noise(), noise()
    share = draw(st.sampled_from([0.0, 0.1, 1.0]))
    where = torch.rand(shape, generator=generator) < share
    width = (
        torch.uint8
        if dtype == torch.bool
        else {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize, dtype)
    )
    b = torch.where(where, other.view(width), a.view(width)).view(dtype)

    def cut(tensor: torch.Tensor) -> Sharded:
        boxes = draw(tilings(shape))
        # Two empty boxes can stand at one place, which no writer does.
        boxes = list({box[0]: box for box in sorted(boxes, key=lambda box: math.prod(box[1]))}.values())
        return Sharded(tensor, boxes, [draw(st.integers(0, 1)) for _ in boxes], draw(st.booleans()))

    return Pair(a, b, cut(a), cut(b))


def found(folder: Path, pair: Pair, **options: Any) -> TensorDiff | None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    a = save_dcp(folder / "a", {"model": {"w": pair.cut_a}})
    b = save_dcp(folder / "b", {"model": {"w": pair.cut_b}})
    report = diff(a, b, **options)
    (part,) = report.parts
    assert report.is_equal is all(tensor.change is Change.CLOSE for tensor in part.tensors)
    return part.tensors[0] if part.tensors else None


def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements as NumPy has them, through their bytes."""
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = getattr(ml_dtypes, name, None) or getattr(np, "bool_" if name == "bool" else name)
    return np.frombuffer(full_bits(tensor), dtype=dtype).reshape(tuple(tensor.shape))


def exact(value: Any) -> tuple[Fraction, Fraction] | None:
    """A number without rounding, as real and imaginary part; None when it is not finite."""
    number = complex(value) if not isinstance(value, np.integer) else value
    if isinstance(number, complex):
        if not (math.isfinite(number.real) and math.isfinite(number.imag)):
            return None
        return Fraction(number.real), Fraction(number.imag)
    return Fraction(int(number)), Fraction(0)


def is_nan(value: Any) -> bool:
    number = complex(value)
    return math.isnan(number.real) or math.isnan(number.imag)


def judge(pair: Pair) -> dict[str, Any]:
    """Work the statistics out element by element, in exact arithmetic."""
    a, b = array(pair.a).reshape(-1), array(pair.b).reshape(-1)
    size = pair.a.dtype.itemsize
    bits_a, bits_b = full_bits(pair.a), full_bits(pair.b)
    changed = [i for i in range(a.size) if bits_a[i * size : (i + 1) * size] != bits_b[i * size : (i + 1) * size]]
    numbers = [(exact(x), exact(y)) for x, y in zip(a, b, strict=True)]
    finite = [(x, y) for x, y in numbers if x is not None and y is not None]
    squares = [(x[0] - y[0]) ** 2 + (x[1] - y[1]) ** 2 for x, y in finite]
    nan = [i for i in changed if is_nan(a[i]) or is_nan(b[i])]
    return {
        "num_changed": len(changed),
        "nan_changed": len(nan),
        "inf_changed": sum(i not in nan and None in numbers[i] for i in changed),
        "max_square": max(squares, default=Fraction(0)),
        "dd": sum(squares, Fraction(0)),
        "aa": sum((x[0] ** 2 + x[1] ** 2 for x, _ in finite), Fraction(0)),
        "bb": sum((y[0] ** 2 + y[1] ** 2 for _, y in finite), Fraction(0)),
        "ab": sum((x[0] * y[0] + x[1] * y[1] for x, y in finite), Fraction(0)),
    }


def check(stats: ValueStats, pair: Pair) -> None:
    wanted = judge(pair)
    assert {key: getattr(stats, key) for key in ("num_changed", "nan_changed", "inf_changed")} == {
        key: wanted[key] for key in ("num_changed", "nan_changed", "inf_changed")
    }
    assert stats.share_changed == wanted["num_changed"] / pair.a.numel()
    if stats.max_abs == "inf":
        assert wanted["max_square"] > Fraction(1.7e308) ** 2
    else:
        assert stats.max_abs is not None
        largest = Fraction(stats.max_abs) ** 2
        assert abs(largest - wanted["max_square"]) <= wanted["max_square"] * Fraction(1, 10**12)
    if not wanted["aa"]:
        assert stats.relative_l2 is None
    elif stats.relative_l2 is None:
        assert wanted["dd"] / wanted["aa"] > Fraction(1.7e308) ** 2
    else:
        ratio = Fraction(stats.relative_l2) ** 2
        assert abs(ratio - wanted["dd"] / wanted["aa"]) <= wanted["dd"] / wanted["aa"] * Fraction(1, 10**9)
    if not wanted["aa"] or not wanted["bb"]:
        assert stats.cosine is None
    else:
        cosine = math.sqrt(wanted["ab"] ** 2 / (wanted["aa"] * wanted["bb"]))
        assert stats.cosine == pytest.approx(-cosine if wanted["ab"] < 0 else cosine, abs=1e-9)
    assert stats.largest_at is not None
    assert all(0 <= index < size for index, size in zip(stats.largest_at, pair.a.shape, strict=True))
    x, y = array(pair.a)[stats.largest_at], array(pair.b)[stats.largest_at]
    for shown, value in ((stats.largest_a, x), (stats.largest_b, y)):
        assert shown is not None
        same = complex(shown) == complex(value) if not isinstance(value, np.integer) else int(shown) == int(value)
        assert same or is_nan(value)


@cache
def ranks(name: str) -> dict[float, int]:
    """The finite values of a float type of one or two bytes in order, by their number."""
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    width = f"u{dtype.itemsize}"
    with np.errstate(invalid="ignore"):
        values = np.arange(256**dtype.itemsize, dtype=width).view(dtype).astype(np.float64)
    return {float(value): number for number, value in enumerate(np.unique(values[np.isfinite(values)]))}


@settings(max_examples=80)
@given(pairs())
def test_steps_are_counted_among_all_values_of_the_type(tmp_path: Path, pair: Pair) -> None:
    name = str(pair.a.dtype).removeprefix("torch.")
    if name not in FLOATS[2:]:
        return
    tensor = found(tmp_path / "x", pair)
    if tensor is None:
        return
    order = ranks(name)
    both = zip(*(array(item).astype(np.float64).reshape(-1).tolist() for item in (pair.a, pair.b)), strict=True)
    steps = [abs(order[x] - order[y]) for x, y in both if math.isfinite(x) and math.isfinite(y)]
    assert tensor.stats is not None
    assert tensor.stats.max_ulp == max(steps, default=0)


@settings(max_examples=150)
@given(pairs())
def test_statistics_are_those_of_whole_arrays(tmp_path: Path, pair: Pair) -> None:
    tensor = found(tmp_path / "x", pair)
    if full_bits(pair.a) == full_bits(pair.b):
        assert tensor is None
        return
    assert tensor is not None
    assert tensor.change is Change.CHANGED
    assert tensor.stats is not None
    check(tensor.stats, pair)


@settings(max_examples=60)
@given(pairs(), st.booleans())
def test_reading_and_not_reading_agree(tmp_path: Path, pair: Pair, statistics: bool) -> None:
    by_crc = found(tmp_path / "x", pair, statistics=statistics)
    by_bytes = found(tmp_path / "y", pair, statistics=statistics, trust_crc=False)
    assert by_crc == by_bytes
    assert (by_crc is None) is (full_bits(pair.a) == full_bits(pair.b))


@settings(max_examples=60)
@given(pairs(), st.sampled_from([0.0, 0.5, 3.0, 1e30]), st.sampled_from([0.0, 0.25]))
def test_closeness_is_that_of_torch(tmp_path: Path, pair: Pair, tolerance: float, rtol: float) -> None:
    if pair.a.dtype in (torch.int64, torch.complex128, torch.complex64):  # torch has no exact answer for them
        return
    tensor = found(tmp_path / "x", pair, tolerance=tolerance, rtol=rtol)
    # torch measures relative to its second argument.
    wanted = torch.isclose(pair.b.double(), pair.a.double(), rtol=rtol, atol=tolerance, equal_nan=True)
    if tensor is None:
        assert wanted.all()
        return
    assert tensor.stats is not None
    assert tensor.stats.num_outside == int((~wanted).sum())
    assert (tensor.change is Change.CLOSE) is bool(wanted.all())


@pytest.mark.parametrize("name", FLOATS)
def test_the_judge_itself(name: str) -> None:
    """The exact arithmetic above against numbers worked out by hand."""
    values = torch.tensor([3.0, 4.0]).to(getattr(torch, name)), torch.tensor([3.0, 1.0]).to(getattr(torch, name))
    whole = [((0,), (2,))]
    wanted = judge(Pair(*values, *(Sharded(value, whole, [0]) for value in values)))
    assert (wanted["num_changed"], wanted["max_square"], wanted["dd"], wanted["aa"]) == (1, 9, 9, 25)
