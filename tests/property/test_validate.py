"""Holes, overlaps and shards outside of random geometries are always found, and whole ones are never accused."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fsdp_ckpt.catalog import DTYPES, Shape
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo
from fsdp_ckpt.codec.dcp_metadata_writer import write_metadata
from fsdp_ckpt.ops.validate import validate
from fsdp_ckpt.plan.boxes import Box
from tests.property.tilings import tilings

Geometry = dict[str, tuple[Shape, list[Box]]]
"""Shape and boxes by key."""

ITEM_BYTES = 4096


@st.composite
def grids(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Cut along whole dimensions, as meshes do."""
    edges = []
    for size in shape:
        cuts = draw(st.sets(st.integers(0, size), max_size=3))
        edges.append([0, *sorted(cuts - {0, size}), size])
    cells = itertools.product(*(itertools.pairwise(edge) for edge in edges))
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


@st.composite
def pieces(draw: st.DrawFn, *, max_side: int = 9) -> tuple[Shape, list[Box]]:
    """Return a shape of one to three dimensions and boxes that tile it, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, max_side), min_size=1, max_size=3)))
    boxes = draw(st.one_of(grids(shape), tilings(shape)))
    # Two empty boxes can stand at one place, which no writer does.
    return shape, list({box[0]: box for box in sorted(boxes, key=lambda box: math.prod(box[1]))}.values())


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    found = draw(st.lists(pieces(), min_size=1, max_size=4))
    return {f"model.layers.{number}.weight": piece for number, piece in enumerate(found)}


def write(geometry: Geometry, folder: Path, *, ranks: int = 3) -> Path:
    """Write metadata, and data files that are nothing but long enough."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    storage: dict[tuple[str, Shape | None], StorageInfo] = {}
    ends = dict.fromkeys((f"__{rank}_0.distcp" for rank in range(ranks)), 0)
    for key, (_, boxes) in geometry.items():
        for number, (offsets, _) in enumerate(boxes):
            file = f"__{number % ranks}_0.distcp"
            storage[key, offsets] = (file, ends[file], ITEM_BYTES, ())
            ends[file] += ITEM_BYTES
    tensors = {
        key: DcpTensor(dtype=DTYPES["float32"], shape=shape, chunks=boxes) for key, (shape, boxes) in geometry.items()
    }
    paths: dict[str, tuple[str | int, ...]] = {key: tuple(key.split(".")) for key in geometry}
    metadata = DcpMetadata(tensors=tensors, objects=[], paths=paths, storage=storage, writer="torch 2.9-2.14")
    (folder / ".metadata").write_bytes(write_metadata(metadata))
    for file, size in ends.items():
        if size:
            (folder / file).touch()
            os.truncate(folder / file, size)
    return folder


def faults(folder: Path) -> list[tuple[str, str]]:
    report = validate(folder, level="geometry")
    return [(one.name, one.where) for one in report.findings if one.severity != "note"]


def solid(boxes: Sequence[Box]) -> list[int]:
    """Return the numbers of boxes that have elements."""
    return [number for number, (_, lengths) in enumerate(boxes) if math.prod(lengths)]


@given(geometries())
def test_whole_ones_are_never_accused(tmp_path: Path, geometry: Geometry) -> None:
    assert faults(write(geometry, tmp_path / "ckpt")) == []


@given(geometries(), st.data())
def test_a_hole_is_found_and_its_tensor_named(tmp_path: Path, geometry: Geometry, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(geometry)))
    shape, boxes = geometry[key]
    gone = data.draw(st.sampled_from(solid(boxes)))
    left = [box for number, box in enumerate(boxes) if number != gone]
    folder = write(geometry | {key: (shape, left)}, tmp_path / "ckpt")
    report = validate(folder, level="geometry")
    (one,) = [one for one in report.findings if one.severity == "error"]
    assert (one.code, one.where) == ("E101", key)
    assert one.message.startswith(f"{math.prod(boxes[gone][1])} of {math.prod(shape)} elements are in no shard")


@given(geometries(), st.data())
def test_a_hole_within_a_box_is_found(tmp_path: Path, geometry: Geometry, data: st.DataObject) -> None:
    """A box that is shorter than it was."""
    key = data.draw(st.sampled_from(sorted(geometry)))
    shape, boxes = geometry[key]
    number = data.draw(st.sampled_from(solid(boxes)))
    offsets, lengths = boxes[number]
    dim = data.draw(st.integers(0, len(shape) - 1))
    shorter = (*lengths[:dim], data.draw(st.integers(0, lengths[dim] - 1)), *lengths[dim + 1 :])
    changed = [*boxes[:number], (offsets, shorter), *boxes[number + 1 :]]
    assert faults(write(geometry | {key: (shape, changed)}, tmp_path / "ckpt")) == [("missing-shard", key)]


def _neighbours(geometry: Geometry) -> Iterator[tuple[str, int, int, Shape]]:
    """Yield key and number of a box, a dimension, and where it may begin earlier; two at one place are one entry."""
    for key, (_, boxes) in geometry.items():
        taken = {offsets for offsets, _ in boxes}
        for number in solid(boxes):
            offsets = boxes[number][0]
            for dim, start in enumerate(offsets):
                for other in range(start):
                    begin = (*offsets[:dim], other, *offsets[dim + 1 :])
                    if begin not in taken:
                        yield key, number, dim, begin


@given(geometries(), st.data())
def test_an_overlap_is_found(tmp_path: Path, geometry: Geometry, data: st.DataObject) -> None:
    """A box that reaches into its neighbour."""
    geometry["model.head.bias"] = (4,), [((0,), (2,)), ((2,), (2,))]
    key, number, dim, begin = data.draw(st.sampled_from(list(_neighbours(geometry))))
    shape, boxes = geometry[key]
    offsets, lengths = boxes[number]
    longer = (*lengths[:dim], lengths[dim] + offsets[dim] - begin[dim], *lengths[dim + 1 :])
    changed = [*boxes[:number], (begin, longer), *boxes[number + 1 :]]
    assert faults(write(geometry | {key: (shape, changed)}, tmp_path / "ckpt")) == [("shard-overlap", key)]


@given(geometries(), st.data())
def test_a_shard_outside_is_found(tmp_path: Path, geometry: Geometry, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(geometry)))
    shape, boxes = geometry[key]
    number = data.draw(st.sampled_from(solid(boxes)))
    offsets, lengths = boxes[number]
    dim = data.draw(st.integers(0, len(shape) - 1))
    beyond = shape[dim] - offsets[dim] + data.draw(st.integers(1, 5))
    longer = (*lengths[:dim], beyond, *lengths[dim + 1 :])
    changed = [*boxes[:number], (offsets, longer), *boxes[number + 1 :]]
    assert faults(write(geometry | {key: (shape, changed)}, tmp_path / "ckpt")) == [("shard-outside", key)]


@given(geometries(), st.data())
def test_a_file_that_ends_too_soon_is_found(tmp_path: Path, geometry: Geometry, data: st.DataObject) -> None:
    folder = write(geometry, tmp_path / "ckpt")
    file = data.draw(st.sampled_from(sorted(folder.glob("*.distcp"))))
    os.truncate(file, data.draw(st.integers(0, file.stat().st_size - 1)))
    assert faults(folder) == [("short-file", file.name)]
