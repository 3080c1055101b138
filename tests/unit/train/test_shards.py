"""What the first rank makes of all ranks' shares, as torch reads it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from fsdp_ckpt.errors import CorruptCheckpoint, Incompatible
from fsdp_ckpt.train.shards import MetadataCache, Share, assemble

Item = tuple[tuple[int, ...], tuple[int, ...], int, int, int]


def _share(rank: int, *items: Item, dtype: str = "float32", shape: tuple[int, ...] = (4, 2), **fields: Any) -> Share:
    tensors = {"model.w": (dtype, shape, list(items))} if items else {}
    return Share(file=f"__{rank}_0.distcp", size=9, tensors=tensors, paths={"model.w": ("model", "w")}, **fields)


def _read(*shares: Share) -> Any:
    return pickle.loads(assemble(shares)[0])


TOP: Item = ((0, 0), (2, 2), 0, 100, 5)
LOW: Item = ((2, 0), (2, 2), 50, 100, 5)


def test_boxes_of_all_ranks_become_one_tensor() -> None:
    found = _read(_share(0, TOP), _share(1, LOW))
    tensor = found.state_dict_metadata["model.w"]
    assert tuple(tensor.size) == (4, 2)
    assert sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks) == [
        ((0, 0), (2, 2)),
        ((2, 0), (2, 2)),
    ]
    places = {tuple(index.offset): info for index, info in found.storage_data.items()}
    assert (places[2, 0].relative_path, places[2, 0].offset, places[2, 0].length) == ("__1_0.distcp", 50, 100)


def test_of_equal_boxes_the_first_counts() -> None:
    """Tensor-parallel ranks that hold the same on meshes of their own each store it."""
    found = _read(_share(0, TOP), _share(1, TOP), _share(2, LOW), _share(3, LOW))
    assert len(found.state_dict_metadata["model.w"].chunks) == 2
    assert {info.relative_path for info in found.storage_data.values()} == {"__0_0.distcp", "__2_0.distcp"}


@pytest.mark.parametrize("other", [((0, 0), (4, 2), 0, 100, 5), ((0, 0), (2, 2), 0, 100, 6)])
def test_copies_of_other_lengths_or_values_are_refused(other: Item) -> None:
    with pytest.raises(Incompatible, match=r"rank 1 holds `model\.w` at \(0, 0\) with other values"):
        _read(_share(0, TOP), _share(1, other))


def test_boxes_that_overlap_are_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="two boxes overlap"):
        _read(_share(0, TOP), _share(1, ((1, 0), (3, 2), 0, 100, 5)))


def test_a_box_that_nobody_stored_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"nothing was stored of the box at \(\(2, 0\), \(2, 2\)\)"):
        _read(_share(0, TOP), _share(1))


def test_a_tensor_that_nobody_stored_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"no rank stored `model\.w`"):
        _read(_share(0), _share(1))


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"shape": (4, 3)}])
def test_ranks_that_disagree_about_a_tensor_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Incompatible, match=r"`model\.w` is .* on rank 1, float32 \(4, 2\) on an earlier one"):
        _read(_share(0, TOP), _share(1, LOW, **change))


def test_tied_names_point_at_the_same_bytes() -> None:
    first = _share(0, TOP, aliases={"model.v": "model.w"})
    first.paths["model.v"] = ("model", "v")
    found = _read(first, _share(1, LOW))
    places = {(index.fqn, tuple(index.offset)): info for index, info in found.storage_data.items()}
    assert places["model.v", (2, 0)] == places["model.w", (2, 0)]
    assert sorted(found.state_dict_metadata) == ["model.v", "model.w"]


def test_of_equal_objects_the_first_counts() -> None:
    shares = [_share(rank, item, objects={"model.extra": (7, 8)}) for rank, item in enumerate((TOP, LOW))]
    for share in shares:
        share.paths["model.extra"] = ("model", "extra")
    found = _read(*shares)
    (info,) = [info for index, info in found.storage_data.items() if index.fqn == "model.extra"]
    assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 7, 8)


def test_metadata_follow_from_places_unless_there_are_copies() -> None:
    assert assemble([_share(0, TOP), _share(1, LOW)])[1] is True
    assert assemble([_share(0, TOP), _share(1, TOP), _share(2, LOW)])[1] is False, "their values were compared"


def _with_crc(item: Item, crc: int) -> Item:
    return (*item[:4], crc)


def test_a_share_with_other_values_at_the_same_places_has_the_same_digest_and_metadata() -> None:
    first = [_share(0, TOP), _share(1, LOW)]
    second = [_share(0, _with_crc(TOP, 77)), _share(1, _with_crc(LOW, 78))]
    second[0].size, second[0].crc32 = 9, 1234
    assert [one.digest() for one in first] == [one.digest() for one in second]
    assert assemble(first) == assemble(second)


@pytest.mark.parametrize(
    "other",
    [
        _share(0, ((0, 0), (2, 2), 64, 100, 5)),
        _share(0, ((0, 0), (2, 2), 0, 101, 5)),
        _share(0, ((0, 0), (1, 2), 0, 100, 5)),
        _share(0, TOP, dtype="int32"),
        _share(0, TOP, shape=(5, 2)),
        _share(1, TOP),
        _share(0, TOP, objects={"model.x": (7, 9)}),
        _share(0, TOP, aliases={"model.tied": "model.w"}),
    ],
    ids=["start", "length", "box", "dtype", "shape", "file", "object", "alias"],
)
def test_a_share_that_would_make_other_metadata_has_another_digest(other: Share) -> None:
    assert other.digest() != _share(0, TOP).digest()


def test_the_cache_knows_all_ranks_together_and_forgets() -> None:
    cache = MetadataCache()
    first, second = _share(0, TOP).summary(), _share(1, LOW).summary()
    cache.put([first, second], b"both")
    assert cache.get([first, second]) == b"both"
    assert cache.get([first]) is None
    assert cache.get([second, first]) is None
    for number in range(8):
        cache.get([first, second])
        cache.put([_share(number, ((0, 0), (2, 2), 64, 100, 5)).summary()], b"x")
    assert cache.get([first, second]) == b"both", "what is used stays"
    for number in range(8):
        cache.put([_share(number, ((0, 0), (2, 2), 128, 100, 5)).summary()], b"y")
    assert cache.get([first, second]) is None
