"""From what people write to what is meant: ``full_shard``, ``1`` and ``FULL_SHARD`` are one value, ``1e8`` is a number.

Every function takes a value as YAML, an environment variable or Python gives it, and raises ``ValueError`` with what
is allowed; who calls adds the key and where it stands.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["as_boolean", "as_choice", "as_integer", "as_names", "as_text", "closest", "is_unset"]

_TRUE = frozenset({"true", "yes", "y", "on", "1", "t"})
_FALSE = frozenset({"false", "no", "n", "off", "0", "f"})


def is_unset(value: Any) -> bool:
    """Tell whether a value says nothing: None, or an empty text or ``none``, as templates leave it."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null"))


def as_boolean(value: Any) -> bool:
    """Read a truth value: a bool, 0 or 1, or a word of YAML's and Accelerate's in any case.

    Example:
        >>> as_boolean("False"), as_boolean("yes")
        (False, True)
    """
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("allowed: true, false")


def as_integer(value: Any, *, minimum: int = 0) -> int:
    """Read a whole number; ``1e8`` and ``100_000_000`` are the same. PyYAML gives ``1e8`` as a text.

    Example:
        >>> as_integer("1e8")
        100000000
    """
    wanted = f"allowed: a whole number from {minimum}, such as {max(minimum, 1)} or 1e8"
    try:
        number = value if isinstance(value, int) else _whole(float(str(value).strip()))
    except (ValueError, OverflowError):
        number = None
    if number is None or isinstance(number, bool) or number < minimum:
        raise ValueError(wanted)
    return number


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError
    return int(number)


def as_choice(value: Any, choices: Sequence[str], *, first: int = 1) -> str:
    """Read one of some names: in any case, or by its number.

    Args:
        value: A name, a number or its digits, or an enumeration member of torch's, which counts by its name.
        choices: The names, in the order of their numbers.
        first: Number of the first of them; 0 when the names have no numbers that people use.
    """
    listed = ", ".join(f"{first + i} {name}" for i, name in enumerate(choices)) if first else ", ".join(choices)
    name = str(getattr(value, "name", value)).strip()
    for choice in choices:
        if choice.lower() == name.lower():
            return choice
    if first and not isinstance(value, bool) and name.isdecimal() and 0 <= int(name) - first < len(choices):
        return choices[int(name) - first]
    near = closest(name.upper(), choices)
    raise ValueError(f"allowed: {listed}" + (f"; did you mean {near}?" if near else ""))


def as_names(value: Any) -> tuple[str, ...]:
    """Read names that are separated by commas, or a list of them.

    Example:
        >>> as_names("BertLayer, BertEmbeddings")
        ('BertLayer', 'BertEmbeddings')
    """
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple | set | frozenset) or not all(isinstance(item, str) for item in items):
        raise ValueError("allowed: names separated by commas, or a list of them")
    ordered = sorted(items) if isinstance(items, set | frozenset) else items
    return tuple(name for item in ordered if (name := item.strip().strip("`'\"")))


def as_text(value: Any) -> str:
    """Read a text."""
    if isinstance(value, str):
        return value
    raise ValueError("allowed: a text")


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like this one; None when none is."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
