"""Show what push and pull did."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from fsdp_ckpt.cli import out
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.pull import PullReport
from fsdp_ckpt.ops.push import PushReport
from fsdp_ckpt.units import format_duration, format_rate, format_size

__all__ = ["show_pull", "show_push"]

_MAX_FILES = 12
_MAX_FINDINGS = 20


def show_push(report: PushReport, *, as_json: bool, quiet: bool) -> None:
    """Print notes and warnings to stderr, the report to stdout."""
    for text in report.warnings:
        out.warning(text)
    for text in report.notes if not quiet else ():
        out.note(f"note: {text}")
    if as_json:
        out.json_report("push", report)
        return
    lines = [report.pull_request or report.commit_url or report.url] if quiet else _push_lines(report)
    for line in lines:
        print(printable(line))


def _push_lines(report: PushReport) -> list[str]:
    count, size = _count(len(report.files)), format_size(report.num_bytes)
    whose = "private" if report.private else "public"
    lines = []
    if report.dry_run:
        new = "new, " if report.created else ""
        lines.append(f"would push {count}, {size}, to {report.url} ({new}{whose})")
    elif report.commit is None:
        lines.append(f"nothing to do: all {_count(len(report.skipped))} are at {report.url} already")
    else:
        rate = format_rate(report.num_bytes, report.elapsed_s)
        lines.append(f"pushed {count}, {size}, in {format_duration(report.elapsed_s)} ({rate})")
        lines.append(f"  to {report.url} ({whose})")
    lines += _file_lines(report.files)
    if report.skipped and (report.files or report.dry_run):
        lines.append(f"  {_count(len(report.skipped))}, {format_size(sum(report.skipped.values()))}, already there")
    lines += [f"  {'would remove' if report.dry_run else 'removed'} {path}" for path in report.removed[:_MAX_FILES]]
    if len(report.removed) > _MAX_FILES:
        lines.append(f"  … {len(report.removed) - _MAX_FILES} more")
    if report.left_out:
        names = ", ".join(report.left_out[:4]) + (", …" if len(report.left_out) > 4 else "")
        lines.append(f"  left out, as not part of it: {names}")
    if report.commit_url is not None:
        lines.append(f"commit: {report.commit_url}")
    if report.pull_request is not None:
        lines.append(f"pull request: {report.pull_request}")
    if not report.dry_run:
        lines.append(f"next: fsdp-ckpt pull {shlex.quote(report.url)} FOLDER")
    return lines


def show_pull(report: PullReport, *, as_json: bool, quiet: bool) -> None:
    """Print notes and what validation found to stderr, the report to stdout."""
    for text in report.notes if not quiet else ():
        out.note(f"note: {text}")
    if as_json:
        out.json_report("pull", report)
    else:
        for line in [report.destination] if quiet else _pull_lines(report):
            print(printable(line))
    sys.stdout.flush()
    for found in report.findings[:_MAX_FINDINGS]:
        out.warning(f"as it is on the hub: {found.where}: {found.message}")
    if report.findings:
        out.note(f"hint: fsdp-ckpt validate {shlex.quote(report.destination)}    (says all)")


def _pull_lines(report: PullReport) -> list[str]:
    count, size = _count(len(report.files)), format_size(report.num_bytes)
    if report.dry_run:
        lines = [f"would pull {count}, {size}, from {report.url} at {report.commit[:12]} to {report.destination}"]
    else:
        fetched = report.num_bytes - sum(report.kept.values())
        rate = format_rate(fetched, report.elapsed_s)
        lines = [f"pulled {count}, {size}, in {format_duration(report.elapsed_s)} ({rate})"]
        lines.append(f"  from {report.url} at {report.commit[:12]} to {report.destination}")
    lines += _file_lines(report.files)
    if report.left_out:
        lines.append(f"  {_count(len(report.left_out))} on the hub not wanted")
    if report.kept:
        lines.append(f"  {_count(len(report.kept))}, {format_size(sum(report.kept.values()))}, kept of an earlier run")
    if not report.dry_run:
        what = {None: "", "deep": ", validated with all checksums"}.get(report.checked, ", validated")
        lines.append(f"  sizes and hashes compared, all right{what}")
        lines.append(f"next: fsdp-ckpt inspect {shlex.quote(report.destination)}")
    return lines


def _file_lines(files: Mapping[str, int]) -> list[str]:
    rows = [f"  {name}  {format_size(num_bytes)}" for name, num_bytes in files.items()]
    return rows if len(rows) <= _MAX_FILES else [*rows[: _MAX_FILES - 1], f"  … {len(rows) - _MAX_FILES + 1} more"]


def _count(number: int) -> str:
    return f"{number} file{'' if number == 1 else 's'}"
