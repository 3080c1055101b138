"""The command line: `python -m benchmarks`, or `make bench`."""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks import cases, conversion, report, shared, state, validation
from benchmarks.budgets import judge
from benchmarks.cases import Settings
from benchmarks.compare import Comparison, compare
from benchmarks.machine import describe
from benchmarks.measure import CommandFailedError
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.units import format_size, parse_size

_CASES = {**cases.CASES, **conversion.CASES, **validation.CASES}
_NAMES = [*_CASES, *shared.KINDS, *state.KINDS]


def main() -> int:
    """Run the chosen cases and report; 0 when every command ran, 1 when one failed, 2 for a wrong command line."""
    args = _parser().parse_args()
    names = [name for name in _NAMES if name in (args.only or _NAMES)]
    # The large checkpoint of the memory case and its merged copy are the most that lies there at one time.
    free_bytes, need_bytes = shutil.disk_usage(args.work).free, 5 * args.size
    if free_bytes < need_bytes:
        _tell(f"{format_size(need_bytes)} of free disk are needed, {format_size(free_bytes)} are there; see --work")
        return 1
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="fsdp-ckpt-bench-", dir=args.work, ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        os.environ["TMPDIR"] = folder  # whatever a command leaves in the folder for temporary files goes with ours
        settings = Settings(work=work, size_bytes=args.size, rounds=args.rounds, chunks=tuple(args.chunks))
        machine = describe(work)
        results: dict[str, Comparison] = {}
        failed = False
        for name in names:
            try:
                found = _play(name, settings)
            except CommandFailedError as error:
                _tell(f"{error}")
                failed = True
            else:
                results |= {} if found is None else {name: found}
    budgets = judge(results, settings.chunks)
    if args.json:
        report.write(args.json, report.to_json(machine, results, budgets))
    if args.write_docs:
        report.write(args.write_docs, report.to_markdown(machine, results, budgets))
    report.show(machine, results, budgets)
    return 1 if failed or any(series.problem for result in results.values() for series in result.series) else 0


def _play(name: str, settings: Settings) -> Comparison | None:
    log = settings.work / "log"
    if name in state.KINDS:
        return state.play(name, settings, tell=_tell)
    if name in shared.KINDS:
        return shared.play(name, settings, log=log, tell=_tell)
    return compare(_CASES[name](settings), log=log, tell=_tell)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure fsdp-ckpt beside cp and others.")
    parser.add_argument("--size", type=_size, default="2GB", help="size of the generated checkpoint (default: 2GB)")
    parser.add_argument("--rounds", type=_positive, default=5, help="counted rounds of each case (default: 5)")
    parser.add_argument("--only", nargs="+", choices=_NAMES, help="cases to run (default: all)")
    parser.add_argument(
        "--chunks",
        type=_positive,
        nargs="+",
        default=[1_000_000],
        help="chunks of the metadata for inspect (default: 1000000; 14000000 needs minutes and 3 GB of disk)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--write-docs", type=Path, metavar="FILE", help="write the Markdown page, docs/benchmarks.md")
    parser.add_argument(
        "--work", type=Path, default=tempfile.gettempdir(), metavar="DIR", help="where to make the scratch folder"
    )
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
