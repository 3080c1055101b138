"""Sizes and durations for people: ``5GB`` is 10^9 bytes as in Hugging Face shards, ``4GiB`` is 2^30."""

from __future__ import annotations

import re

from fsdp_ckpt.errors import UsageError

__all__ = ["counted", "format_count", "format_duration", "format_rate", "format_size", "parse_size"]

_FACTORS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _FACTORS[f"{_letter}B"] = _FACTORS[_letter] = 1000**_power
    _FACTORS[f"{_letter}IB"] = 1024**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Return the number of bytes that a text such as ``5GB``, ``4GiB``, ``200MB`` or ``1e9`` means.

    Args:
        text: A number with an optional unit, upper or lower case; an int is taken as bytes.

    Returns:
        Bytes, at least 1.

    Raises:
        UsageError: The text is not a size, or it is below one byte.

    Example:
        >>> parse_size("5GB"), parse_size("4 GiB")
        (5000000000, 4294967296)
    """
    if isinstance(text, int):
        size = text
    elif re.fullmatch(r"\s*\d+(\.\d+)?[eE]\+?\d{1,2}\s*", text):
        size = int(float(text))
    else:
        match = _SIZE.fullmatch(text)
        factor = _FACTORS.get(match[2].upper()) if match else None
        if match is None or factor is None:
            raise UsageError(f"`{text}` is not a size", hint="write it as 5GB (10^9 bytes), 4GiB (2^30) or 200MB")
        number = match[1]
        size = int(number) * factor if number.isdigit() else round(float(number) * factor)
    if size < 1:
        raise UsageError(f"`{text}` is not a size of at least one byte", hint="write it as 5GB, 4GiB or 200MB")
    return size


def format_size(num_bytes: float) -> str:
    """Return a size with three significant digits and a decimal unit, as ``2.31 GB``.

    Example:
        >>> format_size(488), format_size(2_310_000_000)
        ('488 B', '2.31 GB')
    """
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def counted(number: int, noun: str) -> str:
    """Return a number of things.

    Example:
        >>> counted(1, "tensor"), counted(2, "tensor")
        ('1 tensor', '2 tensors')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_count(number: int) -> str:
    """Return a count as people say it: ``488``, ``1.24 M``, ``8.03 B`` (10^9).

    Example:
        >>> format_count(8_030_261_248)
        '8.03 B'
    """
    value = float(number)
    for unit in ("", " K", " M", " B", " T"):
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if not unit or value >= 99.95 else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} Q"


def format_duration(seconds: float) -> str:
    """Return ``0.4 s``, ``12 s``, ``3:05`` or ``1:02:03``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_rate(num_bytes: float, seconds: float) -> str:
    """Return bytes per second, as ``1.94 GB/s``."""
    return f"{format_size(num_bytes / seconds)}/s" if seconds > 0 else "-"
