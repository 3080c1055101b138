"""Show what is wrong with a checkpoint: by kind of finding, with what it means and the next command."""

from __future__ import annotations

import itertools
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fsdp_ckpt.cli import out
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.validate import Checked, Finding, ValidateReport, ValidateRun
from fsdp_ckpt.ops.validation.wording import counted
from fsdp_ckpt.units import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["show_validate"]

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_SHOWN = 10


def show_validate(
    report: ValidateRun, *, as_json: bool, quiet: bool, options: Sequence[str] = (), console: Console | None = None
) -> None:
    """Print a report to stdout, or to the console given.

    Args:
        report: The report.
        as_json: As JSON.
        quiet: A line for each checkpoint.
        options: As typed, for the command to look at one of several.
        console: Where to print.
    """
    if as_json:
        out.json_report("validate", report)
    elif quiet:
        for one in report.checkpoints:
            print(printable(f"{_verdict(one)}  {_name(one)}"))
    elif len(report.checkpoints) == 1:
        _show_one(report.checkpoints[0], console or out.console())
    else:
        _show_table(report, options, console or out.console())


def _name(report: ValidateReport) -> str:
    return " + ".join([report.path, *report.other_paths])


def _verdict(report: ValidateReport) -> str:
    counts = [(report.errors, "error"), (report.warnings, "warning")]
    shown = ", ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count)
    return shown if shown and not report.ok else f"ok, {shown}" if shown else "ok"


def _show_one(report: ValidateReport, console: Console) -> None:
    facts = [report.title, f"step {report.step}" if report.step is not None else ""]
    facts += [f"{report.world_size} rank{'s' if report.world_size != 1 else ''}"] if report.world_size else []
    console.print(_text(_name(report), "bold"), _text(f"  {', '.join(filter(None, facts))}"), sep="", soft_wrap=True)
    if report.root not in (report.path, "") and not report.other_paths and report.root.startswith(report.path):
        console.print(_text(f"  looked at {report.root}", "dim"), soft_wrap=True)
    width = min(console.width, 100)
    for _, group in itertools.groupby(report.findings, key=lambda finding: (finding.severity, finding.code)):
        console.print()
        for line, style in _group_lines(list(group), width):
            console.print(_text(line, style), soft_wrap=True)
    console.print()
    for line in textwrap.wrap(_checked(report.checked), width):
        console.print(_text(line, "dim"), soft_wrap=True)
    for sentence in report.fits:
        console.print(_text(sentence), soft_wrap=True)
    if report.values and not any(finding.code.startswith("W31") for finding in report.findings):
        console.print(
            _text(f"values of {counted(len(report.values), 'tensor')}: no NaN, no infinities, no matrix of zeros")
        )
    if report.resume is not None:
        answer = "yes" if report.resume.can_resume else "no"
        console.print(_text(f"can training be resumed from it: {answer}"), soft_wrap=True)
        for reason in report.resume.reasons:
            console.print(_text(f"  {reason}"), soft_wrap=True)
    console.print(_text(_verdict(report), "green" if report.ok else "bold red"))


def _group_lines(findings: Sequence[Finding], width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of the findings of one kind: what it means is the same for all of them."""
    first = findings[0]
    number = f"  ({len(findings)})" if len(findings) > 1 else ""
    yield f"{first.severity} {first.code} {first.name}{number}", _STYLES[first.severity]
    for finding in findings[:_SHOWN]:
        if finding.where != ".":
            yield f"  {finding.where}", "bold"
        for line in textwrap.wrap(printable(finding.message), width - 4, break_long_words=False):
            yield f"    {line}", ""
    if len(findings) > _SHOWN:
        yield f"  … and {len(findings) - _SHOWN} more; --json has them all", "dim"
    meaning = textwrap.wrap(first.meaning, width - 11)
    for label, line in zip(itertools.chain(["means:"], itertools.repeat("")), meaning, strict=False):
        yield f"  {label:<7}{line}", ""
    if first.next:
        yield f"  next:  {first.next}", ""


def _checked(checked: Checked) -> str:
    files, tensors = counted(checked.num_files, "file"), counted(checked.num_tensors, "tensor")
    text = f"looked at: {files}, {tensors}, {format_size(checked.num_bytes)}"
    if checked.num_items:
        text += f"; the {'head' if checked.num_items == 1 else 'heads'} of {counted(checked.num_items, 'item')}"
    if checked.level == "deep" or checked.verified_bytes:
        text += f"; {format_size(checked.verified_bytes)} compared with their CRC-32"
        if checked.unverified_bytes:
            text += f", {format_size(checked.unverified_bytes)} have none"
    else:
        text += "; not the bytes (--deep)"
    if checked.fetched_bytes is not None:
        text += f"; fetched {format_size(checked.fetched_bytes)} in {counted(checked.requests or 0, 'request')}"
    return text


def _show_table(report: ValidateRun, options: Sequence[str], console: Console) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("checkpoint", overflow="fold", min_width=10)
    table.add_column("verdict", no_wrap=True)
    table.add_column("first finding", overflow="fold")
    for one in report.checkpoints:
        worst = next((finding for finding in one.findings if finding.severity != "note"), None)
        shown = ""
        if worst is not None:
            where = "" if worst.where == "." else f"{worst.where}: "
            shown = f"{worst.code} {worst.name}: {where}{worst.message}"
        table.add_row(_text(_name(one)), _text(_verdict(one), "green" if one.ok else "bold red"), _text(shown[:200]))
    console.print(table)
    console.print()
    bad = [one for one in report.checkpoints if not one.ok]
    whole = len(report.checkpoints) - len(bad)
    console.print(_text(f"{whole} of {len(report.checkpoints)} checkpoints are ok", "dim"))
    if bad:
        command = shlex.join(["fsdp-ckpt", "validate", *_typed(bad[0]), *options])
        console.print(_text(f"next: {command}"), soft_wrap=True)


def _typed(report: ValidateReport) -> list[str]:
    """Return what to type for one of several."""
    first = report.path if not report.path.startswith("-") else f"./{report.path}"
    return [first, *report.other_paths, *(["--as-one"] if report.other_paths else [])]


def _text(content: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(content), style=style)
