"""Byte ranges of files: no two tensors may claim the same bytes."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_ckpt.catalog import Encoding, TensorEntry

__all__ = ["find_shared_bytes"]


def find_shared_bytes(tensors: Iterable[TensorEntry]) -> tuple[str, str] | None:
    """Return the keys of two tensors of which one claims bytes of the other, None when there are none.

    Only records that hold one tensor each are looked at (items of distributed checkpoints): in full files tensors may
    share a storage.
    """
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    for tensor in tensors:
        for chunk in tensor.chunks:
            if chunk.encoding is not Encoding.RAW and chunk.stop > chunk.start:
                by_file.setdefault(chunk.file, []).append((chunk.start, chunk.stop, tensor.key))
    for extents in by_file.values():
        extents.sort()
        end, owner = 0, ""
        for start, stop, key in extents:
            if start < end:
                return owner, key
            end, owner = stop, key
    return None
