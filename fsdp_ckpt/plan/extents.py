"""Byte ranges of files: two tensors claim either all of each other's bytes, or none."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from fsdp_ckpt.catalog import Encoding, TensorEntry

__all__ = ["find_shared_bytes", "same_bytes"]


def same_bytes(tensor: TensorEntry) -> Hashable:
    """Return a key that is equal for tensors that are one: the same shards from the same bytes, as tied weights are."""
    chunks = (
        (chunk.file, chunk.start, chunk.stop, chunk.offsets, chunk.lengths, chunk.strides, chunk.conj, chunk.neg)
        for chunk in tensor.chunks
    )
    return tensor.shape, tensor.dtype.name, tuple(sorted(chunks, key=repr))


def find_shared_bytes(tensors: Iterable[TensorEntry]) -> tuple[str, str] | None:
    """Return the keys of two tensors of which one claims bytes of the other, None when there are none.

    Only records that hold one tensor each are looked at (items of distributed checkpoints): in full files tensors may
    share a storage. One tensor under two names, as ``save_state`` stores tied weights, is no contradiction.
    """
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    listed = list(tensors)
    for tensor in listed:
        for chunk in tensor.chunks:
            if chunk.encoding is not Encoding.RAW and chunk.stop > chunk.start:
                by_file.setdefault(chunk.file, []).append((chunk.start, chunk.stop, tensor.key))
    by_key = {tensor.key: tensor for tensor in listed}
    for extents in by_file.values():
        extents.sort()
        begin, end, owner = 0, 0, ""
        for start, stop, key in extents:
            is_shared = (start, stop) == (begin, end) and owner != key
            if start < end and not (is_shared and same_bytes(by_key[owner]) == same_bytes(by_key[key])):
                return owner, key
            begin, end, owner = start, stop, key
    return None
