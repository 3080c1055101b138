"""``.metadata`` that is a proper pickle of the proper classes, with values that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import assert_refused, tensors
from tests.hostile.forge_dcp import MODULE, Forged, Rows, index, pattern, place, tensor_metadata
from tests.hostile.forge_pickle import Glob, New, bomb, nested
from tests.hostile.forge_zip import saved, tensor_value
from tests.hostile.places import assert_harmless
from tests.hostile.sandbox import Case, Sandbox

Spoil = Callable[[Forged], dict[str, Any] | None]
HUGE = 1 << 20_000


def _sound() -> Forged:
    """Two tensors: ``w`` of 4 x 2 in two files, two rows in each, and ``v`` of 4 x 2 in the first file."""
    forged = Forged()
    forged.tensor("w", (4, 2), rows=(2, 2))
    forged.tensor("v", (4, 2))
    return forged


def _boxes(shape: Any, *boxes: Any) -> Spoil:
    """Say that ``w`` has these chunks; they keep the places of the true ones, in order."""

    def spoil(forged: Forged) -> None:
        places = [info for key, info in forged.storage if key.state["fqn"] == "w"]
        others = [pair for pair in forged.storage if pair[0].state["fqn"] != "w"]
        offsets = [box[0] if isinstance(box, tuple) else (0, 0) for box in boxes]
        forged.storage = [*((index("w", at), places[n % 2]) for n, at in enumerate(offsets)), *others]
        forged.items["w"] = tensor_metadata(shape, list(boxes))

    return spoil


def _place(**changes: Any) -> Spoil:
    """Falsify the place of the first half of ``w``."""

    def spoil(forged: Forged) -> None:
        info = forged.storage[0][1]
        forged.storage[0] = (forged.storage[0][0], New(info.cls, info.state | changes))

    return spoil


def _item(value: Any) -> Spoil:
    def spoil(forged: Forged) -> None:
        forged.items["w"] = value

    return spoil


def _field(cls: str, **changes: Any) -> Spoil:
    """Falsify a field of ``w``'s metadata."""

    def spoil(forged: Forged) -> None:
        good = forged.items["w"]
        forged.items["w"] = New(Glob(MODULE, cls), good.state | changes)

    return spoil


def _more(**more: Any) -> Spoil:
    return lambda _: more


def _storage(change: Callable[[list[tuple[Any, Any]]], list[tuple[Any, Any]]]) -> Spoil:
    def spoil(forged: Forged) -> None:
        forged.storage = change(forged.storage)

    return spoil


TENSOR = "TensorStorageMetadata"
TOP, BOTTOM = ((0, 0), (2, 2)), ((2, 0), (2, 2))

REFUSED: dict[str, Spoil] = {
    "hole": _boxes((4, 2), TOP),
    "hole-at-the-end": _boxes((5, 2), TOP, BOTTOM),
    "hole-in-columns": _boxes((4, 3), TOP, BOTTOM),
    "overlap": _boxes((3, 2), TOP, ((1, 0), (2, 2))),
    "same-box-twice": _boxes((2, 2), TOP, TOP),
    "beyond": _boxes((4, 2), TOP, ((3, 0), (2, 2))),
    "offset-negative": _boxes((4, 2), TOP, ((-2, 0), (2, 2))),
    "length-negative": _boxes((4, 2), TOP, ((2, 0), (-2, 2))),
    "offset-2-62": _boxes((4, 2), TOP, ((1 << 62, 0), (2, 2))),
    "offset-2-63": _boxes((4, 2), TOP, ((1 << 63, 0), (2, 2))),
    "offset-huge": _boxes((4, 2), TOP, ((HUGE, 0), (2, 2))),
    "length-2-63": _boxes((4, 2), TOP, ((2, 0), (1 << 63, 2))),
    "length-huge": _boxes((4, 2), TOP, ((2, 0), (HUGE, 2))),
    "shape-negative": _boxes((-4, 2), TOP, BOTTOM),
    "shape-2-63": _boxes((1 << 63, 2), TOP, BOTTOM),
    "shape-2-62": _boxes((1 << 62, 1 << 62), TOP, BOTTOM),
    "shape-huge": _boxes((HUGE, 2), TOP, BOTTOM),
    "rank-higher": _boxes((4, 2), ((0, 0, 0), (2, 2, 1)), ((2, 0, 0), (2, 2, 1))),
    "rank-lower": _boxes((4, 2), ((0,), (2,)), ((2,), (2,))),
    "rank-zero": _boxes((4, 2), ((), ()), ((), ())),
    "rank-mixed": _boxes((4, 2), ((0, 0), (2,)), ((2,), (2, 2))),
    "shape-of-rank-zero": _boxes((), TOP, BOTTOM),
    "rank-5000-with-hole": _boxes((2,) + (1,) * 5_000, ((0,) * 5_001, (1,) * 5_001)),
    "rank-100000": _boxes((1 << 40,) * 100_000, ((0,) * 100_000, (1 << 40,) * 100_000)),
    "no-chunks": _boxes((4, 2)),
    "chunks-none": _field(TENSOR, chunks=None),
    "chunks-number": _field(TENSOR, chunks=7),
    "chunks-text": _field(TENSOR, chunks="ab"),
    "chunks-of-none": _field(TENSOR, chunks=[None]),
    "chunks-of-numbers": _field(TENSOR, chunks=[1, 2]),
    "chunk-offsets-float": _boxes((4, 2), ((0.0, 0.0), (2, 2)), BOTTOM),
    "chunk-offsets-bomb": _boxes((4, 2), (bomb(), (2, 2)), BOTTOM),
    "chunk-sizes-bomb": _boxes((4, 2), ((0, 0), bomb()), BOTTOM),
    "shape-bomb": _field(TENSOR, size=bomb()),
    "shape-nested": _field(TENSOR, size=nested(100_000)),
    "shape-none": _field(TENSOR, size=None),
    "shape-text": _field(TENSOR, size="4"),
    "shape-of-texts": _field(TENSOR, size=("4", "2")),
    "properties-none": _field(TENSOR, properties=None),
    "properties-number": _field(TENSOR, properties=7),
    "properties-empty": _field(TENSOR, properties=New(Glob(MODULE, "TensorProperties"), ())),
    "dtype-text": _field(TENSOR, properties=New(Glob(MODULE, "TensorProperties"), ("float32", 1, 2, 3, 4))),
    "dtype-unknown": _item(tensor_metadata((4, 2), [TOP, BOTTOM], dtype="float99")),
    "dtype-other": _item(tensor_metadata((4, 2), [TOP, BOTTOM], dtype="int32")),
    "item-none": _item(None),
    "item-text": _item("w"),
    "item-of-another-class": _item(New(Glob(MODULE, "ChunkStorageMetadata"))),
    "place-offset-negative": _place(offset=-1),
    "place-offset-negative-far": _place(offset=-(1 << 62)),
    "place-offset-beyond": _place(offset=1 << 40),
    "place-offset-2-63": _place(offset=1 << 63),
    "place-offset-2-70": _place(offset=1 << 70),
    "place-offset-huge": _place(offset=HUGE),
    "place-offset-float": _place(offset=0.0),
    "place-offset-text": _place(offset="0"),
    "place-length-zero": _place(length=0),
    "place-length-one": _place(length=1),
    "place-length-of-an-end-record": _place(length=22),
    "place-length-less": _place(length=300),
    "place-length-negative": _place(length=-1),
    "place-length-2-40": _place(length=1 << 40),
    "place-length-2-63": _place(length=1 << 63),
    "place-length-huge": _place(length=HUGE),
    "place-length-of-the-tensor": _place(length=16),
    "place-length-of-the-tensor-offset-negative": _place(length=16, offset=-1),
    "place-length-of-the-tensor-offset-2-70": _place(length=16, offset=1 << 70),
    "place-path-number": _place(relative_path=7),
    "place-path-bomb": _place(relative_path=bomb()),
    "place-path-long": _place(relative_path="p" * 1_000_000),
    "place-of-nothing": _storage(lambda rows: rows[1:]),
    "places-none": _storage(lambda _: []),
    "place-none": _storage(lambda rows: [(rows[0][0], None), *rows[1:]]),
    "place-text": _storage(lambda rows: [(rows[0][0], "x"), *rows[1:]]),
    "index-none": _storage(lambda rows: [(None, rows[0][1]), *rows[1:]]),
    "index-text": _storage(lambda rows: [("w", rows[0][1]), *rows[1:]]),
    "index-key-number": _storage(lambda rows: [(index(7, (0, 0)), rows[0][1]), *rows[1:]]),
    "index-key-bomb": _storage(lambda rows: [(index(bomb(), (0, 0)), rows[0][1]), *rows[1:]]),
    "index-offset-bomb": _storage(lambda rows: [(index("w", bomb()), rows[0][1]), *rows[1:]]),
    "index-offset-list": _storage(lambda rows: [(index("w", [bomb()]), rows[0][1]), *rows[1:]]),
    "places-swapped-between-shapes": _storage(
        lambda rows: [(rows[0][0], rows[2][1]), rows[1], (rows[2][0], rows[0][1])]
    ),
    "one-place-for-two": _storage(lambda rows: [rows[0], (rows[1][0], rows[0][1]), rows[2]]),
    "transform-bomb": _place(transform_descriptors=(bomb(),)),
    "transform-huge": _place(transform_descriptors=(HUGE,)),
    "transform-number": _place(transform_descriptors=7),
    "transform-zstd-of-something-else": _place(transform_descriptors=("stream.zstd/1",)),
    "storage-none": _more(storage_data=None),
    "storage-list": _more(storage_data=[]),
    "items-none": _more(state_dict_metadata=None),
    "items-list": _more(state_dict_metadata=[]),
    "items-empty": _more(state_dict_metadata={}),
    "items-key-number": _more(state_dict_metadata={7: tensor_metadata((4, 2), [TOP, BOTTOM])}),
    "items-key-bomb": _more(state_dict_metadata=Rows((bomb(), tensor_metadata((4, 2), [TOP, BOTTOM])))),
    "columns-of-one": _boxes((1, 9_000), *(((0, 2 * n), (1, 2)) for n in range(4_000))),
}
"""What a merge must refuse, whatever inspect makes of it."""


def _both(forged: Forged, more: dict[str, Any] | None, tmp_path: Path, sandbox: Sandbox) -> tuple[Any, Any]:
    path, out = forged.write(tmp_path / "ckpt", **(more or {})), tmp_path / "out"
    cases = [
        Case(argv=["inspect", str(path), "--objects", "--shards"], direct=True),
        Case(argv=["merge", str(path), str(out), "--no-fsync"], out=str(out), direct=True),
    ]
    seen, merged = sandbox.many(cases, timeout_s=20)
    for outcome in (seen, merged):
        assert_harmless(outcome, tmp_path)
    return seen, merged


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_cannot_be_are_refused(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    forged = _sound()
    more = REFUSED[name](forged)
    seen, merged = _both(forged, more, tmp_path, sandbox)
    assert seen.code in (0, 3, 4, 8), seen.err
    assert_refused(merged, 3, 4, 8)
    assert merged.digest is None


PLANS: dict[str, Any] = {
    "none": None,
    "list": [1],
    "path-of-numbers": {"w": (1, 2)},
    "path-of-floats": {"w": (1.5, float("nan"))},
    "path-of-none": {"w": (None,)},
    "path-of-bytes": {"w": (b"x",)},
    "path-empty": {"w": ()},
    "path-bomb": {"w": (bomb(), "x")},
    "path-nested": {"w": (nested(100_000), "x")},
    "path-huge": {"w": ("x", HUGE)},
    "path-long": {"w": ("x",) * 100_000},
    "path-text": {"w": "model"},
    "path-of-lists": {"w": ([1], [2])},
}


@pytest.mark.parametrize("name", PLANS)
def test_paths_that_cannot_be_are_refused_or_left_aside(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    seen, merged = _both(_sound(), {"planner_data": PLANS[name]}, tmp_path, sandbox)
    assert seen.code in (0, 4), seen.err
    assert merged.code in (0, 4), merged.err
    if merged.code == 0:
        out = tmp_path / "again"
        assert sandbox.run("merge", tmp_path / "ckpt", out).code == 0
        assert {content for _, shape, content in tensors(out).values() if shape == (4, 2)} == {pattern(32)}


OBJECT_PLACES: dict[str, Any] = {
    "offset-2-63": place("__0_0.distcp", 1 << 63, 300),
    "offset-2-70": place("__0_0.distcp", 1 << 70, 300),
    "offset-huge": place("__0_0.distcp", HUGE, 300),
    "offset-negative": place("__0_0.distcp", -300, 300),
    "length-2-40": place("__0_0.distcp", 0, 1 << 40),
    "length-2-63": place("__0_0.distcp", 0, 1 << 63),
    "length-zero": place("__0_0.distcp", 0, 0),
    "file-missing": place("__9_0.distcp", 0, 300),
    "file-outside": place("../__0_0.distcp", 0, 300),
    "zstd-2-40": place("__0_0.distcp", 0, 1 << 40, transform_descriptors=("stream.zstd/1",)),
    "zstd-of-something-else": place("__0_0.distcp", 0, 300, transform_descriptors=("stream.zstd/1",)),
}


@pytest.mark.parametrize("name", OBJECT_PLACES)
def test_an_object_at_an_impossible_place_is_not_shown(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    forged = _sound()
    forged.item("thing", b"")
    forged.storage[-1] = (index("thing"), OBJECT_PLACES[name])
    seen, _ = _both(forged, None, tmp_path, sandbox)
    assert seen.code in (0, 4), seen.err
    if seen.code == 0:
        assert 'thing = "<unreadable: ' in seen.out


def test_a_compressed_object_that_expands_without_end_is_cut(tmp_path: Path, sandbox: Sandbox) -> None:
    import zstandard

    forged = _sound()
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 29))
    forged.item("thing", packed)
    forged.storage[-1][1].state["transform_descriptors"] = ("stream.zstd/1",)
    item = zstandard.ZstdCompressor().compress(saved(tensor_value((2, 2)), [bytes(16)]) + bytes(1 << 29))
    placed = place(*forged.append(item), transform_descriptors=("stream.zstd/1",))
    forged.storage[0] = (index("w", (0, 0)), placed)
    seen, merged = _both(forged, None, tmp_path, sandbox)
    assert seen.code == 0, seen.err
    assert_refused(merged, 4)
    assert merged.digest is None
