"""Stored bits as numbers that can be subtracted, and the distance between two of them in representable steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdp_ckpt.catalog import DType
from fsdp_ckpt.run.gather import numpy_dtype

__all__ = ["as_numbers", "bits_differ", "magnitudes", "max_ulp", "plain"]

_Array = np.ndarray[Any, np.dtype[Any]]


def bits_differ(a: _Array, b: _Array) -> _Array:
    """Tell which elements differ, as bits: NaN equals itself, and 0.0 is not -0.0.

    Args:
        a: Elements in a row, of ``gather.storage_dtype``.
        b: As many of the same type.
    """
    if a.dtype.itemsize == 16:
        halves: _Array = a.view("<u8").reshape(-1, 2) != b.view("<u8").reshape(-1, 2)
        return np.logical_or(halves[:, 0], halves[:, 1])
    found: _Array = a != b
    return found


def as_numbers(bits: _Array, dtype: DType) -> _Array | None:
    """Return elements in a type that can hold all of their values: float64, complex128, int64 or uint64.

    Args:
        bits: Elements in a row, of ``gather.storage_dtype``.
        dtype: What they are.

    Returns:
        The numbers; None for a type that has none of its own (pairs of float4).
    """
    if dtype.pack > 1:
        return None
    with np.errstate(invalid="ignore"):  # a signalling NaN
        if dtype.name == "complex32":
            parts: _Array = bits.view("<f2").astype(np.float64)
            pairs: _Array = parts.view(np.complex128)
            return pairs
        if dtype.kind == "bool":
            return np.not_equal(bits, 0).astype(np.float64)
        numbers: _Array = bits.view(numpy_dtype(dtype))
        if dtype.name in ("int64", "uint64"):
            return numbers
        return numbers.astype(np.complex128 if dtype.kind == "complex" else np.float64)


def magnitudes(a: _Array, b: _Array) -> _Array:
    """Return ``|a - b|``, exact for two arrays of 64-bit integers of the same type (then as uint64)."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        below = a < b
        difference = a.view(np.uint64) - b.view(np.uint64)
        np.negative(difference, out=difference, where=below)
        return difference
    with np.errstate(over="ignore", invalid="ignore"):
        found: _Array = np.abs(_floating(a) - _floating(b))
    return found


def _floating(values: _Array) -> _Array:
    return values.astype(np.float64) if values.dtype.kind in "iu" else values


def max_ulp(a: _Array, b: _Array, dtype: DType) -> int:
    """Return the largest number of representable steps between two finite values of one type; 0.0 is -0.0 here.

    Args:
        a: Elements in a row, as bits.
        b: As many.
        dtype: A kind of float.
    """
    if not len(a):
        return 0
    if dtype.name == "float8_e8m0fnu":  # exponents only, no sign
        return int(np.abs(a.astype(np.int32) - b.astype(np.int32)).max())
    top = a.dtype.type(1 << (8 * dtype.itemsize - 1))
    first, second = a & ~top, b & ~top  # sums of two magnitudes fit, too
    apart = np.where((a ^ b) & top != 0, first + second, np.maximum(first, second) - np.minimum(first, second))
    return int(apart.max())


def plain(value: Any) -> int | float | str:
    """Return a NumPy number as one that JSON has; infinities, NaN and complex numbers as texts."""
    number = value.item()
    if isinstance(number, complex):
        return str(number)
    if isinstance(number, float) and not np.isfinite(number):
        return str(number)
    assert isinstance(number, int | float)
    return number
