"""The log of a run, ``log.jsonl``: what rank 0 appends, and what is read while it runs. Does not import torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

__all__ = [
    "LOG", "Evaluated", "Event", "Failed", "Finished", "Killed", "LogReader", "LogWriter", "Saved", "Saving", "Started",
    "Stepped", "Stopped",
]  # fmt: skip

LOG = "log.jsonl"
"""Name of the log in a run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The ranks are there, the model is built and, where asked for, loaded.

    Attributes:
        world_size: Number of ranks.
        device: ``cpu`` or ``cuda``.
        num_params: Parameters of the whole model.
        steps: Last step, inclusive.
        first_step: Step that comes next.
        fsdp: How the model is sharded, in a line.
        resumed_from: The checkpoint; None for a new run.
        saved_world_size: Ranks that saved it, where known.
        warnings: What loading passed over or could not keep.
    """

    world_size: int
    device: str
    num_params: int
    steps: int
    first_step: int
    fsdp: str = ""
    resumed_from: str | None = None
    saved_world_size: int | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A step is done: its mean loss over all ranks, learning rate, and tokens of all ranks per second."""

    step: int
    loss: float
    lr: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A save begins."""

    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint is in its place; wall times in seconds, of the save and of the loop's stop; size in bytes."""

    step: int
    path: str
    elapsed_s: float
    stopped_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Held-out samples: shares, 0 to 1, of right answer tokens and of wholly right answers."""

    step: int
    token_accuracy: float
    answer_accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """Every rank is about to be killed, as asked for; ``while_saving`` before the checkpoint was committed."""

    step: int
    while_saving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A signal ended the run after this step, which was saved."""

    step: int
    signal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last step is done; wall time of this attempt in seconds."""

    step: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An error ended the run."""

    message: str
    hint: str | None = None


Event = Started | Stepped | Saving | Saved | Evaluated | Killed | Stopped | Finished | Failed

_KINDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (Started, Stepped, Saving, Saved, Evaluated, Killed, Stopped, Finished, Failed)
}


class LogWriter:
    """Appends events; each line is handed to the operating system at once, so that it outlives the process.

    Args:
        folder: The run's folder; made when missing.
        attempt: Tells the lines of this start from those of earlier ones.
    """

    def __init__(self, folder: str | os.PathLike[str], attempt: str) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.attempt = attempt
        self._file = (path / LOG).open("a+b", buffering=0)
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # an earlier attempt died within a line
                self._file.write(b"\n")

    def append(self, event: Event) -> None:
        """Write a line."""
        values = {"attempt": self.attempt, "kind": type(event).__name__.lower()} | asdict(event)
        self._file.write(json.dumps(values).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LogReader:
    """Reads events as they come; lines that are torn, foreign or of another attempt are passed over.

    Args:
        folder: The run's folder; the log need not exist yet.
        attempt: Only events of this one; None for all.
    """

    def __init__(self, folder: str | os.PathLike[str], attempt: str | None = None) -> None:
        self._path = Path(folder) / LOG
        self._attempt = attempt
        self._offset = 0

    def poll(self) -> list[Event]:
        """Return the events of lines that were completed since the last call; never waits."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = (self._parse(line) for line in whole.splitlines())
        return [event for event in found if event is not None]

    def _parse(self, line: bytes) -> Event | None:
        try:
            values = json.loads(line)
        except ValueError:
            return None
        if not isinstance(values, dict) or self._attempt not in (None, values.get("attempt")):
            return None
        kind = _KINDS.get(str(values.get("kind")))
        if kind is None:
            return None
        known = {one.name for one in fields(kind)}
        chosen = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
        try:
            event: Event = kind(**chosen)
        except TypeError:  # a field is missing: written by another version
            return None
        return event
