"""A writer for ``torch.distributed.checkpoint.save``: checksummed, aligned, and never over what is there."""

from __future__ import annotations

import errno
import io
import os
import platform
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fsdp_ckpt.codec.dcp_metadata_writer import write_metadata
from fsdp_ckpt.codec.distcp_item import lay_out_item
from fsdp_ckpt.errors import Incompatible, NotEnoughSpace, UsageError
from fsdp_ckpt.store.publish import resolve_destination
from fsdp_ckpt.train.dcp_classes import from_torch
from fsdp_ckpt.train.dcp_staging import UnfinishedSave, begin_save, staging_candidates
from fsdp_ckpt.train.destination import local_path
from fsdp_ckpt.train.live import dtype_of
from fsdp_ckpt.train.record_file import RecordFile, WrittenRecord

__all__ = ["FastFileSystemWriter"]


@dataclass(frozen=True)
class _Place:
    """Where a rank writes; travels from the coordinator with its plan.

    Attributes:
        prefix: What its files' names begin with.
        destination: What is being saved to.
        folder: The hidden folder beside it.
    """

    prefix: str
    destination: str
    folder: str


class FastFileSystemWriter(StorageWriter, BlockingAsyncStager):
    """Writes a checkpoint for ``torch.distributed.checkpoint.save``, in place of torch's ``FileSystemWriter``.

    What it writes is a folder of ``dcp.save`` like any other: torch 2.4 and newer load it. Unlike torch's, it writes
    into a hidden folder beside the destination, which becomes the destination in one step when all ranks are done:
    a save that fails or is killed leaves the old checkpoint as it was. Each rank streams its tensors, checksummed on
    the way, to files in which they begin on multiples of 4096 bytes, so that ``merge`` shares their blocks on XFS and
    btrfs.

    ``dcp.async_save`` and planners with ``enable_plan_caching`` work; ``use_collectives=False`` does not, as nobody
    would know when all ranks are done. One writer may serve many saves, one after the other.

    Args:
        path: The folder, on a file system that all ranks see; ``checkpoint_id`` of ``dcp.save`` replaces it.
        files_per_rank: Files that each rank writes at a time, each by a thread of its own.
        durable: Return only when the disk has everything.
        overwrite: Replace a checkpoint of ``dcp.save``. Any other folder with content is never replaced.

    Raises:
        UsageError: A URL instead of a local path, or no files.

    ``dcp.save`` raises torch's ``CheckpointException``, which is no ``Exception``, on every rank; its ``failures``
    hold our errors by rank: DestinationExists, NotEnoughSpace, Incompatible, UsageError.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> dcp.save({"model": model.state_dict()}, storage_writer=FastFileSystemWriter("run/step-1"))  # doctest: +SKIP
    """

    def __init__(
        self, path: str | os.PathLike[str], *, files_per_rank: int = 1, durable: bool = True, overwrite: bool = True
    ) -> None:
        # As torch's writer does; the stager that async_save would choose otherwise loses lazy conj and neg bits.
        BlockingAsyncStager.__init__(self)
        if files_per_rank < 1:
            raise UsageError(f"files_per_rank must be at least 1, not {files_per_rank}")
        self.path = local_path(path)
        self.files_per_rank = files_per_rank
        self.durable = durable
        self.overwrite = overwrite
        self.save_id = str(uuid4())
        self._save: UnfinishedSave | None = None
        self._is_busy = False

    def __getstate__(self) -> dict[str, Any]:
        """Travel to another process, which saves by itself (``AsyncCheckpointerType.PROCESS``)."""
        return self.__dict__ | {"_save": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, and turn to another folder when one is given; what a failed save left is removed."""
        self._is_busy = self._save is not None and not self._save.is_over()
        if self._is_busy:  # raised later, where all ranks learn of it
            return
        self.close()
        if checkpoint_id:
            self.path = local_path(checkpoint_id)
        self.save_id = str(uuid4())

    def close(self) -> None:
        """Remove what a failed save left behind, and give up its lock; so does the end of this object."""
        if self._save is not None:
            self._save.discard()
            self._save = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a local path, by torch's own rule."""
        return FileSystemWriter.validate_checkpoint_id(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Return what planners are told of this save."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - torch's signature
        """Learn whether this rank publishes; that one makes the hidden folder.

        Raises:
            UsageError: ``use_collectives=False``, or this writer is busy with another save.
            DestinationExists: Something else is at the destination, or somebody is writing to it.
        """
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "with use_collectives=False no rank knows when all are done, so that nothing could be published",
                hint="leave it out, or save with torch's FileSystemWriter",
            )
        if self._is_busy:
            self._is_busy = False
            raise UsageError(
                f"this writer is saving to `{self.path}` in another thread",
                hint="wait for that save, close() the writer if it has failed, or use a writer for each save",
            )
        if is_coordinator:
            # Not later: a planner that caches plans cannot go on after a failure in prepare_global_plan.
            self._save = begin_save(resolve_destination(self.path), overwrite=self.overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank where to write."""
        save = self._begun()
        destination, folder = str(resolve_destination(self.path)), str(save.folder)
        return [
            replace(plan, storage_data=_Place(f"__{rank}_", destination, folder)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; the future is done.

        Raises:
            UsageError: This rank does not see the hidden folder.
            NotEnoughSpace: The disk is full.
            Incompatible: Something that no checkpoint holds, or other than the plan says.
        """
        place: _Place = plan.storage_data
        folder = self._folder(place)
        shares = _share_out(plan.items, self.files_per_rank)
        paths = [folder / f"{place.prefix}{number}.distcp" for number in range(len(shares))]
        results: list[WriteResult] = []
        if len(shares) == 1:
            results = self._write_file(paths[0], shares[0], planner)
        else:
            with ThreadPoolExecutor(len(shares), thread_name_prefix="fsdp-ckpt-write") as pool:
                for found in pool.map(self._write_file, paths, shares, [planner] * len(shares)):
                    results += found
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata`` and put the checkpoint in its place.

        Raises:
            DestinationExists: Something appeared at the destination in the meantime.
            CorruptCheckpoint: What the metadata list is not where a rank says that it is.
            Incompatible: The planner's own data cannot be stored.
        """
        save = self._begun()
        try:
            places: dict[Any, _StorageInfo] = {one.index: one.storage_data for found in results for one in found}
            ends: defaultdict[str, int] = defaultdict(int)
            for info in places.values():
                ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
            save.check_sizes(ends.items())
            save.publish(write_metadata(from_torch(metadata, places), save_id=self.save_id), durable=self.durable)
        except BaseException:
            save.discard()
            raise
        finally:
            self._save = None
        metadata.storage_data = places  # which dcp.save returns
        metadata.storage_meta = self.storage_meta()

    def _begun(self) -> UnfinishedSave:
        if self._save is None:
            raise UsageError("set_up_storage_writer() comes first; dcp.save calls it")
        return self._save

    def _folder(self, place: _Place) -> Path:
        """Return where this rank writes.

        A planner that caches plans hands out the place of the first save again; that of this one follows from the
        path, which must then be the same on all ranks.
        """
        mine = resolve_destination(self.path)
        told = Path(place.folder)
        candidates = [told, *staging_candidates(mine)] if str(mine) == place.destination else staging_candidates(mine)
        found = next((folder for folder in (*candidates, told) if folder.is_dir()), None)
        if found is None:
            raise UsageError(
                f"{platform.node()} does not see {told}, which the first rank made",
                hint="save to the same path on every rank, on a file system that all of them share",
            )
        return found

    def _write_file(self, path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        file = RecordFile(path, durable=self.durable, expected_bytes=_expected_bytes(items))
        results: list[WriteResult] = []
        try:
            for item in items:
                written = _add(file, item, planner.resolve_data(item))
                info = _StorageInfo(path.name, written.start, written.num_bytes)
                results.append(WriteResult(index=item.index, size_in_bytes=written.num_bytes, storage_data=info))
            file.close()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NotEnoughSpace(
                    f"{error.strerror} while writing {path}", hint="there must be room for one more checkpoint"
                ) from error
            raise
        finally:
            file.abort()
        return results


def _add(file: RecordFile, item: WriteItem, data: Tensor | io.BytesIO) -> WrittenRecord:
    """Append an item, as it was planned."""
    key, planned = item.index.fqn, item.tensor_data
    if planned is None:
        if not isinstance(data, io.BytesIO):
            raise Incompatible(f"`{key}`: the planner gives a {type(data).__name__} for an object, not bytes")
        return file.add_bytes(data.getvalue())
    if not isinstance(data, Tensor) or data.layout != torch.strided:
        kind = data.layout if isinstance(data, Tensor) else type(data).__name__
        raise Incompatible(f"`{key}` is no dense tensor ({kind})")
    dtype, shape = planned.properties.dtype, planned.chunk.sizes
    if data.dtype != dtype or data.shape != shape:
        raise Incompatible(
            f"`{key}`: the planner gives {data.dtype} {tuple(data.shape)}, and has planned {dtype} {tuple(shape)}",
            hint="a planner that converts tensors has to plan what it converts them to, in create_local_plan",
        )
    return file.add_tensor(data, dtype_of(dtype, key))


def _expected_bytes(items: Sequence[WriteItem]) -> int:
    """Return the size of a file that holds these items; objects do not count, as theirs is not known."""
    size = 0
    for item in items:
        if item.tensor_data is not None:
            dtype = dtype_of(item.tensor_data.properties.dtype, item.index.fqn)
            size = lay_out_item(dtype, tuple(item.tensor_data.chunk.sizes), size).stop
    return size


def _share_out(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """Deal out items to files of about the same size, the largest first; each file has them in their order."""
    sizes = [item.tensor_storage_size() or 0 for item in items]
    totals = [0] * count
    shares: list[list[int]] = [[] for _ in range(count)]
    for number in sorted(range(len(items)), key=lambda number: -sizes[number]):
        least = totals.index(min(totals))
        shares[least].append(number)
        totals[least] += sizes[number]
    return [[items[number] for number in sorted(share)] for share in shares]
