"""The other side of ``save_yard``: imports torch once, forks ranks that save as they are told, and judges.

Ranks and server talk to the test through a Unix socket. None of them can hang for good: whoever waits for an answer has
a limit, a rank that is busy too long shows its stacks and ends, and all end with the server.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import fsdp_ckpt.store.leftovers
import fsdp_ckpt.train.record_file
import fsdp_ckpt.train.save
from fsdp_ckpt import Checkpointer, inspect, load_state, merge, save_state
from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.layouts.registry import list_checkpoints
from fsdp_ckpt.store.leftovers import is_staging
from tests.crash.save_job import Job, expected, judge, read_parts, versions_in
from tests.dist.nodes_ranks import show

__all__ = ["main"]

_BUSY_S = 60
"""Longest that a rank may be at one order."""
_GROUP_S = 20
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_PTRACER = 1, 22, 38, 0x59616D61


def main() -> None:
    """Serve one test session: ``python -m tests.crash.save_server SOCKET FOLDER``."""
    address, folder = sys.argv[1], Path(sys.argv[2])
    faulthandler.enable()
    torch.set_num_threads(1)
    _warm_up(folder)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks
    link = _connect(address)
    link.send(("server", 0, os.getpid()))
    while True:
        try:
            do, options = link.recv()
        except EOFError:
            os._exit(0)  # nothing is worth tidying up
        try:
            if do == "fork":
                _fork(address, folder, link, **options)
                link.send(("done", None))
            else:
                link.send(("done", _ANSWERS[do](**options)))
        except BaseException:  # noqa: BLE001 - the test shows it
            link.send(("failed", traceback.format_exc()))


def _connect(address: str) -> Connection:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(address)
        return Connection(plain.detach())


def _warm_up(folder: Path) -> None:
    """Import, before anything is forked, what a save, a load and a judge import when they are first called."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/warm", rank=0, world_size=1)
    job = Job(5)
    place = folder / "warm-up" / "step-1"
    job.become(1)
    save_state(place, **job.state(), values={"version": 1})
    dcp.save(job.nested(), checkpoint_id=folder / "warm-up" / "stock")
    load_state(place, **job.state())
    init_device_mesh("cpu", (1,))
    verdict = judge(place, 5, 1)
    assert verdict["state"] == "whole", verdict
    dist.destroy_process_group()
    shutil.rmtree(place.parent)


# ------------------------------------------------------------------------------------------------------- what it knows


def _look(run: Path, rows: int, ranks: int) -> dict[str, Any]:
    """Tell what lies in the folder of a run: what each name holds, and what fsdp_ckpt makes of it all."""
    names = sorted(os.listdir(run)) if run.is_dir() else []
    found: dict[str, Any] = {
        "visible": {name: judge(run / name, rows, ranks) for name in names if not name.startswith(".")},
        "hidden": {name: is_staging(name) for name in names if name.startswith(".")},
        "listed": [path.name for _, path in list_checkpoints(run)] if names else [],
    }
    try:
        found["inspected"] = str(Path(inspect(run).root).relative_to(run))
    except FsdpCkptError as error:
        found["inspected"] = type(error).__name__
    return found


def _merged(path: Path, out: Path, version: int, rows: int) -> str:
    """Merge a checkpoint with fsdp_ckpt and read it with safetensors; return what is wrong with it."""
    merge(path, out)
    found = load_file(out / "model.safetensors")
    right = {
        place.removeprefix("model."): tensor
        for place, tensor in expected(version, rows).items() if place.startswith("model.")
    }  # fmt: skip
    same = found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)
    return "" if same else f"{sorted(versions_in(list(found.values())))} in {sorted(found)}"


def _versions(folder: Path) -> list[int] | str:
    """Tell which versions are in a folder of DCP, or why it does not load."""
    try:
        return sorted(versions_in(list(read_parts(folder).values())))
    except BaseException as error:  # noqa: BLE001 - CheckpointException is one
        return f"{type(error).__name__}: {error}"[:500]


_ANSWERS: dict[str, Callable[..., Any]] = {"look": _look, "versions": _versions, "judge": judge, "merged": _merged}

# -------------------------------------------------------------------------------------------------------------- ranks


def _fork(address: str, folder: Path, link: Connection, *, name: str, ranks: int, rows: int) -> None:
    for rank in range(ranks):
        if os.fork() == 0:
            os.close(link.fileno())
            _play(address, folder / f"store-{name}", name, rank=rank, ranks=ranks, rows=rows)


def _play(address: str, store: Path, name: str, *, rank: int, ranks: int, rows: int) -> NoReturn:
    """Be a rank: obey until told to end, or until nobody is there to tell."""
    code = 1
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))  # strace is no ancestor
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        faulthandler.dump_traceback_later(_BUSY_S, exit=True)
        link = _connect(address)
        link.send((name, rank, os.getpid()))
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=_GROUP_S)
        )
        player = Player(Job(rows), link)
        while True:
            faulthandler.cancel_dump_traceback_later()
            do, options = link.recv()
            faulthandler.dump_traceback_later(_BUSY_S, exit=True)
            if do == "end":
                code = 0
                break
            link.send(player.obey(do, options))
    except EOFError:
        code = 0
    except SystemExit:
        pass
    except BaseException:  # noqa: BLE001 - shown, then it ends as any failed rank
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _forbid(call: int, error: int) -> None:
    """Install a filter: load the call's number; if it is this one, return the error; allow the others."""
    filters = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in filters))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(filters), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, *arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, 2, program, 0, 0)):
        if libc.prctl(option, *arguments) != 0:
            raise OSError(ctypes.get_errno(), "no filter for system calls")


class Player:
    """A rank's part: what it does at each order, and what it answers."""

    def __init__(self, job: Job, link: Connection) -> None:
        self.job = job
        self.link = link

    def obey(self, do: str, options: dict[str, Any]) -> dict[str, Any]:
        begun = time.monotonic()
        answer: dict[str, Any] = {"kind": "", "message": "", "named": True, "value": None}
        try:
            answer["value"] = getattr(self, do)(**options)
        except SystemExit:  # a handler's: it ends the process, and is no answer
            raise
        except BaseException as error:  # noqa: BLE001 - it is what is asked for
            answer |= {"kind": type(error).__name__, "message": str(error), "named": isinstance(error, FsdpCkptError)}
        return answer | {"seconds": time.monotonic() - begun}

    def forbid(self, call: int, error: int) -> None:
        """Let the kernel refuse a system call from now on."""
        _forbid(call, error)

    def own_disk(self, place: str) -> None:
        """See a folder of this rank's own at ``place/disk`` from now on."""
        show(Path(place), self.job.rank)

    def become(self, version: int) -> None:
        self.job.become(version)

    def save(self, path: str, version: int, **options: Any) -> None:
        """Save as a version that it has become."""
        save_state(path, **self.job.state(), values={"version": version}, step=version, **options)

    def large(self, path: str, version: int, **options: Any) -> None:
        """Save as gigabytes are: the disk begins early to write, and a thread removes the old checkpoint."""
        with (
            mock.patch.object(fsdp_ckpt.train.record_file, "_WRITEBACK_BYTES", 100),
            mock.patch.object(fsdp_ckpt.store.leftovers, "_MUCH_BYTES", 1),
        ):
            self.save(path, version, **options)
        for thread in threading.enumerate():
            if thread.name.startswith("fsdp-ckpt removing"):
                thread.join(_GROUP_S)

    def later(self, path: str, version: int, **options: Any) -> None:
        """Save in the background, train on meanwhile, and wait."""
        pending = save_state(
            path, **self.job.state(), values={"version": version}, step=version, async_save=True, **options
        )
        self.job.become(version + 5000)
        pending.wait()

    def begin(self, path: str, version: int, **options: Any) -> None:
        """Save in the background, and train on without a word."""
        save_state(path, **self.job.state(), values={"version": version}, step=version, async_save=True, **options)
        self.job.become(version + 5000)

    def keep(self, run: str, step: int, version: int) -> None:
        """Save a step and keep no other."""
        Checkpointer(run, **self.job.state(), keep=1, durable=False).save(step, values={"version": version})

    def resume(self, run: str) -> int | None:
        """Resume; return the version of what was loaded, after a look at every number."""
        report = Checkpointer(run, **self.job.state()).resume()
        return None if report is None else self._loaded(report.values["version"])

    def load(self, path: str) -> int:
        """Load what is at a path, a checkpoint or the folder of a run; return its version."""
        return self._loaded(load_state(path, **self.job.state()).values["version"])

    def _loaded(self, version: Any) -> int:
        wrong = self.job.lacks(version)
        assert not wrong, wrong
        return int(version)

    def stock(self, path: str) -> None:
        """Save with torch's own means."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that something is overwritten; showing it reads source files
            dcp.save(self.job.nested(), checkpoint_id=path)

    def dawdle(self, seconds: float) -> None:
        """Write slowly from now on, so that a save is under way for a while."""
        module: Any = fsdp_ckpt.train.record_file
        real = module.write_all

        def slow(*args: Any) -> None:
            time.sleep(seconds)
            real(*args)

        module.write_all = slow

    def leave(self) -> None:
        """Come to the end of the program, as a script does."""
        threading._shutdown()  # type: ignore[attr-defined]
        sys.exit(0)

    def on_term(self, how: str) -> None:
        """Set a handler for SIGTERM: ``exit`` raises SystemExit, ``default`` is none."""
        signal.signal(signal.SIGTERM, (lambda *_: sys.exit(143)) if how == "exit" else signal.SIG_DFL)

    def run_on(self, run: str, first: int, keep: int) -> None:
        """Save step after step, and tell of each that is done, until killed."""
        checkpointer = Checkpointer(run, **self.job.state(), keep=keep, durable=False)
        for version in range(first, first + 1000):
            faulthandler.dump_traceback_later(_BUSY_S, exit=True)
            self.job.become(version)
            checkpointer.save(version, values={"version": version})
            self.link.send({"saved": version})


if __name__ == "__main__":
    main()
