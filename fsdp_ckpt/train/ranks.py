"""What the ranks of a job tell each other while they save or load: statuses, small values, and tensors one by one.

Every rank learns of every failure. Nothing here waits for a rank that has failed: a rank which cannot go on still
takes part in the next exchange, and says so.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_ckpt import errors
from fsdp_ckpt.errors import FsdpCkptError, NotEnoughSpace, RankFailed, StateMismatch, UnsafePickle, UsageError
from fsdp_ckpt.store.remote.mirrors import with_urls

__all__ = ["Failure", "Ranks", "has_lost_touch"]

T = TypeVar("T")
Failure = dict[str, Any]
"""An error as it travels between ranks: class name, message, hint, and lists of names."""

_SHOWN = 4


class Ranks:
    """The processes that save or load together.

    Args:
        group: Their process group; None for all, or for this process alone when torch.distributed is not set up.

    Attributes:
        rank: This process's number, from 0.
        size: Number of processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1
        if self.rank < 0:
            raise UsageError("this process is not in the process group that was given")

    def refuse_strangers(self) -> None:
        """Make sure that this process knows of the others that were started with it, before it writes anything.

        Raises:
            UsageError: torchrun started several, and torch.distributed is not set up: each would save by itself.
        """
        started = os.environ.get("WORLD_SIZE", "1")
        together = dist.is_available() and dist.is_initialized()
        if not together and "RANK" in os.environ and started.isdecimal() and int(started) > 1:
            raise UsageError(
                f"this process was started as one of {started} (WORLD_SIZE), but torch.distributed is not initialised: "
                "every process would save by itself, to the same place",
                hint="call torch.distributed.init_process_group() first",
            )

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides and publishes."""
        return self.rank == 0

    def agree(self, error: BaseException | None, doing: str) -> None:
        """Raise on every rank when any of them has an error.

        Args:
            error: This rank's error, None when all is well.
            doing: What was being done, for messages (``saving run/step-10``).

        Raises:
            FsdpCkptError: The same class and message on all ranks; the ranks are named when not all of them failed.
        """
        mine = None if error is None else _pack(error)
        found = self.gather_all(mine, doing)
        failed = {rank: failure for rank, failure in enumerate(found) if failure is not None}
        if not failed:
            return
        _raise(_unpack(failed, self.size, doing), error)

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block on every rank; when it fails on one, raise on all of them at its end."""
        error: BaseException | None = None
        try:
            yield
        except (Exception, CheckpointException) as caught:  # noqa: BLE001 - raised by agree
            error = caught
        self.agree(error, doing)

    def gather_all(self, value: T, doing: str) -> list[T]:
        """Return the values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self._talking(doing):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def largest(self, value: int, doing: str) -> int:
        """Return the largest value of all ranks: one all_reduce of 8 bytes, the cheapest question there is."""
        if self.size == 1:
            return value
        shared = torch.full((1,), value, dtype=torch.int64, device=self._device())
        with self._talking(doing):
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
            return int(shared.item())

    def gather_first(self, value: T, doing: str) -> list[T] | None:
        """Return the values of all ranks on the first one, None on the others."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.is_first else None
        with self._talking(doing):
            dist.gather_object(value, found, dst=self.global_rank(0), group=self.group)
        return found

    def demand_same(self, value: T, what: str, doing: str) -> None:
        """Raise on all ranks when they do not call for the same: collectives that differ wait for each other.

        Args:
            value: What this rank calls for.
            what: What it is, for messages (``the path``).
            doing: For messages.

        Raises:
            UsageError: With the first two values that differ.
        """
        values = self.gather_all(value, doing)
        other = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
        if other is not None:
            raise UsageError(
                f"{what} differs between ranks: {values[0]} on rank 0, {values[other]} on rank {other}",
                hint="call it with the same arguments on every rank",
            )

    def from_first(self, make: Callable[[], T], doing: str) -> T:
        """Let the first rank work something out; return it on all ranks, or raise its error on all of them."""
        result: list[Any] = [None, None]
        caught: BaseException | None = None
        if self.is_first:
            try:
                result[0] = make()
            except (Exception, CheckpointException) as error:  # noqa: BLE001 - raised below
                caught = error
                result[1] = _pack(error)
        if self.size > 1:
            with self._talking(doing):
                dist.broadcast_object_list(result, src=self.global_rank(0), group=self.group)
        if result[1] is not None:
            knows_more = result[1]["foreseen"]  # such a message is about the job, another one about the first rank
            failed = dict.fromkeys(range(self.size), result[1]) if knows_more else {0: result[1]}
            _raise(_unpack(failed, self.size, doing), caught)
        value: T = result[0]
        return value

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor's elements to a rank of the group, which must be receiving one of this shape and dtype."""
        raw = tensor.detach().to(self._device()).contiguous().reshape(-1).view(torch.uint8)
        with self._talking("sending a tensor"):
            dist.send(raw, self.global_rank(rank), group=self.group)

    def receive(self, shape: torch.Size, dtype: torch.dtype, rank: int) -> torch.Tensor:
        """Receive a tensor of this shape and dtype from a rank of the group."""
        raw = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8, device=self._device())
        with self._talking("receiving a tensor"):
            dist.recv(raw, self.global_rank(rank), group=self.group)
        return raw.view(dtype).reshape(shape)

    def global_rank(self, rank: int) -> int:
        """Return a rank's number among all processes of the job."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _device(self) -> torch.device:
        """Return the device whose tensors travel: the CPU where the group has a backend for it.

        The same on all ranks, wherever a shard lies: with ``cpu:gloo,cuda:nccl`` a tensor that is sent by one backend
        never arrives at a rank that receives by the other.
        """
        group = self.group or dist.distributed_c10d._get_default_group()
        kinds = {device.type for device in group._device_types}
        kind = "cpu" if "cpu" in kinds else next(iter(kinds))
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())

    @contextmanager
    def _talking(self, doing: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            if "is not registered" not in str(error):
                raise
            raise _lost_touch(
                f"{doing}: torch.distributed was shut down meanwhile",
                "call wait() or close() before torch.distributed.destroy_process_group()",
            ) from error
        except RuntimeError as error:  # also dist.DistError: a peer closed its connection, or time ran out
            raise _lost_touch(
                f"{doing}: rank {self.rank} lost touch with the other ranks: {_first_line(error)}",
                "a rank died or hangs: look for the first error in the logs of all ranks",
            ) from error


def _lost_touch(message: str, hint: str) -> RankFailed:
    error = RankFailed(message, hint=hint)
    error.has_lost_touch = True
    return error


def has_lost_touch(error: BaseException) -> bool:
    """Tell whether an error says that others may be dead or may go on, so that it is not known how far they came."""
    return isinstance(error, RankFailed) and error.has_lost_touch


def _raise(agreed: FsdpCkptError, own: BaseException | None) -> NoReturn:
    """Raise what the ranks agreed on; this rank's own error where that says the same, and where it came from."""
    if own is not None and type(own) is type(agreed) and str(own) == str(agreed):
        raise own
    raise agreed from own


def _pack(error: BaseException) -> Failure:
    if isinstance(error, FsdpCkptError):
        hint = None if error.hint is None else with_urls(error.hint)  # each rank has a mirror of its own
        packed: Failure = {
            "class": type(error).__name__, "message": with_urls(error.message), "hint": hint, "foreseen": True,
        }  # fmt: skip
        if isinstance(error, StateMismatch):
            packed |= {name: getattr(error, name) for name in ("missing", "unexpected", "mismatched")}
        if isinstance(error, UnsafePickle):
            packed |= {"name": error.name, "where": with_urls(error.where)}
        return packed
    kind, hint = "RankFailed", None
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind = NotEnoughSpace.__name__
        hint = "make room on that disk; checkpoints are removed after a save, so there must be room for one more"
    message = with_urls(f"{type(error).__name__}: {_first_line(error)}")
    return {"class": kind, "message": message, "hint": hint, "foreseen": False}


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _unpack(failed: dict[int, Failure], size: int, doing: str) -> FsdpCkptError:
    first = next(iter(failed.values()))
    everywhere = len(failed) == size and all(failure == first for failure in failed.values())
    if everywhere:
        ranks = f" on all {size} ranks" if size > 1 else ""
        text = first["message"] if first["foreseen"] else f"{doing} failed{ranks}: {first['message']}"
    else:
        text = f"{doing} failed: {_list(failed)}"
    cls = getattr(errors, first["class"], RankFailed)
    if cls is StateMismatch:
        lists: dict[str, Sequence[str]] = {name: first[name] for name in ("missing", "unexpected", "mismatched")}
        return StateMismatch(text, hint=first["hint"], **lists)
    if cls is UnsafePickle:
        unsafe = UnsafePickle(first["name"], where=first["where"], hint=first["hint"])
        unsafe.message, unsafe.args = text, (text,)
        return unsafe
    if not issubclass(cls, FsdpCkptError) or cls.__init__ is not FsdpCkptError.__init__:
        cls = errors.CorruptCheckpoint if issubclass(cls, errors.CorruptCheckpoint) else RankFailed
    found: FsdpCkptError = cls(text, hint=first["hint"])
    return found


def _list(failed: dict[int, Failure]) -> str:
    """Name the ranks, those with one message together."""
    by_message: dict[str, list[int]] = {}
    for rank, failure in failed.items():
        by_message.setdefault(failure["message"], []).append(rank)
    rows = []
    for message, ranks in list(by_message.items())[:_SHOWN]:
        shown = ", ".join(map(str, ranks[:_SHOWN])) + (
            f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
        )
        rows.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}: {message}")
    if len(by_message) > _SHOWN:
        rows.append(f"and {len(by_message) - _SHOWN} other messages")
    return "; ".join(rows)
