"""The words that everybody here speaks: a checkpoint is parts, a part is tensors, a tensor is chunks.

A chunk is a box of the tensor together with the place of its bytes. Everything is immutable and knows nothing of
how it came about; readers are in ``layouts/``, arithmetic is in ``plan/``, and bytes are moved in ``run/``.

Units: names ending in ``_bytes`` and byte ranges count bytes, ranges are half-open ``[start, stop)``; ``offsets``,
``lengths`` and ``shape`` count elements, one number per dimension; strides count elements, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "DTYPES",
    "MAX_DIMS",
    "Checkpoint",
    "Chunk",
    "DType",
    "Encoding",
    "ObjectEntry",
    "Part",
    "Problem",
    "Role",
    "Severity",
    "Shape",
    "TensorEntry",
    "contiguous_strides",
]

Shape = tuple[int, ...]

MAX_DIMS = 64
"""Dimensions that a tensor can have, in torch and in NumPy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """An element type.

    Attributes:
        name: torch's name, without ``torch.``.
        itemsize: Bytes of one element as torch counts them.
        safetensors: The code in a safetensors header; None where the format has no such type.
        kind: What a cast may do with it: only ``float`` is ever converted (see ``merge --dtype``).
        pack: Logical values in one element along the last dimension (2 for ``float4_e2m1fn_x2``): safetensors
            counts values, torch counts bytes.
    """

    name: str
    itemsize: int
    safetensors: str | None
    kind: str = "int"
    pack: int = 1

    def __str__(self) -> str:
        return self.name


def _dtype_table() -> dict[str, DType]:
    rows: list[tuple[str, int, str | None, str]] = [
        ("float64", 8, "F64", "float"),
        ("float32", 4, "F32", "float"),
        ("float16", 2, "F16", "float"),
        ("bfloat16", 2, "BF16", "float"),
        ("int64", 8, "I64", "int"),
        ("int32", 4, "I32", "int"),
        ("int16", 2, "I16", "int"),
        ("int8", 1, "I8", "int"),
        ("uint64", 8, "U64", "int"),
        ("uint32", 4, "U32", "int"),
        ("uint16", 2, "U16", "int"),
        ("uint8", 1, "U8", "int"),
        ("bool", 1, "BOOL", "bool"),
        ("complex32", 4, None, "complex"),
        ("complex64", 8, "C64", "complex"),
        ("complex128", 16, None, "complex"),
        ("float8_e4m3fn", 1, "F8_E4M3", "float8"),
        ("float8_e5m2", 1, "F8_E5M2", "float8"),
        ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", "float8"),
        ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", "float8"),
        ("float8_e8m0fnu", 1, "F8_E8M0", "float8"),
    ]
    table = {name: DType(name=name, itemsize=size, safetensors=code, kind=kind) for name, size, code, kind in rows}
    table["float4_e2m1fn_x2"] = DType(name="float4_e2m1fn_x2", itemsize=1, safetensors="F4", kind="float8", pack=2)
    return table


DTYPES: Mapping[str, DType] = _dtype_table()
"""All element types by torch's name."""


class Encoding(StrEnum):
    """How a record holds its bytes."""

    RAW = "raw"
    """The elements themselves, little-endian, laid out by ``Chunk.strides``."""
    TORCH_ZIP = "torch-zip"
    """A whole ``torch.save`` archive; where the elements lie is found by reading its directory."""
    ZSTD_TORCH_ZIP = "torch-zip+zstd"
    """A zstd stream of such an archive."""


class Chunk(NamedTuple):
    """One box of a tensor and the bytes that hold it.

    A named tuple rather than a dataclass: a large checkpoint has millions of them.

    Attributes:
        offsets: Where the box begins in the tensor, per dimension.
        lengths: Its extent, per dimension; the elements of the box are stored as a tensor of this shape.
        file: The file, relative to the checkpoint's root, with ``/``.
        start: First byte of the record in the file, inclusive.
        stop: End of the record, exclusive.
        encoding: What the record is.
        strides: Elements between neighbours, per dimension, for RAW records; None for row-major.
        crc32: CRC-32 that the writer recorded for bytes ``[crc_start, crc_stop)``; None where there is none.
        crc_range: The bytes that ``crc32`` covers (the whole storage, of which the chunk may be a part); None for
            ``[start, stop)``.
        conj: The stored values are the conjugates of the tensor's (torch's lazy conj bit).
        neg: The stored values are the negatives of the tensor's (torch's lazy neg bit).
    """

    offsets: Shape
    lengths: Shape
    file: str
    start: int
    stop: int
    encoding: Encoding = Encoding.RAW
    strides: Shape | None = None
    crc32: int | None = None
    crc_range: tuple[int, int] | None = None
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.lengths)

    def part(self, offsets: Shape, lengths: Shape, element: int, itemsize: int) -> Chunk:
        """Return the chunk of a box within this one (RAW records only).

        Args:
            offsets: Where the part begins in the tensor.
            lengths: Its extent.
            element: Its first element, counted along ``strides`` from this chunk's first one.
            itemsize: Bytes of an element.
        """
        strides = self.strides or contiguous_strides(self.lengths)
        span = 0 if 0 in lengths else 1 + sum((n - 1) * s for n, s in zip(lengths, strides, strict=True))
        start = self.start + element * itemsize
        return self._replace(
            offsets=offsets,
            lengths=lengths,
            start=start,
            stop=start + span * itemsize,
            strides=None if strides == contiguous_strides(lengths) else strides,
            crc_range=self.crc_range or (self.start, self.stop),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of a checkpoint, whole, wherever its chunks may lie.

    Attributes:
        key: The name that the file format uses (``model.layers.0.weight``).
        name: The name within its part, before any clean-up (``layers.0.weight``).
        dtype: Element type.
        shape: The whole (unsharded) tensor's shape.
        chunks: Boxes that should tile the tensor. Replicas of one box stand in ``replicas``, not here.
        replicas: Further copies of boxes in ``chunks`` (files per rank, HSDP): same box, other place.
        placements: The sharding over the device mesh where the format records it, as torch prints it.
        path: Where it stood in the part's nested state dict: texts are keys, integers list indices; ``name`` is the
            same with dots.
    """

    key: str
    name: str
    dtype: DType
    shape: Shape
    chunks: Sequence[Chunk]
    replicas: Sequence[Chunk] = ()
    placements: str | None = None
    path: tuple[str | int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEntry:
    """Something in a checkpoint that is not a tensor: a pickled value.

    Attributes:
        key: The name that the file format uses.
        name: The name within its part.
        file: The file, relative to the checkpoint's root.
        start: First byte of the ``torch.save`` archive or pickle, inclusive.
        stop: End, exclusive.
        encoding: TORCH_ZIP or ZSTD_TORCH_ZIP; RAW for a bare pickle.
        value: The value, where reading the index has already decoded it; otherwise it is read on demand.
        decoded: Whether ``value`` is set.
        path: Where it stood in the part's nested state dict, see ``TensorEntry``.
    """

    key: str
    name: str
    file: str
    start: int
    stop: int
    encoding: Encoding = Encoding.TORCH_ZIP
    value: object = None
    decoded: bool = False
    path: tuple[str | int, ...] = ()


class Severity(StrEnum):
    """How much a problem matters for reading."""

    ERROR = "error"
    """Data is missing or contradictory: merging is refused."""
    WARNING = "warning"
    """Nothing is lost, but somebody should know."""
    NOTE = "note"
    """A fact that helps to understand the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something about a checkpoint that a reader noticed.

    Attributes:
        severity: How much it matters.
        code: Stable, in words with dashes: ``missing-shard``.
        where: The file, tensor or folder, relative to the checkpoint's root.
        message: One sentence.
    """

    severity: Severity
    code: str
    where: str
    message: str


class Role(StrEnum):
    """What a part is for."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    RNG = "rng"
    DATALOADER = "dataloader"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing that was saved: a model, an optimizer, a scheduler, random states.

    Attributes:
        name: How to name it on the command line (``pytorch_model_fsdp_0``, ``model``).
        role: What it is for.
        dialect: The on-disk format of this part (``dcp``, ``safetensors``, …).
        folder: Its folder relative to the checkpoint's root; ``""`` for the root itself.
        files: Files that hold it, relative to the root, with their sizes in bytes.
        tensors: By key.
        objects: By key.
        world_size: Ranks that wrote it, where that can be told.
        writer: What wrote it, as far as can be told (``torch >= 2.9``).
        flat: The reason why the tensors cannot be named (FSDP flat parameters); None otherwise.
        problems: What the reader noticed.
    """

    name: str
    role: Role
    dialect: str
    folder: str = ""
    files: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    objects: Mapping[str, ObjectEntry] = field(default_factory=dict)
    world_size: int | None = None
    writer: str | None = None
    flat: str | None = None
    problems: Sequence[Problem] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all whole tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def numel(self) -> int:
        """Elements of all whole tensors."""
        return sum(tensor.numel for tensor in self.tensors.values())

    @property
    def is_complete(self) -> bool:
        """Whether no problem of severity ERROR was noticed."""
        return all(problem.severity is not Severity.ERROR for problem in self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint as it lies on disk.

    Attributes:
        root: The folder that all ``file`` entries are relative to.
        layout: What the whole is (``accelerate``, ``dcp``, ``hf-safetensors``, …).
        title: The same for people.
        parts: What was saved, models first.
        step: Training step, where the layout records it.
        world_size: Ranks that wrote it, where that can be told.
        facts: Further facts for people, in order: (name, value).
        side_files: Other files that belong to it (config.json, trainer_state.json), relative to the root.
        problems: What was noticed about the whole; those of a part stand there.
        chosen: Set when the reader stepped from the path it was given into a folder below: that path.
        other_roots: Further folders like ``root``: of other nodes, where those saved to disks of their own.
    """

    root: Path
    layout: str
    title: str
    parts: Sequence[Part]
    step: int | None = None
    world_size: int | None = None
    facts: Sequence[tuple[str, str]] = ()
    side_files: Sequence[str] = ()
    problems: Sequence[Problem] = ()
    chosen: str | None = None
    other_roots: Sequence[Path] = ()

    @property
    def roots(self) -> tuple[Path, ...]:
        """All folders that hold the checkpoint between them."""
        return (self.root, *self.other_roots)

    @property
    def is_complete(self) -> bool:
        """Whether neither the whole nor a part has a problem of severity ERROR."""
        return all(p.severity is not Severity.ERROR for p in self.problems) and all(p.is_complete for p in self.parts)


def contiguous_strides(shape: Shape) -> Shape:
    """Return row-major strides in elements.

    Example:
        >>> contiguous_strides((2, 3, 4))
        (12, 4, 1)
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)
