"""Measure commands as child processes, in turns (A B C, A B C, ...): a slow minute of the machine hits all alike."""

import contextlib
import dataclasses
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_LAUNCHER = Path(__file__).with_name("launch.py")
_TAIL_BYTES = 2000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One thing to measure.

    Attributes:
        name: What tables and ratios call it, unique in its case; holds no path.
        argv: Program and arguments.
        output: Folder that is emptied before each run, for the command to write into; None when it writes nothing.
        min_output_bytes: A run that leaves less than this in `output` has failed.
        exit_codes: Exit codes that count as success.
        timeout_s: The command is killed and has failed after this long.
    """

    name: str
    argv: tuple[str, ...]
    output: Path | None = None
    min_output_bytes: int = 0
    exit_codes: frozenset[int] = frozenset({0})
    timeout_s: float = 600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one run cost; CPU is user + system, and like the peak RSS it covers every process the command waited for."""

    wall_s: float
    cpu_s: float
    rss_bytes: int
    exit_code: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """All counted runs of one command, in order of the rounds.

    Attributes:
        name: The command's name.
        samples: One per round; fewer when the command failed.
        problem: Why the command was given up, or None.
    """

    name: str
    samples: tuple[Sample, ...]
    problem: str | None = None

    @property
    def wall_s(self) -> float:
        """Median wall time."""
        return statistics.median(sample.wall_s for sample in self.samples)

    @property
    def best_wall_s(self) -> float:
        """Shortest wall time."""
        return min(sample.wall_s for sample in self.samples)

    @property
    def cpu_s(self) -> float:
        """Median CPU time."""
        return statistics.median(sample.cpu_s for sample in self.samples)

    @property
    def best_cpu_s(self) -> float:
        """Shortest CPU time."""
        return min(sample.cpu_s for sample in self.samples)

    @property
    def rss_bytes(self) -> int:
        """Largest peak RSS of any run."""
        return max(sample.rss_bytes for sample in self.samples)


class CommandFailedError(Exception):
    """A measured command failed, ran out of time or did not do its work; the message ends with its last output."""


def ratio(numerator: Series, denominator: Series) -> float | None:
    """Return the median over the rounds of one command's wall time divided by the other's in the same round.

    None when one of the two failed.
    """
    if numerator.problem or denominator.problem or not numerator.samples:
        return None
    pairs = zip(numerator.samples, denominator.samples, strict=True)
    return statistics.median(above.wall_s / below.wall_s for above, below in pairs)


def alternate(
    commands: Sequence[Command], *, rounds: int, warm_ups: int, log: Path, tell: Callable[[str], None]
) -> tuple[Series, ...]:
    """Run every command once per round, in the given order, and return one series for each.

    A command that fails is left out of the rounds that follow; its series says why.

    Args:
        commands: What to measure, names unique.
        rounds: Counted rounds, at least 1.
        warm_ups: Rounds before them that are run and forgotten.
        log: Scratch file for the output of the command that is running.
        tell: Called with a line for every run.
    """
    samples: dict[str, list[Sample]] = {command.name: [] for command in commands}
    problems: dict[str, str] = {}
    for turn in range(-warm_ups, rounds):
        for command in commands:
            if command.name in problems:
                continue
            prepare(command)
            label = f"round {turn + 1}/{rounds}" if turn >= 0 else "warm-up"
            try:
                sample = run(command, log)
            except CommandFailedError as error:
                problems[command.name] = str(error)
                tell(f"  {label}: {command.name}: {error}")
                continue
            tell(f"  {label}: {command.name}: {sample.wall_s:.3g} s, CPU {sample.cpu_s:.3g} s")
            if turn >= 0:
                samples[command.name].append(sample)
    for command in commands:
        prepare(command)
    return tuple(
        Series(name=command.name, samples=tuple(samples[command.name]), problem=problems.get(command.name))
        for command in commands
    )


def prepare(command: Command) -> None:
    """Empty the command's output folder and wait until nothing is left to be written back from earlier runs."""
    if command.output is not None:
        shutil.rmtree(command.output, ignore_errors=True)
        command.output.mkdir(parents=True)
        os.sync()


def run(command: Command, log: Path) -> Sample:
    """Run the command once and return what it cost.

    Raises:
        CommandFailedError: Other exit code than allowed, too slow, or too little output.
    """
    # A measured Python writes and finds its .pyc files, as it does for everybody.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    argv = [sys.executable, "-I", "-S", str(_LAUNCHER), str(log), *command.argv]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as launcher:
        try:
            numbers, errors = launcher.communicate(timeout=command.timeout_s)
        except subprocess.TimeoutExpired:
            raise CommandFailedError(f"killed after {command.timeout_s:.0f} s; {_tail(log)}") from None
        finally:
            # Its session holds the command and what that started; after a regular end nothing is left to kill.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    if launcher.returncode != 0:
        raise CommandFailedError(f"could not be started; {errors.strip()[-_TAIL_BYTES:]}")
    wall_s, cpu_s, rss_kib, exit_code = numbers.split()
    sample = Sample(wall_s=float(wall_s), cpu_s=float(cpu_s), rss_bytes=int(rss_kib) * 1024, exit_code=int(exit_code))
    if sample.exit_code not in command.exit_codes:
        raise CommandFailedError(f"exit code {sample.exit_code}; {_tail(log)}")
    written = 0 if command.output is None else _size(command.output)
    if written < command.min_output_bytes:
        raise CommandFailedError(f"wrote {written} bytes, at least {command.min_output_bytes} expected; {_tail(log)}")
    return sample


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _tail(log: Path) -> str:
    text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if log.exists() else ""
    return f"last output: {text.strip() or '(none)'}"
