"""torchrun, in a process that ends as the script did.

torchrun itself ends with 1 whatever happened to a rank. Here the first rank that failed gives the exit code: the
script's own, or 128 + the signal that killed it. Everything else, arguments included, is torchrun's.

SIGTERM to this process is passed on by torchrun, which gives ranks 30 seconds and then ends them. SIGUSR1, which would
end torchrun, is passed on as well, and waits for the ranks without a limit.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subprocess import Popen

    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run torchrun with the arguments of this process."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    # Its report of a failure is 30 lines without the traceback, which the rank has printed already.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    _stop_with_parent()
    started = _note_starts()
    signal.signal(signal.SIGUSR1, lambda number, _: _pass_on(started, number))
    try:
        run(get_args_parser().parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        return _explain(error.failures)
    except SignalException as error:
        return _code_of_all(started) or 128 + int(error.sigval)
    return 0


def _stop_with_parent() -> None:
    """Ask for SIGTERM when the process that started this one dies, SIGKILL included (Linux): ranks save and stop."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _note_starts() -> list[PContext]:
    """Return a list to which torchrun's ranks are added as it starts them, and once more when it restarts them."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    started: list[PContext] = []
    start = PContext.start

    def note_and_start(context: PContext) -> None:
        started.append(context)
        start(context)

    PContext.start = note_and_start  # type: ignore[assignment, method-assign]  # it tells nobody else what it has started
    return started


def _processes(started: list[PContext]) -> list[Popen[bytes]]:
    handlers = getattr(started[-1], "subprocess_handlers", {}) if started else {}
    return [handler.proc for handler in handlers.values()]


def _pass_on(started: list[PContext], number: int) -> None:
    for process in _processes(started):
        process.send_signal(number)  # does nothing to one that has ended


def _code_of_all(started: list[PContext]) -> int:
    """Return the exit code with which all ranks here ended by themselves; 0 where they did not agree on one."""
    codes = {process.poll() for process in _processes(started)}
    code = codes.pop() if len(codes) == 1 else None
    return code if code is not None and code > 0 else 0


def _explain(failures: Mapping[int, ProcessFailure]) -> int:
    """Say which rank failed first and how; return the exit code."""
    rank, first = min(failures.items(), key=lambda item: _order(item[0], item[1]))
    code = first.exitcode
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    others = f" ({len(failures) - 1} more failed)" if len(failures) > 1 else ""
    print(f"fsdp-ckpt: rank {rank} {how}{others}", file=sys.stderr)  # noqa: T201  # it is the launcher
    return 128 - code if code < 0 else code


def _order(rank: int, failure: ProcessFailure) -> tuple[float, bool, bool, int]:
    """Sort by time, in whole seconds.

    Within one second, ranks that the launcher ended, and those with the exit code of a traceback, as a rank has that
    lost its peers, come after the others.
    """
    return failure.timestamp, failure.exitcode == -signal.SIGTERM, failure.exitcode == 1, rank


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    sys.exit(main())
