"""Boxes are put together as torch would index the whole tensor."""

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
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.catalog import DTYPES, Chunk
from fsdp_ckpt.errors import ChecksumMismatch, MalformedFile
from fsdp_ckpt.plan.boxes import Box, bands, intersect
from fsdp_ckpt.run.gather import Gatherer, numpy_dtype, storage_dtype, verify_boxes
from fsdp_ckpt.run.sources import Located
from fsdp_ckpt.store.local import LocalStore
from tests.build import full_bits, grid

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


Verify = Literal["full", "passing", "off"]
Array = np.ndarray[Any, np.dtype[Any]]


class Shelf:
    """Pieces of a tensor, in one file with gaps between them."""

    def __init__(self, folder: Path, name: str = "f") -> None:
        self.store = LocalStore(folder)
        self.name = name
        self.data = bytearray(b"\xee" * 13)
        self.located: list[Located] = []

    def add(self, offsets: tuple[int, ...], piece: torch.Tensor, *, checked: bool = True) -> None:
        storage = bytes(piece.untyped_storage().tolist())
        start = len(self.data)
        self.data += storage + b"\xee" * 13
        itemsize = piece.dtype.itemsize
        first = start + int(piece.storage_offset()) * itemsize
        span = (
            0 if not piece.numel() else 1 + sum((n - 1) * s for n, s in zip(piece.shape, piece.stride(), strict=True))
        )
        whole = (start, start + len(storage))
        self.located.append((self.store, Chunk(
            offsets, tuple(piece.shape), self.name, first, first + span * itemsize,
            strides=None if piece.is_contiguous() else tuple(piece.stride()),
            crc32=zlib.crc32(storage) if checked else None,
            crc_range=None if whole == (first, first + span * itemsize) else whole,
            conj=piece.is_conj(), neg=piece.is_neg(),
        )))  # fmt: skip

    def gatherer(self, tensor: torch.Tensor, *, verify: Verify = "full") -> Gatherer:
        (self.store.root / self.name).write_bytes(self.data)
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        return Gatherer("w", dtype, tuple(tensor.shape), self.located, verify=verify)


def patch_sizes(patch: pytest.MonkeyPatch, block: int, mapped: int, sparse: int, long: int) -> None:
    patch.setattr("fsdp_ckpt.run.gather.BLOCK_BYTES", block)
    patch.setattr("fsdp_ckpt.run.gather._MAPPED_BYTES", mapped)
    patch.setattr("fsdp_ckpt.run.gather._SPARSE", sparse)
    patch.setattr("fsdp_ckpt.run.gather._LONG_BYTES", long)


@pytest.fixture(params=["as they are", "tiny blocks", "small blocks", "tiny maps", "small maps", "rows"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors take the ways of large ones."""
    never = 1 << 30
    chosen = {
        "tiny blocks": (1, 1, never, never), "small blocks": (50, 1, never, never),
        "tiny maps": (1, 1, 1, never), "small maps": (50, 50, 1, never), "rows": (50, 50, never, 1),
    }  # fmt: skip
    if request.param in chosen:
        patch_sizes(monkeypatch, *chosen[request.param])


def read(gatherer: Gatherer, box: Box) -> bytes:
    out = np.empty(box[1], dtype=gatherer.bits)
    gatherer.read(box, out)
    return out.tobytes()


def whole(tensor: torch.Tensor) -> Box:
    return (0,) * tensor.dim(), tuple(tensor.shape)


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = getattr(torch, name)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    raw = raw & 1 if name == "bool" else raw
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_grid_of_pieces_of_every_dtype(name: str, tmp_path: Path) -> None:
    tensor = random_tensor(name, (7, 6, 5))
    shelf = Shelf(tmp_path)
    cut = grid(tensor, [[2, 3], [4], [1]], ranks=1)
    for offsets, lengths in cut.boxes:
        piece = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        shelf.add(offsets, piece.clone(memory_format=torch.contiguous_format))
    gatherer = shelf.gatherer(tensor)
    assert read(gatherer, whole(tensor)) == full_bits(tensor)
    gatherer.finish()
    assert gatherer.verified_bytes == tensor.numel() * tensor.dtype.itemsize


@pytest.mark.parametrize("limit", [1, 8, 40, 100, 10_000])
@pytest.mark.parametrize("checked", [False, True])
def test_bands_in_order_check_everything(limit: int, checked: bool, tmp_path: Path) -> None:
    tensor = random_tensor("int32", (5, 4, 6))
    shelf = Shelf(tmp_path)
    for offsets, lengths in grid(tensor, [[3], [1], [2, 5]], ranks=1).boxes:
        piece = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        shelf.add(offsets, piece.clone(memory_format=torch.contiguous_format), checked=checked)
    gatherer = shelf.gatherer(tensor)
    assert b"".join(read(gatherer, box) for box in bands((5, 4, 6), 4, limit)) == full_bits(tensor)
    gatherer.finish()
    assert gatherer.verified_bytes == (tensor.numel() * 4 if checked else 0)


@pytest.mark.usefixtures("sizes")
def test_any_box(tmp_path: Path) -> None:
    tensor = random_tensor("bfloat16", (6, 7, 5))
    shelf, rng = Shelf(tmp_path), random.Random(3)
    for number, (offsets, lengths) in enumerate(grid(tensor, [[2], [3, 4], [2]], ranks=1).boxes):
        piece = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        # Every other piece is stored by columns, or with gaps, as views are.
        piece = piece.transpose(0, 2).contiguous().transpose(0, 2) if number % 2 else piece.clone()
        shelf.add(offsets, piece)
    gatherer = shelf.gatherer(tensor, verify="off")
    for _ in range(200):
        starts = tuple(rng.randrange(size + 1) for size in tensor.shape)
        lengths = tuple(rng.randrange(size - start + 1) for size, start in zip(tensor.shape, starts, strict=True))
        judge = tensor[tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True))]
        assert read(gatherer, (starts, lengths)) == full_bits(judge)


def strided(name: str) -> dict[str, torch.Tensor]:
    base = random_tensor(name, (6, 8, 4))
    return {
        "transposed": base.transpose(0, 1),
        "steps": base[::2, 1::3],
        "one column": base[:, 2, 1],
        "expanded": base[:1].expand(5, 8, 4),
        "offset": base[2:5],
        "scalar": base[1, 2, 3],
        "channels last": random_tensor(name, (2, 3, 4, 5)).to(memory_format=torch.channels_last),
        "row of ones": base[:1, :, :1],
    }


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "complex128", "float8_e4m3fn"])
def test_strided_storages(name: str, tmp_path: Path) -> None:
    for number, (key, tensor) in enumerate(strided(name).items()):
        shelf = Shelf(tmp_path, f"f{number}")
        shelf.add((0,) * tensor.dim(), tensor)
        gatherer = shelf.gatherer(tensor)
        assert read(gatherer, whole(tensor)) == full_bits(tensor), key
        gatherer.finish()


def lazy() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in ("complex64", "complex128"):
        base = torch.view_as_complex(
            torch.randn(4, 3, 2, dtype=torch.float32 if name == "complex64" else torch.float64)
        )
        found |= {
            f"{name} conj": base.clone().conj(),
            f"{name} conj, transposed": base.clone().conj().t(),
            f"{name} conj of one": base.clone().conj()[1, 2],
            f"{name} neg": base.clone().conj().imag,
            f"{name} neg of one": base.clone().conj().imag[2, 1],
            f"{name} neg of complex": torch._neg_view(base.clone()),
            f"{name} both": torch._neg_view(base.clone().conj()),
            f"{name} both of one": torch._neg_view(base.clone().conj())[3, 0],
            f"{name} conj of nothing": base.clone().conj()[:0],
        }
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.uint8):
        found[f"{dtype} neg"] = torch._neg_view(torch.arange(12).to(dtype).reshape(3, 4))
        found[f"{dtype} neg of one"] = torch._neg_view(torch.tensor(7).to(dtype))
    zeros = torch.tensor([complex(0.0, 0.0), complex(-0.0, -0.0), complex(float("inf"), float("nan"))])
    return found | {"zeros conj": zeros.conj(), "zeros neg": torch._neg_view(zeros.clone())}


LAZY = lazy()


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("name", LAZY)
def test_lazy_conj_and_neg_bits(name: str, tmp_path: Path) -> None:
    tensor = LAZY[name]
    assert tensor.is_conj() or tensor.is_neg()
    shelf = Shelf(tmp_path)
    shelf.add((0,) * tensor.dim(), tensor)
    found = read(shelf.gatherer(tensor), whole(tensor))
    judge = full_bits(tensor)
    if name.startswith("zeros"):
        # A NaN's sign does not matter.
        mask = np.isnan(np.frombuffer(judge, np.float32))
        assert np.array_equal(np.frombuffer(found, np.uint32)[~mask], np.frombuffer(judge, np.uint32)[~mask])
    else:
        assert found == judge


def test_a_lazy_piece_between_others(tmp_path: Path) -> None:
    tensor = torch.view_as_complex(torch.randn(6, 4, 2))
    shelf = Shelf(tmp_path)
    shelf.add((0, 0), tensor[:3].clone())
    shelf.add((3, 0), tensor[3:].conj().clone().resolve_conj().conj())
    gatherer = shelf.gatherer(tensor)
    assert b"".join(read(gatherer, box) for box in bands((6, 4), 8, 50)) == full_bits(tensor)
    gatherer.finish()


@pytest.mark.parametrize("where", ["whole", "strided", "view"])
def test_damage_is_noticed(where: str, tmp_path: Path) -> None:
    tensor = random_tensor("int16", (6, 4))
    pieces = {"whole": tensor, "strided": tensor.t().contiguous().t(), "view": torch.cat([tensor, tensor])[6:]}
    shelf = Shelf(tmp_path)
    shelf.add((0, 0), pieces[where])
    shelf.data[shelf.located[0][1].start + 5] ^= 4

    def use() -> None:
        gatherer = shelf.gatherer(tensor)
        read(gatherer, whole(tensor))
        gatherer.finish()

    with pytest.raises(ChecksumMismatch, match="`w` is damaged"):
        use()
    assert read(shelf.gatherer(tensor, verify="off"), whole(tensor)) != full_bits(tensor)


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    tensor = random_tensor("int16", (6, 4))
    shelf = Shelf(tmp_path)
    shelf.add((0, 0), tensor, checked=False)
    del shelf.data[30:]
    with pytest.raises(MalformedFile, match="ends within `w`"):
        read(shelf.gatherer(tensor), whole(tensor))


def test_a_strided_file_that_ends_too_early(tmp_path: Path) -> None:
    tensor = random_tensor("int16", (6, 4))
    shelf = Shelf(tmp_path)
    shelf.add((0, 0), tensor.t().contiguous().t(), checked=False)
    del shelf.data[30:]
    with pytest.raises(MalformedFile):
        read(shelf.gatherer(tensor), whole(tensor))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_numpy_types(name: str) -> None:
    dtype = DTYPES[name]
    assert storage_dtype(dtype).itemsize == dtype.itemsize
    if name in ("complex32", "float4_e2m1fn_x2"):
        with pytest.raises(TypeError, match=name):
            numpy_dtype(dtype)
        return
    found: Any = numpy_dtype(dtype)
    assert found.itemsize == dtype.itemsize
    assert found.name == name


# From here on NumPy is the judge: a whole array is cut, its pieces are written, boxes of it are read.


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

    monkeypatch.setattr("fsdp_ckpt.run.gather.read_into", spy)
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

    monkeypatch.setattr("fsdp_ckpt.run.gather.read_into", counted)
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

    monkeypatch.setattr("fsdp_ckpt.run.checksum.read_into", counted)
    assert verify_boxes("w", DTYPES["float32"], located, [((0, 0), (3, 1))]) == (72, 0)
    assert num_bytes == 72
    flip(tmp_path, 71)  # in the padding of the last row
    with pytest.raises(ChecksumMismatch):
        verify_boxes("w", DTYPES["float32"], located, [((0, 0), (1, 1))])
    os.truncate(tmp_path / "f", 71)
    with pytest.raises(MalformedFile, match="f ends within `w`"):
        verify_boxes("w", DTYPES["float32"], located, [((0, 0), (1, 1))])
