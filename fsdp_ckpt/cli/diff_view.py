"""Show how two checkpoints differ: a verdict, what differs in each part, what was left aside."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.diff_rows import (
    COLUMNS,
    Row,
    cells,
    count,
    describe,
    heading,
    largest,
    number,
    object_lines,
    tensor_rows,
)
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.diff import DiffReport, PartDiff
from fsdp_ckpt.units import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["show_diff"]

_MAX_ROWS = 40
_GAP = "   "
_EXPENDABLE = 3
"""So many of the last columns are left out where there is no room."""
_MAX_STAT_NAME = 48
_MAX_STAT_WIDTH = 100


def show_diff(
    report: DiffReport,
    *,
    stat: bool = False,
    name_only: bool = False,
    quiet: bool = False,
    console: Console | None = None,
) -> None:
    """Print a report to stdout, or to the console given; what was chosen for the user goes to stderr."""
    if quiet:
        if not report.is_equal:
            print(printable(f"{report.a} and {report.b} differ"))
        return
    for note in report.notes:
        out.note(note)
    if name_only:
        for names in _names(report):
            print("\t".join(map(printable, names)))
        return
    console = console or out.console()
    _say(console, _verdict(report), "green" if report.is_equal else "bold")
    for label, path, root, title, world_size in (
        ("A", report.a, report.root_a, report.title_a, report.world_size_a),
        ("B", report.b, report.root_b, report.title_b, report.world_size_b),
    ):
        is_below = path != root and PurePath(root).is_relative_to(path)  # the folder that was found there
        place = root if is_below else path
        ranks = f", {count(world_size, 'rank')}" if world_size else ""
        console.print(_text(f"  {label}  {place}  [{title}{ranks}]", "dim"), soft_wrap=True)
    left = _MAX_ROWS
    for part in report.parts:
        if not part.is_equal or part.notes or part.tied or part.num_close:
            console.print()
            _say(console, heading(part), "bold")
            left = _show_stat(console, part) if stat else _show_part(console, part, left)
            _show_remarks(console, part)
    _show_sides(console, report)


def _verdict(report: DiffReport) -> str:
    by_checksum = report.num_settled - report.num_same_file
    if report.is_equal:
        values = sum(part.num_objects for part in report.parts)
        close = sum(part.num_close for part in report.parts)
        all_by_checksum = by_checksum == report.num_tensors > 0
        unread = "bytes were not read, --full reads them"
        if not all_by_checksum:
            unread = f"{by_checksum} of them by recorded checksums, their {unread}" if by_checksum else ""
        facts = [
            f"{close} of them within the tolerance" if close else "",
            f"{report.num_same_file} of them the same file on both sides" if report.num_same_file else "",
            unread,
            f"{format_size(report.read_bytes)} read" if report.read_bytes else "",
        ]
        what = count(report.num_tensors, "tensor") + (f", {count(values, 'value')}" if values else "")
        head = "equal by recorded checksums" if all_by_checksum else "equal"
        return "; ".join([f"{head}: {what}, {format_size(report.num_bytes / 2)}", *filter(None, facts)])
    tensors = sum(len(part.different) for part in report.parts)
    objects = sum(len(part.objects) for part in report.parts)
    parts = len(report.only_in_a) + len(report.only_in_b)
    lost = [part.part_a for part in report.parts if part.incomparable]
    found = [
        *([count(tensors, "tensor")] if tensors else []),
        *([count(objects, "value")] if objects else []),
        *([f"{count(parts, 'part')} on one side only"] if parts else []),
        *([f"{', '.join(lost)} cannot be matched"] if lost else []),
    ]
    same = f"{report.num_equal} of {count(report.num_tensors, 'tensor')} equal"
    unread = f", {by_checksum} of them by recorded checksums (--full reads them)" if by_checksum else ""
    return f"different: {', '.join(found)}; {same}{unread}"


def _names(report: DiffReport) -> Iterable[tuple[str, ...]]:
    for part in report.parts:
        if part.incomparable:
            yield (part.part_a,)
        names = [*(tensor.name for tensor in part.different), *(value.name for value in part.objects)]
        yield from ((part.part_a, name) for name in names)
    yield from ((name,) for name in (*report.only_in_a, *report.only_in_b))


def _show_part(console: Console, part: PartDiff, left: int) -> int:
    """Print a part as a table and lines; return how many more rows may follow."""
    rows = tensor_rows(part.tensors)
    measured = [row for row in rows if row.is_measured]
    if measured and left > 0:
        _show_table(console, measured[:left])
        _say(console, largest(measured) or "", "dim")
    lines = [f"{row.name}: {describe(row)}" for row in rows if not row.is_measured] + object_lines(part.objects)
    for line in lines[: max(left - len(measured), 0)]:
        _say(console, line)
    hidden = len(measured) + len(lines) - max(left, 0)
    if hidden > 0:
        console.print(_text(f"… {hidden} more; --stat or --json for all", "dim"))
    return left - len(measured) - len(lines)


def _show_table(console: Console, rows: Sequence[Row]) -> None:
    """Print numbers in columns; rather than that names break, columns are left out, and long names get a line."""
    from rich.cells import cell_len

    names = ["tensor", *(printable(row.name) for row in rows)]
    notes = [printable(describe(row)) for row in rows]
    notes = ["note" if any(notes) else "", *notes]
    columns = [[head, *texts] for head, *texts in zip(COLUMNS, *map(cells, rows), strict=True)]
    longest = max(map(cell_len, names))
    left_out: list[str] = []
    while (room := _room(console, columns, notes)) < longest and len(left_out) < _EXPENDABLE:
        left_out.append(columns.pop()[0])
    room = max(min(longest, room), cell_len(names[0]))
    widths = [max(map(len, column)) for column in columns]
    for row_number, (name, note, *texts) in enumerate(zip(names, notes, *columns, strict=True)):
        shown = name
        if cell_len(name) > room:
            console.print(_text(name), soft_wrap=True)
            shown = ""
        numbers = [text.rjust(width) for text, width in zip(texts, widths, strict=True)]
        line = _GAP.join([shown + " " * (room - cell_len(shown)), *numbers, note]).rstrip()
        console.print(_text(line, "" if row_number else "bold"), soft_wrap=True)
        if not row_number:
            console.print("─" * (room + console.width - _room(console, columns, notes)), soft_wrap=True)
    if left_out:
        _say(console, f"no room for {', '.join(reversed(left_out))}: --json has all", "dim")


def _room(console: Console, columns: Sequence[Sequence[str]], notes: Sequence[str]) -> int:
    """Return how wide names may be beside the other columns."""
    widths = [max(map(len, column)) for column in (*columns, notes)]
    return console.width - sum(len(_GAP) + width for width in widths if width)


def _show_stat(console: Console, part: PartDiff) -> int:
    """Print a line for every tensor, with a bar for its relative L2, and all values."""
    rows = [Row(name=tensor.name, tensors=[tensor]) for tensor in part.tensors]
    longest = min(max((len(printable(row.name)) for row in rows), default=0), _MAX_STAT_NAME)
    sizes = [row.stats[0].relative_l2 or 0.0 for row in rows if row.is_measured]
    most = max(sizes, default=0.0)
    room = max(min(console.width, _MAX_STAT_WIDTH) - longest - 20, 8)
    for row in rows:
        name = printable(row.name)
        if len(name) > longest:
            name = "…" + name[1 - longest :]
        shown = describe(row)
        if row.is_measured:
            size = row.stats[0].relative_l2  # None where A is zero: no bar is long enough
            bar = "█" * (room if size is None else max(1, round(room * size / most)) if most else 1)
            shown = f"{number(size):>8} {bar} {shown}".rstrip()
        console.print(_text(f"{name:<{longest}} | {shown}"), soft_wrap=True)
    for value in part.objects:
        _say(console, "".join(object_lines([value])))
    return 0


def _show_remarks(console: Console, part: PartDiff) -> None:
    remarks = [f"{name} is {kept}, which stands on both sides: no difference" for name, kept in part.tied.items()]
    for remark in ([part.incomparable] if part.incomparable else []) + remarks + list(part.notes):
        _say(console, remark)


def _show_sides(console: Console, report: DiffReport) -> None:
    lines = []
    for label, names in (("A", report.only_in_a), ("B", report.only_in_b)):
        lines += [f"only in {label}: {', '.join(names)}"] if names else []
    for label, other, names in (("A", "B", report.aside_a), ("B", "A", report.aside_b)):
        if names:
            lines.append(
                f"not compared, as {other} holds models only: {', '.join(names)} of {label}; to insist, name them: "
                f"--part {shlex.quote(names[0])}"
            )
    if lines:
        console.print()
    for line in lines:
        _say(console, line)


def _say(console: Console, text: str, style: str = "") -> None:
    """Print a line, wrapped between words where it is longer than the terminal."""
    lines = textwrap.wrap(printable(text), console.width, break_long_words=False, break_on_hyphens=False)
    for line in lines:
        console.print(_text(line, style), soft_wrap=True)


def _text(content: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(content), style=style)
