"""Conversions are torch's, bit for bit; which bits a NaN has is nobody's business."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fsdp_ckpt.catalog import DTYPES
from fsdp_ckpt.run.cast import cast_bits
from fsdp_ckpt.run.gather import storage_dtype

FLOATS = ("float64", "float32", "float16", "bfloat16")
PAIRS = [pair for pair in itertools.product(FLOATS, FLOATS) if pair[0] != pair[1]]


def samples(name: str) -> torch.Tensor:
    """All values of a 16-bit type; of a wider one many, and those around the edges of the narrower ones."""
    dtype = getattr(torch, name)
    if dtype.itemsize == 2:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(7)
    bits = torch.int32 if dtype.itemsize == 4 else torch.int64
    anything = torch.randint(-(1 << 31), (1 << 31) - 1, (200_000 * dtype.itemsize // 4,), generator=generator)
    parts = [anything.to(torch.int32).view(bits).view(dtype)]
    for narrow in (torch.float16, torch.bfloat16, torch.float32):
        if narrow.itemsize < dtype.itemsize:
            size = 1 << 15 if narrow.itemsize == 2 else 0
            exact = (
                torch.arange(size, dtype=torch.int16).view(narrow) if size else torch.rand(50_000, generator=generator)
            )
            exact = exact.to(dtype)
            exact = exact[exact.isfinite()]
            middle = (exact[1:] + exact[:-1]) / 2  # ties, where rounding to even shows
            near = [torch.nextafter(middle, torch.full_like(middle, end)) for end in (-torch.inf, torch.inf)]
            parts += [exact, middle, *near, -exact, -middle]
    edges = [
        0.0,
        -0.0,
        torch.inf,
        -torch.inf,
        torch.nan,
        65504.0,
        65519.99,
        65520.0,
        3.4e38,
        3.3953e38,
        6e-8,
        2.98e-8,
        1e-40,
        1e-45,
    ]
    return torch.cat([*parts, torch.tensor(edges, dtype=dtype)])


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_conversions_are_those_of_torch(src: str, dst: str) -> None:
    values = samples(src)
    want = values.to(getattr(torch, dst))
    bits = np.frombuffer(bytes(values.view(torch.uint8).numpy()), dtype=storage_dtype(DTYPES[src]))
    found = torch.from_numpy(cast_bits(bits, DTYPES[src], DTYPES[dst]).view(np.uint8).copy()).view(want.dtype)
    assert torch.equal(found.isnan(), want.isnan())
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[want.dtype.itemsize]
    differing = (found.view(integers) != want.view(integers)) & ~want.isnan()
    assert not differing.any(), (values[differing][:3], found[differing][:3], want[differing][:3])


def test_the_case_of_p17() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, 3.0e38, 1e-40, np.nan, np.inf, -0.0], dtype=np.float32)
    found = cast_bits(values.view(np.uint32), DTYPES["float32"], DTYPES["bfloat16"]).view(np.uint16).tolist()
    # By hand: 1.00390625 is a tie and goes down to 1.0, 1.01171875 is a tie and goes up to 1.015625.
    assert found[:3] == [0x3F80, 0x3F80, 0x3F82]
    assert found[6:] == [0x7F80, 0x8000]
    assert found[5] & 0x7F80 == 0x7F80
    assert found[5] & 0x007F


def test_no_warnings_and_no_copies_of_other_sizes() -> None:
    values = np.array([1e300, np.nan], dtype=np.float64)
    found = cast_bits(values.view(np.uint64), DTYPES["float64"], DTYPES["float16"])
    assert found.shape == (2,)
    assert found[0] == np.inf
