"""Signals by which a cluster takes its machines back, as a question that a training loop asks once per step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.ranks import Ranks

__all__ = ["Preemption"]

_AT_ONCE_S = 1.0
_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)
_Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Turns SIGTERM and SIGUSR1 into a wish to stop, on which all ranks agree at one step.

    Enter it around the training loop, ask ``requested()`` once per step on every rank; when it says yes, save and leave
    with ``exit_code``. Within the block the first signal of each kind is only noted; one of the same kind that comes
    more than a second later does what it would have done without this class, so that a job that hangs can be ended.
    What comes within that second is the same wish by another way: Slurm signals every process, and torchrun passes on
    what it gets. After the block, signals do what they did before.

    A forked child process (a worker of a data loader) is ended by SIGTERM as ever, and is deaf to the others.

    Args:
        signals: Numbers of the signals. SIGTERM is what Kubernetes, Slurm at a job's end, and torchrun send; SIGUSR1
            is for ``sbatch --signal=USR1@120``. Add SIGINT to save upon Ctrl-C.
        every: Ask the other ranks at every n-th call only, the same n on all of them; what comes in between waits.
        exit_code: What ``exit_code`` is to be, 1 to 255, where the cluster requeues by number (HTCondor: 85; Slurm:
            one of its RequeueExit). None for 128 + the signal's number, which Kubernetes' operators take for a
            reason to start again.
        process_group: The ranks that train together; None for all. It need not exist before the first question.

    Attributes:
        signal: Number of the signal that all ranks agreed on; None as long as ``requested()`` has said no. Where
            ranks got different ones, the highest number.

    Raises:
        UsageError: No signal, one that cannot be caught, ``every`` below 1, or an impossible exit code.

    Example:
        >>> with Checkpointer("run", model, optimizer) as checkpointer, Preemption() as preemption:  # doctest: +SKIP
        ...     for step in range(1, 1001):
        ...         train(step)
        ...         if preemption.requested():
        ...             checkpointer.save(step)
        ...             break
        >>> sys.exit(preemption.exit_code)  # doctest: +SKIP
    """

    def __init__(
        self,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        *,
        every: int = 1,
        exit_code: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        wrong = [number for number in signals if number not in signal.valid_signals() or number in _UNCATCHABLE]
        if wrong or not signals:
            raise UsageError(
                f"signals: {wrong[0]!r} cannot be caught" if wrong else "signals: there is none",
                hint="Preemption(signals=(signal.SIGTERM, signal.SIGUSR1))",
            )
        if every < 1:
            raise UsageError(f"every: {every} is not possible; allowed: a whole number from 1")
        if exit_code is not None and not 1 <= exit_code <= 255:
            raise UsageError(f"exit_code: {exit_code} is not possible; allowed: 1 to 255")
        self.signal: int | None = None
        self._signals = tuple(dict.fromkeys(signals))
        self._every = every
        self._exit_code = exit_code
        self._group = process_group
        self._pid = os.getpid()
        self._num_calls = 0
        self._came: dict[int, float] = {}
        """When the first signal of each kind came, as ``time.monotonic`` counts."""
        self._previous: dict[int, _Handler] = {}
        """What handled the signals before; empty outside of the block."""

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"Preemption was entered in the thread `{threading.current_thread().name}`: Python lets only the main "
                "thread say what signals do",
                hint="enter it in the main thread, around what starts the others",
            )
        if self._previous:
            raise UsageError("this Preemption is entered already", hint="ask requested() of the one that there is")
        self._pid = os.getpid()
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not Python's, beyond reach
        self._previous = {}

    def requested(self) -> bool:
        """Tell whether any rank was asked to stop; the same answer on every rank. A collective.

        It costs an all_reduce of 8 bytes on the group's own device: with gloo, 0.4 ms for 2 ranks on a busy machine of
        2 cores. With nccl this process also waits until the GPU has done what it was given, instead of preparing the
        next step meanwhile: ``every=10`` makes that one step of ten, and a group of ``"cpu:gloo,cuda:nccl"`` avoids
        it, as the question then goes over the CPUs. Once it has said yes, it says so without asking.

        Raises:
            UsageError: Outside of the block; or torchrun started several ranks and torch.distributed is not set up, so
                that each would stop at a step of its own.
            RankFailed: Another rank is gone.
        """
        if self.signal is not None:
            return True
        if not self._previous:
            raise UsageError("requested() is asked within the block", hint="with Preemption() as preemption:")
        self._num_calls += 1
        if self._num_calls % self._every:
            return False
        ranks = Ranks(self._group)
        ranks.refuse_strangers()
        self.signal = ranks.largest(max(tuple(self._came), default=0), "agreeing on whether to stop") or None
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What to end the process with: 0 as long as nobody agreed to stop, then as it was made."""
        if self.signal is None:
            return 0
        return 128 + self.signal if self._exit_code is None else self._exit_code

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_child = os.getpid() != self._pid
        if is_child and number != signal.SIGTERM:
            return
        if is_child or now - self._came.setdefault(number, now) > _AT_ONCE_S:
            self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
