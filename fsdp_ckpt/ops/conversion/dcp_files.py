"""Lay out one part as torch.distributed.checkpoint stores it: a data file per rank, and ``.metadata``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo
from fsdp_ckpt.codec.dcp_metadata_writer import write_metadata
from fsdp_ckpt.codec.distcp_item import ItemLayout, lay_out_item, seal_item
from fsdp_ckpt.codec.stamp import make_stamp
from fsdp_ckpt.errors import NameCollision
from fsdp_ckpt.ops.tensor_tasks import source_box, tasks_of
from fsdp_ckpt.plan.boxes import Box
from fsdp_ckpt.plan.output import OutputTensor
from fsdp_ckpt.plan.reshard import Sharding
from fsdp_ckpt.run.engine import OutputSpec, Task
from fsdp_ckpt.run.tasks import ChunkIndex

__all__ = ["DcpFiles", "DcpObject", "DcpState", "lay_out_dcp"]

_OBJECT_ALIGNMENT = 64

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpObject:
    """A value that is no tensor: its place in the state dict, and the archive that holds it."""

    path: KeyPath
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpState:
    """A state dict to store.

    Attributes:
        tensors: With their places in the whole state dict (``OutputTensor.path``).
        objects: Likewise.
        placed_as: Name that placements go by, by key; for tensors whose key says it differently.
    """

    tensors: Sequence[OutputTensor]
    objects: Sequence[DcpObject] = ()
    placed_as: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpFiles:
    """The files of a state dict.

    Attributes:
        specs: One per rank.
        metadata: Content of ``.metadata``.
    """

    specs: Sequence[OutputSpec]
    metadata: bytes


@dataclass(frozen=True, slots=True)
class _Item:
    """A box of a tensor, and where it goes."""

    tensor: OutputTensor
    index: ChunkIndex
    box: Box
    layout: ItemLayout


@dataclass(slots=True)
class _RankFile:
    """What one rank stores."""

    name: str
    head: bytes
    position: int
    items: list[_Item] = field(default_factory=list)
    objects: list[tuple[int, bytes]] = field(default_factory=list)


def lay_out_dcp(state: DcpState, sharding: Sharding, *, folder: str, save_id: str | None = None) -> DcpFiles:
    """Return the files that store a state dict for the ranks of a mesh.

    Every tensor's bytes begin on a multiple of 4096 in the file where it has as many, as in our own checkpoints.

    Args:
        state: What to store.
        sharding: Places the tensors; it keeps count of the load, so that several states may share it.
        folder: Folder of the files within the result; ``""`` for its top.
        save_id: What the first bytes of each file say, where a manifest says the same.

    Raises:
        NameCollision: Two values would get one key.
        Incompatible: A placement does not fit a tensor.
    """
    stamps = [b"" if save_id is None else make_stamp(save_id, rank) for rank in range(sharding.mesh.num_ranks)]
    files = [_RankFile(f"__{rank}_0.distcp", stamp, len(stamp)) for rank, stamp in enumerate(stamps)]
    paths: dict[str, KeyPath] = {}
    metadata = DcpMetadata(tensors={}, objects=[], paths=paths, storage={}, writer="torch 2.9-2.14")
    for tensor in state.tensors:
        key = _claim(paths, tensor.path or (tensor.name,))
        entry = DcpTensor(dtype=tensor.dtype, shape=tensor.shape, chunks=[])
        metadata.tensors[key] = entry
        index = ChunkIndex(tensor.source)
        name = state.placed_as.get(key, tensor.name)
        for rank, box in sharding.place(name, tensor.shape, tensor.dtype.itemsize):
            file = files[rank]
            layout = lay_out_item(tensor.dtype, box[1], file.position)
            file.items.append(_Item(tensor, index, box, layout))
            file.position = layout.stop
            entry.chunks.append(box)
            info: StorageInfo = (file.name, layout.start, layout.stop - layout.start, ())
            metadata.storage[key, box[0]] = info
    for value in state.objects:
        key = _claim(paths, value.path)
        file = files[0]
        start = file.position + -file.position % _OBJECT_ALIGNMENT
        file.objects.append((start, value.data))
        file.position = start + len(value.data)
        metadata.objects.append(key)
        metadata.storage[key, None] = (file.name, start, len(value.data), ())
    prefix = f"{folder}/" if folder else ""
    return DcpFiles(specs=[_spec(prefix, file) for file in files], metadata=write_metadata(metadata))


def _claim(paths: dict[str, KeyPath], path: KeyPath) -> str:
    key = ".".join(map(str, path))
    if key in paths:
        raise NameCollision(
            f"two values would both be stored as `{key}`",
            hint="keep them apart with --rename, or leave one out with --exclude",
        )
    paths[key] = path
    return key


def _spec(prefix: str, file: _RankFile) -> OutputSpec:
    def tasks() -> Iterator[tuple[str, Task]]:
        for number, item in enumerate(file.items):
            box = source_box(item.tensor, item.box)
            for task in tasks_of(item.tensor, box, position=item.layout.data_start, index=item.index):
                yield str(number), task

    def seal(crcs: Mapping[str, int]) -> Sequence[tuple[int, bytes]]:
        pieces: list[tuple[int, bytes]] = []
        for number, item in enumerate(file.items):
            head, tail = seal_item(item.layout, crcs[str(number)])
            pieces += (item.layout.start, head), (item.layout.data_stop, tail)
        return [*pieces, *file.objects]

    return OutputSpec(
        name=prefix + file.name,
        size=file.position,
        head=file.head,
        ranges={str(number): (item.layout.data_start, item.layout.data_stop) for number, item in enumerate(file.items)},
        tasks=tasks,
        seal=seal,
    )
