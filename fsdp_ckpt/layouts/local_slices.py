"""FSDP1's LOCAL_STATE_DICT with ``use_orig_params``: each rank's slices of the parameters, in one dimension.

torch hands out views of the rank's flat parameter, and keeps in the file that they are views. So the bytes tell where
in the flat parameter a slice lies, and thereby which slices follow each other. Where somebody copied the tensors
before saving, slices of unequal sizes are put together by rank.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_ckpt.catalog import Chunk, DType, Encoding, TensorEntry
from fsdp_ckpt.names import is_flat_param

__all__ = ["LOCAL_SLICES", "join_by_rank", "place_slices"]

LOCAL_SLICES = "FSDP1 local slices"
"""What stands in ``TensorEntry.placements`` of a parameter in one dimension that was put together from slices."""


@dataclass(frozen=True, slots=True)
class _Shards:
    """Where the shards of flat parameters lie: first bytes, and key, dtype and chunk, by file."""

    starts: Mapping[str, Sequence[int]]
    by_file: Mapping[str, Sequence[tuple[str, DType, Chunk]]]

    @classmethod
    def of(cls, tensors: Mapping[str, TensorEntry]) -> _Shards:
        found: dict[str, list[tuple[str, DType, Chunk]]] = {}
        for key, entry in tensors.items():
            if is_flat_param(entry.name) and len(entry.shape) == 1:
                for chunk in (*entry.chunks, *entry.replicas):
                    if chunk.numel and _is_plain(chunk):
                        found.setdefault(chunk.file, []).append((key, entry.dtype, chunk))
        for shards in found.values():
            shards.sort(key=lambda shard: shard[2].start)
        return cls({file: [chunk.start for _, _, chunk in shards] for file, shards in found.items()}, found)

    def locate(self, chunk: Chunk, dtype: DType) -> tuple[str, int] | None:
        """Return the flat parameter that a slice is a view of, and its first element there; None for no view."""
        number = bisect.bisect_right(self.starts.get(chunk.file, ()), chunk.start) - 1
        if number < 0 or not _is_plain(chunk):
            return None
        key, flat_dtype, shard = self.by_file[chunk.file][number]
        elements, odd_bytes = divmod(chunk.start - shard.start, dtype.itemsize)
        if chunk.stop > shard.stop or flat_dtype != dtype or odd_bytes:
            return None
        return key, shard.offsets[0] + elements


def place_slices(tensors: Mapping[str, TensorEntry], by_rank: Mapping[str, Sequence[Chunk]]) -> dict[str, TensorEntry]:
    """Put slices together that lie beside flat parameters.

    Args:
        tensors: What a part holds, by key; of plain tensors the first rank's is the chunk.
        by_rank: All ranks' chunks of plain tensors in one dimension, by key, in the order of the ranks.

    Returns:
        The same with parameters in one dimension in the place of slices. What is whole on each rank is unchanged.
    """
    shards = _Shards.of(tensors)
    return {
        key: entry if is_flat_param(entry.name) else _place(entry, by_rank.get(key, ()), shards)
        for key, entry in tensors.items()
    }


def _place(entry: TensorEntry, chunks: Sequence[Chunk], shards: _Shards) -> TensorEntry:
    solid = [chunk for chunk in chunks if chunk.numel]
    spots = [spot for chunk in solid if (spot := shards.locate(chunk, entry.dtype)) is not None]
    if solid and len(spots) == len(solid) and len({key for key, _ in spots}) == 1:
        return _join_by_place(entry, [position for _, position in spots], solid)
    if len({chunk.lengths for chunk in chunks}) > 1:
        return join_by_rank(entry, chunks)
    return entry


def _join_by_place(entry: TensorEntry, positions: Sequence[int], slices: Sequence[Chunk]) -> TensorEntry:
    """Return the parameter of slices at known places of the flat parameter."""
    first = min(positions)
    placed = sorted(zip(positions, slices, strict=True), key=lambda item: item[0])
    chunks = tuple(chunk._replace(offsets=(position - first,)) for position, chunk in placed)
    stop = max(chunk.offsets[0] + chunk.numel for chunk in chunks)
    return replace(entry, shape=(stop,), chunks=chunks, replicas=(), placements=LOCAL_SLICES)


def join_by_rank(entry: TensorEntry, chunks: Sequence[Chunk]) -> TensorEntry:
    """Return the parameter in one dimension that slices form, one after the other."""
    starts = [0, *itertools.accumulate(chunk.numel for chunk in chunks)]
    return replace(
        entry,
        shape=(starts[-1],),
        chunks=tuple(_moved(chunks, starts)),
        replicas=(),
        placements=LOCAL_SLICES,
    )


def _moved(chunks: Sequence[Chunk], starts: Sequence[int]) -> Iterator[Chunk]:
    for chunk, start in zip(chunks, starts, strict=False):
        if chunk.numel:
            yield chunk._replace(offsets=(start,))


def _is_plain(chunk: Chunk) -> bool:
    return chunk.encoding is Encoding.RAW and chunk.strides is None and not chunk.conj and not chunk.neg
