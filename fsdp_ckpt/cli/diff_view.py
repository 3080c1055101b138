"""Show how two checkpoints differ: a verdict, what differs in each part, what was left aside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.diff_rows import Row, cells, count, describe, heading, largest, number, object_lines, tensor_rows
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.diff import DiffReport, PartDiff
from fsdp_ckpt.units import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["show_diff"]

_MAX_ROWS = 40
_WIDE = 100
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
    console.print(_text(_verdict(report), "green" if report.is_equal else "bold"), soft_wrap=True)
    for label, path, root, title, world_size in (
        ("A", report.a, report.root_a, report.title_a, report.world_size_a),
        ("B", report.b, report.root_b, report.title_b, report.world_size_b),
    ):
        place = path if path.startswith(root) else root  # a file, or the folder that was found below
        ranks = f", {count(world_size, 'rank')}" if world_size else ""
        console.print(_text(f"  {label}  {place}  [{title}{ranks}]", "dim"), soft_wrap=True)
    left = _MAX_ROWS
    for part in report.parts:
        if not part.is_equal or part.notes or part.tied or part.num_close:
            console.print()
            console.print(_text(heading(part), "bold"))
            left = _show_stat(console, part) if stat else _show_part(console, part, left)
            _show_remarks(console, part)
    _show_sides(console, report)


def _verdict(report: DiffReport) -> str:
    if report.is_equal:
        values = sum(part.num_objects for part in report.parts)
        close = sum(part.num_close for part in report.parts)
        what = count(report.num_tensors, "tensor") + (f", {count(values, 'value')}" if values else "")
        within = f"; {close} of them within the tolerance" if close else ""
        read = "recorded checksums are equal, nothing was read"
        if report.read_bytes:
            read = f"{format_size(report.read_bytes)} read"
        return f"equal: {what}, {format_size(report.num_bytes / 2)}{within}; {read}"
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
    unread = f", {report.num_settled} of them without reading" if report.num_settled else ""
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
        console.print(_text(largest(measured) or "", "dim"), soft_wrap=True)
    lines = [f"{row.name}: {describe(row)}" for row in rows if not row.is_measured] + object_lines(part.objects)
    for line in lines[: max(left - len(measured), 0)]:
        console.print(_text(line), soft_wrap=True)
    hidden = len(measured) + len(lines) - max(left, 0)
    if hidden > 0:
        console.print(_text(f"… {hidden} more; --stat or --json for all", "dim"))
    return left - len(measured) - len(lines)


def _show_table(console: Console, rows: Sequence[Row]) -> None:
    from rich import box
    from rich.table import Table

    wide = console.width >= _WIDE
    longest = max(len(printable(row.name)) for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("tensor", overflow="fold", min_width=min(longest, console.width // 2 - 6))
    for name in ("changed", "max abs", "rel L2", *(["cosine", "max ulp"] if wide else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in rows:
        table.add_row(_text(row.name), *cells(row, wide=wide), describe(row))
    console.print(table)


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
        console.print(_text("".join(object_lines([value]))), soft_wrap=True)
    return 0


def _show_remarks(console: Console, part: PartDiff) -> None:
    remarks = [f"{name} is {kept}, which stands on both sides: no difference" for name, kept in part.tied.items()]
    for remark in ([part.incomparable] if part.incomparable else []) + remarks + list(part.notes):
        console.print(_text(remark), soft_wrap=True)


def _show_sides(console: Console, report: DiffReport) -> None:
    lines = []
    for label, names in (("A", report.only_in_a), ("B", report.only_in_b)):
        lines += [f"only in {label}: {', '.join(names)}"] if names else []
    for label, other, names in (("A", "B", report.aside_a), ("B", "A", report.aside_b)):
        if names:
            lines.append(f"not compared, as {other} is a model and nothing else: {', '.join(names)} of {label}")
    if lines:
        console.print()
    for line in lines:
        console.print(_text(line), soft_wrap=True)


def _text(content: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(content), style=style)
