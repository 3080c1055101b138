"""Show the checkpoints of a run, newest first."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from fsdp_ckpt.cli import out
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.list_run import ListedCheckpoint, ListReport
from fsdp_ckpt.units import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["show_list"]

_STYLES = {"complete": "green", "incomplete": "bold red", "model only": "yellow", "damaged": "bold red"}
_MAX_NAME = 30
_MAX_VALUES = 3


def show_list(report: ListReport, *, console: Console | None = None) -> None:
    """Print a report to stdout, or to the console given."""
    from rich import box
    from rich.table import Table

    console = console or out.console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("checkpoint", overflow="fold", min_width=10, max_width=_MAX_NAME)
    for name in ("age", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("notes", overflow="fold")
    for item in report.checkpoints:
        state = _text(item.state, _STYLES[item.state])
        table.add_row(_text(item.name), format_age(item.age_s), format_size(item.num_bytes), state, _remark(item))
    for left in report.leftovers:
        name, size = left.path.rpartition("/.")[2].partition(".fsdp-ckpt-")[0], format_size(left.num_bytes)
        why = "a save or removal that died, or goes on"
        table.add_row(_text(name, "dim"), format_age(left.age_s), size, _text("unfinished", "dim"), why)
    console.print(table)
    console.print()
    total = f"{report.num_complete} of {len(report.checkpoints)} complete, {format_size(report.num_bytes)}"
    if report.deep:
        num_compared = sum(item.compared for item in report.checkpoints)
        total += f"; checksums compared, right in {num_compared}"
        if any(not item.own for item in report.checkpoints):
            total += " (there are none for files of other writers)"
    console.print(_text(total, "dim"), soft_wrap=True)
    if report.latest is None:
        broken = shlex.quote(report.checkpoints[0].path)
        console.print(_text(f"resuming would find nothing whole; next: fsdp-ckpt validate {broken}"), soft_wrap=True)


def _remark(item: ListedCheckpoint) -> Text:
    """Say which one resuming takes, what is wrong, or the first numbers that were saved with it."""
    numbers = [
        f"{name} {value:.4g}"
        for name, value in item.values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    ]
    texts = ["resume takes this"] if item.latest else []
    texts += [item.why] if item.why else numbers[:_MAX_VALUES]
    return _text("; ".join(texts), "bold" if item.latest else "")


def _text(content: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(content), style=style)


def format_age(seconds: float) -> str:
    """Return how long ago something was: ``40 s``, ``12 min``, ``5 h``, ``3 d``.

    Example:
        >>> format_age(40), format_age(3600), format_age(86400 * 400)
        ('40 s', '60 min', '400 d')
    """
    for unit, length, limit in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 36)):
        if seconds / length < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
