"""What is found among values is what torch finds in the same tensor, however it is cut, stored and read."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_ckpt.catalog import DTYPES, Chunk, TensorEntry
from fsdp_ckpt.errors import ChecksumMismatch, IncompleteCheckpoint, MalformedFile
from fsdp_ckpt.run import scan
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.run.scan import TensorScan, scan_tensors
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.run.tally import Statistics
from fsdp_ckpt.store.syscalls import read_into
from tests.unit.run.test_gather import Shelf, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

NAMES = sorted(set(DTYPES) - {"float4_e2m1fn_x2"})
FLOATS = [name for name in NAMES if DTYPES[name].kind in ("float", "float8")]
SMALL_FLOATS = [name for name in FLOATS if DTYPES[name].itemsize <= 2]
PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def expected(tensor: torch.Tensor) -> Statistics:
    """Look at a tensor with torch's own notions: conversion to float64, isnan, isinf, finfo."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name in PARTS:
        parts = [expected(part) for part in torch.view_as_real(tensor.resolve_conj().resolve_neg()).unbind(-1)]
        sums = {
            field: sum(getattr(part, field) for part in parts)
            for field in ("count", "nan", "positive_inf", "negative_inf", "zeros", "denormals")
        }
        return Statistics(**sums, minimum=None, maximum=None, is_constant=all(part.is_constant for part in parts))
    if not tensor.dtype.is_floating_point:
        numbers = [int(value) for value in tensor.reshape(-1).tolist()]
        return Statistics(
            count=len(numbers), nan=0, positive_inf=0, negative_inf=0, zeros=numbers.count(0), denormals=0,
            minimum=min(numbers, default=None), maximum=max(numbers, default=None), is_constant=len(set(numbers)) == 1,
        )  # fmt: skip
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    values = values.double().reshape(-1)
    finite = values[values.isfinite()]
    # 2 ** -127 is the smallest number of float8_e8m0fnu, a normal one.
    tiny = 0.0 if name == "float8_e8m0fnu" else torch.finfo(tensor.dtype).smallest_normal
    return Statistics(
        count=values.numel(),
        nan=int(values.isnan().sum()),
        positive_inf=int(values.isposinf().sum()),
        negative_inf=int(values.isneginf().sum()),
        zeros=int((values == 0).sum()),
        denormals=int(((values != 0) & (values.abs() < tiny)).sum()),
        minimum=float(finite.min()) if finite.numel() else None,
        maximum=float(finite.max()) if finite.numel() else None,
        is_constant=bool(finite.numel()) and finite.numel() == values.numel() and bool((finite == finite[0]).all()),
    )


def entry(tensor: torch.Tensor, shelf: Shelf, key: str = "w") -> TensorEntry:
    (shelf.store.root / shelf.name).write_bytes(shelf.data)
    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    chunks = [chunk for _, chunk in shelf.located]
    return TensorEntry(key=key, name=key, dtype=dtype, shape=tuple(tensor.shape), chunks=chunks)


def look(root: Path, *tensors: TensorEntry, **options: Any) -> list[TensorScan]:
    with Sources(root) as sources:
        return list(scan_tensors(tensors, sources, **{"jobs": 2} | options))


def bits(name: str, patterns: list[int]) -> torch.Tensor:
    dtype = getattr(torch, name)
    return (
        torch.tensor(patterns, dtype=torch.int32).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    )


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_every_bit_pattern_by_itself(name: str, tmp_path: Path) -> None:
    """Of 16 bits those around each place where the kind of a number changes."""
    size = 8 * DTYPES[name].itemsize
    near = range(256) if size == 8 else [
        (base + step) % 65536 for base in range(0, 65536, 128) for step in (-1, 0, 1)
    ]  # fmt: skip
    entries = []
    shelf = Shelf(tmp_path)
    for pattern in near:
        shelf.located.clear()
        value = bits(name, [pattern])
        shelf.add((0,), value)
        entries.append((value, shelf.located[0][1]))
    (tmp_path / shelf.name).write_bytes(shelf.data)
    tensors = [TensorEntry(key="w", name="w", dtype=DTYPES[name], shape=(1,), chunks=[chunk]) for _, chunk in entries]
    for (value, _), found in zip(entries, look(tmp_path, *tensors), strict=True):
        assert found.statistics == expected(value), value.view(torch.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_every_type(name: str, tmp_path: Path) -> None:
    """Random bits: a share of them are NaN, infinite, denormal; of 16-bit types all patterns are there."""
    tensor = random_tensor(name, (30, 1000))
    if name in SMALL_FLOATS:
        tensor = bits(name, list(range(256 ** DTYPES[name].itemsize))).reshape(16, -1)
    shelf = Shelf(tmp_path)
    shelf.add((0, 0), tensor)
    (found,) = look(tmp_path, entry(tensor, shelf))
    assert found.statistics == expected(tensor)
    assert not found.faults


def test_packed_float4_is_counted_by_bytes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes([0, 0x12, 0, 0x80]))
    tensor = TensorEntry(
        key="w", name="w", dtype=DTYPES["float4_e2m1fn_x2"], shape=(2, 2), chunks=[Chunk((0, 0), (2, 2), "f", 0, 4)]
    )
    (found,) = look(tmp_path, tensor)
    assert (found.statistics.count, found.statistics.zeros, found.statistics.minimum) == (4, 2, None)
    assert not found.statistics.is_constant


SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-41, -1e-41, 6e-8, 1.0, -1.0, 3e38, 2.5)

values_of = st.lists(st.sampled_from(SPECIALS), max_size=6)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Numbers of one sign or both, mostly ordinary ones, with special ones among them, in all kinds of memory."""
    dtype = getattr(torch, draw(st.sampled_from([name for name in FLOATS if name != "float8_e8m0fnu"] + ["complex64"])))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    numbers = torch.randn(math.prod(shape), generator=generator, dtype=torch.float64)
    numbers = draw(st.sampled_from([numbers, numbers.abs() + 0.1, -numbers.abs() - 0.1, torch.full_like(numbers, 0.5)]))
    for value in draw(values_of):
        numbers[draw(st.integers(0, numbers.numel() - 1))] = value
    tensor = numbers.float().to(dtype).reshape(shape)
    way = draw(st.sampled_from(["as is", "transposed", "gaps", "expanded", "overlapping", "neg", "conj"]))
    match way:
        case "transposed":
            tensor = tensor.permute(*draw(st.permutations(range(tensor.dim()))))
        case "gaps":
            tensor = tensor[..., ::2]
        case "expanded":
            tensor = tensor.unsqueeze(draw(st.integers(0, tensor.dim())))
            tensor = tensor.expand([3 if length == 1 else length for length in tensor.shape])
        case "overlapping":
            tensor = tensor.reshape(-1).unfold(0, min(3, tensor.numel()), 1)
        case "neg" if dtype.is_complex:
            tensor = tensor._neg_view()
        case "conj" if dtype.is_complex:
            tensor = tensor.conj()
        case _:
            pass
    return tensor


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensor=tensors(), block=st.sampled_from([16, 48, 1 << 20]), task=st.sampled_from([1, 1 << 20]), data=st.data())
def test_any_memory_any_cut(
    tensor: torch.Tensor, block: int, task: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rows are shards; blocks end within them."""
    folder = tmp_path_factory.mktemp("scan")
    cut = data.draw(st.integers(0, tensor.shape[0]))
    shelf = Shelf(folder)
    for start, stop in ((0, cut), (cut, tensor.shape[0])):
        shelf.add((start, *[0] * (tensor.dim() - 1)), tensor[start:stop])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "BLOCK_BYTES", block)
        patch.setattr(scan, "_TASK_BYTES", task)
        (found,) = look(folder, entry(tensor, shelf), verify=True)
    assert found.statistics == expected(tensor)
    assert not found.faults


LAZY = torch.complex(torch.tensor([1.0, math.inf, 2.0]), torch.tensor([math.inf, math.inf, -3.0]))


@pytest.mark.parametrize(
    "tensor",
    [LAZY.conj(), LAZY._neg_view(), LAZY.conj()._neg_view(), LAZY.conj().imag, LAZY[2:].conj().imag],
    ids=["conj", "neg", "both", "imaginary part, negated", "one finite number, negated"],
)
def test_lazy_bits(tensor: torch.Tensor, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.add((0,), tensor)
    (found,) = look(tmp_path, entry(tensor, shelf))
    assert tensor.is_conj() or tensor.is_neg()
    assert found.statistics == expected(tensor)


def test_one_value_in_the_last_block(tmp_path: Path) -> None:
    """A block boundary before it, and a block that ends in the middle."""
    numbers = torch.ones((1 << 18) * 3 + 5)
    numbers[-1] = math.nan
    numbers[(1 << 18) - 1] = -math.inf
    (tmp_path / "f").write_bytes(numbers.numpy().tobytes())
    size = numbers.numel()
    chunks = [Chunk((0,), (size,), "f", 0, 4 * size)]
    (found,) = look(tmp_path, TensorEntry(key="w", name="w", dtype=DTYPES["float32"], shape=(size,), chunks=chunks))
    assert (found.statistics.nan, found.statistics.negative_inf, found.statistics.positive_inf) == (1, 1, 0)
    assert found.statistics.count == numbers.numel()
    assert (found.statistics.minimum, found.statistics.maximum) == (1.0, 1.0)
    assert not found.statistics.is_constant


def test_transposed_matrices_are_read_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with their checksum, once."""

    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("read another way")

    tensor = torch.randn(5, 6, 7).permute(2, 0, 1)
    shelf = Shelf(tmp_path)
    shelf.add((0, 0, 0), tensor)
    monkeypatch.setattr(scan, "Gatherer", fail)
    monkeypatch.setattr(scan, "checksum_range", fail)
    (found,) = look(tmp_path, entry(tensor, shelf), verify=True)
    assert found.statistics == expected(tensor)
    assert found.verified_bytes == tensor.nbytes


def test_replicas_are_not_looked_at(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.add((0,), torch.ones(4))
    shelf.add((0,), torch.full((4,), math.nan))
    whole = entry(torch.ones(4), shelf)
    first, second = whole.chunks
    tensor = TensorEntry(key="w", name="w", dtype=whole.dtype, shape=(4,), chunks=[first], replicas=[second])
    (found,) = look(tmp_path, tensor)
    assert (found.statistics.count, found.statistics.nan) == (4, 0)


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.add((0, 0), torch.ones(0, 3))
    nothing = entry(torch.ones(0, 3), shelf)
    shelf = Shelf(tmp_path, "g")
    shelf.add((), torch.tensor(-2.5))
    one = entry(torch.tensor(-2.5), shelf)
    empty, scalar = look(tmp_path, nothing, one)
    assert (empty.statistics.count, empty.statistics.minimum, empty.statistics.is_constant) == (0, None, False)
    assert (scalar.statistics.count, scalar.statistics.minimum, scalar.statistics.is_constant) == (1, -2.5, True)


def test_results_come_in_the_order_of_the_tensors(tmp_path: Path) -> None:
    """More tensors than may wait; the large one first."""
    made = []
    for number in range(150):
        values = torch.full((30_000 if number == 0 else 3,), float(number))
        shelf = Shelf(tmp_path, f"f{number}")
        shelf.add((0,), values)
        made.append(entry(values, shelf, key=f"w{number}"))
    found = look(tmp_path, *made, jobs=3)
    assert [one.tensor.key for one in found] == [tensor.key for tensor in made]
    assert [one.statistics.maximum for one in found] == list(range(150))


def test_tensors_are_taken_as_threads_become_free(tmp_path: Path) -> None:
    """A checkpoint of millions of chunks is never in memory as tasks."""
    shelf = Shelf(tmp_path)
    shelf.add((0,), torch.ones(3))
    tensor = entry(torch.ones(3), shelf)
    taken = []

    def endless() -> Iterator[TensorEntry]:
        while True:
            taken.append(tensor)
            yield tensor

    with Sources(tmp_path) as sources:
        results = scan_tensors(endless(), sources, jobs=2)
        next(results)
        next(results)
        results.close()  # type: ignore[attr-defined]
    assert len(taken) < 80


def test_all_bytes_of_elements_are_told(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0).reshape(10, 100)
    shelf = Shelf(tmp_path)
    shelf.add((0, 0), tensor[:4])
    shelf.add((4, 0), tensor[4:, :].t().contiguous().t())
    meter = Meter(4000, None)
    look(tmp_path, entry(tensor, shelf), meter=meter)
    assert meter.done_bytes == 4000


class TestChecksums:
    """Compared in the same pass where that is possible, and always when asked."""

    def test_bytes_that_were_compared(self, tmp_path: Path) -> None:
        whole = torch.arange(200.0).reshape(10, 20)
        shelf = Shelf(tmp_path)
        shelf.add((0, 0), whole[:4].clone())  # in a row: 320 bytes
        shelf.add((4, 0), whole[4:6].t().clone().t())  # turned: 160 bytes
        shelf.add((6, 0), whole[6:8])  # part of a storage of 800 bytes
        shelf.add((8, 0), whole[8:].clone(), checked=False)  # 160 bytes
        tensor = entry(whole, shelf)
        (found,) = look(tmp_path, tensor, verify=True)
        assert (found.verified_bytes, found.unverified_bytes) == (320 + 160 + 800, 160)
        assert not found.faults
        (found,) = look(tmp_path, tensor, verify=False)
        assert (found.verified_bytes, found.unverified_bytes) == (0, 0)

    def test_a_shared_storage_is_compared_once(self, tmp_path: Path) -> None:
        storage = torch.arange(200.0).reshape(10, 20)
        raw = storage.numpy().tobytes()
        (tmp_path / "f").write_bytes(raw)
        chunks = [
            Chunk((row, 0), (1, 20), "f", row * 80, row * 80 + 80, crc32=zlib.crc32(raw), crc_range=(0, 800))
            for row in range(10)
        ]
        tensor = TensorEntry(key="w", name="w", dtype=DTYPES["float32"], shape=(10, 20), chunks=chunks)
        (found,) = look(tmp_path, tensor, verify=True)
        assert (found.verified_bytes, found.faults) == (800, ())
        assert found.statistics == expected(storage)

    @pytest.mark.parametrize("way", ["in a row", "turned", "gaps", "part"])
    def test_damage(self, tmp_path: Path, way: str) -> None:
        """Also of a byte that no element has."""
        whole = torch.arange(1.0, 101.0).reshape(10, 10)
        piece = {"in a row": whole, "turned": whole.t(), "gaps": whole[:, ::2], "part": whole[:5]}[way]
        shelf = Shelf(tmp_path)
        shelf.add((0, 0), piece)
        at = 13 + 4 * 99  # the last number of the storage
        shelf.data[at] ^= 1
        tensor = entry(piece, shelf)
        (found,) = look(tmp_path, tensor, verify=True)
        (fault,) = found.faults
        assert isinstance(fault, ChecksumMismatch)
        assert "`w` is damaged" in str(fault)
        assert (found.statistics.count, found.verified_bytes) == (piece.numel(), 0)
        (unseen,) = look(tmp_path, tensor)
        assert not unseen.faults

    def test_bytes_after_the_elements_belong_to_the_record(self, tmp_path: Path) -> None:
        raw = torch.ones(4).numpy().tobytes() + b"\xff" * 9
        (tmp_path / "f").write_bytes(raw)
        chunk = Chunk((0,), (4,), "f", 0, len(raw), crc32=zlib.crc32(raw))
        tensor = TensorEntry(key="w", name="w", dtype=DTYPES["float32"], shape=(4,), chunks=[chunk])
        (found,) = look(tmp_path, tensor, verify=True)
        assert (found.verified_bytes, found.faults) == (25, ())
        assert found.statistics == expected(torch.ones(4))


class TestFaults:
    """One bad chunk is told; the others are looked at all the same."""

    def test_file_that_ends_early(self, tmp_path: Path) -> None:
        whole = torch.tensor([1.0, math.nan, 2.0, 3.0])
        for name, piece in (("f", whole[:2]), ("g", whole[2:])):
            (tmp_path / name).write_bytes(piece.numpy().tobytes()[: 8 if name == "f" else 7])
        chunks = [Chunk((0,), (2,), "f", 0, 8), Chunk((2,), (2,), "g", 0, 8)]
        tensor = TensorEntry(key="w", name="w", dtype=DTYPES["float32"], shape=(4,), chunks=chunks)
        (found,) = look(tmp_path, tensor)
        (fault,) = found.faults
        assert isinstance(fault, MalformedFile)
        assert "g ends within `w`" in str(fault)
        assert (found.statistics.count, found.statistics.nan) == (2, 1)

    def test_file_that_is_not_there(self, tmp_path: Path) -> None:
        chunks = [Chunk((0,), (2,), "f", 0, 8)]
        tensor = TensorEntry(key="w", name="w", dtype=DTYPES["float32"], shape=(2,), chunks=chunks)
        (found,) = look(tmp_path, tensor)
        assert [type(fault) for fault in found.faults] == [IncompleteCheckpoint]

    @pytest.mark.parametrize("strides", [None, (2,)])
    def test_record_too_short_for_its_shape(self, tmp_path: Path, strides: tuple[int, ...] | None) -> None:
        """What follows the record in the file is not taken for its elements."""
        (tmp_path / "f").write_bytes(bytes(100))
        chunks = [Chunk((0,), (3,), "f", 0, 8, strides=strides)]
        tensor = TensorEntry(key="w", name="w", dtype=DTYPES["float32"], shape=(3,), chunks=chunks)
        (found,) = look(tmp_path, tensor)
        assert [type(fault) for fault in found.faults] == [MalformedFile]
        assert found.statistics.count == 0

    def test_meter_arrives_also_where_chunks_have_faults(self, tmp_path: Path) -> None:
        chunks = [Chunk((0,), (2,), "f", 0, 8)]
        tensor = TensorEntry(key="w", name="w", dtype=DTYPES["float32"], shape=(2,), chunks=chunks)
        meter = Meter(8, None)
        look(tmp_path, tensor, meter=meter)
        assert meter.done_bytes == 8


def _large(folder: Path, mib: int) -> TensorEntry:
    """Half of it zeros and NaN, which is the long way; in chunks of 8 MiB."""
    rows = torch.ones(1 << 18)
    rows[::3], rows[1::7] = 0.0, math.nan
    with (folder / "f").open("wb") as file:
        for _ in range(mib):
            file.write(rows.numpy().tobytes())
    chunks = [Chunk((number, 0), (8, 1 << 18), "f", number << 20, (number + 8) << 20) for number in range(0, mib, 8)]
    return TensorEntry(key="w", name="w", dtype=DTYPES["float32"], shape=(mib, 1 << 18), chunks=chunks)


def test_memory_does_not_depend_on_the_size(tmp_path: Path) -> None:
    """Two threads have a block of 1 MiB each and at most five times as much beside it."""
    tensor = _large(tmp_path, 96)
    tracemalloc.start()
    try:
        (found,) = look(tmp_path, tensor)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.statistics.count == 96 << 18
    assert peak < 12 << 20


def test_a_caller_that_stops_early_waits_for_no_more_than_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = _large(tmp_path, 8)
    (chunk,) = tensor.chunks
    os.truncate(tmp_path / "f", 200 << 20)
    long = dataclasses.replace(
        tensor, shape=(200, 1 << 18), chunks=[chunk._replace(lengths=(200, 1 << 18), stop=200 << 20)]
    )
    blocks = []

    def read_slowly(fd: int, view: memoryview, position: int) -> int:
        blocks.append(position)
        time.sleep(0.005)
        return read_into(fd, view, position)

    monkeypatch.setattr("fsdp_ckpt.store.local.read_into", read_slowly)
    with Sources(tmp_path) as sources:
        results = scan_tensors(itertools.chain([tensor], itertools.repeat(long, 63)), sources, jobs=1)
        next(results)
        results.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fsdp-ckpt-scan")]
    assert len(blocks) < 200


def test_an_error_of_the_disk_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("fsdp_ckpt.store.local.read_into", fail)
    with pytest.raises(OSError, match="Input/output error"):
        look(tmp_path, _large(tmp_path, 8))
