"""Byte ranges of files: two tensors claim either all of each other's bytes, or none, and nobody's bytes are rare."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from fsdp_ckpt.catalog import Encoding, ObjectEntry, TensorEntry

__all__ = ["Extent", "collect_extents", "find_gaps", "find_shared_bytes", "iter_shared_bytes", "same_bytes"]


class Extent(NamedTuple):
    """Bytes ``[start, stop)`` of a file that an item claims."""

    start: int
    stop: int
    key: str


def same_bytes(tensor: TensorEntry) -> Hashable:
    """Return a key that is equal for tensors that are one: the same shards from the same bytes, as tied weights are."""
    chunks = (
        (chunk.file, chunk.start, chunk.stop, chunk.offsets, chunk.lengths, chunk.strides, chunk.conj, chunk.neg)
        for chunk in tensor.chunks
    )
    return tensor.shape, tensor.dtype.name, tuple(sorted(chunks, key=repr))


def collect_extents(tensors: Iterable[TensorEntry], objects: Iterable[ObjectEntry] = ()) -> dict[str, list[Extent]]:
    """Return by file what its items claim, in the order of their bytes.

    Only records that hold one item each are looked at (those of distributed checkpoints): in full files tensors may
    share a storage.
    """
    by_file: dict[str, list[Extent]] = {}
    new = tuple.__new__
    for tensor in tensors:
        key = tensor.key
        for chunks in (tensor.chunks, tensor.replicas):
            for chunk in chunks:
                if chunk.encoding is not Encoding.RAW and chunk.stop > chunk.start:
                    by_file.setdefault(chunk.file, []).append(new(Extent, (chunk.start, chunk.stop, key)))
    for entry in objects:
        if not entry.decoded and entry.encoding is not Encoding.RAW and entry.stop > entry.start:
            by_file.setdefault(entry.file, []).append(Extent(entry.start, entry.stop, entry.key))
    for extents in by_file.values():
        extents.sort()
    return by_file


def iter_shared_bytes(
    extents: Mapping[str, list[Extent]], tensors: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, str, str]]:
    """Yield file and keys of two items of which one claims bytes of the other.

    One tensor under two names, as ``save_state`` stores tied weights, is no contradiction.
    """
    for file, listed in extents.items():
        begin, end, owner = 0, 0, ""
        for start, stop, key in listed:
            if start < end:
                is_shared = (start, stop) == (begin, end) and owner != key and owner in tensors and key in tensors
                if not (is_shared and same_bytes(tensors[owner]) == same_bytes(tensors[key])):
                    yield file, owner, key
            if stop > end:
                begin, end, owner = start, stop, key


def find_shared_bytes(tensors: Iterable[TensorEntry]) -> tuple[str, str] | None:
    """Return the keys of two tensors of which one claims bytes of the other, None when there are none."""
    by_key = {tensor.key: tensor for tensor in tensors}
    found = next(iter_shared_bytes(collect_extents(by_key.values()), by_key), None)
    return None if found is None else found[1:]


def find_gaps(extents: list[Extent], size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file that no item claims.

    Args:
        extents: What its items claim, sorted.
        size: Its bytes.

    Example:
        >>> list(find_gaps([Extent(0, 10, "a"), Extent(12, 20, "b")], 25))
        [(10, 12), (20, 25)]
    """
    end = 0
    for start, stop, _ in extents:
        if min(start, size) > end:
            yield end, min(start, size)
        end = max(end, stop)
    if size > end:
        yield end, size
