"""Recognise one tensor saved under two names: the embedding and the output head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_ckpt.catalog import Chunk
from fsdp_ckpt.plan.boxes import bands
from fsdp_ckpt.plan.extents import same_bytes
from fsdp_ckpt.plan.merge import Selection, find_tie_candidates
from fsdp_ckpt.plan.output import OutputTensor
from fsdp_ckpt.run.sources import Sources

__all__ = ["find_aliases", "tie"]

_BAND_BYTES = 1 << 20


def tie(selection: Selection, sources: Sources, *, asked: bool) -> tuple[Selection, list[str]]:
    """Drop the output head where it equals the embedding.

    Args:
        selection: What is to be written.
        sources: Finds the bytes.
        asked: Whether the user asked for it, rather than the model's config.

    Returns:
        The selection, with the pair in ``tied`` if there is one, and warnings.
    """
    aliases = find_aliases(selection.tensors)
    pair = find_tie_candidates(selection.tensors)
    tied = dict(aliases)
    warnings = []
    if pair is not None and pair[1].name not in tied and pair[0].name not in tied:
        embedding, head = pair
        if _is_plain(embedding) and _is_plain(head) and _are_equal(embedding, head, sources):
            tied[head.name] = embedding.name
        else:
            why = "--tie" if asked else "config.json says tie_word_embeddings"
            warnings.append(f"{why}, but `{embedding.name}` and `{head.name}` differ: both are written")
    elif pair is None and not aliases and asked:
        warnings.append("--tie: no output head of the shape of the embedding was found; nothing is tied")
    return selection.without(tied), warnings


def find_aliases(tensors: Sequence[OutputTensor]) -> dict[str, str]:
    """Return tensors that are the same bytes of the same files, as full files and ``save_state`` keep tied weights.

    Returns:
        Name of the one to keep by name of the other; an embedding is kept rather than a head, else the first.
    """
    beginnings: dict[Any, list[OutputTensor]] = {}  # few tensors share one: the rest need no closer look
    for tensor in tensors:
        if tensor.num_bytes and _is_plain(tensor):
            first = min((chunk.file, chunk.start) for chunk in tensor.source.chunks)
            beginnings.setdefault(first, []).append(tensor)
    groups: dict[Any, list[OutputTensor]] = {}
    for together in beginnings.values():
        for tensor in together if len(together) > 1 else ():
            groups.setdefault(same_bytes(tensor.source), []).append(tensor)
    found: dict[str, str] = {}
    for group in groups.values():
        if len(group) > 1:
            pair = find_tie_candidates(group)
            keep = pair[0] if pair is not None else group[0]
            found |= {tensor.name: keep.name for tensor in group if tensor is not keep}
    return found


def _is_plain(tensor: OutputTensor) -> bool:
    """Whether a tensor is all of its source and nothing but it: no window, no adapter that is folded in."""
    return tensor.window is None and tensor.addition is None


def _are_equal(a: OutputTensor, b: OutputTensor, sources: Sources) -> bool:
    by_crc = _equal_by_crc(a, b, sources)
    return _equal_by_bytes(a, b, sources) if by_crc is None else by_crc


def _equal_by_crc(a: OutputTensor, b: OutputTensor, sources: Sources) -> bool | None:
    """Compare recorded checksums, shard by shard: no data are read. None where that decides nothing."""
    first, second = (_crcs(tensor, sources) for tensor in (a, b))
    if first is None or second is None or first.keys() != second.keys():
        return None
    if any(first[box][1:] != second[box][1:] for box in first):  # equal values, perhaps, in another order
        return None
    return first == second


def _crcs(tensor: OutputTensor, sources: Sources) -> dict[Any, Any] | None:
    found = {}
    for chunk in tensor.source.chunks:
        if chunk.numel:
            raw: Chunk = sources.resolve(tensor.source, chunk)[1]
            if raw.crc32 is None or raw.crc_range is not None:
                return None
            found[raw.offsets, raw.lengths] = (raw.crc32, raw.strides, raw.conj, raw.neg)
    return found


def _equal_by_bytes(a: OutputTensor, b: OutputTensor, sources: Sources) -> bool:
    import numpy as np

    from fsdp_ckpt.run.gather import Gatherer

    readers = [
        Gatherer(
            tensor.source.key,
            tensor.source.dtype,
            tensor.source.shape,
            [sources.resolve(tensor.source, chunk) for chunk in tensor.source.chunks],
            verify="off",
        )
        for tensor in (a, b)
    ]
    for box in bands(a.source.shape, a.source.dtype.itemsize, _BAND_BYTES):
        pieces = [np.empty(box[1], dtype=reader.bits) for reader in readers]
        for reader, piece in zip(readers, pieces, strict=True):
            reader.read(box, piece)
        if not np.array_equal(pieces[0], pieces[1]):
            return False
    return True
