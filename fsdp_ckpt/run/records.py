"""Follow the chunks of one tensor while it is read: which of them a box needs, and how far each was read in order."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

from fsdp_ckpt.catalog import Chunk, DType, Shape, contiguous_strides
from fsdp_ckpt.errors import MalformedFile
from fsdp_ckpt.plan.boxes import Box
from fsdp_ckpt.run.checksum import crc32
from fsdp_ckpt.run.sources import Located
from fsdp_ckpt.store.local import LocalStore

__all__ = ["Record", "Records"]


class Record:
    """A RAW chunk, and how far it was read.

    Attributes:
        store: The store that its file is in.
        chunk: The chunk.
        crc: CRC-32 of the bytes before ``position``; None when it is of no use.
        position: End, in the file, of what was read in order.
        is_touched: Whether anything of it was wanted.
        is_verified: Whether it was compared before.
    """

    __slots__ = ("chunk", "crc", "is_touched", "is_verified", "position", "store")

    def __init__(self, store: LocalStore, chunk: Chunk) -> None:
        self.store = store
        self.chunk = chunk
        self.crc: int | None = None
        self.position = chunk.start
        self.is_touched = False
        self.is_verified = False

    @property
    def strides(self) -> Shape:
        """Elements in the file between neighbours, per dimension."""
        return contiguous_strides(self.chunk.lengths) if self.chunk.strides is None else self.chunk.strides

    def check_extent(self, dtype: DType, *, key: str) -> None:
        """Check that the elements lie within the record.

        Raises:
            MalformedFile: They would reach beyond its end.
        """
        chunk = self.chunk
        last = sum((n - 1) * stride for n, stride in zip(chunk.lengths, self.strides, strict=True))
        if chunk.start + (last + 1) * dtype.itemsize > chunk.stop:
            raise MalformedFile(f"{chunk.file}: bytes {chunk.start}-{chunk.stop} are too few for the shape of `{key}`")

    def note(self, start: int, block: memoryview) -> None:
        """Take a block into account that was read from byte ``start`` of the file."""
        if self.crc is not None and start <= self.position < start + len(block):
            self.crc = crc32(block[self.position - start :], self.crc)
            self.position = start + len(block)


class Records:
    """The chunks of a tensor that are not empty, found by box."""

    def __init__(self, located: Sequence[Located]) -> None:
        self._records = [Record(store, chunk) for store, chunk in located if chunk.numel]
        self._rows: list[int] | None = None
        if self._records and self._records[0].chunk.offsets:
            rows = sorted(self._records, key=lambda record: record.chunk.offsets[0])
            spans = [(record.chunk.offsets[0], record.chunk.lengths[0]) for record in rows]
            if all(row + length <= after for (row, length), (after, _) in itertools.pairwise(spans)):
                self._records = rows
                self._rows = [row for row, _ in spans]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def near(self, box: Box) -> Sequence[Record]:
        """Return all records that share elements with a box, and perhaps others.

        Records that follow one another along dimension 0 are found by bisection, so that reading thousands of row
        shards block by block does not look at all of them for each block.
        """
        if self._rows is None:
            return self._records
        first = max(bisect.bisect_right(self._rows, box[0][0]) - 1, 0)
        return self._records[first : bisect.bisect_left(self._rows, box[0][0] + box[1][0])]
