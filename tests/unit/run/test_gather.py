"""Boxes are put together as torch would index the whole tensor."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fsdp_ckpt.catalog import DTYPES, Chunk
from fsdp_ckpt.errors import ChecksumMismatch, MalformedFile
from fsdp_ckpt.plan.boxes import Box, bands
from fsdp_ckpt.run.gather import Gatherer, numpy_dtype, storage_dtype
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
