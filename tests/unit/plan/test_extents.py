"""Tensors that claim each other's bytes: tied weights are one tensor, everything else is damage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_ckpt.catalog import DTYPES, Chunk, Encoding, ObjectEntry, TensorEntry
from fsdp_ckpt.plan.extents import Extent, collect_extents, find_gaps, find_shared_bytes, iter_shared_bytes


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


def _object(key: str, start: int, stop: int, **fields: Any) -> ObjectEntry:
    given: dict[str, Any] = {"file": "__0_0.distcp", "encoding": Encoding.TORCH_ZIP}
    return ObjectEntry(key=key, name=key, start=start, stop=stop, **given | fields)


def test_extents_are_by_file_and_sorted() -> None:
    tensor = _tensor("a", (20, 30), (0, 10))
    tensor = replace(tensor, replicas=(tensor.chunks[0]._replace(file="__1_0.distcp"),))
    found = collect_extents([tensor], [_object("o", 12, 15), _object("raw", 1, 2, encoding=Encoding.RAW)])
    assert found == {
        "__0_0.distcp": [Extent(0, 10, "a"), Extent(12, 15, "o"), Extent(20, 30, "a")],
        "__1_0.distcp": [Extent(20, 30, "a")],
    }


def test_empty_extents_and_decoded_objects_claim_nothing() -> None:
    assert collect_extents([_tensor("a", (5, 5))], [_object("o", 0, 9, decoded=True), _object("p", 3, 3)]) == {}


def test_every_overlap_is_yielded_in_the_order_of_bytes() -> None:
    tensors = {key: _tensor(key, extent) for key, extent in (("a", (0, 10)), ("b", (5, 20)), ("c", (19, 25)))}
    found = list(iter_shared_bytes(collect_extents(tensors.values()), tensors))
    assert found == [("__0_0.distcp", "a", "b"), ("__0_0.distcp", "b", "c")]


def test_an_object_and_a_tensor_share_nothing() -> None:
    tensors = {"a": _tensor("a", (0, 10))}
    extents = collect_extents(tensors.values(), [_object("o", 0, 10)])
    assert list(iter_shared_bytes(extents, tensors)) == [("__0_0.distcp", "a", "o")]


def test_a_long_item_hides_no_overlap_behind_a_short_one() -> None:
    tensors = {key: _tensor(key, extent) for key, extent in (("a", (0, 100)), ("b", (5, 6)), ("c", (50, 60)))}
    found = list(iter_shared_bytes(collect_extents(tensors.values()), tensors))
    assert [second for _, _, second in found] == ["b", "c"]


@pytest.mark.parametrize(
    ("extents", "size", "gaps"),
    [
        ([], 0, []),
        ([], 7, [(0, 7)]),
        ([(0, 7)], 7, []),
        ([(2, 5)], 7, [(0, 2), (5, 7)]),
        ([(0, 5), (3, 4), (5, 6)], 6, []),
        ([(0, 3), (9, 12)], 5, [(3, 5)]),
        ([(0, 3), (4, 12)], 5, [(3, 4)]),
    ],
)
def test_gaps(extents: list[tuple[int, int]], size: int, gaps: list[tuple[int, int]]) -> None:
    assert list(find_gaps([Extent(start, stop, "a") for start, stop in extents], size)) == gaps
