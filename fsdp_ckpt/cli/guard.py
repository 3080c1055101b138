"""From exceptions to messages and exit codes, in one place.

Exit codes: 0 ok, 1 findings, 2 usage, 3 no or unknown checkpoint, 4 corrupt or incomplete, 5 destination exists,
6 not enough memory or disk, 7 network or hub, 8 incompatible, 70 internal, 130 and 143 signals.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import typer

from fsdp_ckpt.cli.out import error_lines
from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.store.remote.urls import redact

__all__ = ["TerminatedError", "guard"]

_INTERNAL = 70
P = ParamSpec("P")
R = TypeVar("R")


class TerminatedError(KeyboardInterrupt):
    """SIGTERM arrived; everything that cleans up after Ctrl-C cleans up after this, too."""


def guard(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command so that it ends with a message and the right exit code, never with a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        signal.signal(signal.SIGTERM, _terminate)
        # It says what it tries again, with addresses, in between our lines; what fails for good we say.
        logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()
        except FsdpCkptError as error:
            _explain(error.message, error.hint)
            raise typer.Exit(error.exit_code) from None
        except TerminatedError:
            _explain("stopped by SIGTERM" + _left(), _resume_hint())
            raise typer.Exit(128 + signal.SIGTERM) from None
        except KeyboardInterrupt:
            _explain("interrupted" + _left(), _resume_hint())
            raise typer.Exit(128 + signal.SIGINT) from None
        except BrokenPipeError:
            _close_pipe()
            raise typer.Exit(0) from None
        except MemoryError:
            _explain("not enough memory", None)
            raise typer.Exit(6) from None
        except OSError as error:
            _explain(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), None)
            _close_pipe_if_full()
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise typer.Exit(6 if full else _INTERNAL) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:  # noqa: BLE001  # the last resort of the command line
            _explain(
                f"internal error: {type(error).__name__}: {error}",
                "this is a bug in fsdp-ckpt; run again with FSDP_CKPT_DEBUG=1 and report the traceback",
            )
            raise typer.Exit(_INTERNAL) from None
        return result

    return run


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise TerminatedError


def _explain(message: str, hint: str | None) -> None:
    if os.environ.get("FSDP_CKPT_DEBUG") == "1" and sys.exc_info()[0] is not None:
        print(redact(traceback.format_exc()), end="", file=sys.stderr)  # signed URLs may be in it
    for line in error_lines(message, hint):
        print(line, file=sys.stderr)


def _left() -> str:
    """Commands that write say that nothing half-written is left."""
    return "" if sys.argv[1:2] in (["inspect"], ["validate"], ["diff"], ["list"]) else "; nothing half-written was left"


def _resume_hint() -> str | None:
    arguments: list[Any] = sys.argv[1:]
    if arguments[:1] in (["push"], ["pull"]):
        return "the same command goes on where it stopped"
    if not arguments or arguments[0] not in ("merge", "convert", "reshard") or "--resume" in arguments:
        return None
    import shlex

    return f"to go on where it stopped: fsdp-ckpt {shlex.join(arguments)} --resume"


def _close_pipe_if_full() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _close_pipe()


def _close_pipe() -> None:
    # Python would complain once more when it flushes stdout at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
