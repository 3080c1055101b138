"""Show what a repair found and did."""

from __future__ import annotations

import shlex
import sys

from fsdp_ckpt.cli import out
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.repair import RepairReport
from fsdp_ckpt.ops.repairs.actions import RepairAction
from fsdp_ckpt.units import format_size

__all__ = ["show_repair"]

_MAX_ROWS = 40


def show_repair(report: RepairReport, *, as_json: bool, quiet: bool) -> None:
    """Print what cannot be mended and notes to stderr, the report to stdout."""
    if report.chosen is not None:
        out.note(f"note: {report.chosen} means {report.path}")
    if as_json:
        out.json_report("repair", report)
        return
    if quiet:
        for action in report.actions:
            print(printable(action.file))
    else:
        for line in _lines(report):
            print(printable(line))
    sys.stdout.flush()
    for text in report.notes if not quiet else ():
        out.note(f"note: {text}")
    for fault in report.faults[:_MAX_ROWS]:
        out.warning(f"cannot be mended without help: {fault.where}: {fault.why}")
    if len(report.faults) > _MAX_ROWS:
        out.warning(f"and {len(report.faults) - _MAX_ROWS} more; --json lists all")
    for hint in dict.fromkeys(fault.hint for fault in report.faults if fault.hint):
        out.note(f"hint: {hint}")


def _lines(report: RepairReport) -> list[str]:
    if not report.actions:
        checked = f", {format_size(report.checked_bytes)} compared" if report.checked_bytes else ""
        return [f"nothing {'to mend' if report.whole else 'that can be mended'} in {report.path}{checked}"]
    lines = [line for action in report.actions[:_MAX_ROWS] for line in _row(action, applied=report.applied)]
    if len(report.actions) > _MAX_ROWS:
        lines.append(f"… {len(report.actions) - _MAX_ROWS} more; --json lists all")
    number, size = _count(len(report.actions), "action"), format_size(report.num_bytes)
    left = f"; {_count(len(report.faults), 'fault')} cannot be mended without help" if report.faults else ""
    if not report.applied:
        return [*lines, f"{number}, {size} to write{left}. Nothing was changed: add --apply to do it"]
    lines.append(f"{number} done, {size} written{left or '; all is whole now'}")
    if report.backup is not None:
        lines.append(f"backup: {report.backup}    (to drop it: {report.drop_backup})")
    if report.undo:
        lines.append(f"undo:   {' && '.join(report.undo)}")
    return [*lines, f"next:   fsdp-ckpt validate {shlex.quote(report.path)}"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _row(action: RepairAction, *, applied: bool) -> list[str]:
    verbs = {"write": "wrote", "set aside": "set aside", "put back": "put back", "remove": "removed"}
    verb = verbs[action.what] if applied else f"would {action.what}"
    size = f", {format_size(action.num_bytes)}" if action.num_bytes else ""
    lines = [f"{verb} {action.file}  ({action.kind}{size})", f"    {action.why}"]
    if action.source is not None:
        lines.append(f"    from {action.source}")
    return lines
