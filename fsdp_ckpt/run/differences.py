"""Add up how the values of two tensors differ, block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_ckpt.catalog import DType, Shape
from fsdp_ckpt.run.elements import as_numbers, bits_differ, magnitudes, max_ulp, plain

__all__ = ["Differences", "ValueStats"]

_Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 1 << 14
"""Elements at a time: as float64 they stay in the cache. With four times as many it takes twice the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStats:
    """How the values of two tensors differ.

    Attributes:
        num_changed: Elements whose bits differ; where dtypes differ, those whose values do. 0.0 and -0.0 have
            different bits and differ by nothing.
        share_changed: The same as a share of all elements, 0 to 1.
        max_abs: Largest absolute difference, of elements that are finite on both sides; a text where it exceeds every
            float64, None where there are no numbers (pairs of float4).
        relative_l2: ``||a - b|| / ||a||`` over elements that are finite on both sides; None when A is all zero.
        cosine: Cosine of the angle between both, over the same elements; None when one is all zero.
        max_ulp: Largest distance in representable steps, of finite floats; None where dtypes differ or are no floats.
        nan_changed: Changed elements that are NaN on one side, or on both with different bits. They do not count in
            the four numbers above.
        nan_in_a: Those of them that are NaN in A.
        nan_in_b: Those of them that are NaN in B.
        inf_changed: Other changed elements that are infinite on one side or on both. They do not count either.
        num_outside: Elements outside of the tolerance; None when there is none.
        largest_at: Index of the largest difference; of the first changed element when no finite one differs.
        largest_a: The value there on side A; a text where JSON has no such number.
        largest_b: The same on side B.
    """

    num_changed: int
    share_changed: float
    max_abs: int | float | str | None
    relative_l2: float | None
    cosine: float | None
    max_ulp: int | None
    nan_changed: int
    nan_in_a: int
    nan_in_b: int
    inf_changed: int
    num_outside: int | None
    largest_at: Shape | None
    largest_a: int | float | str | None
    largest_b: int | float | str | None


class Differences:
    """The differences of one pair of tensors, as far as they were added.

    Args:
        a: Element type of the first.
        b: Element type of the second.
        tolerance: Largest absolute difference that counts as equal; None when nothing does.
        rtol: To which this share of ``|a|`` is added.

    Attributes:
        num_changed: See ``ValueStats``.
        num_outside: The same; 0 without a tolerance.
    """

    def __init__(self, a: DType, b: DType, *, tolerance: float | None = None, rtol: float = 0.0) -> None:
        self.num_changed = 0
        self.num_outside = 0
        self._a = a
        self._b = b
        self._tolerance = tolerance
        self._rtol = rtol
        self._retyped = a != b
        self._has_ulp = not self._retyped and a.kind in ("float", "float8") and a.pack == 1
        self._is_wide = not {"float64", "complex128"}.isdisjoint((a.name, b.name))
        self._nan = 0
        self._nan_a = 0
        self._nan_b = 0
        self._inf = 0
        self._ulp = 0
        self._max: Any = None
        self._at: int | None = None
        self._values: tuple[Any, Any] | None = None
        self._aa, self._bb, self._ab, self._dd = _Sum(), _Sum(), _Sum(), _Sum()

    def add(self, start: int, a: _Array, b: _Array) -> None:
        """Take elements into account.

        Args:
            start: Number of the first one in row-major order.
            a: As bits (``gather.storage_dtype``), in a row.
            b: As many.
        """
        for begin in range(0, len(a), _BLOCK):
            self._add(start + begin, a[begin : begin + _BLOCK], b[begin : begin + _BLOCK])

    def add_equal(self, a: _Array) -> None:
        """Take elements into account whose bits are equal on both sides: they count in the norms."""
        for begin in range(0, len(a), _BLOCK):
            self._add_equal(as_numbers(a[begin : begin + _BLOCK], self._a))

    def finish(self, shape: Shape) -> ValueStats:
        """Return the statistics of a tensor of this shape, all elements of which were added."""
        at: Shape | None = None
        if self._at is not None:
            at = tuple(int(number) for number in np.unravel_index(self._at, shape)) if shape else ()
        return ValueStats(
            num_changed=self.num_changed,
            share_changed=self.num_changed / max(math.prod(shape), 1),
            max_abs=self._max_abs(),
            relative_l2=self._relative_l2(),
            cosine=self._cosine(),
            max_ulp=self._ulp if self._has_ulp else None,
            nan_changed=self._nan,
            nan_in_a=self._nan_a,
            nan_in_b=self._nan_b,
            inf_changed=self._inf,
            num_outside=None if self._tolerance is None else self.num_outside,
            largest_at=at,
            largest_a=None if self._values is None else plain(self._values[0]),
            largest_b=None if self._values is None else plain(self._values[1]),
        )

    def _max_abs(self) -> int | float | str | None:
        if self._max is not None:
            return plain(self._max)
        return 0.0 if self._a.pack == self._b.pack == 1 else None

    def _relative_l2(self) -> float | None:
        if not self._aa.mantissa:
            return None
        # Exponents of squares are even.
        quotient, exponent = self._dd.mantissa / self._aa.mantissa, self._dd.exponent - self._aa.exponent
        try:
            return math.ldexp(math.sqrt(quotient), exponent // 2)
        except OverflowError:
            return None

    def _cosine(self) -> float | None:
        if not self._aa.mantissa or not self._bb.mantissa:
            return None
        quotient = self._ab.mantissa / math.sqrt(self._aa.mantissa) / math.sqrt(self._bb.mantissa)
        found = math.ldexp(quotient, self._ab.exponent - (self._aa.exponent + self._bb.exponent) // 2)
        return min(max(found, -1.0), 1.0)

    def _add(self, start: int, a: _Array, b: _Array) -> None:
        x, y = as_numbers(a, self._a), as_numbers(b, self._b)
        if not self._retyped:
            changed = bits_differ(a, b)
        elif x is not None and y is not None:
            changed = ~_same_value(x, y)
        else:
            return
        count = int(np.count_nonzero(changed))
        if not count and not self._retyped:
            self._add_equal(x)
            return
        self.num_changed += count
        if x is None or y is None:
            self.num_outside += count if self._tolerance is not None else 0
            self._at = start + int(changed.argmax()) if self._at is None else self._at
            return
        difference = magnitudes(x, y)
        finite = _finite(x, y)
        if finite is not None:
            difference = np.where(finite, difference, 0)
            nan_a, nan_b = changed & np.isnan(x), changed & np.isnan(y)
            nan = nan_a | nan_b
            self._nan += int(np.count_nonzero(nan))
            self._nan_a += int(np.count_nonzero(nan_a))
            self._nan_b += int(np.count_nonzero(nan_b))
            self._inf += int(np.count_nonzero(changed & ~nan & ~finite))
        if self._tolerance is not None:
            self.num_outside += self._count_outside(x, y, difference, finite)
        if count:
            self._note_largest(start, changed, difference, x, y)
        if self._has_ulp:
            first, second = (a, b) if finite is None else (a[finite], b[finite])
            self._ulp = max(self._ulp, max_ulp(first, second, self._a))
        self._add_norms(_real(x, finite), _real(y, finite), difference)

    def _note_largest(self, start: int, changed: _Array, difference: _Array, x: _Array, y: _Array) -> None:
        index = int(difference.argmax())
        largest = difference[index]
        if self._max is not None and largest <= self._max:
            return
        self._max = largest
        if not largest:
            index = int(changed.argmax())
        self._at, self._values = start + index, (x[index], y[index])

    def _count_outside(self, x: _Array, y: _Array, difference: _Array, finite: _Array | None) -> int:
        assert self._tolerance is not None
        size = np.abs(x if x.dtype.kind == "c" else x.astype(np.float64, copy=False))
        with np.errstate(over="ignore", invalid="ignore"):
            inside = difference <= self._tolerance + self._rtol * size
        if finite is not None:
            inside = np.where(finite, inside, _same_value(x, y))
        return len(inside) - int(np.count_nonzero(inside))

    def _add_equal(self, x: _Array | None) -> None:
        if x is not None:
            real = _real(x, _finite(x, x))
            self._add_norms(real, real, None)

    def _add_norms(self, x: _Array, y: _Array, difference: _Array | None) -> None:
        a = b = apart = 0
        if self._is_wide:  # squares may exceed a float64
            if difference is not None:
                halves = 0 if np.isfinite(difference).all() else 1
                difference, apart = _scale(np.ldexp(x, -halves) - np.ldexp(y, -halves))
                apart += halves
            (x, a), (y, b) = _scale(x), _scale(y)
        self._aa.add(_dot(x, x), 2 * a)
        self._bb.add(_dot(y, y), 2 * b)
        self._ab.add(_dot(x, y), a + b)
        if difference is not None:
            difference = difference.astype(np.float64, copy=False)
            self._dd.add(_dot(difference, difference), 2 * apart)


class _Sum:
    """A sum that may exceed a float64: ``mantissa * 2**exponent``."""

    __slots__ = ("exponent", "mantissa")

    def __init__(self) -> None:
        self.mantissa = 0.0
        self.exponent = 0

    def add(self, value: float, exponent: int) -> None:
        if not value:
            return
        if not self.mantissa:
            self.mantissa, self.exponent = value, exponent
            return
        if exponent > self.exponent:
            self.mantissa = math.ldexp(self.mantissa, self.exponent - exponent)
            self.exponent = exponent
        self.mantissa += math.ldexp(value, exponent - self.exponent)


def _scale(values: _Array) -> tuple[_Array, int]:
    """Return values of at most one, and the power of two by which they were divided."""
    exponent = math.frexp(float(np.abs(values).max(initial=0)))[1]
    return np.ldexp(values, -exponent), exponent


def _same_value(x: _Array, y: _Array) -> _Array:
    """Tell which elements have one value; NaN has that of NaN."""
    same: _Array = x == y
    if x.dtype.kind in "fc" and y.dtype.kind in "fc":
        same |= np.isnan(x) & np.isnan(y)
    return same


def _finite(x: _Array, y: _Array) -> _Array | None:
    """Return which elements are finite on both sides; None for all."""
    if x.dtype.kind in "iu" and y.dtype.kind in "iu":
        return None
    found: _Array = np.isfinite(x)
    if y is not x:
        found &= np.isfinite(y)
    return None if found.all() else found


def _real(values: _Array, finite: _Array | None) -> _Array:
    """Return float64 with the same norms and products: parts of complex numbers, and 0 for what does not count."""
    kept = values if finite is None else np.where(finite, values, 0)
    if kept.dtype.kind == "c":
        return kept.view(np.float64)
    return kept.astype(np.float64, copy=False)


def _dot(x: _Array, y: _Array) -> float:
    return float(np.einsum("i,i->", x, y))  # np.dot would start threads of its own
