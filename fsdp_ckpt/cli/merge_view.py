"""Show what a merge did."""

from __future__ import annotations

import shlex

from fsdp_ckpt.cli import out
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.conversion.report import ConvertReport
from fsdp_ckpt.ops.merge import MergeReport
from fsdp_ckpt.units import counted, format_count, format_duration, format_rate, format_size

__all__ = ["closing_lines", "show_merge"]


def show_merge(report: MergeReport, *, as_json: bool, quiet: bool) -> None:
    """Print notes and warnings to stderr, the report to stdout."""
    if not quiet:
        for text in report.notes:
            out.note(text)
    for text in (*report.warnings, *(f"recovered: {sentence}" for sentence in report.recovered)):
        out.warning(text)
    if as_json:
        out.json_report("merge", report)
    elif quiet:
        print(report.destination)
    else:
        for line in _lines(report):
            print(printable(line))


def _lines(report: MergeReport) -> list[str]:
    dtypes = ", ".join(f"{count} {name}" for name, count in report.dtypes.items())
    size = format_size(report.tensor_bytes)
    what = (
        f"{counted(report.num_tensors, 'tensor')}, {format_count(report.num_parameters)} parameters, {size} ({dtypes})"
    )
    lines = []
    if report.dry_run:
        lines.append(f"would write {what} to {report.destination}")
    elif report.pending:
        lines.append(f"this share is written; waiting for {len(report.pending)} more: {report.pending}")
        lines.append("  (torchrun and srun start several processes; to merge in this one alone: --part 1/1)")
    else:
        rate = format_rate(report.tensor_bytes, report.elapsed_s)
        lines.append(f"merged {what}")
        lines.append(f"  in {format_duration(report.elapsed_s)} ({rate}) to {report.destination}")
    names = list(report.files.items())
    for name, num_bytes in names if len(names) <= 6 else [*names[:3], *names[-2:]]:
        lines.append(f"  {name}  {format_size(num_bytes)}")
        if len(names) > 6 and name == names[2][0]:
            lines.append(f"  … {len(names) - 5} more")
    lines += _details(report)
    return [*lines, *closing_lines(report)]


def closing_lines(report: MergeReport | ConvertReport) -> list[str]:
    """Return what room there is, or what to type next; nothing where other processes have still to write."""
    if report.dry_run:
        free = "unknown" if report.free_bytes is None else format_size(report.free_bytes)
        return [f"  free at the destination {free}, memory about {format_size(report.peak_memory_bytes)}"]
    return [] if report.pending else [f"next: fsdp-ckpt inspect {shlex.quote(report.destination)}"]


def _details(report: MergeReport) -> list[str]:
    lines = []
    if report.renamed:
        old, new = next(iter(report.renamed.items()))
        lines.append(f"  {len(report.renamed)} renamed, such as {old} -> {new}")
    lines += [f"  {count} cast, {step}" for step, count in report.cast.items()]
    lines += [f"  tied: {name} is {kept}, written once" for name, kept in report.tied.items()]
    lines += [
        f"  {name} and {kept} are one tensor in the source; both were written" for name, kept in report.aliases.items()
    ]
    if report.excluded:
        lines.append(f"  {report.excluded} left out by --include / --exclude")
    if report.resumed:
        lines.append(f"  {counted(report.resumed, 'file')} of an interrupted run kept")
    if report.shared_bytes:
        lines.append(
            f"  {format_size(report.shared_bytes)} share blocks with the source: not copied, not read, no space used"
        )
    if report.unverified:
        lines.append(f"  {counted(report.unverified, 'shard')} without a recorded checksum, copied unchecked")
    elif report.verified_bytes:
        lines.append(f"  checksums of {format_size(report.verified_bytes)} compared, all right")
    if report.side_files:
        lines.append(f"  with {', '.join(report.side_files[:8])}{', …' if len(report.side_files) > 8 else ''}")
    has_tokenizer = any(name.startswith("tokenizer") for name in report.side_files)
    if "tokenizer_config.json" in report.missing_side_files and report.side_files and not has_tokenizer:
        lines.append("  no tokenizer files were found beside the checkpoint")
    if report.source_removed:
        sources = ", ".join([report.source, *report.other_sources])
        lines.append(f"  the result was read back and compared; removed: {sources}")
    return lines
