"""Files that ``torch.save`` wrote: a whole model or optimizer, one rank's share of them, random states.

Zip archives (torch 1.6 and newer) and the older stream of pickles; see ``codec.torchzip`` and ``codec.legacy``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.catalog import Chunk, ObjectEntry, Part, Problem, Role, Severity, TensorEntry
from fsdp_ckpt.codec.legacy import is_legacy, load_legacy
from fsdp_ckpt.codec.safetensors import LFS_POINTER
from fsdp_ckpt.codec.tensors import DTensorRef, ShardedTensorRef, TensorRef
from fsdp_ckpt.codec.torchzip import Archive, locate, open_archive
from fsdp_ckpt.errors import IncompleteCheckpoint, MalformedFile, NameCollision, UnknownLayout
from fsdp_ckpt.layouts.faults import coverage_problems, flat_reason
from fsdp_ckpt.layouts.flatten import flatten
from fsdp_ckpt.layouts.mesh import local_boxes
from fsdp_ckpt.layouts.roles import KeyPath, split_roles
from fsdp_ckpt.store.local import LocalStore

__all__ = ["TorchFile", "load_torch_file", "open_torch_file", "open_torch_value", "read_torch_file", "sharded_entry"]


@dataclass
class TorchFile:
    """An opened file.

    Attributes:
        file: Its name, relative to the store's root.
        size: Its size in bytes.
        archive: Its records.
        leaves: Path and value of everything in it; tensors are refs.
    """

    file: str
    size: int
    archive: Archive
    leaves: list[tuple[KeyPath, Any]] = field(default_factory=list)

    def by_key(self) -> dict[str, tuple[KeyPath, Any]]:
        """Return path and value by dotted key.

        Raises:
            NameCollision: Two values would get one key.
        """
        found: dict[str, tuple[KeyPath, Any]] = {}
        for path, value in self.leaves:
            key = ".".join(map(str, path))
            if key in found:
                raise NameCollision(f"{self.file}: two values would both be named `{key}`")
            found[key] = (path, value)
        return found

    def chunk(self, tensor: TensorRef) -> Chunk:
        """Return where a whole tensor lies."""
        return locate(self.archive, tensor, self.file, (0,) * len(tensor.shape), tensor.shape)

    def boxes(self, value: DTensorRef | ShardedTensorRef) -> list[Chunk]:
        """Return the boxes of a sharded tensor that lie in this file."""
        if isinstance(value, ShardedTensorRef):
            return [locate(self.archive, s.tensor, self.file, s.offsets, s.lengths) for s in value.shards]
        local, itemsize = self.chunk(value.local), value.local.dtype.itemsize
        return [
            local._replace(offsets=offsets)
            if lengths == local.lengths
            else local.part(offsets, lengths, first, itemsize)
            for offsets, lengths, first in local_boxes(value)
        ]


def open_torch_file(store: LocalStore, file: str, *, allow_unknown: bool = False) -> TorchFile:
    """Read the pickles of a file.

    Args:
        store: Where it is.
        file: Its name.
        allow_unknown: Keep values of unknown classes as opaque records; for files that hold no model.

    Raises:
        IncompleteCheckpoint: There is no such file.
        UnknownLayout: It is not a file of torch.save, or not of a state dict.
        UnsafePickle: It refers to a global that is not allowed.
        MalformedFile: It is damaged.
    """
    archive, value = load_torch_file(store, file, allow_unknown=allow_unknown)
    leaves = flatten(value, where=file)
    if any(path == () for path, _ in leaves):
        raise UnknownLayout(f"{file} holds a single value, not a state dict")
    return TorchFile(file, archive.stop, archive, leaves)


def open_torch_value(store: LocalStore, file: str, *, allow_unknown: bool = True) -> Any:
    """Return the value of a file as it is nested; values of unknown classes are opaque records, unless refused.

    Raises:
        As ``open_torch_file``.
    """
    return load_torch_file(store, file, allow_unknown=allow_unknown)[1]


def load_torch_file(store: LocalStore, file: str, *, allow_unknown: bool = False) -> tuple[Archive, Any]:
    """Return the records of a file and its value as it is nested; tensors are refs.

    Raises:
        As ``open_torch_file``.
    """
    size = store.size(file)
    if size is None:
        raise IncompleteCheckpoint(f"{file} is missing")
    reader = store.reader(file)
    magic = reader(0, min(size, 16))
    if magic.startswith(b"PK"):
        archive = open_archive(reader, 0, size, where=file)
        return archive, archive.load(allow_unknown=allow_unknown)
    if is_legacy(magic):
        return load_legacy(reader, size, where=file, allow_unknown=allow_unknown)
    if not size:
        raise MalformedFile(f"{file} is empty")
    if reader(0, min(size, len(LFS_POINTER))) == LFS_POINTER:
        raise MalformedFile(f"{file}: a pointer of git-lfs, not the file that it stands for", hint="git lfs pull")
    raise UnknownLayout(
        f"{file} is not a file that torch.save wrote", hint="torch.load would not read it either: copy or save it again"
    )


def read_torch_file(store: LocalStore, file: str, *, name: str | None = None, role: Role | None = None) -> list[Part]:
    """Read a file that holds whole tensors.

    Args:
        store: Where it is.
        file: Its name.
        name: Name of the part when the file is one thing.
        role: Role of keys that do not tell it themselves.

    Returns:
        The parts, models first.

    Raises:
        As ``open_torch_file``.
    """
    opened = open_torch_file(store, file, allow_unknown=role not in (None, Role.MODEL, Role.OPTIMIZER))
    by_key = opened.by_key()
    parts = []
    splits = split_roles(((key, path) for key, (path, _) in by_key.items()), default=role or Role.MODEL)
    for number, split in enumerate(splits):
        tensors: dict[str, TensorEntry] = {}
        objects: dict[str, ObjectEntry] = {}
        problems: list[Problem] = []
        for key, inner in split.names.items():
            value, place = by_key[key][1], split.paths[key]
            if isinstance(value, TensorRef):
                tensors[key] = TensorEntry(
                    key=key, name=inner, dtype=value.dtype, shape=value.shape, chunks=(opened.chunk(value),), path=place
                )
            elif isinstance(value, DTensorRef | ShardedTensorRef):
                tensors[key] = sharded_entry(key, inner, value, opened.boxes(value))
                problems += _slice_problem(tensors[key], value)
            else:
                objects[key] = ObjectEntry(
                    key=key, name=inner, file=file, start=0, stop=opened.size, value=value, decoded=True, path=place
                )
        whole = [entry for entry in tensors.values() if entry.placements is None]
        parts.append(
            Part(
                name=name if name is not None and number == 0 else split.name,
                role=role if role is not None and len(splits) == 1 else split.role,
                dialect="torch-file",
                folder=file.rpartition("/")[0],
                files={file: opened.size},
                tensors=tensors,
                objects=objects,
                world_size=1,
                flat=flat_reason(tensors.values()),
                problems=(*problems, *coverage_problems(whole)),
            )
        )
    return parts


def sharded_entry(key: str, name: str, value: DTensorRef | ShardedTensorRef, chunks: list[Chunk]) -> TensorEntry:
    """Return the entry of a sharded tensor, with the chunks found so far."""
    if isinstance(value, ShardedTensorRef):
        return TensorEntry(
            key=key, name=name, dtype=value.dtype, shape=value.shape, chunks=tuple(chunks), placements="ShardedTensor"
        )
    shown = [
        {
            "shard": "Shard({})",
            "strided": "_StridedShard({}, sf={})",
            "replicate": "Replicate()",
            "partial": "Partial()",
        }[str(kind)].format(*rest)
        for kind, *rest in value.placements
    ]
    return TensorEntry(
        key=key,
        name=name,
        dtype=value.local.dtype,
        shape=value.shape,
        chunks=tuple(chunks),
        placements=", ".join(shown),
    )


def _slice_problem(entry: TensorEntry, value: DTensorRef | ShardedTensorRef) -> list[Problem]:
    """A file of its own that holds a sharded tensor holds one rank's share of it (accelerate#4206)."""
    have = sum(chunk.numel for chunk in entry.chunks)
    if have == entry.numel:
        return []
    share = f"{have} of {entry.numel} elements"
    if isinstance(value, DTensorRef) and value.shape and value.local.shape[:1] != value.shape[:1]:
        share = f"{value.local.shape[0]} of {value.shape[0]} rows"
    pieces = len(value.boxes) if isinstance(value, ShardedTensorRef) else value.mesh_shape
    of = pieces if isinstance(pieces, int) else "x".join(map(str, pieces))
    message = f"holds one rank's shard of {of} ({share}); the other ranks' shards were never written"
    return [Problem(severity=Severity.ERROR, code="one-shard-only", where=entry.key, message=message)]
