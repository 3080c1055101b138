"""Put differences into words, and collapse repeated layers into one row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never

from fsdp_ckpt.ops.diff import Change, ObjectDiff, PartDiff, TensorDiff
from fsdp_ckpt.ops.inspect import TensorReport, group_tensors

if TYPE_CHECKING:
    from fsdp_ckpt.run.differences import ValueStats

__all__ = [
    "COLUMNS", "Row", "cells", "count", "describe", "heading", "largest", "number", "object_lines", "single",
    "tensor_rows",
]  # fmt: skip

COLUMNS = ("changed", "max abs", "rel L2", "cosine", "max ulp")
"""What ``cells`` returns."""

_MAX_VALUE = 60
_DIGITS = 17
"""As many make two float64 differ."""
_LONG_LIST = 8
_FEW_ITEMS = 3
_FEW = 1000
_CASTS = {"a-to-b": "B is A rounded", "b-to-a": "A is B rounded", "both": "same values"}
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_WORDS = {
    Change.CHANGED: "changed", Change.RETYPED: "of another dtype", Change.RESHAPED: "of another shape",
    Change.REMOVED: "only in A", Change.ADDED: "only in B", Change.CLOSE: "within the tolerance",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Tensors that differ in the same way, and by name only in numbers of layers.

    Attributes:
        name: One name for all of them: ``layers.{0..31}.weight  x32``.
        tensors: At least one.
    """

    name: str
    tensors: Sequence[TensorDiff]

    @property
    def stats(self) -> list[ValueStats]:
        """Statistics of those that have any."""
        return [tensor.stats for tensor in self.tensors if tensor.stats is not None]

    @property
    def is_measured(self) -> bool:
        """Whether it is a row of numbers; otherwise a line of words says more."""
        tensor = self.tensors[0]
        same = tensor.change in (Change.CHANGED, Change.CLOSE) and tensor.dtype_a == tensor.dtype_b
        return same and bool(self.stats) and single(tensor) is None


def heading(part: PartDiff) -> str:
    """Return names of a part and how many of its tensors differ in which way."""
    name = part.part_a if part.part_a == part.part_b else f"{part.part_a} | {part.part_b}"
    counts = {change: sum(tensor.change is change for tensor in part.tensors) for change in _WORDS}
    shown = [f"{counts[change]} {word}" for change, word in _WORDS.items() if counts[change]]
    shown += [f"{part.num_equal} equal"] if part.num_equal else []
    return f"{name}: {', '.join(shown)}" if shown else name


def tensor_rows(tensors: Sequence[TensorDiff]) -> list[Row]:
    """Collapse repeated layers, and counters of one value under many names."""
    groups: dict[Any, list[TensorDiff]] = {}
    for tensor in tensors:
        values = single(tensor)
        mask = tensor.name.rpartition(".")[2] if values else _NUMBER.sub("#", tensor.name)
        key = (
            mask, values, tensor.change, tensor.dtype_a, tensor.dtype_b, tensor.shape_a, tensor.shape_b, tensor.cast,
        )  # fmt: skip
        groups.setdefault(key, []).append(tensor)
    return [Row(name=_pattern([tensor.name for tensor in group]), tensors=group) for group in groups.values()]


def object_lines(objects: Sequence[ObjectDiff]) -> list[str]:
    """Return a line for each value; one for values that differ alike, and by name only in layers or parameters."""
    groups: dict[Any, list[str]] = {}
    for value in objects:
        head, _, option = value.name.rpartition(".")
        mask = option if head.startswith("param_groups.") else _NUMBER.sub("#", value.name)
        groups.setdefault((mask, _arrow(value)), []).append(value.name)
    return [f"{_pattern(names)}: {arrow}" if names[0] else arrow for (_, arrow), names in groups.items()]


def single(tensor: TensorDiff) -> str | None:
    """Return both values of a tensor of one element, as counters of steps are: they say more than statistics."""
    stats = tensor.stats
    if stats is None or tensor.num_elements != 1 or stats.largest_a is None:
        return None
    return _change(stats)


def cells(row: Row) -> list[str]:
    """Return the numbers of a row, one for each of ``COLUMNS``; of several tensors the worst, marked as a bound.

    Where no finite number differs, there is nothing to measure but how many changed.
    """
    stats, elements = row.stats, sum(tensor.num_elements for tensor in row.tensors)
    changed = sum(item.num_changed for item in stats)
    share = f"{100 * changed / max(elements, 1):.3g} %"
    finite = [item for item in stats if not item.num_changed or item.num_changed > item.nan_changed + item.inf_changed]
    cosines = [f"{item.cosine:.6f}" for item in sorted(finite, key=_by_cosine) if item.cosine is not None]
    return [
        f"{changed} of {number(elements)}" if changed < _FEW and changed < elements else share,
        _bound("≤", [number(item.max_abs) for item in sorted(finite, key=lambda item: -_size(item.max_abs))]),
        _bound("≤", [number(item.relative_l2) for item in sorted(finite, key=lambda item: -_size(item.relative_l2))]),
        _bound("≥", cosines),
        _bound("≤", [number(item.max_ulp) for item in sorted(finite, key=lambda item: -_size(item.max_ulp))]),
    ]


def _by_cosine(stats: ValueStats) -> float:
    return 2.0 if stats.cosine is None else stats.cosine


def _bound(sign: str, worst_first: Sequence[str]) -> str:
    if not worst_first:
        return "-"
    return worst_first[0] if len(set(worst_first)) == 1 else f"{sign} {worst_first[0]}"


def describe(row: Row) -> str:
    """Say what is special about a row; nothing about tensors that have changed and are no more than that."""
    tensor, stats = row.tensors[0], row.stats
    dtypes = [f"{tensor.dtype_a} -> {tensor.dtype_b}"] if tensor.dtype_a != tensor.dtype_b else []
    notes: list[str]
    match tensor.change:
        case Change.CHANGED:
            notes = [values] if (values := single(tensor)) else [] if stats else ["changed"]
        case Change.CLOSE:
            notes = [*dtypes, "close"]
        case Change.REMOVED:
            notes = [f"only in A, {_shape(tensor.shape_a)} {tensor.dtype_a}"]
        case Change.ADDED:
            notes = [f"only in B, {_shape(tensor.shape_b)} {tensor.dtype_b}"]
        case Change.RESHAPED:
            notes = [f"{_shape(tensor.shape_a)} -> {_shape(tensor.shape_b)}", *dtypes]
        case Change.RETYPED:
            notes = [*dtypes, *([_CASTS[tensor.cast]] if tensor.cast else [])]
        case _:
            assert_never(tensor.change)
    if dtypes and stats and tensor.cast != "both":
        found = cells(row)
        notes += [f"max abs {found[1]}", f"rel L2 {found[2]}"]
    if single(tensor) is None:
        notes += _special(stats)
    return ", ".join(notes)


def _special(stats: Sequence[ValueStats]) -> list[str]:
    """Say how many changed elements are no finite numbers, of which there is nothing to measure."""
    counts = [
        (sum(item.nan_changed - item.nan_in_a for item in stats), "became NaN"),
        (sum(item.nan_changed - item.nan_in_b for item in stats), "was NaN"),
        (sum(item.nan_in_a + item.nan_in_b - item.nan_changed for item in stats), "NaN with other bits"),
        (sum(item.inf_changed for item in stats), "inf"),
    ]
    return [f"{many} {what}" for many, what in counts if many]


def largest(rows: Iterable[Row]) -> str | None:
    """Say where the largest difference of some rows is, and both values."""
    found = [
        (tensor.name, tensor.stats)
        for row in rows
        for tensor in row.tensors
        if tensor.stats is not None and tensor.stats.largest_at is not None and tensor.stats.largest_a is not None
    ]
    if not found:
        return None
    name, stats = max(found, key=lambda item: _size(item[1].max_abs))
    where = ", ".join(map(str, stats.largest_at or ()))
    return f"{'largest' if stats.max_abs else 'first'} at {name}[{where}]: {_change(stats)}"


def _change(stats: ValueStats) -> str:
    """Return both values of the largest difference, with as many digits as it takes to tell them apart."""
    a, b = stats.largest_a, stats.largest_b
    for digits in range(3, _DIGITS + 1):
        first, second = number(a, digits), number(b, digits)
        if first != second:
            return f"{first} -> {second}"
    # Integers of more digits than a float has; what remains are NaN.
    return f"{a} -> {b}" if a != b else f"{'NaN' if a == 'nan' else a} with other bits"


def number(value: float | str | None, digits: int = 3) -> str:
    """Return a number with a few digits; texts as they are."""
    if value is None or isinstance(value, str):
        return value or "-"
    return str(value) if isinstance(value, int) and abs(value) < 10**7 else f"{value:.{digits}g}"


def count(many: int, noun: str) -> str:
    """Return ``1 tensor``, ``2 tensors``."""
    return f"{many} {noun}{'' if many == 1 else 's'}"


def _pattern(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    if len({_NUMBER.sub("#", name) for name in names}) > 1:
        heads = {name.partition(".")[0] for name in names}
        return f"{heads.pop() + '.' if len(heads) == 1 else ''}*.{names[0].rpartition('.')[2]}  x{len(names)}"
    alike = [TensorReport(name=name, shape=(), dtype="", shards=1, num_bytes=0) for name in names]
    return f"{group_tensors(alike)[0].pattern}  x{len(names)}"


def _arrow(value: ObjectDiff) -> str:
    if value.is_random:
        return "differs"
    if value.change is not Change.CHANGED:
        side, shown = ("A", value.a) if value.change is Change.REMOVED else ("B", value.b)
        return f"only in {side}, {_value(shown)}"
    if isinstance(value.a, list) and isinstance(value.b, list) and len(value.a) + len(value.b) > _LONG_LIST:
        return _list_change(value.a, value.b)
    first, second = _value(value.a), _value(value.b)
    return f"{first} -> {second}" if first != second else f"{first} differs"


def _list_change(a: list[Any], b: list[Any]) -> str:
    """Say what is only in one of two long lists."""
    signs = (("-", [item for item in a if item not in b]), ("+", [item for item in b if item not in a]))
    shown = ", ".join(f"{sign}{_value(item)}" for sign, items in signs for item in items[:_FEW_ITEMS])
    more = sum(max(len(items) - _FEW_ITEMS, 0) for _, items in signs)
    return f"{shown or 'another order'}{f', … {more} more' if more else ''}"


def _value(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= _MAX_VALUE else shown[: _MAX_VALUE - 2] + " …"


def _size(value: float | str | None) -> float:
    return -1.0 if value is None else float("inf") if isinstance(value, str) else float(value)


def _shape(shape: Sequence[int] | None) -> str:
    return "x".join(map(str, shape or ())) or "scalar"
