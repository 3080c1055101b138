"""A whole array is cut, its pieces are written, boxes of it are read: NumPy is the judge of values, bytes, checks."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import tracemalloc
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.catalog import DTYPES, Chunk
from fsdp_ckpt.errors import ChecksumMismatch, MalformedFile
from fsdp_ckpt.plan.boxes import Box, intersect
from fsdp_ckpt.run.gather import Gatherer, verify_boxes
from fsdp_ckpt.run.sources import Located
from fsdp_ckpt.store.local import LocalStore
from tests.unit.run.sizes import patch_sizes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


Verify = Literal["full", "passing", "off"]
Array = np.ndarray[Any, np.dtype[Any]]


def store_pieces(
    folder: Path, values: Array, boxes: Sequence[Box], *, orders: Sequence[Sequence[int]] = (), checked: bool = True
) -> list[Located]:
    """Write pieces of an array into one file ``f``, each with its dimensions in the order given (row-major if none)."""
    store, data, located = LocalStore(folder), bytearray(b"\xee" * 3), []
    for number, (offsets, lengths) in enumerate(boxes):
        order = list(orders[number]) if orders else list(range(values.ndim))
        piece = values[*cut_of((offsets, lengths)), ...].transpose(order).copy()
        strides = [0] * values.ndim
        for dim, stride in zip(order, piece.strides, strict=True):
            strides[dim] = stride // piece.itemsize
        raw, start = piece.tobytes(), len(data)
        data += raw + b"\xee" * 3
        located.append((store, Chunk(
            offsets, lengths, "f", start, start + len(raw),
            strides=None if order == sorted(order) else tuple(strides), crc32=zlib.crc32(raw) if checked else None,
        )))  # fmt: skip
    (folder / "f").write_bytes(data)
    return located


def cut_of(box: Box) -> tuple[Any, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(*box, strict=True))


def grid_boxes(cuts: Sequence[Sequence[int]], shape: Sequence[int]) -> list[Box]:
    spans = [list(itertools.pairwise([0, *sorted(set(c)), n])) for c, n in zip(cuts, shape, strict=True)]
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)]


def numbers(shape: tuple[int, ...], kind: str = "<u4") -> Array:
    count = int(np.prod(shape, dtype=int))
    return np.frombuffer(np.random.default_rng(count).bytes(count * np.dtype(kind).itemsize), dtype=kind).reshape(shape)


DTYPE_OF = {"u1": "uint8", "<u2": "int16", "<u4": "float32", "<u8": "float64", "<c16": "complex128"}


def gatherer_of(values: Array, located: Sequence[Located], verify: Verify) -> Gatherer:
    name = next(name for kind, name in DTYPE_OF.items() if np.dtype(kind) == values.dtype)
    return Gatherer("w", DTYPES[name], values.shape, located, verify=verify)


def out_like(lengths: tuple[int, ...], kind: Any, layout: str) -> Array:
    """Return an array of zeros of some memory layout, as the parameters of a model may have."""
    if layout == "transposed":
        return np.zeros(lengths[::-1], dtype=kind).T
    if layout in ("stepped", "reversed"):
        step, steps = (3, slice(1, None, 3)) if layout == "stepped" else (1, slice(None, None, -1))
        index: tuple[Any, ...] = (*[steps] * len(lengths), ...)
        view: Array = np.zeros([step * n for n in lengths], dtype=kind)[index]
        return view
    return np.zeros(lengths, dtype=kind)


LAYOUTS = ["contiguous", "transposed", "stepped", "reversed"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_box_of_any_cut_into_any_array(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=4), label="shape"))
    kind = data.draw(st.sampled_from(sorted(DTYPE_OF)))
    only_rows = data.draw(st.booleans(), label="only rows")
    cuts: list[list[int]] = [
        [] if n == 1 or (only_rows and dim) else data.draw(st.lists(st.integers(1, n - 1), max_size=2))
        for dim, n in enumerate(shape)
    ]
    boxes = data.draw(st.permutations(grid_boxes(cuts, shape)))
    orders = [data.draw(st.permutations(range(len(shape)))) for _ in boxes] if data.draw(st.booleans()) else []
    starts = tuple(data.draw(st.integers(0, n)) for n in shape)
    lengths = tuple(data.draw(st.integers(0, n - start)) for n, start in zip(shape, starts, strict=True))
    values = numbers(shape, kind)
    sizes = [data.draw(st.sampled_from(s)) for s in ([1, 7, 64, 4096], [1, 64, 4096], [1, 2, 8], [1, 32, 4096])]
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch_sizes(patch, *sizes)
        located = store_pieces(Path(name), values, boxes, orders=orders)
        gatherer = gatherer_of(values, located, data.draw(st.sampled_from(["full", "passing", "off"])))
        out = out_like(lengths, kind, data.draw(st.sampled_from(LAYOUTS)))
        gatherer.read((starts, lengths), out)
        gatherer.finish()
    assert out.tobytes() == values[cut_of((starts, lengths))].tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("sizes")
def test_column_shards_into_row_targets_are_checked_in_passing(layout: str, tmp_path: Path) -> None:
    values = numbers((12, 10))
    located = store_pieces(tmp_path, values, grid_boxes([[], [3, 7]], (12, 10)))
    gatherer = gatherer_of(values, located, "passing")
    for first in range(0, 12, 4):
        out = out_like((4, 10), "<u4", layout)
        gatherer.read(((first, 0), (4, 10)), out)
        assert out.tobytes() == values[first : first + 4].tobytes()
    gatherer.finish()
    assert (gatherer.verified_bytes, gatherer.unverified_bytes) == (480, 0)


def test_runs_are_read_straight_into_the_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = numbers((3, 1 << 18), "<u4")
    located = store_pieces(tmp_path, values, grid_boxes([[1], []], values.shape))
    out = np.zeros((2, 1 << 18), dtype="<u4")
    first, read_blocks = out.ctypes.data, []

    def spy(fd: int, view: memoryview, position: int) -> int:
        read_blocks.append((np.frombuffer(view, dtype="u1").ctypes.data - first, len(view)))
        return os.preadv(fd, [view], position)

    monkeypatch.setattr("fsdp_ckpt.store.local.read_into", spy)
    gatherer_of(values, located, "full").read(((1, 0), (2, 1 << 18)), out)
    assert read_blocks == [(0, 1 << 20), (1 << 20, 1 << 20)]
    assert np.array_equal(out, values[1:])


@pytest.mark.parametrize(
    ("layout", "order", "conj"),
    [
        ("contiguous", (0, 1), False), ("transposed", (0, 1), False), ("contiguous", (1, 0), False),
        ("contiguous", (0, 1), True), ("contiguous", (1, 0), True),
    ],
)  # fmt: skip
def test_64_mib_need_no_memory_beyond_the_array(
    layout: str, order: tuple[int, ...], conj: bool, tmp_path: Path
) -> None:
    shape = (2048, 4096)
    values = np.arange(2048 * 4096, dtype="<f8").reshape(shape)
    kind, dtype, lengths = ("<c16", "complex128", (2048, 2048)) if conj else ("<u8", "float64", shape)
    values = values.view(kind)
    [(store, chunk)] = store_pieces(tmp_path, values, [((0, 0), lengths)], orders=[order])
    out = out_like(lengths, kind, layout)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        gatherer = Gatherer("w", DTYPES[dtype], lengths, [(store, chunk._replace(conj=conj))], verify="passing")
        gatherer.read(((0, 0), lengths), out)
        gatherer.finish()
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert np.array_equal(out, values.conj() if conj else values)
    assert (gatherer.verified_bytes, gatherer.unverified_bytes) == (64 << 20, 0)
    assert peak < 4 << 20


@pytest.mark.parametrize("num_columns", [1, 100, 512, 2048])
def test_a_few_columns_of_64_mib_need_little_memory_and_reading(
    num_columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = 0

    def counted(fd: int, view: memoryview, position: int) -> int:
        nonlocal num_bytes
        num_bytes += len(view)
        return os.preadv(fd, [view], position)

    monkeypatch.setattr("fsdp_ckpt.store.local.read_into", counted)
    values = np.arange(1 << 24, dtype="<u4").reshape(4096, 4096)
    located = store_pieces(tmp_path, values, grid_boxes([[1000], []], values.shape))
    out = np.zeros((4096, num_columns), dtype="<u4")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        gatherer_of(values, located, "passing").read(((0, 7), out.shape), out)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert np.array_equal(out, values[:, 7 : 7 + num_columns])
    assert peak < 4 << 20
    assert num_bytes <= 8 * out.nbytes


def flip(folder: Path, position: int) -> None:
    data = bytearray((folder / "f").read_bytes())
    data[position] ^= 16
    (folder / "f").write_bytes(data)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [1, 2, 6])
def test_a_flipped_byte_is_found_in_passing(layout: str, step: int, tmp_path: Path) -> None:
    values = numbers((6, 5))
    located = store_pieces(tmp_path, values, grid_boxes([[4], []], (6, 5)))
    flip(tmp_path, located[1][1].start + 17)

    def use(verify: Verify) -> None:
        gatherer = gatherer_of(values, located, verify)
        for row in range(0, 6, step):
            gatherer.read(((row, 0), (step, 5)), out_like((step, 5), "<u4", layout))
        gatherer.finish()

    for verify in ("full", "passing"):
        with pytest.raises(ChecksumMismatch, match="`w` is damaged"):
            use(verify)
    use("off")


@pytest.mark.parametrize("verify", ["full", "passing"])
@pytest.mark.parametrize(
    ("rows", "verified", "unverified"),
    [
        ([(0, 3), (3, 3), (6, 2)], 160, 0),
        ([(0, 4), (2, 4), (5, 3)], 160, 0),  # overlapping, yet in order
        ([(0, 2)], 0, 80),
        ([(2, 2), (0, 2)], 0, 80),
        ([(0, 4)], 80, 0),
        ([(5, 3)], 0, 80),
        ([(0, 5)], 80, 80),
        ([(0, 1), (2, 2), (1, 1), (4, 4)], 80, 80),
        ([(0, 1), (2, 2), (1, 3), (4, 4)], 160, 0),
        ([], 0, 0),
    ],
)
def test_what_is_read_in_part_counts_as_unverified(
    verify: Verify, rows: list[tuple[int, int]], verified: int, unverified: int, tmp_path: Path
) -> None:
    values = numbers((8, 5))
    gatherer = gatherer_of(values, store_pieces(tmp_path, values, grid_boxes([[4], []], (8, 5))), verify)
    for first, count in rows:
        gatherer.read(((first, 0), (count, 5)), np.zeros((count, 5), dtype="<u4"))
    gatherer.finish()
    assert (gatherer.verified_bytes, gatherer.unverified_bytes) == (verified, unverified)


@pytest.mark.parametrize(("verify", "unverified"), [("full", 80), ("passing", 80), ("off", 0)])
def test_records_without_a_checksum_are_unverified(verify: Verify, unverified: int, tmp_path: Path) -> None:
    values = numbers((8, 5))
    boxes = grid_boxes([[4], []], (8, 5))
    gatherer = gatherer_of(values, store_pieces(tmp_path, values, boxes, checked=False), verify)
    gatherer.read(boxes[0], np.zeros((4, 5), dtype="<u4"))
    gatherer.finish()
    assert (gatherer.verified_bytes, gatherer.unverified_bytes) == (0, unverified)


def views_of_one_storage(folder: Path, values: Array) -> list[Located]:
    """Write a table of which each row is a chunk, with one checksum over all of it and two columns more."""
    raw = np.pad(values, ((0, 0), (0, 2))).tobytes()
    (folder / "f").write_bytes(raw)
    store, (num_rows, num_columns) = LocalStore(folder), values.shape
    starts = [row * (num_columns + 2) * 4 for row in range(num_rows)]
    return [
        (store, Chunk((row, 0), (1, num_columns), "f", start, start + num_columns * 4,
                      crc32=zlib.crc32(raw), crc_range=(0, len(raw))))
        for row, start in enumerate(starts)
    ]  # fmt: skip


def test_only_full_checks_what_is_part_of_a_larger_storage(tmp_path: Path) -> None:
    values = numbers((3, 4))
    located = views_of_one_storage(tmp_path, values)
    counts = {}
    for verify in ("full", "passing", "off"):
        gatherer = gatherer_of(values, located, verify)
        out = np.zeros((3, 4), dtype="<u4")
        gatherer.read(((0, 0), (3, 4)), out)
        gatherer.finish()
        assert np.array_equal(out, values)
        counts[verify] = (gatherer.verified_bytes, gatherer.unverified_bytes)
    assert counts == {"full": (3 * 72, 0), "passing": (0, 48), "off": (0, 0)}


def test_a_checksum_of_just_the_record_may_name_its_range(tmp_path: Path) -> None:
    values = numbers((3, 4))
    [(store, chunk)] = store_pieces(tmp_path, values, [((0, 0), (3, 4))])
    gatherer = gatherer_of(values, [(store, chunk._replace(crc_range=(chunk.start, chunk.stop)))], "passing")
    gatherer.read(((0, 0), (3, 4)), np.zeros((3, 4), dtype="<u4"))
    gatherer.finish()
    assert (gatherer.verified_bytes, gatherer.unverified_bytes) == (48, 0)


@pytest.mark.parametrize(
    ("verify", "num_rows", "counts"),
    [("passing", 3, (48, 0)), ("passing", 2, (0, 48)), ("full", 3, (48, 0)), ("full", 2, (48, 0)), ("off", 2, (0, 0))],
)
def test_a_record_by_columns(verify: Verify, num_rows: int, counts: tuple[int, int], tmp_path: Path) -> None:
    """In passing it is checked when all of it is read at once: in the order of the file."""
    values = numbers((3, 4))
    located = store_pieces(tmp_path, values, [((0, 0), (3, 4))], orders=[(1, 0)])
    gatherer = gatherer_of(values, located, verify)
    gatherer.read(((0, 0), (num_rows, 4)), np.zeros((num_rows, 4), dtype="<u4"))
    gatherer.finish()
    assert (gatherer.verified_bytes, gatherer.unverified_bytes) == counts
    flip(tmp_path, located[0][1].start + 47)
    if verify == "full":
        with pytest.raises(ChecksumMismatch):
            gatherer_of(values, located, verify)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("columns", [5, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_was_cut_off(columns: int, layout: str, tmp_path: Path) -> None:
    values = numbers((8, 5))
    located = store_pieces(tmp_path, values, grid_boxes([[4], []], (8, 5)))
    os.truncate(tmp_path / "f", located[1][1].start + 50)
    gatherer = gatherer_of(values, located, "full")
    out = out_like((6, columns), "<u4", layout)
    gatherer.read(((0, 0), (6, columns)), out)
    assert np.array_equal(out, values[:6, :columns])
    with pytest.raises(MalformedFile, match="f ends within `w`"):
        gatherer.read(((6, 0), (2, columns)), out[:2])


def test_a_record_that_is_too_short_for_its_shape(tmp_path: Path) -> None:
    values = numbers((8, 5))
    [(store, chunk)] = store_pieces(tmp_path, values, [((0, 0), (8, 5))])
    for short in (chunk._replace(stop=chunk.stop - 1), chunk._replace(strides=(5, 2))):
        with pytest.raises(MalformedFile, match="too few for the shape of `w`"):
            gatherer_of(values, [(store, short)], "off").read(((0, 0), (1, 1)), np.zeros((1, 1), dtype="<u4"))
        with pytest.raises(MalformedFile, match="too few for the shape of `w`"):
            verify_boxes("w", DTYPES["float32"], [(store, short)], [((0, 0), (1, 1))])


def test_thousands_of_row_shards_are_not_searched_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = numbers((4000, 3))
    boxes = grid_boxes([list(range(2, 4000, 2)), []], (4000, 3))
    random.Random(1).shuffle(boxes)
    located = store_pieces(tmp_path, values, boxes)
    gatherer = gatherer_of(values, located, "passing")
    calls = 0

    def counted(a: Box, b: Box) -> Box | None:
        nonlocal calls
        calls += 1
        return intersect(a, b)

    monkeypatch.setattr("fsdp_ckpt.run.gather.intersect", counted)
    out = np.zeros((4000, 3), dtype="<u4")
    for row in range(1, 4000, 2):  # each block has a row of two shards
        gatherer.read(((row, 0), (min(2, 4000 - row), 3)), out[row : row + 2])
    gatherer.read(((0, 0), (1, 3)), out[:1])
    assert np.array_equal(out, values)
    assert calls == 2 * 2000
    calls = 0
    assert verify_boxes("w", DTYPES["float32"], located, [((row, 0), (1, 3)) for row in range(100)]) == (50 * 24, 0)
    assert calls < 150


def test_verify_boxes_reads_what_the_boxes_touch(tmp_path: Path) -> None:
    values = numbers((6, 8))
    located = store_pieces(tmp_path, values, grid_boxes([[3], [4]], (6, 8)))
    dtype, store = DTYPES["float32"], located[0][0]
    left, upper = ((0, 0), (6, 1)), ((2, 3), (1, 3))
    assert verify_boxes("w", dtype, located, [left]) == (96, 0)
    assert verify_boxes("w", dtype, located, [left, upper, left]) == (144, 0)
    assert verify_boxes("w", dtype, located, []) == (0, 0)
    some = [(store, chunk if chunk.offsets[0] else chunk._replace(crc32=None)) for _, chunk in located]
    assert verify_boxes("w", dtype, some, [left, upper]) == (48, 96)
    flip(tmp_path, located[1][1].stop - 1)  # upper right
    assert verify_boxes("w", dtype, located, [left]) == (96, 0)
    with pytest.raises(ChecksumMismatch, match="`w` is damaged"):
        verify_boxes("w", dtype, located, [left, upper])
    os.truncate(tmp_path / "f", located[3][1].stop - 1)  # lower right
    assert verify_boxes("w", dtype, located, [left]) == (96, 0)
    with pytest.raises(MalformedFile, match="f ends within `w`"):
        verify_boxes("w", dtype, located, [((5, 7), (1, 1))])
    without = [(store, chunk._replace(crc32=None)) for _, chunk in located]
    with pytest.raises(MalformedFile, match="f ends within `w`"):
        verify_boxes("w", dtype, without, [((5, 7), (1, 1))])


def test_verify_boxes_reads_a_shared_storage_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    located = views_of_one_storage(tmp_path, numbers((3, 4)))
    num_bytes = 0

    def counted(fd: int, view: memoryview, position: int) -> int:
        nonlocal num_bytes
        num_bytes += len(view)
        return os.preadv(fd, [view], position)

    monkeypatch.setattr("fsdp_ckpt.store.local.read_into", counted)
    assert verify_boxes("w", DTYPES["float32"], located, [((0, 0), (3, 1))]) == (72, 0)
    assert num_bytes == 72
    flip(tmp_path, 71)  # in the padding of the last row
    with pytest.raises(ChecksumMismatch):
        verify_boxes("w", DTYPES["float32"], located, [((0, 0), (1, 1))])
    os.truncate(tmp_path / "f", 71)
    with pytest.raises(MalformedFile, match="f ends within `w`"):
        verify_boxes("w", DTYPES["float32"], located, [((0, 0), (1, 1))])
