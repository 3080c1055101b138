"""Describe a checkpoint of many ranks without bytes: only its metadata and sparse shard files get written."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Self

from benchmarks import llama

BYTES_PER_ELEMENT = 2
ITEM_OVERHEAD_BYTES = 1577
"""What torch.save (2.7 and later) adds to a tensor below 4 GiB, counted from its size rounded down to 64 bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One bf16 tensor, cut along its first dimension into one equal chunk per rank.

    Attributes:
        fqn: Name in the checkpoint, with the leading `model.` that Accelerate's wrapping adds.
        name: Name in the model's state dict.
        shape: Global shape, elements.
        chunk: Shape of every rank's chunk, elements.
        start: Position of the chunk's item in the file of each rank, bytes.
    """

    fqn: str
    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    start: int

    @property
    def item_bytes(self) -> int:
        """Length of the chunk's item in the file, bytes."""
        return math.prod(self.chunk) * BYTES_PER_ELEMENT // 64 * 64 + ITEM_OVERHEAD_BYTES

    def offsets(self, rank: int) -> tuple[int, ...]:
        """Return the place of the rank's chunk in the tensor, elements per dimension."""
        return (rank * self.chunk[0],) + (0,) * (len(self.chunk) - 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """A pure-FSDP bf16 checkpoint in which every rank holds one chunk of every tensor.

    Attributes:
        num_ranks: Ranks, one shard file each.
        num_tensors: Tensors with Llama's names.
        rows: Rows (first dimension) of every chunk, elements.
        columns: Columns of the matrices, elements.
    """

    num_ranks: int
    num_tensors: int
    rows: int
    columns: int

    @classmethod
    def of_chunks(cls, num_chunks: int) -> Self:
        """Describe a checkpoint of 4,096 ranks with as many tensors as come closest to this many chunks."""
        return cls(num_ranks=4096, num_tensors=max(1, round(num_chunks / 4096)), rows=4, columns=8192)

    @property
    def num_chunks(self) -> int:
        """Chunks of all tensors together."""
        return self.num_ranks * self.num_tensors

    @property
    def file_bytes(self) -> int:
        """Length of every rank's shard file, bytes."""
        return sum(entry.item_bytes for entry in self.tensors())

    def file_name(self, rank: int) -> str:
        """Return the name of the rank's shard file, as torch's writer gives it."""
        return f"__{rank}_0.distcp"

    def tensors(self) -> Iterator[Entry]:
        """Yield the tensors in state dict order, which is also the order of their items in each file."""
        start = 0
        for name in llama.names(self.num_tensors):
            columns = () if llama.is_vector(name) else (self.columns,)
            entry = Entry(
                fqn=f"model.{name}",
                name=name,
                shape=(self.rows * self.num_ranks, *columns),
                chunk=(self.rows, *columns),
                start=start,
            )
            yield entry
            start += entry.item_bytes
