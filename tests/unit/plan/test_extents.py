"""Tensors that claim each other's bytes: tied weights are one tensor, everything else is damage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_ckpt.catalog import DTYPES, Chunk, Encoding, TensorEntry
from fsdp_ckpt.plan.extents import find_shared_bytes


def _tensor(key: str, *extents: tuple[int, int], dtype: str = "float32") -> TensorEntry:
    chunks = tuple(
        Chunk(file="__0_0.distcp", start=start, stop=stop, offsets=(row,), lengths=(4,), encoding=Encoding.TORCH_ZIP)
        for row, (start, stop) in zip(range(0, 40, 4), extents, strict=False)
    )
    return TensorEntry(key=key, name=key, shape=(4 * len(chunks),), dtype=DTYPES[dtype], chunks=chunks)


def test_tied_weights_are_one_tensor() -> None:
    embedding, head = _tensor("embed", (0, 10), (20, 30)), _tensor("head", (0, 10), (20, 30))
    assert find_shared_bytes([embedding, _tensor("other", (10, 20)), head]) is None


@pytest.mark.parametrize(
    "second",
    [
        _tensor("b", (0, 10)),  # fewer shards
        _tensor("b", (0, 10), (30, 40)),  # another second shard
        _tensor("b", (5, 15), (20, 30)),  # half of the first
        _tensor("b", (20, 30), (0, 10)),  # the other way round
        _tensor("b", (0, 10), (20, 30), dtype="int32"),
    ],
)
def test_anything_else_is_damage(second: TensorEntry) -> None:
    assert find_shared_bytes([_tensor("a", (0, 10), (20, 30)), second]) == ("a", "b")


def test_two_shards_of_one_tensor_are_damage() -> None:
    assert find_shared_bytes([_tensor("a", (0, 10), (0, 10))]) == ("a", "a")


def test_tied_weights_hide_no_overlap_within_themselves() -> None:
    tied = [_tensor(key, (0, 10), (5, 15)) for key in ("a", "b")]
    assert find_shared_bytes(tied) is not None


def test_storages_of_full_files_may_be_shared() -> None:
    raw = _tensor("a", (0, 10))
    first = replace(raw, chunks=tuple(chunk._replace(encoding=Encoding.RAW) for chunk in raw.chunks))
    assert find_shared_bytes([first, replace(first, key="b", chunks=(first.chunks[0]._replace(stop=20),))]) is None
