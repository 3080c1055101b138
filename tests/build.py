"""Small real checkpoints for tests, written by torch itself, and judges that read results without our code.

Everything here runs in one process unless it says otherwise: torch's own planner and storage writer take the part of
each rank in turn, and DTensors and ShardedTensors are made in torch's "fake" process group, which never communicates.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = [
    "Box", "DeadRanksError", "Sharded", "as_rank", "assert_same", "full_bits", "grid", "read_bin", "read_safetensors",
    "rows", "run_ranks", "save_dcp", "save_rank_files",
]  # fmt: skip

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths."""


@dataclass(frozen=True)
class Sharded:
    """A whole tensor and how it is cut: ``boxes[i]`` belongs to rank ``owners[i]``; stored by columns where asked."""

    tensor: Tensor
    boxes: Sequence[Box]
    owners: Sequence[int]
    by_columns: bool = False


def rows(tensor: Tensor, ranks: int, *, empty: bool = True) -> Sharded:
    """Cut as FSDP does: along dimension 0 by ``torch.chunk``; ranks without rows get an empty box where asked."""
    boxes, start = [], 0
    pieces = tensor.chunk(ranks) if tensor.shape[0] else ()
    for piece in pieces:
        boxes.append(((start, *[0] * (tensor.dim() - 1)), tuple(piece.shape)))
        start += piece.shape[0]
    owners = list(range(len(boxes)))
    if empty and len(boxes) < ranks:
        boxes.append(((start, *[0] * (tensor.dim() - 1)), (0, *tensor.shape[1:])))
        owners.append(len(boxes) - 1)
    return Sharded(tensor, boxes, owners)


def grid(tensor: Tensor, cuts: Sequence[Sequence[int]], *, ranks: int) -> Sharded:
    """Cut along every dimension at the given positions; boxes go to the ranks in turn."""
    edges = [[0, *sorted(set(inner)), size] for inner, size in zip(cuts, tensor.shape, strict=True)]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    boxes = [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)]
    return Sharded(tensor, boxes, [number % ranks for number in range(len(boxes))])


def _piece(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(offset, offset + length) for offset, length in zip(*box, strict=True))]


class _Pieces(Tensor):
    """One rank's boxes of a tensor, offered to torch's planner by its own extension point (``_Checkpointable``)."""

    whole: Tensor
    boxes: list[Box]
    by_columns: bool

    @staticmethod
    def of(sharded: Sharded, rank: int) -> _Pieces:
        pieces = torch.empty(0).as_subclass(_Pieces)
        pieces.whole, pieces.by_columns = sharded.tensor, sharded.by_columns
        pieces.boxes = [box for box, owner in zip(sharded.boxes, sharded.owners, strict=True) if owner == rank]
        return pieces

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)),
                    properties=TensorProperties.create_from_tensor(self.whole),
                    size=self.whole.size(),
                ),
            )
            for offsets, lengths in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = next(box for box in self.boxes if torch.Size(box[0]) == index.offset)
        piece = _piece(self.whole, box).detach()
        back = tuple(range(piece.dim()))[::-1] if self.by_columns else tuple(range(piece.dim()))
        return piece.permute(back).clone(memory_format=torch.contiguous_format).permute(back)


def _local(value: Any, rank: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _local(item, rank) for key, item in value.items()}
    return _Pieces.of(value, rank) if isinstance(value, Sharded) else value


def save_dcp(
    folder: Path, state: Mapping[str, Any], *, ranks: int = 2, flatten: bool = True, **writer_options: Any
) -> Path:
    """Write a nested state dict as ``ranks`` ranks would with ``dcp.save``.

    Args:
        folder: Where to; returned.
        state: Leaves are ``Sharded``, plain tensors (replicated: one rank stores them), or any object.
        ranks: World size.
        flatten: As ``DefaultSavePlanner(flatten_state_dict=…)``.
        **writer_options: For ``FileSystemWriter``: ``thread_count``, ``single_file_per_rank``, ….
    """
    planners, writers, plans = [], [], []
    for rank in range(ranks):
        planner = DefaultSavePlanner(flatten_state_dict=flatten)
        writer = dcp.FileSystemWriter(folder, sync_files=False, **writer_options)
        planner.set_up_planner(_local(state, rank), writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        planners.append(planner)
        writers.append(writer)
    global_plans, metadata = planners[0].create_global_plan(plans)
    global_plans = writers[0].prepare_global_plan(global_plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, writer, plan in zip(planners, writers, global_plans, strict=True)
    ]
    writers[0].finish(metadata, results)
    return folder


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a process group that never communicates; enough to make DTensors and ShardedTensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_rank_files(
    folder: Path,
    state: Mapping[str, Any],
    *,
    mesh: Sequence[int],
    placements: Mapping[str, Sequence[Any]],
    pattern: str = "model_world_size_{world_size}_rank_{rank}.pt",
    kind: str = "DTensor",
) -> Path:
    """Write one ``torch.save`` file per rank, as RL trainers do.

    Args:
        folder: Where to; made when missing, returned.
        state: Whole tensors, or any object.
        mesh: Shape of the device mesh.
        placements: By key, torch's placements over the mesh; keys that are absent are saved whole on every rank.
        pattern: File name with ``{rank}`` and ``{world_size}``.
        kind: ``DTensor``, or ``ShardedTensor`` (row shards; the placement's only meaning then is "sharded").
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    folder.mkdir(parents=True, exist_ok=True)
    world_size = int(torch.tensor(list(mesh)).prod())
    for rank in range(world_size):
        local: dict[str, Any] = {}
        with as_rank(rank, world_size):
            device_mesh = init_device_mesh("cpu", tuple(mesh))
            for key, value in state.items():
                if key not in placements:
                    local[key] = value
                elif kind == "DTensor":
                    local[key] = distribute_tensor(value, device_mesh, list(placements[key]), src_data_rank=None)
                else:
                    local[key] = _sharded_tensor(value, rank, world_size)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
                torch.save(local, folder / pattern.format(rank=rank, world_size=world_size))
    return folder


def _sharded_tensor(tensor: Tensor, rank: int, world_size: int) -> Any:
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardedProperties
    from torch.distributed._shard.sharding_spec import ShardMetadata

    cut = rows(tensor, world_size, empty=False)
    shards = [
        ShardMetadata(shard_offsets=list(offsets), shard_sizes=list(lengths), placement=f"rank:{owner}/cpu")
        for (offsets, lengths), owner in zip(cut.boxes, cut.owners, strict=True)
    ]
    local = [Shard(_piece(tensor, box).clone(), shards[i]) for i, box in enumerate(cut.boxes) if cut.owners[i] == rank]
    metadata = ShardedTensorMetadata(
        shards_metadata=shards, size=tensor.size(), tensor_properties=ShardedProperties(dtype=tensor.dtype)
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


class DeadRanksError(AssertionError):
    """Ranks did not end in time; they were killed."""


def run_ranks(worker: Callable[..., None], ranks: int, *args: Any, timeout_s: float = 90.0) -> None:
    """Run ``worker(rank, *args)`` in ``ranks`` gloo processes; all are killed when the time is over.

    Args:
        worker: A function at the top level of a module that can be imported.
        ranks: World size.
        *args: Pickled for each rank.
        timeout_s: For everything together.

    Raises:
        DeadRanksError: The time was over.
        Exception: What the first failing rank raised (``torch.multiprocessing.ProcessRaisedException``).
    """
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank, (worker, ranks, f"file://{folder}/store", args), nprocs=ranks, join=False, start_method="spawn"
        )
        end = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=0.5):
                if time.monotonic() > end:
                    raise DeadRanksError(f"{ranks} ranks did not end within {timeout_s} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join(10)


def _rank(rank: int, worker: Callable[..., None], ranks: int, store: str, args: Sequence[Any]) -> None:
    from datetime import timedelta

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        worker(rank, *args)
    finally:
        dist.destroy_process_group()
    # Without the interpreter's end, in which torch 2.13 now and then aborts: "terminate called without an active ...".
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of ``model*.safetensors`` with the safetensors library; the index must say the same."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("model*.safetensors"))
    found = {file.name: load_file(file) for file in files}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map == {key: name for name, tensors in found.items() for key in tensors}
    else:
        assert [file.name for file in files] == ["model.safetensors"]
    return {key: tensor for tensors in found.values() for key, tensor in tensors.items()}


def read_bin(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of ``pytorch_model*.bin`` with ``torch.load(weights_only=True)``."""
    files = sorted(folder.glob("pytorch_model*.bin"))
    return {key: tensor for file in files for key, tensor in torch.load(file, weights_only=True).items()}


def full_bits(tensor: Tensor) -> bytes:
    """Return a tensor's elements as row-major bytes, conj and neg bits resolved."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert equal names, dtypes, shapes and bits (so that NaN equals NaN, and 0.0 is not -0.0)."""
    assert sorted(found) == sorted(expected)
    for key, want in expected.items():
        have = found[key]
        assert (have.dtype, tuple(have.shape)) == (want.dtype, tuple(want.shape)), key
        assert full_bits(have) == full_bits(want), key
