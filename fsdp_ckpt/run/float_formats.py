"""How the float types use their bits, so that numbers can be judged without computing with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FLOATS", "FloatFormat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """How a float format uses its bits.

    Attributes:
        itemsize: Bytes.
        sign: The sign bit; the magnitude is below it. 2 ** bits for a format without sign.
        finite: Magnitudes below this one are finite.
        infinity: The magnitude of infinity; None where there is none.
        normal: The smallest normal magnitude; 0 where not even zero is below it.
        nan_is_minus_zero: Whether NaN is the sign alone, as in the ``fnuz`` formats.
    """

    itemsize: int
    sign: int
    finite: int
    infinity: int | None
    normal: int
    nan_is_minus_zero: bool = False


def _ieee(itemsize: int, mantissa_bits: int) -> FloatFormat:
    sign = 1 << (8 * itemsize - 1)
    infinity = sign - (1 << mantissa_bits)
    return FloatFormat(itemsize=itemsize, sign=sign, finite=infinity, infinity=infinity, normal=1 << mantissa_bits)


FLOATS: Mapping[str, FloatFormat] = {
    "float64": _ieee(8, 52),
    "float32": _ieee(4, 23),
    "float16": _ieee(2, 10),
    "bfloat16": _ieee(2, 7),
    "float8_e5m2": _ieee(1, 2),
    "float8_e4m3fn": FloatFormat(itemsize=1, sign=0x80, finite=0x7F, infinity=None, normal=8),
    "float8_e4m3fnuz": FloatFormat(itemsize=1, sign=0x80, finite=0x80, infinity=None, normal=8, nan_is_minus_zero=True),
    "float8_e5m2fnuz": FloatFormat(itemsize=1, sign=0x80, finite=0x80, infinity=None, normal=4, nan_is_minus_zero=True),
    "float8_e8m0fnu": FloatFormat(itemsize=1, sign=0x100, finite=0xFF, infinity=None, normal=0),
}
"""By name of the dtype: all float types but packed float4."""
