"""Tell from metadata whether two tensors are equal: the same bytes of the same files, or equal recorded checksums.

No element is read. What a checksum says is what was written; whether the disk still has it is for ``validate``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from fsdp_ckpt.catalog import Chunk, Encoding, Shape, TensorEntry
from fsdp_ckpt.plan.boxes import Box, is_contiguous_in, linear_offset
from fsdp_ckpt.run.checksum import combine_crc
from fsdp_ckpt.run.sides import Side, TensorPair

__all__ = ["Settled", "settle"]


class Settled(StrEnum):
    """How a question was answered without reading."""

    SAME_FILE = "same-file"
    """Both are the same bytes of the same files: equal."""
    CHECKSUMS = "checksums"
    """The CRC-32 that were recorded when both were written are equal."""
    DIFFERENT = "different"
    """Recorded checksums of the same boxes differ, so that the bits differ."""


def settle(pair: TensorPair, a: Side, b: Side, *, trust_crc: bool = True) -> Settled | None:
    """Compare two tensors of equal shape without reading their elements.

    Checksums of shards are put together to that of the whole tensor, so that it does not matter into how many row
    blocks each side was cut.

    Args:
        pair: The tensors.
        a: Where the first one is.
        b: Where the second one is.
        trust_crc: Whether recorded checksums count.

    Returns:
        The answer; None when elements must be read.

    Raises:
        CorruptCheckpoint: An item is damaged; the message names the side.
    """
    if pair.a.dtype != pair.b.dtype:
        return None
    if _files(pair.a, a) == _files(pair.b, b) and _places(pair.a, a) == _places(pair.b, b):
        return Settled.SAME_FILE
    if not trust_crc or _lacks_crc(pair.a) or _lacks_crc(pair.b):
        return None
    first = _records(pair.a, a)
    second = _records(pair.b, b) if first is not None else None
    if first is None or second is None:
        return None
    if first.keys() == second.keys():
        if any(_order(first[box]) != _order(second[box]) for box in first):
            return None  # equal values, perhaps, in another order
        same = all(first[box].crc32 == second[box].crc32 for box in first)
    else:
        whole = _whole_crc(first, pair.shape), _whole_crc(second, pair.shape)
        if None in whole:
            return None
        same = whole[0] == whole[1]
    return Settled.CHECKSUMS if same else Settled.DIFFERENT


def _files(tensor: TensorEntry, side: Side) -> frozenset[object]:
    with side.blame():
        return frozenset(side.inode(file) for file in {chunk.file for chunk in tensor.chunks if chunk.numel})


def _places(tensor: TensorEntry, side: Side) -> frozenset[object]:
    with side.blame():
        return frozenset(
            (side.inode(chunk.file), *chunk._replace(file="", crc32=None, crc_range=None))
            for chunk in tensor.chunks
            if chunk.numel
        )


def _lacks_crc(tensor: TensorEntry) -> bool:
    return any(
        chunk.encoding is Encoding.ZSTD_TORCH_ZIP or (chunk.encoding is Encoding.RAW and chunk.crc32 is None)
        for chunk in tensor.chunks
        if chunk.numel
    )


def _records(tensor: TensorEntry, side: Side) -> dict[Box, Chunk] | None:
    """Return the records by box, None when one has no checksum of exactly its own bytes."""
    found: dict[Box, Chunk] = {}
    with side.blame():
        for _, chunk in side.resolve(tensor):
            if chunk.crc32 is None or chunk.crc_range not in (None, (chunk.start, chunk.stop)):
                return None
            found[chunk.offsets, chunk.lengths] = chunk
    return found


def _order(chunk: Chunk) -> tuple[object, ...]:
    return chunk.strides, chunk.conj, chunk.neg


def _whole_crc(records: Mapping[Box, Chunk], shape: Shape) -> int | None:
    """Return the CRC-32 of the tensor in row-major order, None when the shards are no runs of it."""
    if any(_order(chunk) != (None, False, False) or not is_contiguous_in(box, shape) for box, chunk in records.items()):
        return None
    total: int | None = 0
    for box in sorted(records, key=lambda box: linear_offset(box[0], shape)):
        chunk = records[box]
        assert total is not None
        assert chunk.crc32 is not None
        total = combine_crc(total, chunk.crc32, chunk.stop - chunk.start)
        if total is None:
            return None
    return total
