"""Count what is special among numbers: NaN, infinities, zeros, denormals; and find the least and the greatest.

Floats are looked at as integers. Four reductions over a block, which keep up with memory, bound all magnitudes in it:
where no number is too small to be normal or too large to be finite, as in nearly all blocks of a healthy checkpoint,
nothing is left to be counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_ckpt.catalog import DTYPES, DType
from fsdp_ckpt.run.float_formats import FLOATS, FloatFormat
from fsdp_ckpt.run.gather import numpy_dtype

__all__ = ["Statistics", "Tally"]

_Array = np.ndarray[Any, np.dtype[Any]]

_COMPLEX_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What was found among the values of a tensor.

    Attributes:
        count: Numbers that were looked at: elements; of a complex tensor, real and imaginary parts; of packed float4,
            bytes.
        nan: NaN among them.
        positive_inf: Infinities above zero.
        negative_inf: Infinities below zero.
        zeros: Zeros of either sign.
        denormals: Floats that are not zero, but below the smallest normal number.
        minimum: The least finite number; None where there is none, and for complex tensors and packed float4.
        maximum: The greatest finite number; None likewise.
        is_constant: Whether all elements are one finite number; False when there are none.
    """

    count: int
    nan: int
    positive_inf: int
    negative_inf: int
    zeros: int
    denormals: int
    minimum: float | None
    maximum: float | None
    is_constant: bool

    @property
    def inf(self) -> int:
        """Infinities of either sign."""
        return self.positive_inf + self.negative_inf


class Tally:
    """Adds up what blocks of a tensor's elements hold. For one thread at a time.

    Args:
        dtype: Element type.
    """

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype
        part = DTYPES.get(_COMPLEX_PARTS.get(dtype.name, ""))
        self._parts = [_Count(part), _Count(part)] if part else [_Count(dtype)]

    def add(self, block: _Array) -> None:
        """Take elements into account.

        Args:
            block: Their bytes, contiguous and aligned, as uint8; a whole number of elements.
        """
        words = block.view(self._parts[0].words)
        for number, part in enumerate(self._parts):
            part.add(words[number :: len(self._parts)])

    def merge(self, other: Tally, *, times: int = 1, neg: bool = False, conj: bool = False) -> None:
        """Take in what another tally of the same dtype has found.

        Args:
            other: The tally; it is left as it is.
            times: How often each of its elements stands in the tensor (torch's ``expand``).
            neg: Whether the tensor's elements are the negatives of those that were looked at.
            conj: Whether they are the conjugates.
        """
        for number, (mine, its) in enumerate(zip(self._parts, other._parts, strict=True)):
            mine.merge(its, times, negate=neg != (conj and number == 1))

    def result(self) -> Statistics:
        """Return what has been found so far."""
        total = _Count(self._dtype)
        for part in self._parts:
            total.merge(part, 1, negate=False)
        minimum = maximum = None
        if len(self._parts) == 1 and self._dtype.pack == 1:
            minimum, maximum = total.value(total.lowest), total.value(total.highest)
        return Statistics(
            count=total.count,
            nan=total.nan,
            positive_inf=total.positive_inf,
            negative_inf=total.negative_inf,
            zeros=total.zeros,
            denormals=total.denormals,
            minimum=minimum,
            maximum=maximum,
            is_constant=all(part.is_constant for part in self._parts),
        )


class _Count:
    """Counts of one real dtype. Extremes are kept as numbers of the format: its values in order, zero is number 0."""

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype
        self._format = FLOATS.get(dtype.name)
        self.words = np.dtype(f"<u{self._format.itemsize if self._format else min(dtype.itemsize, 8)}")
        self._signed = np.dtype(f"<i{self.words.itemsize}")
        self.count = self.nan = self.positive_inf = self.negative_inf = self.zeros = self.denormals = 0
        self.lowest: int | None = None
        self.highest: int | None = None
        # Room for a block, used again.
        self._magnitudes: _Array = np.empty(0, dtype=self.words)
        self._flags: _Array = np.empty(0, dtype=np.bool_)

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same finite one."""
        special = self.nan + self.positive_inf + self.negative_inf
        return self.lowest is not None and self.lowest == self.highest and not special

    def merge(self, other: _Count, times: int, *, negate: bool) -> None:
        self.count += times * other.count
        self.nan += times * other.nan
        self.zeros += times * other.zeros
        self.denormals += times * other.denormals
        above, below, ends = other.positive_inf, other.negative_inf, [other.lowest, other.highest]
        if negate:
            above, below, ends = below, above, [None if end is None else -end for end in ends]
        self.positive_inf += times * above
        self.negative_inf += times * below
        self._extend(*(end for end in ends if end is not None))

    def value(self, number: int | None) -> float | None:
        """Return the value that stands at this place of the format."""
        if number is None or self._format is None:
            return number
        bits = number if number >= 0 else self._format.sign - number
        return float(np.array([bits], dtype=self.words).view(numpy_dtype(self._dtype))[0])

    def add(self, words: _Array) -> None:
        if not words.size:
            return
        self.count += words.size
        if self._format is None:
            numbers = words.view(self._signed) if self._dtype.name.startswith("int") else words
            self._extend(int(np.minimum.reduce(numbers)), int(np.maximum.reduce(numbers)))
            self.zeros += words.size - int(np.count_nonzero(words))
            return
        lowest, highest, smallest, largest = self._ends(words, self._format.sign)
        if largest == 0 and self._format.normal and not self._format.nan_is_minus_zero:
            self.zeros += words.size
        elif smallest < self._format.normal or largest >= self._format.finite:
            finite = self._count_specials(words, self._format, smallest, largest)
            if not finite.size:
                return
            if finite.size < words.size:
                lowest, highest, _, _ = self._ends(finite, self._format.sign)
        self._extend(lowest, highest)

    def _ends(self, words: _Array, sign: int) -> tuple[int, int, int, int]:
        """Return the least and the greatest number among floats, the smallest and the largest magnitude."""
        least, most = int(np.minimum.reduce(words)), int(np.maximum.reduce(words))
        if most < sign:
            return least, most, least, most
        if least >= sign:
            return sign - most, sign - least, least - sign, most - sign
        # As two's complement, negative numbers come before all others, and the smallest of them comes first.
        numbers = words.view(self._signed)
        first, last = int(np.minimum.reduce(numbers)), int(np.maximum.reduce(numbers))
        return sign - most, last, min(least, first + sign), max(last, most - sign)

    def _count_specials(self, words: _Array, form: FloatFormat, smallest: int, largest: int) -> _Array:
        """Count what the bounds of the magnitudes do not exclude; return the finite ones of the words."""
        if len(self._magnitudes) < words.size:
            self._magnitudes, self._flags = np.empty(words.size, words.dtype), np.empty(words.size, np.bool_)
        flags = self._flags[: words.size]
        magnitudes = np.bitwise_and(words, form.sign - 1, out=self._magnitudes[: words.size])
        finite, nan = words, 0
        if form.nan_is_minus_zero:
            nan = int(np.count_nonzero(np.equal(words, form.sign, out=flags)))
            finite = words[~flags] if nan else words
        elif largest >= form.finite:
            nan = int(np.count_nonzero(np.greater_equal(magnitudes, form.finite, out=flags)))
            finite = words[~flags]
            if form.infinity is not None:
                above = int(np.count_nonzero(np.equal(words, form.infinity, out=flags)))
                below = int(np.count_nonzero(np.equal(words, form.infinity | form.sign, out=flags)))
                self.positive_inf += above
                self.negative_inf += below
                nan -= above + below
        self.nan += nan
        if smallest < form.normal:
            zeros = words.size - int(np.count_nonzero(magnitudes))
            self.zeros += zeros - nan if form.nan_is_minus_zero else zeros
            # Zero becomes the largest of all.
            np.subtract(magnitudes, 1, out=magnitudes)
            self.denormals += int(np.count_nonzero(np.less(magnitudes, form.normal - 1, out=flags)))
        return finite

    def _extend(self, *numbers: int) -> None:
        if numbers:
            self.lowest = min(numbers) if self.lowest is None else min(self.lowest, *numbers)
            self.highest = max(numbers) if self.highest is None else max(self.highest, *numbers)
