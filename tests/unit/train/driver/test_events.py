"""The log of a run: round trips, torn lines, attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_ckpt.train.driver.events import (
    LOG,
    Evaluated,
    Event,
    Failed,
    Finished,
    Killed,
    LogReader,
    LogWriter,
    Saved,
    Saving,
    Started,
    Stepped,
    Stopped,
)

EVENTS: list[Event] = [
    Started(
        world_size=2, device="cpu", num_params=10, steps=12, first_step=5, fsdp="FSDP2", resumed_from="run/step-4",
        saved_world_size=4, warnings=("one", "two"),
    ),
    Stepped(step=1, loss=2.5, lr=0.1, tokens_per_s=10.0),
    Saving(step=4, path="run/step-4"),
    Saved(step=4, path="run/step-4", elapsed_s=0.5, stopped_s=0.1, num_bytes=100),
    Evaluated(step=4, token_accuracy=0.5, answer_accuracy=0.25),
    Killed(step=6, while_saving=False),
    Stopped(step=6, signal=15),
    Finished(step=12, elapsed_s=3.0),
    Failed(message="no \u2192 line\nand another", hint=None),
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_round_trip(tmp_path: Path, event: Event) -> None:
    with LogWriter(tmp_path / "run", "a") as log:
        log.append(event)
    assert LogReader(tmp_path / "run").poll() == [event]
    assert (tmp_path / "run" / LOG).read_bytes().count(b"\n") == 1


def test_lines_of_other_versions_are_passed_over(tmp_path: Path) -> None:
    lines = [
        b'{"attempt": "a", "kind": "rested", "step": 1}',
        b'{"attempt": "a", "kind": "saving", "step": 1}',
        b'["killed"]',
        b"\xff\x00",
        b'{"attempt": "a", "kind": "killed", "step": 7, "while_saving": true, "mood": "bad"}',
    ]
    (tmp_path / LOG).write_bytes(b"".join(line + b"\n" for line in lines))
    assert LogReader(tmp_path).poll() == [Killed(step=7, while_saving=True)]


def test_a_torn_line_is_passed_over_and_a_resumed_run_appends(tmp_path: Path) -> None:
    reader = LogReader(tmp_path)
    assert reader.poll() == []
    first = Stepped(step=1, loss=2.5, lr=0.1, tokens_per_s=10.0)
    with LogWriter(tmp_path, "a") as log:
        log.append(first)
    with (tmp_path / LOG).open("ab") as file:
        file.write(b'{"attempt": "a", "kind": "kil')
    assert reader.poll() == [first]
    assert reader.poll() == []
    with LogWriter(tmp_path, "b") as log:
        log.append(Killed(step=2, while_saving=True))
        log.append(Finished(step=3, elapsed_s=1.0))
    assert reader.poll() == [Killed(step=2, while_saving=True), Finished(step=3, elapsed_s=1.0)]
    assert LogReader(tmp_path, "a").poll() == [first]
