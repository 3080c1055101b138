"""Show what a conversion did."""

from __future__ import annotations

import shlex

from fsdp_ckpt.cli import out
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.conversion.report import ConvertReport, WrittenPart
from fsdp_ckpt.units import format_count, format_duration, format_rate, format_size

__all__ = ["show_conversion"]

_DONE = {"convert": "converted", "reshard": "resharded"}


def show_conversion(report: ConvertReport, command: str, *, as_json: bool, quiet: bool) -> None:
    """Print notes and warnings to stderr, the report to stdout."""
    if not quiet:
        for text in report.notes:
            out.note(text)
    for text in (*report.warnings, *(f"recovered: {sentence}" for sentence in report.recovered)):
        out.warning(text)
    for text in report.left:
        out.warning(f"left behind: {text}")
    if as_json:
        out.json_report(command, report)
    elif quiet:
        print(report.destination)
    else:
        for line in _lines(report, command):
            print(printable(line))


def _lines(report: ConvertReport, command: str) -> list[str]:
    size = format_size(report.tensor_bytes)
    for_ranks = "" if report.world_size is None else f" for {report.world_size} ranks"
    if report.mesh is not None and len(report.mesh) > 1:
        for_ranks += f" ({'x'.join(map(str, report.mesh))})"
    if report.dry_run:
        lines = [f"would write {size}{for_ranks} to {report.destination}"]
    elif report.pending:
        lines = [f"this share is written; waiting for {len(report.pending)} more: {report.pending}"]
    else:
        rate = format_rate(report.tensor_bytes, report.elapsed_s)
        lines = [
            f"{_DONE[command]} {report.layout}{f' to {report.to}' if command == 'convert' else ''}{for_ranks}",
            f"  {size} in {format_duration(report.elapsed_s)} ({rate}) to {report.destination}",
        ]
    lines += [_part_line(part) for part in report.parts]
    lines += _file_lines(report)
    lines += _details(report)
    if report.dry_run:
        free = "unknown" if report.free_bytes is None else format_size(report.free_bytes)
        lines.append(f"  free at the destination {free}, memory about {format_size(report.peak_memory_bytes)}")
    elif not report.pending:
        lines.append(f"next: fsdp-ckpt inspect {shlex.quote(report.destination)}")
    return lines


def _part_line(part: WrittenPart) -> str:
    what = [f"{part.num_tensors} tensors"] if part.num_tensors else []
    if part.num_tensors and part.role == "model":
        what.append(f"{format_count(part.num_parameters)} parameters")
    if part.num_objects:
        what.append(f"{part.num_objects} values")
    if part.tensor_bytes:
        what.append(format_size(part.tensor_bytes))
    name = part.name if part.name == part.written_as else f"{part.name} -> {part.written_as}"
    return f"  {name}: {', '.join(what)}"


def _file_lines(report: ConvertReport) -> list[str]:
    names = list(report.files.items())
    if len(names) > 6:
        total = format_size(sum(report.files.values()))
        return [f"  {len(names)} files, {total}, from {names[0][0]} to {names[-1][0]}"]
    return [f"  {name}  {format_size(num_bytes)}" for name, num_bytes in names]


def _details(report: ConvertReport) -> list[str]:
    lines = []
    if report.renamed:
        old, new = next(iter(report.renamed.items()))
        lines.append(f"  {len(report.renamed)} renamed, such as {old} -> {new}")
    lines += [f"  {count} cast, {step}" for step, count in report.cast.items()]
    lines += [f"  tied: {name} is {kept}, written once" for name, kept in report.tied.items()]
    if report.excluded:
        lines.append(f"  {report.excluded} left out by --include / --exclude")
    if report.shared_bytes:
        lines.append(f"  {format_size(report.shared_bytes)} share blocks with the source: not copied, no space used")
    if report.unverified:
        lines.append(f"  {report.unverified} shards have no recorded checksum: they were copied unchecked")
    elif report.verified_bytes:
        lines.append(f"  checksums of {format_size(report.verified_bytes)} compared, all right")
    beside = [name for name in report.small_files if not name.endswith(".metadata")]
    if beside:
        lines.append(f"  with {', '.join(beside[:8])}{', …' if len(beside) > 8 else ''}")
    if report.source_removed:
        removed = ", ".join([report.source, *report.other_sources])
        lines.append(f"  the result was read back and compared; removed from {removed}: what was converted")
    return lines
