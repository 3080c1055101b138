"""Show the results: a table on the terminal, one JSON object, a Markdown page."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.budgets import Budget
from benchmarks.compare import Comparison
from benchmarks.machine import Machine
from benchmarks.measure import Series
from fsdp_ckpt.units import format_size

_COLUMNS = ("command", "wall", "best", "CPU", "{memory}", "rate")
_BUDGET_COLUMNS = ("budget", "must", "aim", "measured", "of must", "")

_INTRODUCTION = """\
# Benchmarks

This page is written by `python -m benchmarks --write-docs docs/benchmarks.md`; do not edit it by hand. To repeat it:

    pip install -e '.[bench]'
    make bench                                  # or: python -m benchmarks
    python -m benchmarks --only merge cast      # some cases
    python -m benchmarks --only scale --chunks 14000000

All inputs are generated, the checkpoints with torch's own writer on two gloo ranks; they lie in a scratch folder
(`--work`, by default the folder for temporary files) that is removed at the end.
"""

_READING = """\
## How to read the numbers

- The commands of a case run in turns (A B C, A B C, ...), each as a process of its own; where seconds or less count,
  after one round that is not counted. Before each run the output of the one before is deleted and the disk is synced,
  untimed.
- **Times are noisy**, above all on virtual machines, where the same copy can take several times as long a minute later.
  So median ("wall") and best are both given, a ratio is the median of the ratios *within* the rounds, and numbers of
  two runs, or of two machines, should not be compared.
- Inputs are in the page cache, as just after saving. CPU is user + system time, the median. Peak RSS is the largest of
  all rounds and processes; below about 9 MB it is the measuring process's own.
- The rate is tensor bytes read from the source per second of median wall time.
- Saving and loading are measured within a running job of two ranks, ours and Accelerate's in turns: the slowest rank's
  time, both ranks' CPU, and "extra memory": the peak of any rank and round beyond what the rank held before and what
  is loaded or returned. Both sync what they save, ours its folders as well; `load_state` compares checksums,
  Accelerate's does not.
- `fsdp-ckpt merge` is durable by default: files and folders are fsynced before it returns. `cp`, Accelerate and torch's
  converter do not sync; `--no-fsync` is the like-for-like of those.
"""


def to_json(machine: Machine, results: Mapping[str, Comparison], budgets: Iterable[Budget]) -> str:
    """Return the results as one JSON object."""
    content = {
        "schema": "fsdp-ckpt/benchmarks/1",
        "machine": dataclasses.asdict(machine),
        "cases": {name: _comparison_json(comparison) for name, comparison in results.items()},
        "budgets": [dataclasses.asdict(budget) for budget in budgets],
    }
    return json.dumps(content, indent=2) + "\n"


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    content = dataclasses.asdict(comparison)
    for entry, series in zip(content["series"], comparison.series, strict=True):
        entry["problem"] = _problem(series)
        if series.samples:
            entry["median"] = {"wall_s": series.wall_s, "cpu_s": series.cpu_s}
            entry["best"] = {"wall_s": series.best_wall_s, "cpu_s": series.best_cpu_s}
            entry["peak_rss_bytes"] = series.rss_bytes
    return content


def to_markdown(machine: Machine, results: Mapping[str, Comparison], budgets: Iterable[Budget]) -> str:
    """Return the page for the documentation; no path of the machine stands in it."""
    sections = [
        _INTRODUCTION,
        f"## Machine\n\n{_markdown_table(('', ''), *_machine_rows(machine))}",
        f"## Budgets\n\n{_markdown_table(_BUDGET_COLUMNS, *(_budget_row(budget) for budget in budgets))}",
    ]
    for comparison in results.values():
        sections.append(f"## {_title(comparison)}\n\n{_markdown_table(*_series_table(comparison))}")
        if comparison.ratios:
            sections.append("\n".join(f"- {line}" for line in _ratio_lines(comparison)) + "\n")
    return "\n".join([*sections, _READING])


def show(machine: Machine, results: Mapping[str, Comparison], budgets: Iterable[Budget]) -> None:
    """Print the results as tables on stdout."""
    # Not above: the measuring process stays small, and rich is not needed until it is done.
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for comparison in results.values():
        columns, *rows = _series_table(comparison)
        table = Table(*columns, title=_title(comparison), title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        for line in _ratio_lines(comparison):
            console.print(f"  {line}", markup=False)
    table = Table(*_BUDGET_COLUMNS, title="Budgets", title_justify="left")
    for budget in budgets:
        table.add_row(*(cell.replace("`", "") for cell in _budget_row(budget)))
    console.print(table)
    for name, value in _machine_rows(machine):
        console.print(f"  {name}: {value}", markup=False)


def write(path: Path, text: str) -> None:
    """Write a text file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _title(comparison: Comparison) -> str:
    rounds = max(len(series.samples) for series in comparison.series)
    return f"{comparison.title} ({rounds} round{'s' if rounds != 1 else ''})"


def _series_table(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the head and one row per command, all of one length; the rate only where bytes were moved."""
    rows: list[tuple[str, ...]] = []
    for series in comparison.series:
        if series.problem:
            rows.append((series.name, _problem(series) or "", "", "", "", ""))
            continue
        times = (_time(series.wall_s), _time(series.best_wall_s), _time(series.cpu_s))
        rate = f"{comparison.payload_bytes / series.wall_s / 1e9:.2f} GB/s"
        rows.append((series.name, *times, format_size(series.rss_bytes), rate))
    head = tuple(column.format(memory=comparison.memory) for column in _COLUMNS)
    return [row if comparison.payload_bytes else row[:-1] for row in (head, *rows)]


def _problem(series: Series) -> str | None:
    """Say why the command failed, without its output, which may name paths of the machine."""
    return f"failed: {series.problem.split(';')[0]}" if series.problem else None


def _ratio_lines(comparison: Comparison) -> list[str]:
    return [
        f"{ratio.numerator} / {ratio.denominator}: {'not measured' if ratio.value is None else f'{ratio.value:.2f} x'}"
        for ratio in comparison.ratios
    ]


def _budget_row(budget: Budget) -> tuple[str, ...]:
    verdict = {True: "met", False: "MISSED", None: ""}[budget.is_met]
    share = "" if budget.of_must is None else f"{100 * budget.of_must:.0f} %"
    return (budget.what, budget.must, budget.aim, budget.measured, share, verdict)


def _machine_rows(machine: Machine) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return [
        ("date", machine.date),
        ("CPU", f"{machine.cpu}, {machine.num_cores} cores"),
        ("memory", format_size(machine.memory_bytes)),
        ("kernel", machine.kernel),
        ("file system", machine.file_system),
        ("Python", machine.python),
        ("packages", versions),
    ]


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _markdown_table(head: Sequence[str], *rows: Sequence[str]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
