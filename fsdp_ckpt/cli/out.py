"""What commands print: data to stdout, everything else to stderr, JSON when asked for.

Texts from files are untrusted: they pass ``names.printable`` and are never read as rich markup.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsdp_ckpt.names import printable
from fsdp_ckpt.units import format_duration, format_rate, format_size

if TYPE_CHECKING:
    from rich.console import Console

    from fsdp_ckpt.run.progress import Listener, Progress

__all__ = ["console", "error_lines", "json_report", "note", "progress", "shorten", "warning"]

_MESSAGE_CHARACTERS = 1500


def console() -> Console:
    """Return the console for stdout; without a terminal it is as wide as its content needs."""
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; `| head` is no failure

    columns = os.environ.get("COLUMNS", "")
    width = None if sys.stdout.isatty() else int(columns) if columns.isdigit() and columns != "0" else 160
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # None: nor bold, which rich leaves
    return PipeConsole(width=width, color_system=colors, highlight=False, soft_wrap=False, markup=False, emoji=False)


def json_report(command: str, report: Any) -> None:
    """Print a report as one JSON object with its schema."""
    data = {"schema": f"fsdp-ckpt/{command}/1", **_plain(report)}
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str | Enum):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def note(text: str) -> None:
    """Tell something on stderr."""
    print(shorten(text), file=sys.stderr)


def warning(text: str) -> None:
    """Warn on stderr."""
    print(f"warning: {shorten(text)}", file=sys.stderr)


def error_lines(message: str, hint: str | None) -> Iterator[str]:
    """Yield the lines of an error."""
    yield f"error: {shorten(message)}"
    if hint:
        yield f"hint: {shorten(hint)}"


def shorten(text: str) -> str:
    """Return a text fit for a message: what is invisible escaped, and no longer than a screen."""
    shown = printable(text[:_MESSAGE_CHARACTERS])
    return shown if len(text) <= _MESSAGE_CHARACTERS else shown + " …"


@contextmanager
def progress(label: str, *, quiet: bool) -> Iterator[Listener | None]:
    """Show progress on stderr: a line that is redrawn on a terminal, one line every 10 % elsewhere."""
    if quiet or os.environ.get("FSDP_CKPT_PROGRESS") == "none":
        yield None
        return
    shown = _Line(label) if sys.stderr.isatty() else _Log(label)
    try:
        yield shown
    finally:
        shown.close()


class _Line:
    def __init__(self, label: str) -> None:
        self._label = label
        self._drawn = False

    def __call__(self, event: Progress) -> None:
        text = f"{self._label}  {_describe(event)}"
        sys.stderr.write("\r" + text[: shutil.get_terminal_size().columns - 1].ljust(40) + "\x1b[K")
        sys.stderr.flush()
        self._drawn = True

    def close(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class _Log:
    def __init__(self, label: str) -> None:
        self._label = label
        self._begun = time.monotonic()
        self._tenth = 0

    def __call__(self, event: Progress) -> None:
        tenth = event.done_bytes * 10 // max(event.total_bytes, 1)
        if tenth > self._tenth and event.elapsed_s > 2:
            print(f"{self._label}  {_describe(event)}", file=sys.stderr)
            self._tenth = tenth

    def close(self) -> None:
        pass


def _describe(event: Progress) -> str:
    share = event.done_bytes / max(event.total_bytes, 1)
    left = event.elapsed_s * (1 / share - 1) if share > 0 else 0.0
    done, total = format_size(event.done_bytes), format_size(event.total_bytes)
    rate = format_rate(event.done_bytes, event.elapsed_s)
    return f"{share:4.0%}  {done} / {total}  {rate}  ETA {format_duration(left)}"
