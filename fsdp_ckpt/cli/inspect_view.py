"""Show a checkpoint: a card, the parts, and what was asked for."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fsdp_ckpt.catalog import Problem
from fsdp_ckpt.cli import out
from fsdp_ckpt.layouts.elsewhere import ELSEWHERE
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.inspect import InspectReport, PartReport, group_tensors
from fsdp_ckpt.units import counted, format_count, format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["show_inspect"]

_MAX_GROUPS = 60
_MAX_SHARDS = 64
_MAX_PROBLEMS = 12
_BAR = 24
_MAX_DEPTH = 40


def show_inspect(
    report: InspectReport,
    *,
    tree: bool = False,
    tensors: bool = False,
    shards: bool = False,
    objects: bool = False,
    quiet: bool = False,
    console: Console | None = None,
) -> None:
    """Print a report to stdout, or to the console given; where a folder below was chosen, say so on stderr."""
    if quiet:
        total = format_size(sum(part.num_bytes for part in report.parts))
        state = "complete" if report.complete else "incomplete"
        print("\t".join([report.layout, state, total, printable(report.root)]))
        return
    console = console or out.console()
    if report.path.rstrip("/") != report.root.rstrip("/") and not report.path.startswith(report.root):
        out.note(f"reading {report.root}")
    _card(console, report)
    console.print(_parts(report.parts, wide=console.width >= 90))
    for part in report.parts:
        if tensors:
            _tensors(console, part)
        elif tree and part.num_tensors:
            _tree(console, part)
        elif not (shards or objects) and part.role in ("model", "other") and part.num_tensors:
            _groups(console, part)
        if shards and part.shards:
            _shards(console, part)
        if objects and part.objects:
            _objects(console, part)
    _problems(console, report)


def _text(content: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(content), style=style)


def _table(*columns: tuple[str, str], title: str | None = None) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=None if title is None else _text(title), title_justify="left",
        title_style="bold", header_style="bold", show_edge=False,
    )  # fmt: skip
    for name, align in columns:
        table.add_column(
            name, justify="right" if align == "right" else "left", overflow="fold", no_wrap=align in ("right", "whole")
        )
    return table


def _card(console: Console, report: InspectReport) -> None:
    state = _text("complete", "green") if report.complete else _text("INCOMPLETE", "bold red")
    console.print(_text(report.title, "bold"), state)
    writers = {part.writer for part in report.parts if part.writer}
    roots = [("path", report.root), *(("and", root) for root in report.other_roots)]
    facts = [*roots, *([("written by", ", ".join(sorted(writers)))] if writers else [])]
    if report.step is not None:
        facts.append(("step", str(report.step)))
    if report.world_size is not None:
        facts.append(("ranks", str(report.world_size)))
    facts += report.facts
    if report.fetched_bytes is not None:
        facts.append(("fetched", f"{format_size(report.fetched_bytes)} in {counted(report.requests or 0, 'request')}"))
    if report.side_files:
        names = [file.rpartition("/")[2] for file in report.side_files]
        facts.append(("beside it", ", ".join(names[:6]) + (", …" if len(names) > 6 else "")))
    for name, value in facts:
        console.print(_text(f"  {name:<12}", "dim"), _text(value), sep="")
    console.print()


def _parts(parts: Iterable[PartReport], *, wide: bool) -> Table:
    columns = [("part", "whole"), ("role", ""), ("tensors", "right"), ("size", "right"), ("dtypes", ""), ("state", "")]
    if wide:
        columns.insert(3, ("parameters", "right"))
    table = _table(*columns)
    for part in parts:
        state = _text("ok", "green") if part.complete and not part.problems else _text("ok, see below", "yellow")
        if not part.complete:
            state = _text("incomplete", "bold red")
        if part.flat:
            state = _text("flat", "yellow")
        cells: list[Text | str] = [
            _text(part.name),
            part.role,
            str(part.num_tensors),
            format_size(part.num_bytes or part.file_bytes),
        ]
        if wide:
            cells.insert(3, format_count(part.num_parameters))
        table.add_row(*cells, _dtypes(part), state)
    return table


def _dtypes(part: PartReport) -> str:
    shown = list(part.dtypes)
    return ", ".join(shown[:2]) + (f", +{len(shown) - 2}" if len(shown) > 2 else "")


def _groups(console: Console, part: PartReport) -> None:
    groups = group_tensors(part.tensors)
    table = _table(
        ("tensor", ""),
        ("", "right"),
        ("shape", "right"),
        ("dtype", ""),
        ("shards", "right"),
        ("size", "right"),
        title=part.name,
    )
    for group in groups[:_MAX_GROUPS]:
        table.add_row(
            _text(group.pattern), f"x{group.count}" if group.count > 1 else "", _shape(group.shape), group.dtype,
            str(group.shards), format_size(group.num_bytes),
        )  # fmt: skip
    console.print()
    console.print(table)
    if len(groups) > _MAX_GROUPS:
        console.print(_text(f"… {len(groups) - _MAX_GROUPS} more rows; --tensors lists all", "dim"))


def _tensors(console: Console, part: PartReport) -> None:
    if not part.tensors:
        return
    table = _table(
        ("tensor", ""), ("shape", "right"), ("dtype", ""), ("shards", "right"), ("size", "right"), title=part.name
    )
    for tensor in part.tensors:
        name = tensor.name + (f"  [{tensor.placements}]" if tensor.placements else "")
        table.add_row(
            _text(name), _shape(tensor.shape), tensor.dtype, str(tensor.shards), format_size(tensor.num_bytes)
        )
    console.print()
    console.print(table)


def _tree(console: Console, part: PartReport) -> None:
    from rich.tree import Tree

    sizes: dict[tuple[str, ...], int] = {}
    for group in group_tensors(part.tensors):
        path = _components(group.pattern)
        for depth in range(len(path) + 1):
            sizes[path[:depth]] = sizes.get(path[:depth], 0) + group.num_bytes
    nodes: dict[tuple[str, ...], Tree] = {
        (): Tree(_text(f"{part.name}  {format_size(sizes[()])}", "bold"), guide_style="dim")
    }
    leaves = {_components(group.pattern): group for group in group_tensors(part.tensors)}
    for path, num_bytes in sizes.items():
        if path:
            leaf = leaves.get(path)
            tail = f"  {_shape(leaf.shape)} {leaf.dtype}" if leaf is not None else ""
            nodes[path] = nodes[path[:-1]].add(_text(f"{path[-1]}  {format_size(num_bytes)}{tail}"))
    console.print()
    console.print(nodes[()])


def _components(pattern: str) -> tuple[str, ...]:
    """Split a name at its dots, but not within ``{0..31}``."""
    if pattern.count(".") > _MAX_DEPTH:
        return (pattern,)
    return tuple(re.split(r"\.(?![^{}]*\})", pattern))


def _shards(console: Console, part: PartReport) -> None:
    table = _table(
        ("file", ""), ("shards", "right"), ("tensors", "right"), ("file size", "right"), ("", ""), title=part.name
    )
    most = max(shard.tensor_bytes for shard in part.shards) or 1
    for shard in part.shards[:_MAX_SHARDS]:
        size = "missing" if shard.file_bytes is None else format_size(shard.file_bytes)
        bar = "█" * max(1, round(_BAR * shard.tensor_bytes / most)) if shard.tensor_bytes else ""
        table.add_row(_text(shard.file), str(shard.shards), format_size(shard.tensor_bytes), size, bar)
    console.print()
    console.print(table)
    if len(part.shards) > _MAX_SHARDS:
        console.print(_text(f"… {len(part.shards) - _MAX_SHARDS} more files; --json lists all", "dim"))


def _objects(console: Console, part: PartReport) -> None:
    console.print()
    console.print(_text(part.name, "bold"))
    for name, value in part.objects.items():
        shown = json.dumps(value, ensure_ascii=False)
        console.print(_text(f"  {name} = {shown}"), soft_wrap=True)


def _problems(console: Console, report: InspectReport) -> None:
    found = [*report.problems, *(problem for part in report.parts for problem in part.problems)]
    elsewhere: dict[str, Problem] = {}  # said once for all parts
    for problem in found:
        if problem.code == ELSEWHERE:
            elsewhere.setdefault(problem.message, problem)
    found = [*elsewhere.values(), *(problem for problem in found if problem.code != ELSEWHERE)]
    flats = [part.flat for part in report.parts if part.flat]
    if not found and not flats:
        return
    console.print()
    styles = {"error": "bold red", "warning": "yellow", "note": "dim"}
    for problem in found[:_MAX_PROBLEMS]:
        label = _text(f"{problem.severity.value:<8}", styles[problem.severity.value])
        console.print(label, _text(f"{problem.code:<18} {problem.where}: {problem.message}"), soft_wrap=True)
    if len(found) > _MAX_PROBLEMS:
        console.print(_text(f"… {len(found) - _MAX_PROBLEMS} more; --json lists all", "dim"))
    for flat in flats:
        console.print(_text(f"note     {flat}", "yellow"), soft_wrap=True)
    if not report.complete:
        next_ = [report.root, "--shards"]
        if elsewhere:
            name = os.path.basename(os.path.abspath(report.path))
            next_ = [report.path, *report.other_paths, os.path.join("ANOTHER_NODE", name)]
        console.print(_text(f"next: fsdp-ckpt inspect {shlex.join(next_)}", "dim"), soft_wrap=True)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
