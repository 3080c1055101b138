"""Show what a prune removed."""

from __future__ import annotations

import shlex

from fsdp_ckpt.cli import out
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.prune_run import PruneReport
from fsdp_ckpt.units import format_size

__all__ = ["show_prune"]

_MAX_LINES = 30


def show_prune(report: PruneReport, *, as_json: bool, quiet: bool) -> None:
    """Print warnings to stderr, the report to stdout."""
    for folder in report.failed:
        out.warning(f"could not remove {folder.path}: {folder.why}")
    if as_json:
        out.json_report("prune", report)
    elif quiet:
        for item in report.removed:
            print(printable(item.path))
    else:
        for line in _lines(report):
            print(printable(line))


def _lines(report: PruneReport) -> list[str]:
    verb = "would remove" if report.dry_run else "removed"
    lines = _some([f"keep    {_name(item.path)}  {', '.join(item.reasons)}" for item in report.kept])
    lines += _some([f"leave   {_name(item.path)}  {item.why}" for item in report.spared])
    lines += _some([f"{verb} {_name(item.path)}  {format_size(item.num_bytes)}, {item.why}" for item in report.removed])
    if not report.removed:
        return [*lines, "nothing to remove"]
    lines.append(f"{verb} {len(report.removed)}, {format_size(report.freed_bytes)}, from {report.path}")
    if not report.dry_run:
        lines.append(f"next: fsdp-ckpt list {shlex.quote(report.path)}")
    return lines


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _some(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_LINES:
        return lines
    return [*lines[: _MAX_LINES - 1], f"        … {len(lines) - _MAX_LINES + 1} more; --json lists all"]
