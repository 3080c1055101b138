"""Show what a conversion did."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.merge_view import closing_lines
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.conversion.report import ConvertReport, WrittenPart
from fsdp_ckpt.ops.share import Share
from fsdp_ckpt.units import counted, format_count, format_duration, format_rate, format_size

__all__ = ["show_conversion"]

_DONE = {"convert": "converted", "reshard": "resharded"}


def show_conversion(
    report: ConvertReport, command: str, *, as_json: bool, quiet: bool, share: Share | None = None
) -> None:
    """Print notes and warnings to stderr, the report to stdout; of several processes, one says what all would."""
    speaks_for_all = share is None or share.index == 1
    if not quiet and speaks_for_all:
        for text in report.notes:
            out.note(text)
    for text in report.warnings if speaks_for_all else ():
        out.warning(text)
    for text in report.recovered:
        out.warning(f"recovered: {text}")
    for text in report.left if speaks_for_all else ():
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
    for_ranks = "" if report.world_size is None else f" for {counted(report.world_size, 'rank')}"
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
    lines += _part_lines(report.parts)
    lines += _file_lines(report)
    lines += _details(report)
    return [*lines, *closing_lines(report)]


def _part_lines(parts: Sequence[WrittenPart]) -> list[str]:
    """Return a line for each part; of many small ones of a kind, such as random states, one for all."""
    lines = []
    by_role: dict[str, list[WrittenPart]] = {}
    for part in parts:
        if part.num_tensors or part.role in ("model", "optimizer"):
            lines.append(_part_line(part))
        else:
            by_role.setdefault(part.role, []).append(part)
    for alike in by_role.values():
        last = f" … {alike[-1].name}" if len(alike) > 1 else ""
        name = alike[0].name if last else _renamed(alike[0])
        lines.append(f"  {name}{last}: {counted(sum(part.num_objects for part in alike), 'value')}")
    return lines


def _renamed(part: WrittenPart) -> str:
    is_same = part.written_as == part.name or part.written_as.rpartition(".")[0] == part.name
    return part.name if is_same else f"{part.name} -> {part.written_as}"


def _part_line(part: WrittenPart) -> str:
    what = [counted(part.num_tensors, "tensor")] if part.num_tensors else []
    if part.num_tensors and part.role == "model":
        what.append(f"{format_count(part.num_parameters)} parameters")
    if part.num_objects:
        what.append(counted(part.num_objects, "value"))
    if part.tensor_bytes:
        what.append(format_size(part.tensor_bytes))
    return f"  {_renamed(part)}: {', '.join(what) or 'empty'}"


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
    if report.resumed:
        lines.append(f"  {counted(report.resumed, 'file')} of an interrupted run kept")
    if report.shared_bytes:
        lines.append(f"  {format_size(report.shared_bytes)} share blocks with the source: not copied, no space used")
    if report.unverified:
        lines.append(f"  {counted(report.unverified, 'shard')} without a recorded checksum, copied unchecked")
    elif report.verified_bytes:
        lines.append(f"  checksums of {format_size(report.verified_bytes)} compared, all right")
    told = {part.written_as for part in report.parts}
    beside = [name for name in report.small_files if not name.endswith(".metadata") and name not in told]
    if beside:
        lines.append(f"  with {', '.join(beside[:8])}{', …' if len(beside) > 8 else ''}")
    if report.source_removed:
        removed = ", ".join([report.source, *report.other_sources])
        lines.append(f"  the result was read back and compared; removed from {removed}: what was converted")
    return lines
