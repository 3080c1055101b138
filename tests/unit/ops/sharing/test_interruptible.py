"""Calls that run in threads end soon after Ctrl-C, and the first failure is the one that is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from fsdp_ckpt.ops.sharing import interruptible
from fsdp_ckpt.ops.sharing.interruptible import Stop, StoppedError, run_all, run_one


def test_all_calls_are_made_and_one_returns_its_result() -> None:
    done: list[int] = []
    run_all([lambda number=number: done.append(number) for number in range(20)], Stop(), num_threads=4)  # type: ignore[misc]
    assert sorted(done) == list(range(20))
    assert run_one(lambda: "result", Stop()) == "result"
    run_all([], Stop(), num_threads=4)


def test_the_first_failure_stops_the_others_and_is_raised() -> None:
    stop, begun = Stop(), threading.Event()

    def wait() -> None:
        begun.set()
        while True:
            stop.check()
            time.sleep(0.001)

    def fail() -> None:
        assert begun.wait(5)
        raise ValueError("the reason")

    later: list[int] = []
    calls: list[Callable[[], None]] = [wait, fail, lambda: later.append(1)]
    with pytest.raises(ValueError, match="the reason"):
        run_all(calls, stop, num_threads=2)
    assert later == []


def test_an_interruption_asks_running_calls_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, begun, ended = Stop(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        try:
            while True:
                stop.check()
                time.sleep(0.001)
        except StoppedError:
            ended.set()
            raise

    def interrupted_join(self: threading.Thread, timeout: float | None = None) -> None:
        assert begun.wait(5)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted_join)
    with pytest.raises(KeyboardInterrupt):
        run_one(work, stop)
    assert ended.is_set()


def test_an_interruption_does_not_wait_for_what_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptible, "_GRACE_S", 0.05)
    release, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(30)

    real = threading.Thread.join

    def interrupted_join(self: threading.Thread, timeout: float | None = None) -> None:
        assert begun.wait(5)
        monkeypatch.setattr(threading.Thread, "join", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted_join)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_one(work, Stop())
    assert time.monotonic() - started < 10
    release.set()
