"""Show a training run while it goes on: a line that is redrawn, and lines that stay."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from fsdp_ckpt.cli import out
from fsdp_ckpt.names import printable
from fsdp_ckpt.train.driver.events import (
    Evaluated,
    Event,
    Failed,
    Finished,
    Killed,
    Saved,
    Saving,
    Started,
    Stepped,
    Stopped,
)
from fsdp_ckpt.units import format_count, format_duration, format_size

if TYPE_CHECKING:
    from fsdp_ckpt.ops.run_job import JobEnd
    from fsdp_ckpt.train.driver.options import TrainOptions

__all__ = ["TrainView"]

_PI = "314159265358979323846264338327950288419716939937510"


@dataclass(kw_only=True)
class _Facts:
    """What is known of the run so far; ``--json`` prints it."""

    folder: str
    world_size: int | None = None
    resumed_from: str | None = None
    first_step: int | None = None
    step: int | None = None
    loss: float | None = None
    answer_accuracy: float | None = None
    last_checkpoint: str | None = None
    saves_s: list[float] = field(default_factory=list)
    ended: str = "without a word"
    exit_code: int = 0


class TrainView:
    """Takes events; prints to stderr while the run goes on, and what it came to at its end.

    Args:
        options: Of the run.
        quiet: Show nothing while it goes on.
    """

    def __init__(self, options: TrainOptions, *, quiet: bool) -> None:
        self._options = options
        self._quiet = quiet
        self._redraws = sys.stderr.isatty() and not quiet
        self._facts = _Facts(folder=options.folder)
        self._failed: Failed | None = None
        self._tokens_per_s: list[float] = []

    def show(self, events: Sequence[Event]) -> None:
        """Show what happened."""
        for event in events:
            text = self._take(event)
            if text is not None and not self._quiet:
                self.close()
                out.note(text)
        if self._redraws and events:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r" + self._status()[:width] + "\x1b[K")
            sys.stderr.flush()

    def close(self) -> None:
        """Remove the line that is redrawn."""
        if self._redraws:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _status(self) -> str:
        facts = self._facts
        if facts.step is None:
            return "starting …" if facts.world_size is None else "beginning …"
        loss = "" if facts.loss is None else f"  loss {facts.loss:.4f}"
        last = facts.last_checkpoint or "none yet"
        return f"step {facts.step} / {self._options.steps}{loss}  {self._speed()}  last good checkpoint: {last}"

    def _speed(self) -> str:
        recent = sorted(self._tokens_per_s[-25:])
        return f"{format_count(int(recent[len(recent) // 2]))} tokens/s" if recent else ""

    def _take(self, event: Event) -> str | None:
        """Remember an event; return the line to show for it, if any."""
        facts = self._facts
        match event:
            case Started():
                return self._started(event)
            case Stepped():
                facts.step, facts.loss = event.step, event.loss
                self._tokens_per_s.append(event.tokens_per_s)
                every = max(self._options.steps // 10, 1)
                is_shown = not self._redraws and (event.step % every == 0 or event.step == facts.first_step)
                return f"step {event.step}  loss {event.loss:.4f}  {self._speed()}" if is_shown else None
            case Saving():
                return None
            case Saved():
                facts.last_checkpoint = event.path
                facts.saves_s.append(event.elapsed_s)
                line = f"saved {event.path}: {format_size(event.num_bytes)} in {format_duration(event.elapsed_s)}"
                if event.stopped_s < event.elapsed_s:
                    line += f", training stopped for {format_duration(event.stopped_s)}"
                return line
            case Evaluated():
                facts.answer_accuracy = event.answer_accuracy
                return f"  held-out numbers sorted right: {event.answer_accuracy:.1%}"
            case Killed():
                facts.ended = "killed"
                where = "in the middle of its save" if event.while_saving else "after its update"
                return f"step {event.step}: every rank killed {where}, as asked for"
            case Stopped():
                facts.ended = "stopped"
                return f"stopped after step {event.step}, which was saved"
            case Finished():
                facts.ended = "finished"
                return None
            case Failed():
                facts.ended, self._failed = "failed", event
                return None
            case _:
                assert_never(event)

    def _started(self, event: Started) -> str:
        facts = self._facts
        facts.world_size, facts.first_step, facts.resumed_from = event.world_size, event.first_step, event.resumed_from
        facts.last_checkpoint = event.resumed_from
        for warning in event.warnings:
            out.warning(warning)
        ranks = f"{event.world_size} rank{'s' if event.world_size > 1 else ''} on {event.device}"
        text = f"{format_count(event.num_params)} parameters, {ranks}"
        if event.resumed_from is None:
            anew = f"; no checkpoint in {self._options.folder}: step 1 comes next" if self._options.resume else ""
            return f"{text}{anew}"
        saved_by = f", saved by {event.saved_world_size}" if event.saved_world_size else ""
        return f"{text}; resumed from {event.resumed_from}{saved_by}: step {event.first_step} comes next"

    def finish(self, end: JobEnd, *, as_json: bool) -> None:
        """Print what the run came to, and what to type next."""
        facts = self._facts
        facts.exit_code = end.exit_code
        if as_json:
            out.json_report("train", facts)
        elif facts.ended == "finished" and facts.last_checkpoint:
            print(facts.last_checkpoint if self._quiet else printable(self._summary()))
        if facts.ended in ("failed", "without a word") and end.exit_code:
            self._explain(end)
        if not as_json:
            self.say_next()

    def say_next(self) -> None:
        """Say what to type next."""
        if not self._quiet:
            for line in self._next():
                out.note(line)

    def _summary(self) -> str:
        facts = self._facts
        loss = "" if facts.loss is None else f", loss {facts.loss:.4f}"
        accuracy = "" if facts.answer_accuracy is None else f", {facts.answer_accuracy:.1%} of held-out numbers right"
        return f"finished step {self._options.steps}{loss}{accuracy}: {facts.last_checkpoint}"

    def _explain(self, end: JobEnd) -> None:
        if self._failed is not None:
            for line in out.error_lines(self._failed.message, self._failed.hint):
                print(line, file=sys.stderr)
            return
        for line in end.tail:
            print(printable(line), file=sys.stderr)

    def _next(self) -> list[str]:
        facts, folder = self._facts, shlex.quote(self._options.folder)
        if facts.ended == "finished" and facts.last_checkpoint:
            last = shlex.quote(facts.last_checkpoint)
            return [f"next: fsdp-ckpt inspect {last}", f"      fsdp-ckpt merge {last} merged",
                    f"      fsdp-ckpt generate merged {_PI[: self._options.digits]}"]  # fmt: skip
        if facts.ended in ("killed", "stopped") or (facts.ended == "without a word" and facts.last_checkpoint):
            again = f"next: fsdp-ckpt train {folder} --resume auto      (on any number of ranks: --nproc N)"
            return [f"last good checkpoint: {facts.last_checkpoint or 'none yet'}", again]
        return []
