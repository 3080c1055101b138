"""What one process does with signals; tests/dist/test_preemption.py has several, and torchrun."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fsdp_ckpt
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train import preemption as module
from fsdp_ckpt.train.preemption import Preemption

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, Any]]:
    before: dict[int, Any] = {number: signal.getsignal(number) for number in HANDLED}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE_S", 0.02)


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.05)


def test_it_is_exported() -> None:
    assert fsdp_ckpt.Preemption is Preemption


def test_without_torch_distributed() -> None:
    with Preemption() as preemption:
        assert [preemption.requested() for _ in range(3)] == [False] * 3
        assert (preemption.exit_code, preemption.signal) == (0, None)
        send(signal.SIGUSR1)
        assert preemption.requested()
        assert preemption.requested()
    assert (preemption.exit_code, preemption.signal) == (138, signal.SIGUSR1)


def test_handlers_are_what_they_were(handlers: dict[int, Any]) -> None:
    came: list[int] = []

    def own(number: int, _: Any) -> None:
        came.append(number)

    signal.signal(signal.SIGTERM, own)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def fail() -> None:
        with Preemption((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)):
            assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]
            send(signal.SIGTERM)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert came == []
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)] == [
        own, signal.SIG_IGN, signal.SIG_DFL,
    ]  # fmt: skip
    send(signal.SIGTERM)
    assert came == [signal.SIGTERM]


@pytest.mark.usefixtures("no_patience")
def test_the_second_signal_is_for_the_handler_before() -> None:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with Preemption() as preemption:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            send(number)
        assert came == []  # the first of each kind
        send(signal.SIGUSR1)  # was ignored, and is
        send(signal.SIGTERM)
        assert came == [signal.SIGTERM]
        assert preemption.requested()
        assert preemption.signal == signal.SIGTERM


@pytest.mark.usefixtures("no_patience")
def test_ctrl_c_twice_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Preemption((signal.SIGINT,)) as preemption:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert preemption.requested()
    assert preemption.exit_code == 130


def test_what_comes_at_once_is_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE_S", 60.0)
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    with Preemption() as preemption:
        for _ in range(3):
            send(signal.SIGTERM)
        assert preemption.requested()
    assert came == []


def test_every_nth_call_asks() -> None:
    with Preemption(every=3) as preemption:
        send(signal.SIGTERM)
        assert [preemption.requested() for _ in range(4)] == [False, False, True, True]


def in_a_child(act: Callable[[], int]) -> int:
    pid = os.fork()
    if not pid:
        try:
            os._exit(act())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking beside torch's threads
def test_forked_children_can_be_ended() -> None:
    def told(number: int) -> int:
        os.kill(os.getpid(), number)
        time.sleep(0.05)
        return 7

    with Preemption() as preemption:
        assert in_a_child(lambda: told(signal.SIGTERM)) == -signal.SIGTERM  # as multiprocessing ends them
        assert in_a_child(lambda: told(signal.SIGUSR1)) == 7  # as Slurm tells all processes of a job
        assert not preemption.requested()


def test_other_threads_cannot_enter() -> None:
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            with Preemption():
                pass
        except BaseException as error:  # noqa: BLE001 - the outcome
            caught.append(error)

    thread = threading.Thread(target=enter, name="loader")
    thread.start()
    thread.join()
    (error,) = caught
    assert isinstance(error, UsageError)
    assert "in the thread `loader`" in str(error)


def test_it_is_asked_and_entered_as_it_should() -> None:
    preemption = Preemption()
    with pytest.raises(UsageError, match="within the block"):
        preemption.requested()
    with preemption, pytest.raises(UsageError, match="entered already"), preemption:
        pass


def test_ranks_that_do_not_know_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Preemption() as preemption, pytest.raises(UsageError, match="started as one of 2"):
        preemption.requested()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"signals": ()}, "there is none"),
        ({"signals": (signal.SIGKILL,)}, "cannot be caught"),
        ({"signals": (signal.SIGSTOP, signal.SIGTERM)}, "cannot be caught"),
        ({"signals": (12345,)}, "12345 cannot be caught"),
        ({"every": 0}, "every: 0"),
        ({"exit_code": 0}, "exit_code: 0"),
        ({"exit_code": 256}, "allowed: 1 to 255"),
    ],
)
def test_mistakes(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Preemption(**options)
