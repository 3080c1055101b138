"""Run a case: make its inputs, measure its commands in turns, remove the inputs."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.measure import Series, alternate, prepare, ratio, run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Wall time of one command over another's: the median of the rounds' own ratios; None when a command failed."""

    numerator: str
    denominator: str
    value: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a case gave.

    Attributes:
        title: The case's title.
        payload_bytes: Bytes of tensors that each command moves; 0 when none.
        series: One per command, in order.
        ratios: As the case asked for them.
        memory: What the memory of its samples is.
        disk_bytes: Disk space that the last command took; None where that was not measured.
    """

    title: str
    payload_bytes: int
    series: tuple[Series, ...]
    ratios: tuple[Ratio, ...]
    memory: str = "peak RSS"
    disk_bytes: int | None = None

    def find(self, name: str) -> Series | None:
        """Return the series of the command, or None when it was not measured or failed."""
        return next((series for series in self.series if series.name == name and not series.problem), None)

    def ratio(self, numerator: str, denominator: str) -> float | None:
        """Return the ratio of the two commands, or None when it was not measured."""
        pairs = {(ratio.numerator, ratio.denominator): ratio.value for ratio in self.ratios}
        return pairs.get((numerator, denominator))


def compare(
    case: Case, *, log: Path, tell: Callable[[str], None], before_inputs_go: Callable[[], None] = lambda: None
) -> Comparison:
    """Run the case and return what it gave.

    Args:
        case: What to run.
        log: Scratch file for the output of the running command.
        tell: Called with a line for every step.
        before_inputs_go: Called when everything has been measured.

    Raises:
        benchmarks.measure.CommandFailedError: An input could not be made.
    """
    tell(case.title)
    try:
        for command in case.inputs:
            prepare(command)
            sample = run(command, log)
            tell(f"  {command.name}: {sample.wall_s:.1f} s, {sample.rss_bytes / 1e6:.0f} MB")
        series = alternate(case.commands, rounds=case.rounds, warm_ups=case.warm_ups, log=log, tell=tell)
        before_inputs_go()
    finally:
        for command in (*case.inputs, *case.commands):
            if command.output is not None:
                shutil.rmtree(command.output, ignore_errors=True)
    by_name = {one.name: one for one in series}
    ratios = tuple(
        Ratio(numerator=above, denominator=below, value=ratio(by_name[above], by_name[below]))
        for above, below in case.ratios
    )
    return Comparison(title=case.title, payload_bytes=case.payload_bytes, series=series, ratios=ratios)
