"""Two tensors side by side. Expected numbers are worked out by hand or by NumPy on the whole arrays."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fsdp_ckpt.catalog import Chunk, Part, TensorEntry
from fsdp_ckpt.errors import ChecksumMismatch, IncompleteCheckpoint
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.run.compare import Comparer, Comparison
from fsdp_ckpt.run.differences import ValueStats
from fsdp_ckpt.run.progress import Meter, Progress
from fsdp_ckpt.run.settle import Settled, settle
from fsdp_ckpt.run.sides import Side, TensorPair, batches
from fsdp_ckpt.run.sources import Located, Sources
from tests.build import Sharded, grid, rows, save_dcp
from tests.cli.tool import flip

NAN, INF = math.nan, math.inf


@contextmanager
def opened(a: Path, b: Path) -> Iterator[tuple[TensorPair, Side, Side]]:
    """Open the only tensor of two checkpoints."""
    parts: list[Part] = [read_checkpoint(path).parts[0] for path in (a, b)]
    roots = [read_checkpoint(path).root for path in (a, b)]
    first, second = (next(iter(part.tensors.values())) for part in parts)
    with Sources(roots[0]) as one, Sources(roots[1]) as two:
        yield (
            TensorPair(name="w", a=first, b=second),
            Side(label="A", path=str(a), sources=one),
            Side(label="B", path=str(b), sources=two),
        )


def compare(folder: Path, a: Tensor, b: Tensor, **options: Any) -> Comparison:
    folder.mkdir(exist_ok=True)
    paths = folder / "a.safetensors", folder / "b.safetensors"
    for path, tensor in zip(paths, (a, b), strict=True):
        save_file({"w": tensor}, path)
    with opened(*paths) as (pair, first, second):
        return Comparer(first, second, meter=Meter(pair.num_bytes, None), **options).run(pair)


def stats(folder: Path, a: Any, b: Any, dtype: torch.dtype = torch.float32, **options: Any) -> ValueStats:
    found = compare(folder, torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype), **options)
    assert found.stats is not None
    assert not found.is_equal
    return found.stats


def from_bits(values: list[int], dtype: torch.dtype, kind: str) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=kind)).view(dtype)


def test_equal_tensors_have_no_statistics(tmp_path: Path) -> None:
    tensor = torch.tensor([1.0, NAN, -0.0, INF])
    found = compare(tmp_path, tensor, tensor.clone())
    assert found == Comparison(is_equal=True, read_bytes=32)


def test_one_element(tmp_path: Path) -> None:
    found = stats(tmp_path, [[3.0, 4.0], [0.0, 0.0]], [[3.0, 4.0], [0.0, 2.5]])
    assert found.num_changed == 1
    assert found.share_changed == 0.25
    assert found.max_abs == 2.5
    assert found.relative_l2 == 0.5  # 2.5 / |(3, 4)|
    assert found.cosine == pytest.approx(25 / (5 * math.sqrt(31.25)), rel=1e-15)
    assert (found.largest_at, found.largest_a, found.largest_b) == ((1, 1), 0.0, 2.5)
    assert (found.nan_changed, found.inf_changed, found.num_outside) == (0, 0, None)


@pytest.mark.parametrize(
    ("dtype", "kind", "pair", "steps"),
    [
        (torch.float32, "i4", (0x3F800000, 0x3F800001), 1),
        (torch.float32, "i4", (0x00000001, -0x7FFFFFFF), 2),  # the smallest above zero and below it
        (torch.float32, "i4", (0x7F7FFFFF, -0x00800001), 2 * 0x7F7FFFFF),  # from one end to the other
        (torch.float64, "i8", (0x3FF0000000000000, 0x3FF0000000000003), 3),
        (torch.float64, "i8", (0x7FEFFFFFFFFFFFFF, -0x0010000000000001), 2 * 0x7FEFFFFFFFFFFFFF),
        (torch.float16, "i2", (0x3C00, 0x3BFF), 1),
        (torch.bfloat16, "i2", (0x3F80, 0x4000), 128),  # 1.0 and 2.0: seven bits of mantissa
        (torch.float8_e4m3fn, "i1", (0x38, 0x40), 8),  # 1.0 and 2.0: three bits
        (torch.float8_e5m2, "i1", (0x3C, -0x44), 2 * 0x3C),  # 1.0 and -1.0
        (torch.float8_e8m0fnu, "u1", (0x7F, 0xFE), 127),  # 1.0 and the largest: exponents without a sign
    ],
)
def test_steps_between_representable_numbers(
    dtype: torch.dtype, kind: str, pair: tuple[int, int], steps: int, tmp_path: Path
) -> None:
    found = compare(tmp_path, *(from_bits([bits, 0], dtype, kind) for bits in pair)).stats
    assert found is not None
    assert found.max_ulp == steps


def test_zeros_of_both_signs_have_different_bits_and_differ_by_nothing(tmp_path: Path) -> None:
    found = stats(tmp_path, [1.0, 0.0], [1.0, -0.0])
    assert (found.num_changed, found.max_abs, found.max_ulp, found.relative_l2, found.cosine) == (1, 0.0, 0, 0.0, 1.0)
    assert found.largest_at == (1,)
    assert compare(tmp_path, torch.tensor([0.0]), torch.tensor([-0.0]), tolerance=0.0).is_close


def test_nan_is_counted_apart(tmp_path: Path) -> None:
    found = stats(tmp_path, [NAN, 3.0, NAN, 4.0, 0.0], [NAN, NAN, 7.0, 5.0, 0.0])
    assert (found.num_changed, found.nan_changed, found.inf_changed) == (3, 2, 0)
    assert (found.nan_in_a, found.nan_in_b) == (1, 1)
    assert found.max_abs == 1.0
    assert found.relative_l2 == 0.25  # |5 - 4| / |(4, 0)|: what is NaN on a side does not count
    assert found.cosine == 1.0
    assert found.max_ulp == 1 << 21  # 4.0 and 5.0
    assert found.largest_at == (3,)


def test_nan_with_other_bits(tmp_path: Path) -> None:
    a, b = from_bits([0x7FC00000], torch.float32, "i4"), from_bits([0x7FC00001], torch.float32, "i4")
    found = compare(tmp_path, a, b, tolerance=0.0)
    assert found.stats is not None
    assert (found.stats.num_changed, found.stats.nan_changed, found.stats.num_outside) == (1, 1, 0)
    assert (found.stats.nan_in_a, found.stats.nan_in_b) == (1, 1)
    assert found.is_close


def test_only_nan(tmp_path: Path) -> None:
    found = stats(tmp_path, [1.0, 2.0], [1.0, NAN], tolerance=100.0)
    assert (found.max_abs, found.relative_l2, found.max_ulp, found.num_outside) == (0.0, 0.0, 0, 1)
    assert (found.largest_at, found.largest_a, found.largest_b) == ((1,), 2.0, "nan")


def test_infinities(tmp_path: Path) -> None:
    found = stats(tmp_path, [INF, INF, 1.0, -INF, 3.0], [INF, -INF, INF, 2.0, 4.0], tolerance=1.0)
    assert (found.num_changed, found.inf_changed, found.nan_changed) == (4, 3, 0)
    assert (found.max_abs, found.num_outside) == (1.0, 3)
    assert found.relative_l2 == pytest.approx(1 / 3)


def test_all_zero_on_side_a(tmp_path: Path) -> None:
    found = stats(tmp_path, [0.0, 0.0], [0.0, 1.0])
    assert (found.max_abs, found.relative_l2, found.cosine) == (1.0, None, None)


def test_squares_beyond_every_float64(tmp_path: Path) -> None:
    found = stats(tmp_path, [3e300, 4e300], [3e300, 3e300], torch.float64)
    assert found.max_abs == pytest.approx(1e300)
    assert found.relative_l2 == pytest.approx(0.2, rel=1e-12)
    assert found.cosine == pytest.approx(21e0 / (5 * math.sqrt(18)), rel=1e-12)
    tiny = stats(tmp_path, [3e-300, 4e-300], [3e-300, 3e-300], torch.float64)
    assert tiny.relative_l2 == pytest.approx(0.2, rel=1e-12)
    assert stats(tmp_path, [1.5e308], [-1.5e308], torch.float64).max_abs == "inf"


@pytest.mark.parametrize(
    ("dtype", "a", "b", "largest"),
    [
        (torch.int64, [2**62, 0], [2**62 + 1, 0], 1),
        (torch.int64, [-(2**63), 5], [2**63 - 1, 5], 2**64 - 1),
        (torch.int64, [2**63 - 1, 5], [-(2**63), 5], 2**64 - 1),
        (torch.int32, [-(2**31)], [2**31 - 1], 2**32 - 1),
        (torch.int8, [-128, 1], [127, 1], 255),
        (torch.uint8, [0, 1], [255, 1], 255),
        (torch.bool, [True, False], [True, True], 1),
        (torch.complex64, [0j, 1 + 1j], [3 + 4j, 1 + 1j], 5),
        (torch.complex128, [0j, 1 + 1j], [3 + 4j, 1 + 1j], 5),
    ],
)
def test_other_kinds_of_numbers(dtype: torch.dtype, a: list[Any], b: list[Any], largest: int, tmp_path: Path) -> None:
    if dtype is torch.complex128:  # which safetensors does not have
        paths = []
        for name, values in (("a", a), ("b", b)):
            paths.append(tmp_path / f"{name}.pt")
            torch.save({"w": torch.tensor(values, dtype=dtype)}, paths[-1])
        with opened(*paths) as (pair, first, second):
            found = Comparer(first, second, meter=Meter(0, None)).run(pair).stats
    else:
        found = stats(tmp_path, a, b, dtype)
    assert found is not None
    assert found.max_abs == largest
    assert found.max_ulp is None


def test_complex_values(tmp_path: Path) -> None:
    found = stats(tmp_path, [3 + 4j, 0j], [3 - 4j, 0j], torch.complex64)
    assert (found.max_abs, found.relative_l2) == (8.0, 1.6)
    assert found.cosine == pytest.approx((9 - 16) / 25)
    assert (found.largest_a, found.largest_b) == ("(3+4j)", "(3-4j)")


def test_the_norm_counts_what_is_equal_before_the_first_difference(tmp_path: Path) -> None:
    a = torch.arange(700_000, dtype=torch.float32).reshape(7, 100_000) / 1000
    b = a.clone()
    b[6, 99_999] += 8.0
    found = compare(tmp_path, a, b)
    assert found.stats is not None
    norm = float(np.linalg.norm(a.numpy().astype(np.float64)))
    assert found.stats.relative_l2 == pytest.approx(8.0 / norm, rel=1e-9)
    other = float(np.linalg.norm(b.numpy().astype(np.float64)))
    product = float(np.vdot(a.numpy().astype(np.float64), b.numpy().astype(np.float64)))
    assert found.stats.cosine == pytest.approx(product / norm / other, rel=1e-12)
    assert found.stats.largest_at == (6, 99_999)
    whole = 2 * a.numel() * 4
    assert whole < found.read_bytes < 1.5 * whole, "A is read once more up to the first difference"


def test_only_as_much_is_read_as_must_be_known(tmp_path: Path) -> None:
    a = torch.zeros(4 << 20)
    b = a.clone()
    b[0] = 1.0
    assert compare(tmp_path, a, b, statistics=False) == Comparison(is_equal=False, read_bytes=2 << 20)
    inside = compare(tmp_path, a, b, statistics=False, tolerance=1.0)
    assert (inside.is_close, inside.stats, inside.read_bytes) == (True, None, 32 << 20)
    outside = compare(tmp_path, a, b, statistics=False, tolerance=0.5)
    assert (outside.is_close, outside.read_bytes) == (False, 2 << 20)
    assert compare(tmp_path, a, b.double(), statistics=False).read_bytes == 0


@pytest.mark.parametrize(
    ("tolerance", "rtol", "outside"),
    [
        (0.5, 0.0, 1),
        (0.49, 0.0, 2),
        (1.0, 0.0, 0),
        (0.0, 0.25, 1),
        (0.0, 0.2, 2),
        (0.0, 0.5, 0),
        (0.25, 0.25, 0),
        (0.0, 0.0, 2),
    ],
)
def test_tolerance(tolerance: float, rtol: float, outside: int, tmp_path: Path) -> None:
    a, b = torch.tensor([1.0, 4.0, 8.0]), torch.tensor([1.5, 5.0, 8.0])  # 0.5 is half of 1, 1 a quarter of 4
    found = compare(tmp_path, a, b, tolerance=tolerance, rtol=rtol)
    assert found.stats is not None
    assert found.stats.num_outside == outside
    assert found.is_close is (outside == 0)
    assert not found.is_equal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_a_rounded_to_another_dtype_is_recognised(dtype: torch.dtype, tmp_path: Path) -> None:
    a = torch.tensor([1.0 + 2.0**-20, 1 / 3, 100.0, NAN, -0.0])
    found = compare(tmp_path, a, a.to(dtype))
    assert found.cast == ("both" if dtype is torch.float64 else "a-to-b")
    back = compare(tmp_path, a.to(dtype), a)
    assert back.cast == ("both" if dtype is torch.float64 else "b-to-a")
    off = a.to(dtype)
    off[2] = 256.0
    neither = compare(tmp_path, a, off)
    assert neither.cast is None
    assert neither.stats is not None
    assert neither.stats.max_abs == 156.0


def test_values_of_another_dtype(tmp_path: Path) -> None:
    found = compare(tmp_path, torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0], dtype=torch.bfloat16))
    assert (found.is_equal, found.cast) == (True, "both")
    a, b = torch.tensor([1.0, 1.0 + 2.0**-8]), torch.tensor([1.0, 1.0], dtype=torch.bfloat16)
    found = compare(tmp_path, a, b, tolerance=2.0**-8)
    assert found.stats is not None
    assert (found.stats.num_changed, found.stats.max_abs, found.stats.max_ulp) == (1, 2.0**-8, None)
    assert (found.is_equal, found.is_close, found.cast) == (False, True, "a-to-b")
    integers = compare(tmp_path, torch.tensor([1, 2]), torch.tensor([1.0, 2.5]))
    assert integers.stats is not None
    assert (integers.stats.max_abs, integers.cast) == (0.5, None)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    found = stats(tmp_path, 2.0, 3.0)
    assert (found.largest_at, found.share_changed, found.relative_l2) == ((), 1.0, 0.5)
    assert compare(tmp_path, torch.empty(0, 3), torch.empty(0, 3)) == Comparison(is_equal=True)


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    seen: list[Progress] = []
    a = torch.zeros(1 << 20)
    b = a.clone()
    b[-1] = 1.0
    for name, tensor in (("a", a), ("b", b)):
        save_file({"w": tensor}, tmp_path / f"{name}.safetensors")
    with opened(tmp_path / "a.safetensors", tmp_path / "b.safetensors") as (pair, first, second):
        for statistics in (True, False):
            Comparer(first, second, meter=Meter(pair.num_bytes, seen.append), statistics=statistics).run(pair)
            assert seen[-1].done_bytes == seen[-1].total_bytes == 8 << 20
            seen.clear()


# ------------------------------------------------------------------------------------------------ without reading

WEIGHT = torch.arange(48.0).reshape(8, 6)


def settled(a: Path, b: Path, **options: Any) -> Settled | None:
    with opened(a, b) as (pair, first, second):
        return settle(pair, first, second, **options)


def dcp(folder: Path, tensor: Tensor | Sharded) -> Path:
    return save_dcp(folder, {"model": {"w": tensor}}, ranks=4)


@pytest.mark.parametrize(("first", "second"), [(2, 3), (1, 4), (3, 3), (2, 4)])
def test_checksums_of_row_blocks_are_put_together(first: int, second: int, tmp_path: Path) -> None:
    a = dcp(tmp_path / "a", rows(WEIGHT, first))
    assert settled(a, dcp(tmp_path / "b", rows(WEIGHT.clone(), second))) is Settled.CHECKSUMS
    other = WEIGHT.clone()
    other[7, 5] += 1
    assert settled(a, dcp(tmp_path / "c", rows(other, second))) is Settled.DIFFERENT
    assert settled(a, tmp_path / "b", trust_crc=False) is None


def test_checksums_of_other_boxes(tmp_path: Path) -> None:
    columns = dcp(tmp_path / "columns", grid(WEIGHT, [[], [2, 4]], ranks=3))
    assert settled(columns, dcp(tmp_path / "rows", rows(WEIGHT, 2))) is None
    assert settled(columns, dcp(tmp_path / "again", grid(WEIGHT.clone(), [[], [2, 4]], ranks=2))) is Settled.CHECKSUMS
    turned = dcp(tmp_path / "turned", Sharded(WEIGHT, [((0, 0), (8, 6))], [0], by_columns=True))
    assert settled(turned, dcp(tmp_path / "whole", rows(WEIGHT, 1))) is None


def test_checksums_of_shards_in_any_order(tmp_path: Path) -> None:
    upside_down = Sharded(WEIGHT, [((5, 0), (3, 6)), ((0, 0), (5, 6))], [0, 1])
    assert settled(dcp(tmp_path / "a", upside_down), dcp(tmp_path / "b", rows(WEIGHT, 2))) is Settled.CHECKSUMS


def test_no_checksums(tmp_path: Path) -> None:
    save_file({"w": WEIGHT}, tmp_path / "x.safetensors")
    assert settled(dcp(tmp_path / "a", rows(WEIGHT, 2)), tmp_path / "x.safetensors") is None


def test_the_same_file_under_another_name(tmp_path: Path) -> None:
    save_file({"w": WEIGHT}, tmp_path / "x.safetensors")
    os.link(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    assert settled(tmp_path / "x.safetensors", tmp_path / "y.safetensors", trust_crc=False) is Settled.SAME_FILE
    save_file({"w": WEIGHT}, tmp_path / "z.safetensors")
    assert settled(tmp_path / "x.safetensors", tmp_path / "z.safetensors") is None


def test_other_dtypes_are_never_settled(tmp_path: Path) -> None:
    a, b = dcp(tmp_path / "a", rows(torch.zeros(4), 2)), dcp(tmp_path / "b", rows(torch.zeros(4, dtype=torch.int32), 2))
    assert settled(a, b) is None


def test_small_tensors_go_to_threads_together_and_large_ones_alone(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(8)}, tmp_path / "x.safetensors")
    with opened(tmp_path / "x.safetensors", tmp_path / "x.safetensors") as (small, _, _):
        large = replace(small, a=replace(small.a, shape=(1 << 20,)), b=replace(small.b, shape=(1 << 20,)))
        pairs = [*[small] * 300, large, large, small]
        found = list(batches(pairs))
    assert [len(batch) for batch in found] == [256, 45, 1, 1]
    assert [pair for batch in found for pair in batch] == pairs


def test_where_elements_lie_is_found_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    resolve = Sources.resolve

    def note(sources: Sources, tensor: TensorEntry, chunk: Chunk) -> Located:
        asked.append(chunk.file)
        return resolve(sources, tensor, chunk)

    monkeypatch.setattr(Sources, "resolve", note)
    a, b = dcp(tmp_path / "a", rows(WEIGHT, 2)), dcp(tmp_path / "b", rows(WEIGHT + 1, 2))
    with opened(a, b) as (pair, first, second):
        assert settle(pair, first, second) is Settled.DIFFERENT
        Comparer(first, second, meter=Meter(0, None)).run(pair)
    assert sorted(asked) == sorted(["__0_0.distcp", "__1_0.distcp"] * 2)


# ------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("statistics", [True, False])
def test_damage_is_never_passed_off_as_a_difference(statistics: bool, tmp_path: Path) -> None:
    """Also where the first difference is enough, and where the record's checksum covers more than the tensor."""
    whole = dcp(tmp_path / "whole", rows(torch.zeros(2 << 20), 1))
    shutil.copytree(whole, tmp_path / "bad")
    flip(tmp_path / "bad/__0_0.distcp")
    base = torch.arange(64.0)
    for name in ("x", "y"):
        torch.save({"w": base[:8]}, tmp_path / f"{name}.pt")
    data = bytearray((tmp_path / "y.pt").read_bytes())
    data[data.index(base[:8].numpy().tobytes()) + 3] ^= 1
    (tmp_path / "y.pt").write_bytes(data)
    for good, bad in ((whole, tmp_path / "bad"), (tmp_path / "x.pt", tmp_path / "y.pt")):
        for swap in (False, True):
            with opened(*((bad, good) if swap else (good, bad))) as (pair, first, second):
                comparer = Comparer(first, second, meter=Meter(0, None), statistics=statistics)
                with pytest.raises(ChecksumMismatch, match=r"^A " if swap else r"^B "):
                    comparer.run(pair)


def test_a_storage_of_many_tensors_is_verified_once(tmp_path: Path) -> None:
    for name, base in (("x", torch.zeros(64)), ("y", torch.ones(64))):
        torch.save({f"w{i}": base[i : i + 1] for i in range(64)}, tmp_path / f"{name}.pt")
    parts = [read_checkpoint(tmp_path / f"{name}.pt").parts[0] for name in ("x", "y")]
    with Sources(tmp_path) as sources:
        sides = [Side(label=label, path=label, sources=sources) for label in "AB"]
        pairs = [TensorPair(name=name, a=parts[0].tensors[name], b=parts[1].tensors[name]) for name in parts[0].tensors]
        found = Comparer(*sides, meter=Meter(0, None)).run_all(pairs, jobs=1)
    assert len(found) == 64
    assert sum(item.read_bytes for item in found) == 64 * 8 + 2 * 64 * 4


def test_damage_is_told_with_its_side(tmp_path: Path) -> None:
    a, b = dcp(tmp_path / "a", rows(WEIGHT, 2)), dcp(tmp_path / "b", rows(WEIGHT, 2))
    flip(b / "__1_0.distcp")
    with opened(a, b) as (pair, first, second):
        comparer = Comparer(first, second, meter=Meter(0, None))
        with pytest.raises(ChecksumMismatch, match=r"^B \(`.*/b`\): `model.w` is damaged") as caught:
            comparer.run_all([pair], jobs=2)
        assert caught.value.hint == f"fsdp-ckpt validate {b} --deep"
    with opened(a, b) as (pair, first, second):
        half = replace(pair.a, shape=(4, 6), chunks=pair.a.chunks[:1])  # what the first rank wrote
        good = TensorPair(name="good", a=half, b=half)
        assert Comparer(first, second, meter=Meter(0, None)).run(good).is_equal
        many = [*[good] * 50, pair, *[good] * 50]
        with pytest.raises(ChecksumMismatch, match=r"^B "):  # not what the other threads were stopped by
            Comparer(first, second, meter=Meter(0, None)).run_all(many, jobs=4)
    (a / "__0_0.distcp").unlink()
    with opened(tmp_path / "b", tmp_path / "b") as (pair, _, second):
        gone = Side(label="A", path="a", sources=Sources(a))
        with pytest.raises(IncompleteCheckpoint, match=r"^A \(`a`\): __0_0.distcp is missing"):
            settle(pair, gone, second)
