"""Overwrite a checkpoint by dcp.save and be killed at every step of it, one after the other, with either writer.

``python -m tests.unit.train.dcp_killed PLACE`` prints, by writer, what the checkpoint was after each kill: ``old``,
``new``, or ``destroyed``; and whether the next save worked and left nothing behind. torch is imported once.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

import fsdp_ckpt.store.publish
from fsdp_ckpt import FastFileSystemWriter

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


class Killer:
    """Counts steps, and ends the process before the n-th."""

    def __init__(self, at: int | None, place: Path) -> None:
        self.at = at
        self.count = 0
        self.place = str(place)

    def step(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and isinstance(args[0], str | os.PathLike) and str(args[0]).startswith(self.place):
            self.step()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.step()
            return function(*args, **options)

        return call

    def watch(self) -> None:
        sys.addaudithook(self.hook)
        for name in ("pwrite", "fsync", "ftruncate"):
            setattr(os, name, self.before(getattr(os, name)))
        publish: Any = fsdp_ckpt.store.publish
        publish.exchange = self.before(publish.exchange)
        killer = self

        class Stream(io.FileIO):
            def write(self, data: Any) -> int:
                killer.step()
                return super().write(data)

        @contextmanager
        def create_stream(_: Any, path: Any, mode: str) -> Iterator[Any]:
            with Stream(path, mode) as stream:
                yield stream

        torchs: Any = FileSystem
        torchs.create_stream = create_stream


def state(value: float) -> dict[str, Any]:
    return {"a": torch.full((64, 32), value), "b": torch.full((5,), value), "step": int(value)}


def save(writer: Any, value: float) -> None:
    dcp.save(state(value), storage_writer=writer, no_dist=True)


def what_is_there(folder: Path) -> str:
    found: dict[str, Any] = {"a": torch.zeros(64, 32), "b": torch.zeros(5), "step": None}
    try:
        dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    except BaseException:  # noqa: BLE001 - CheckpointException is none
        return "destroyed"
    for name, value in (("old", 1.0), ("new", 2.0)):
        right = state(value)
        if all(torch.equal(found[key], right[key]) for key in "ab") and found["step"] == right["step"]:
            return name
    return "mixed"


def strike(make: Callable[[Path], Any], place: Path, at: int | None) -> int:
    """Overwrite in a child that is killed before a step; return how many steps there were, when it was not."""
    reader, pipe = os.pipe()
    child = os.fork()
    if not child:
        try:
            killer = Killer(at, place)
            killer.watch()
            save(make(place / "run"), 2.0)
            os.write(pipe, str(killer.count).encode())
        finally:
            os._exit(0)
    os.close(pipe)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    assert at is None or os.WIFSIGNALED(status), f"step {at} was not reached"
    return int(text or 0)


def trial(make: Callable[[Path], Any], place: Path, *, every: int = 1) -> dict[str, Any]:
    """Every step in turn, or every n-th."""
    result: dict[str, Any] = {"found": [], "next": []}

    def fresh() -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        save(make(place / "run"), 1.0)

    fresh()
    for at in range(1, strike(make, place, None) + 1, every):
        fresh()
        strike(make, place, at)
        result["found"].append(what_is_there(place / "run"))
        save(make(place / "run"), 2.0)
        result["next"].append(what_is_there(place / "run") == "new" and os.listdir(place) == ["run"])
    return result


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # torch logs a traceback for each checkpoint that is no more
    torch.set_num_threads(1)
    system: Any = os
    system.fsync = lambda _: None  # a killed process loses nothing that the kernel has
    place = Path(sys.argv[1])
    ours = trial(FastFileSystemWriter, place / "ours")
    several = trial(lambda path: FastFileSystemWriter(path, files_per_rank=2, durable=False), place / "several")
    theirs = trial(dcp.FileSystemWriter, place / "torch", every=9)
    print(json.dumps({"ours": ours, "several": several, "torch": theirs}))


if __name__ == "__main__":
    main()
