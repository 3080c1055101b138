"""``torchrun -m fsdp_ckpt.train.driver OPTIONS.json [ATTEMPT]``: one rank of a training run."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import NoReturn

from fsdp_ckpt.errors import FsdpCkptError, RankFailed, UsageError
from fsdp_ckpt.train.driver.events import Failed, LogWriter
from fsdp_ckpt.train.driver.options import TrainOptions

__all__ = ["main"]

_UNFORESEEN = 1
_LINGER_S = 0.5


def main(arguments: list[str]) -> int:
    """Train; return the exit code. What the ranks agree on is said once, by the first one, and goes to the log.

    Args:
        arguments: File of the options, and what tells this attempt from others in the log (``1``).
    """
    is_first = os.environ.get("RANK", "0") == "0"
    options = None
    attempt = arguments[1] if len(arguments) > 1 else "1"
    try:
        if not 1 <= len(arguments) <= 2:
            raise UsageError("arguments: allowed: OPTIONS.json [ATTEMPT]")
        options = TrainOptions.read(arguments[0])
        from fsdp_ckpt.train.driver.loop import train

        return train(options, attempt=attempt)
    except FsdpCkptError as error:
        message, hint, code = error.message, error.hint, error.exit_code
        if is_first or isinstance(error, RankFailed):
            shown = message if is_first else f"rank {os.environ['RANK']}: {message}"
            sys.stderr.write(f"fsdp-ckpt: error: {shown}\n" + (f"hint: {hint}\n" if hint else ""))
    except Exception as error:  # noqa: BLE001 - the end of the program, which has to get past gloo's threads
        traceback.print_exc()
        message, hint, code = f"{type(error).__name__}: {error}", None, _UNFORESEEN
    sys.stderr.flush()
    if is_first and options is not None:
        _log_failure(options.folder, attempt, Failed(message=message, hint=hint))
    elif not is_first:
        time.sleep(_LINGER_S)  # torchrun ends all ranks with the first that ends; let the one that explains be first
    return code


def _log_failure(folder: str, attempt: str, event: Failed) -> None:
    if not os.path.isdir(folder):
        return
    try:
        with LogWriter(folder, attempt) as log:
            log.append(event)
    except OSError as error:
        sys.stderr.write(f"fsdp-ckpt: the log cannot be written: {error}\n")


def _leave(code: int) -> NoReturn:
    """End without the interpreter's end, in which gloo's threads of torch 2.13 now and then abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
