"""A reader for ``torch.distributed.checkpoint.load``: checked metadata, checked bytes, straight into the tensors."""

from __future__ import annotations

import io
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, read_metadata
from fsdp_ckpt.errors import CheckpointNotFound, FsdpCkptError, UsageError
from fsdp_ckpt.plan.boxes import Box
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.store.memory import no_gc
from fsdp_ckpt.train.dcp_classes import from_torch, to_torch
from fsdp_ckpt.train.dcp_items import Items
from fsdp_ckpt.train.dcp_lanes import Lane, split_evenly
from fsdp_ckpt.train.destination import local_path

__all__ = ["FastFileSystemReader"]

_METADATA = ".metadata"
_MAX_METADATA_BYTES = 16 << 30
_MAX_THREADS = 4
_LANE_BYTES = 8 << 20
"""What a thread of its own is worth starting for."""


class FastFileSystemReader(StorageReader):
    """Reads a checkpoint for ``torch.distributed.checkpoint.load``, in place of torch's ``FileSystemReader``.

    It takes the same folders: those of ``dcp.save`` (also compressed with zstd, or in safetensors, which torch itself
    cannot read back), of ``save_state`` (a part of it: ``CHECKPOINT/pytorch_model_fsdp_0``) and of
    ``FastFileSystemWriter``. Unlike torch's, it runs no code that a file asks for, neither in ``.metadata`` nor in
    objects, compares the checksum of every record that it reads, and refuses to load a tensor of which the checkpoint
    lacks a piece. Bytes go from the file into the tensors' memory, by several threads.

    Before anything is written into a tensor, all ranks have found all of their records, and objects were checked.
    Checksums are compared as records are read, so that a damaged one raises after its tensor was filled; a record that
    every rank needs only a part of is read through by one of them.

    Args:
        path: The folder; ``checkpoint_id`` of ``dcp.load`` replaces it.
        verify: Compare checksums. Without, up to half of the time is saved.
        num_threads: Threads that read; None for up to 4, as many as there are cores.

    Raises:
        UsageError: A URL instead of a local path, or an impossible number of threads.

    ``dcp.load`` raises torch's ``CheckpointException``, which is no ``Exception``, on every rank; its ``failures``
    hold our errors by rank: CheckpointNotFound, IncompleteCheckpoint, MalformedFile, ChecksumMismatch, UnsafePickle,
    Incompatible.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"model": model.state_dict()}  # doctest: +SKIP
        >>> dcp.load(state, storage_reader=FastFileSystemReader("run/step-100"))  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True, num_threads: int | None = None) -> None:
        super().__init__()
        if num_threads is not None and num_threads < 1:
            raise UsageError(f"num_threads must be at least 1, not {num_threads}")
        self.path = local_path(path)
        self.verify = verify
        self.num_threads = num_threads or min(_MAX_THREADS, _num_cores())
        self.load_id = str(uuid4())
        self._metadata: tuple[Metadata, DcpMetadata] | None = None
        self._error: FsdpCkptError | None = None
        self._items: Items | None = None
        self._is_of_rank = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was read, and turn to another folder when one is given."""
        self._forget()
        if checkpoint_id:
            self.path = local_path(checkpoint_id)
        self.load_id = str(uuid4())

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a local path, by torch's own rule."""
        return FileSystemReader.validate_checkpoint_id(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - torch's signature
        """Return the metadata in torch's classes, read without running a pickle.

        Args:
            *args: Not used.
            **kwargs: ``rank``: read ``__RANK.metadata``, which a save with ``use_collectives=False`` leaves. torch
                asks for it when ``.metadata`` could not be read.

        Raises:
            CheckpointNotFound: The folder has no such file.
            UnsafePickle: It refers to a name that no known writer uses.
            MalformedFile: It is broken.
        """
        rank = kwargs.get("rank")
        failed, name = self._error, _METADATA if rank is None else f"__{rank}{_METADATA}"
        if rank is not None and failed is not None and not isinstance(failed, CheckpointNotFound):
            return _Unreadable(failed)
        self._forget()
        try:
            found = self._read(name)
        except FsdpCkptError as error:
            if rank is not None and failed is not None:
                return _Unreadable(failed if isinstance(error, CheckpointNotFound) else error)
            self._error = error
            raise
        metadata = to_torch(found)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.path, load_id=self.load_id)
        self._metadata = metadata, found
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - torch's signature
        """Prepare for reading what some metadata describe.

        Raises:
            FsdpCkptError: Why they could not be read.
        """
        if isinstance(metadata, _Unreadable):
            raise metadata.error
        self._is_of_rank = not kwargs.get("use_collectives", True)
        known = self._metadata
        if known is None or known[0] is not metadata:  # read by somebody else
            self._forget()
            self._metadata = metadata, from_torch(replace(metadata, planner_data=None), metadata.storage_data)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Find every record that this rank needs, and check the objects, before any rank changes a tensor.

        Raises:
            UnsafePickle: An object refers to a name that is not allowed.
            MalformedFile: A record is broken, not what the metadata say, or outside of the folder.
            IncompleteCheckpoint: A file is missing.
        """
        items = self._opened()
        for item in plan.items:
            key, offsets = _index(item)
            if offsets is None:
                items.object_bytes(key)
            elif not items.is_compressed(key, offsets):
                items.locate(key, offsets)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tell each rank which records to read through for their checksum: those that no rank reads whole, once each.

        Otherwise every rank would read all of a tensor that one process saved, for its own piece of it.
        """
        if self._is_of_rank:  # others have other metadata
            return plans
        items = self._opened()
        whole: set[tuple[str, Shape]] = set()
        wanted: dict[tuple[str, Shape], list[int]] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                key, offsets = _index(item)
                if offsets is None:
                    continue
                if tuple(item.lengths) == items.lengths(key, offsets):
                    whole.add((key, offsets))
                elif rank not in (ranks := wanted.setdefault((key, offsets), [])):
                    ranks.append(rank)
        costs = [0] * len(plans)
        parts: list[set[tuple[str, Shape]]] = [set() for _ in plans]
        for (key, offsets), ranks in wanted.items():
            if (key, offsets) not in whole:
                rank = min(ranks, key=lambda rank: costs[rank])
                costs[rank] += items.place(key, offsets)[2]
                parts[rank].add((key, offsets))
        return [replace(plan, storage_data=part) for plan, part in zip(plans, parts, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything that a plan lists; the future is done.

        Raises:
            ChecksumMismatch: Bytes are not those that were written.
            IncompleteCheckpoint: Elements that are to be loaded are in no shard.
            FsdpCkptError: As ``prepare_local_plan``, for items that the planner has added since.
        """
        items = self._opened()
        try:
            self.prepare_local_plan(plan)
            self._check_covered(items, plan, planner)
            self._read_tensors(items, plan, planner)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(items.object_bytes(item.storage_index.fqn)))
        finally:
            self._close_items()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, name: str) -> DcpMetadata:
        store = LocalStore(self.path)
        if store.size(name) is None:
            if not self.path.is_dir():
                raise CheckpointNotFound(f"there is no folder `{self.path}`")
            raise CheckpointNotFound(
                f"`{self.path}` has no {name}: no checkpoint, or a save was cut off", hint=self._hint()
            )
        with no_gc():
            return read_metadata(store.read(name, limit_bytes=_MAX_METADATA_BYTES), where=str(self.path / name))

    def _hint(self) -> str | None:
        """Say what the folder is instead of a checkpoint."""
        parts = sorted(str(path.parent) for path in self.path.glob(f"*/{_METADATA}"))
        if parts:
            return f"there are checkpoints in it: load {' or '.join(parts[:3])}"
        num_ranks = len(list(self.path.glob(f"__*{_METADATA}")))
        if num_ranks:
            return f"{num_ranks} ranks saved it with use_collectives=False: load it with as many"
        return None

    def _opened(self) -> Items:
        if self._items is None:
            if self._metadata is None:
                raise UsageError("read_metadata() and set_up_storage_reader() come first")
            self._items = Items(self.path, self._metadata[1])
        return self._items

    def _close_items(self) -> None:
        if self._items is not None:
            self._items.close()
            self._items = None

    def _forget(self) -> None:
        self._close_items()
        self._metadata = self._error = None

    def _check_covered(self, items: Items, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Refuse tensors with holes; torch plans nothing for a hole, so the plan does not show it."""
        assert self._metadata is not None
        known = self._metadata[0].state_dict_metadata
        # A planner of another kind may not say what this rank holds: whole tensors are all there is to check then.
        held: dict[str, Any] = dict.fromkeys(item.storage_index.fqn for item in plan.items)
        state = getattr(planner, "state_dict", None)
        held |= state if isinstance(state, dict) else {}
        for key, value in held.items():
            described = known.get(key)
            if isinstance(described, TensorStorageMetadata):
                boxes = [((0,) * len(described.size), tuple(described.size))] if value is None else list(_held(value))
                items.check_covered(key, [box for box in boxes if math.prod(box[1])])

    def _read_tensors(self, items: Items, plan: LoadPlan, planner: LoadPlanner) -> None:
        def place(item: ReadItem) -> tuple[str, int]:
            return items.place(*_index(item))[:2]

        def cost(item: ReadItem) -> int:
            return math.prod(item.lengths) * items.entry(item.storage_index.fqn).dtype.itemsize

        ordered = sorted((item for item in plan.items if item.type != LoadItemType.BYTE_IO), key=place)
        costs = [cost(item) for item in ordered]
        count = max(1, min(self.num_threads, sum(costs) // _LANE_BYTES))
        stop, lock = threading.Event(), threading.Lock()
        # None when the planner has made a plan of its own since.
        parts = plan.storage_data if isinstance(plan.storage_data, set) else None
        lanes = [Lane(items, planner, lock, stop, verify=self.verify, parts=parts) for _ in range(count)]
        shares = split_evenly(ordered, costs, count)
        if count == 1:
            lanes[0].run(shares[0])
            return
        with ThreadPoolExecutor(count, thread_name_prefix="fsdp-ckpt-read") as pool:
            is_inference = torch.is_inference_mode_enabled()  # which is each thread's own
            running = [
                pool.submit(lane.run, share, inference=is_inference) for lane, share in zip(lanes, shares, strict=True)
            ]
            try:
                for one in running:
                    one.result()
            finally:
                stop.set()


class _Unreadable(Metadata):
    """Stands for metadata that could not be read, and raises why when they are used.

    torch's loader turns whatever ``read_metadata`` raises into the text of an AssertionError; what
    ``set_up_storage_reader`` raises reaches the caller as it is.
    """

    def __init__(self, error: FsdpCkptError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.error


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _index(item: ReadItem) -> tuple[str, Shape | None]:
    index = item.storage_index
    if item.type == LoadItemType.BYTE_IO:
        return index.fqn, None
    return index.fqn, tuple(index.offset or ())


def _held(value: Any) -> Iterator[Box]:
    """Yield the boxes of a tensor that this rank holds, as torch's planner sees them."""
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return
    if hasattr(value, "__create_chunk_list__"):
        for chunk in value.__create_chunk_list__():
            yield tuple(chunk.offsets), tuple(chunk.sizes)
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
    elif isinstance(value, Tensor):
        yield (0,) * value.dim(), tuple(value.shape)
