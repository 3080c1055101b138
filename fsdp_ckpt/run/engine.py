"""Write output files with several workers: open, fill, seal, make durable, give the final name."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fsdp_ckpt.errors import NotEnoughSpace
from fsdp_ckpt.run.checksum import checksum_range, combine_crc
from fsdp_ckpt.run.copy import CancelledError, Copier, TaskResult
from fsdp_ckpt.store.local import LocalFile
from fsdp_ckpt.store.publish import Staging, current_umask
from fsdp_ckpt.store.syscalls import write_all

__all__ = ["FileResult", "OutputSpec", "Task", "write_files"]


class Task(Protocol):
    """Writes one unbroken run of an output file: ``num_bytes`` from ``position`` on."""

    @property
    def position(self) -> int:
        """Byte in the output file at which the run begins."""

    @property
    def num_bytes(self) -> int:
        """Its length."""

    def carry_out(self, copier: Copier, fd: int) -> TaskResult:
        """Write it.

        Args:
            copier: Has the sources, the buffers, and what is told about progress.
            fd: Descriptor of the output file.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """An output file.

    Attributes:
        name: Its name in the result.
        size: Its bytes.
        head: Its first bytes.
        ranges: Byte range of each tensor in it, by name.
        tasks: Yields what fills it, with the name of the tensor: a large model has millions of tasks.
        seal: Given the CRC-32 of each tensor, returns what is still to be written, as (position, bytes).
    """

    name: str
    size: int
    head: bytes
    ranges: Mapping[str, tuple[int, int]]
    tasks: Callable[[], Iterator[tuple[str, Task]]]
    seal: Callable[[Mapping[str, int]], Sequence[tuple[int, bytes]]] | None = None


@dataclass(slots=True)
class FileResult:
    """What became of a file: sums over its tasks, and the CRC-32 of each tensor where it was asked for."""

    crcs: dict[str, int] = field(default_factory=dict)
    verified_bytes: int = 0
    shared_bytes: int = 0
    unverified: int = 0
    recovered: list[str] = field(default_factory=list)
    runs: dict[str, list[tuple[int, int, int | None]]] = field(default_factory=dict)

    def add(self, name: str, task: Task, result: TaskResult, *, keep_crc: bool) -> None:
        """Count a task; its position, length and CRC-32 are kept until those of the tensor are put together."""
        self.verified_bytes += result.verified_bytes
        self.shared_bytes += result.shared_bytes
        self.unverified += result.unverified
        self.recovered += result.recovered
        if keep_crc:
            self.runs.setdefault(name, []).append((task.position, task.num_bytes, result.crc32))


class _Output:
    """A file while it is written."""

    def __init__(self, spec: OutputSpec, path: Path) -> None:
        self.spec = spec
        self.left = 0
        self.all_issued = False
        self.result = FileResult()
        self.path = path
        self.fd = os.open(
            path,
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0),
            0o666 & ~current_umask(),
        )
        try:
            os.ftruncate(self.fd, spec.size)
            write_all(self.fd, spec.head, 0)
        except BaseException:
            os.close(self.fd)
            raise


class _Engine:
    def __init__(
        self, specs: Sequence[OutputSpec], staging: Staging, copier: Copier, *, durable: bool, need_crcs: bool
    ) -> None:
        self.staging = staging
        self.copier = copier
        self.durable = durable
        self.need_crcs = need_crcs
        self.specs = specs
        self.todo = self.issue()
        self.open: list[_Output] = []
        self.done: dict[str, FileResult] = {}
        self.error: BaseException | None = None
        self.lock = threading.Lock()

    def work(self) -> None:
        try:
            while not self.copier.stop.is_set():
                with self.lock:
                    item = next(self.todo, None)
                if item is None:
                    return
                output, name, task = item
                result = None if task is None else task.carry_out(self.copier, output.fd)
                with self.lock:
                    if task is not None and result is not None:
                        keep_crc = output.spec.seal is not None or self.need_crcs
                        output.result.add(name, task, result, keep_crc=keep_crc)
                    output.left -= 1
                    is_last = output.all_issued and output.left == 0
                if is_last:
                    self.finish(output)
        except CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again in the thread that waits
            with self.lock:
                self.error = self.error or error
            self.copier.stop.set()

    def issue(self) -> Iterator[tuple[_Output, str, Task | None]]:
        """Yield the tasks of one file after the other; a last one without task ends each file."""
        for spec in self.specs:
            output = _Output(spec, self.staging.part_file(spec.name))
            self.open.append(output)
            for name, task in spec.tasks():
                output.left += 1
                yield output, name, task
            output.left += 1
            output.all_issued = True
            yield output, "", None

    def finish(self, output: _Output) -> None:
        spec, result = output.spec, output.result
        if spec.seal is not None or self.need_crcs:
            result.crcs = {
                name: _tensor_crc(output.fd, span, result.runs.get(name, [])) for name, span in spec.ranges.items()
            }
            result.runs.clear()
        if spec.seal is not None:
            for position, data in spec.seal(result.crcs):
                write_all(output.fd, data, position)
        if self.durable:
            os.fsync(output.fd)
        with self.lock:
            self.open.remove(output)
            self.done[spec.name] = result
        os.close(output.fd)
        self.staging.finish_file(spec.name, output.path, json.dumps(result.crcs))

    def close(self) -> None:
        for output in self.open:
            os.close(output.fd)
        self.open.clear()


def write_files(
    specs: Sequence[OutputSpec], staging: Staging, copier: Copier, *, jobs: int, durable: bool, need_crcs: bool
) -> dict[str, FileResult]:
    """Write files into a staging folder.

    Args:
        specs: The files.
        staging: Where they go; each gets its final name once it is complete.
        copier: Moves the bytes.
        jobs: Worker threads.
        durable: fsync each file before it gets its name.
        need_crcs: Work out the CRC-32 of every tensor as written.

    Returns:
        The results, by file name.

    Raises:
        NotEnoughSpace: The disk is full after all.
        Whatever a task raised first; files that were complete by then stay in the staging folder.
    """
    engine = _Engine(specs, staging, copier, durable=durable, need_crcs=need_crcs)
    running: list[threading.Event] = []
    try:
        for number in range(jobs):
            done = threading.Event()
            threading.Thread(target=_work, args=(engine, done), name=f"fsdp-ckpt-{number}", daemon=True).start()
            running.append(done)
        _wait_for(running)
    except BaseException:
        copier.stop.set()
        raise
    finally:
        while not all(done.is_set() for done in running):
            with suppress(KeyboardInterrupt):  # they use files that are closed next, however often Ctrl-C is pressed
                _wait_for(running)
        engine.close()
    if engine.error is not None:
        raise _explain(engine.error, staging.destination)
    compared_bytes = copier.finish()
    if engine.done:
        next(iter(engine.done.values())).verified_bytes += compared_bytes
    return engine.done


def _work(engine: _Engine, done: threading.Event) -> None:
    try:
        engine.work()
    finally:
        done.set()


def _wait_for(running: Sequence[threading.Event]) -> None:
    # Not Thread.join: when a signal interrupts it, CPython 3.11 takes the thread for finished (bpo-45274).
    for done in running:
        while not done.wait(0.2):
            pass


def _tensor_crc(fd: int, span: tuple[int, int], runs: Sequence[tuple[int, int, int | None]]) -> int:
    """Put the checksums of a tensor's runs together; read the tensor back where one is missing."""
    found: int | None = 0
    for position, num_bytes, crc in sorted(runs, key=lambda run: run[0]):
        if found is None or crc is None:
            found = None
        else:
            found = crc if position == span[0] else combine_crc(found, crc, num_bytes)
    return checksum_range(LocalFile(fd), *span) if found is None else found


def _explain(error: BaseException, destination: Path) -> BaseException:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NotEnoughSpace(f"no space left while writing `{destination}`: {error.strerror}")
    return error
