"""How findings are worded: names, shapes and ranks in a sentence, and one sentence for many findings of a kind."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator

from fsdp_ckpt.catalog import Problem, Severity, Shape
from fsdp_ckpt.findings import KINDS
from fsdp_ckpt.units import counted

__all__ = ["capped", "counted", "few", "finding", "rank_ranges", "shape_text"]

_CAP = 50
_SHOWN = 3


def finding(name: str, where: str, message: str, *, severity: Severity | None = None) -> Problem:
    """Return a finding of a kind.

    Args:
        name: The kind, see ``findings``.
        where: Tensor, file or part.
        message: One sentence with the facts.
        severity: Where it is not as bad, or worse, than usual.
    """
    return Problem(severity=severity or KINDS[name].severity, code=name, where=where, message=message)


def capped(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield the first fifty, and one that tells the number of the rest."""
    rest = iter(problems)
    yield from itertools.islice(rest, _CAP)
    last, more = None, 0
    for last in rest:  # noqa: B007  # the last one stands for all
        more += 1
    if last is not None:
        message = last.message if more == 1 else f"… and {more} more of this kind"
        yield Problem(severity=last.severity, code=last.code, where=last.where, message=message)


def few(names: Collection[str]) -> str:
    """Return the first names and how many more there are.

    Example:
        >>> few(["a", "b", "c", "d", "e"])
        '`a`, `b`, `c` and 2 more'
    """
    shown = ", ".join(f"`{name}`" for name in itertools.islice(names, _SHOWN))
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return ranks in a sentence.

    Example:
        >>> rank_ranges([3]), rank_ranges([0, 4, 5, 6, 7])
        ('rank 3', 'ranks 0, 4-7')
    """
    listed = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in listed:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = f" and {len(shown) - 8} more ranges" if len(shown) > 8 else ""
    return f"rank{'' if len(listed) == 1 else 's'} {', '.join(shown[:8])}{more}"


def shape_text(shape: Shape) -> str:
    """Return a shape as Python writes it."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
