"""Weights with an adapter folded in. The judge is NumPy in float64, rounded once."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_ckpt.catalog import DTYPES, Chunk, TensorEntry
from fsdp_ckpt.errors import ChecksumMismatch, NotEnoughSpace
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.plan.output import LowRank, OutputTensor, Window
from fsdp_ckpt.run import fold
from fsdp_ckpt.run.copy import CancelledError, Copier
from fsdp_ckpt.run.fold import fold_tasks
from fsdp_ckpt.run.progress import Meter, Progress
from fsdp_ckpt.run.sources import Sources
from tests.build import Sharded, grid, rows, save_dcp
from tests.unit.carried import carry_out, totals

SHAPE = (61, 47)
RANK = 3
SCALE = 1.75


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def entries(folder: Path) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in read_checkpoint(folder).parts[0].tensors.values()}


def folded(found: dict[str, TensorEntry], dtype: str | None = None, *, turned: bool = False) -> OutputTensor:
    weight = found["w"]
    addition = LowRank(up=found["up"], down=found["down"], scale=SCALE, transposed=turned)
    return OutputTensor(
        name="w", dtype=weight.dtype if dtype is None else DTYPES[dtype], source=weight, addition=addition
    )  # fmt: skip


def judge(
    weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype, *, turned: bool = False
) -> tuple[torch.Tensor, float]:
    """Return the sum in float64, and how far from it a number may be that was summed in float32 and rounded once."""
    product = up.double().numpy() @ down.double().numpy()
    total = weight.double().numpy() + SCALE * (product.T if turned else product)
    step = float(torch.finfo(dtype).eps) if dtype is not torch.float64 else 1e-14
    largest = float(np.abs(weight.double().numpy()).max() + SCALE * np.abs(product).max())
    rounding = 0.5 * step if dtype is not torch.float64 else step
    return torch.from_numpy(total), largest * (rounding + (8 * 2**-24 if dtype is not torch.float64 else 0))


def cut(weight: torch.Tensor, how: str) -> Sharded:
    match how:
        case "rows":
            return rows(weight, 4)
        case "columns":
            return grid(weight, [[], [5, 40]], ranks=3)
        case "grid":
            return grid(weight, [[7, 30], [11]], ranks=3)
        case "strided":
            return Sharded(weight, rows(weight, 2).boxes, [0, 1], by_columns=True)
        case _:
            return rows(weight, 1)


@pytest.fixture(params=[1 << 20, 300, 16])
def band(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "_BAND_BYTES", request.param)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("how", ["rows", "columns", "grid", "strided", "whole"])
@pytest.mark.usefixtures("band")
def test_sums(how: str, dtype: torch.dtype, turned: bool, tmp_path: Path) -> None:
    out, into = SHAPE[::-1] if turned else SHAPE
    weight, up, down = random(*SHAPE, dtype=dtype), random(out, RANK, seed=1), random(RANK, into, seed=2)
    state = {"w": cut(weight, how), "up": rows(up, 2), "down": grid(down, [[], [4]], ranks=2)}
    found = entries(save_dcp(tmp_path / "ckpt", {"model": state}, ranks=4))
    values, results = carry_out([folded(found, turned=turned)], tmp_path / "ckpt", tmp_path)
    total, tolerance = judge(weight, up, down, dtype, turned=turned)
    assert values["w"].dtype is dtype
    assert (values["w"].double() - total).abs().max() <= tolerance
    assert (total - weight.double()).abs().max() > 1000 * tolerance or dtype in (torch.bfloat16, torch.float16)
    verified = sum(tensor.numel() * tensor.dtype.itemsize for tensor in (weight, up, down))
    assert totals(results) == (verified, 0)


@pytest.mark.parametrize("factors", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("stored", "written"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_the_sum_is_rounded_once(stored: str, written: str, factors: torch.dtype, tmp_path: Path) -> None:
    # Whole numbers: float32 has every sum exactly, so that nothing but the last rounding differs.
    generator = torch.Generator().manual_seed(5)
    weight = torch.randint(-99, 99, SHAPE, generator=generator).to(getattr(torch, stored))
    up, down = (torch.randint(-9, 9, s, generator=generator).to(factors) for s in ((61, RANK), (RANK, 47)))
    state = {"w": rows(weight, 3), "up": up, "down": down}
    found = entries(save_dcp(tmp_path / "ckpt", {"model": state}, ranks=3))
    values, _ = carry_out([folded(found, written)], tmp_path / "ckpt", tmp_path)
    exact = weight.double() + SCALE * (up.double() @ down.double())
    assert torch.equal(values["w"], exact.to(getattr(torch, written)))


def test_boxes_and_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "_BAND_BYTES", 200)
    weight, up, down = random(*SHAPE), random(61, RANK, seed=1), random(RANK, 47, seed=2)
    found = entries(save_dcp(tmp_path / "ckpt", {"model": {"w": rows(weight, 3), "up": up, "down": down}}, ranks=3))
    tensor = folded(found)
    expected = carry_out([tensor], tmp_path / "ckpt", tmp_path)[0]["w"]
    with Sources(tmp_path / "ckpt") as sources:
        copier = Copier(sources, Meter(0, None))
        for box in [((0, 0), (61, 47)), ((20, 0), (22, 47)), ((3, 9), (50, 20)), ((60, 46), (1, 1)), ((5, 2), (1, 40))]:
            file = tmp_path / "box"
            file.write_bytes(bytes(box[1][0] * box[1][1] * 4))
            fd = os.open(file, os.O_RDWR)
            for task in fold_tasks(tensor, box, position=0):
                task.carry_out(copier, fd)
            os.close(fd)
            (row, column), (height, width) = box
            part = np.frombuffer(file.read_bytes(), np.float32).reshape(box[1])
            # Which order BLAS sums in depends on the shape of the block.
            np.testing.assert_allclose(part, expected[row : row + height, column : column + width], rtol=0, atol=1e-5)
    window = replace(tensor, window=Window(offsets=(4, 0), lengths=(9, 47), shape=(9, 47)))
    values, _ = carry_out([window], tmp_path / "ckpt", tmp_path)
    torch.testing.assert_close(values["w"], expected[4:13], rtol=0, atol=1e-5)


def test_a_record_is_compared_once_for_all_its_boxes(tmp_path: Path) -> None:
    """As many ranks as a matrix has rows would read it as often otherwise."""
    weight, up, down = random(*SHAPE), random(61, RANK, seed=1), random(RANK, 47, seed=2)
    found = entries(save_dcp(tmp_path / "ckpt", {"model": {"w": rows(weight, 1), "up": up, "down": down}}, ranks=1))
    tensor = folded(found)
    fd = os.open(tmp_path / "box", os.O_RDWR | os.O_CREAT)
    with Sources(tmp_path / "ckpt") as sources:
        copier = Copier(sources, Meter(0, None))
        verified = [
            task.carry_out(copier, fd).verified_bytes
            for row in range(61)
            for task in fold_tasks(tensor, ((row, 0), (1, 47)), position=row * 47 * 4)
        ]
    os.close(fd)
    factors = (up.numel() + down.numel()) * 4
    assert verified == [weight.numel() * 4 + factors, *[factors] * 60]


@pytest.mark.parametrize("name", ["w", "up", "down"])
@pytest.mark.parametrize("how", ["rows", "columns", "strided"])
def test_damage_is_noticed(how: str, name: str, tmp_path: Path) -> None:
    weight, up, down = random(*SHAPE), random(61, RANK, seed=1), random(RANK, 47, seed=2)
    state = {"w": cut(weight, how), "up": rows(up, 2), "down": rows(down, 2)}
    found = entries(save_dcp(tmp_path / "ckpt", {"model": state}, ranks=4))
    flip(tmp_path / "ckpt", found[name].chunks[-1])
    with pytest.raises(ChecksumMismatch, match=f"`(model\\.)?{name}` is damaged"):
        carry_out([folded(found)], tmp_path / "ckpt", tmp_path)
    carry_out([folded(found)], tmp_path / "ckpt", tmp_path, verify=False)


def flip(root: Path, chunk: Chunk) -> None:
    path = root / chunk.file
    data = bytearray(path.read_bytes())
    with Sources(root) as sources:
        entry = TensorEntry(key="x", name="x", dtype=DTYPES["float32"], shape=chunk.lengths, chunks=(chunk,))
        _, raw = sources.resolve(entry, chunk)
    data[raw.start + 5] ^= 0x40
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["w", "up"])
def test_a_replica_takes_the_place_of_a_damaged_shard(name: str, tmp_path: Path) -> None:
    weight, up, down = random(*SHAPE), random(61, RANK, seed=1), random(RANK, 47, seed=2)
    state = {"w": rows(weight, 2), "up": rows(up, 2), "down": rows(down, 1)}
    root = tmp_path / "ckpt"
    for copy in ("a", "b"):
        save_dcp(root / copy, {"model": state})
    found = {
        key: replace(
            entry,
            chunks=[chunk._replace(file=f"a/{chunk.file}") for chunk in entry.chunks],
            replicas=[chunk._replace(file=f"b/{chunk.file}") for chunk in entry.chunks],
        )
        for key, entry in entries(root / "a").items()
    }
    expected, _ = carry_out([folded(found)], root, tmp_path)
    flip(root, found[name].chunks[1])
    values, results = carry_out([folded(found)], root, tmp_path)
    assert torch.equal(values["w"], expected["w"])
    (sentence,) = [sentence for result in results["w"] for sentence in result.recovered]
    assert f"the copy in {found[name].replicas[1].file} was used" in sentence
    assert totals(results)[0] >= sum(tensor.numel() * 4 for tensor in (weight, up, down))


def test_what_is_no_number_goes_its_way(tmp_path: Path) -> None:
    weight = random(*SHAPE)
    weight[3, 4], weight[5, 6] = float("nan"), float("inf")
    up, down = random(61, RANK, seed=1), random(RANK, 47, seed=2)
    found = entries(save_dcp(tmp_path / "ckpt", {"model": {"w": rows(weight, 2), "up": up, "down": down}}))
    values, _ = carry_out([folded(found)], tmp_path / "ckpt", tmp_path)
    assert torch.equal(values["w"].isnan(), weight.isnan())
    assert torch.equal(values["w"].isinf(), weight.isinf())


def test_records_without_checksum_are_counted(tmp_path: Path) -> None:
    weight, up, down = random(6, 4), random(6, RANK, seed=1), random(RANK, 4, seed=2)
    data = b"".join(tensor.numpy().tobytes() for tensor in (weight, up, down))
    (tmp_path / "f").write_bytes(data)
    starts = [0, *itertools.accumulate(tensor.numel() * 4 for tensor in (weight, up, down))]
    found = {
        name: TensorEntry(
            key=name,
            name=name,
            dtype=DTYPES["float32"],
            shape=tuple(tensor.shape),
            chunks=(Chunk((0, 0), tuple(tensor.shape), "f", start, start + tensor.numel() * 4),),
        )
        for name, tensor, start in zip(("w", "up", "down"), (weight, up, down), starts, strict=False)
    }
    (tmp_path / "out").mkdir()
    values, results = carry_out([folded(found)], tmp_path, tmp_path / "out")
    torch.testing.assert_close(values["w"], weight + SCALE * (up @ down))
    assert totals(results) == (0, 3)


def test_tasks_are_shared_and_tell_how_far_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_ckpt.run.tasks._SPLIT_BYTES", 0)
    monkeypatch.setattr(fold, "_BAND_BYTES", 500)
    weight, up, down = random(*SHAPE), random(61, RANK, seed=1), random(RANK, 47, seed=2)
    found = entries(save_dcp(tmp_path / "ckpt", {"model": {"w": rows(weight, 4), "up": up, "down": down}}, ranks=4))
    expected = weight + SCALE * (up @ down)
    seen: list[Progress] = []
    file = tmp_path / "out"
    file.write_bytes(bytes(weight.numel() * 4))
    fd = os.open(file, os.O_RDWR)
    with Sources(tmp_path / "ckpt") as sources:
        copier = Copier(sources, Meter(weight.numel() * 4, seen.append))
        tasks = list(fold_tasks(folded(found), None, position=0))
        assert [task.num_bytes // (47 * 4) for task in tasks] == [16, 16, 16, 13]
        assert [task.position // (47 * 4) for task in tasks] == [0, 16, 32, 48]
        told: list[Any] = []
        threads = [threading.Thread(target=lambda t=task: told.append(t.carry_out(copier, fd))) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(result.verified_bytes for result in told) == 4 * (weight.numel() + up.numel() + down.numel())
        assert seen[-1].done_bytes == weight.numel() * 4
        copier.stop.set()
        with pytest.raises(CancelledError):
            tasks[0].carry_out(copier, fd)
    os.close(fd)
    values = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32).reshape(SHAPE)
    torch.testing.assert_close(values, expected)


def test_an_adapter_too_large_for_memory_is_refused_before_it_is_read() -> None:
    def vast(name: str, *shape: int) -> TensorEntry:
        return TensorEntry(key=name, name=name, dtype=DTYPES["float32"], shape=shape, chunks=())

    tensor = folded(
        {"w": vast("w", 1 << 20, 1 << 20), "up": vast("up", 1 << 20, 256), "down": vast("down", 256, 1 << 20)}
    )
    with pytest.raises(NotEnoughSpace, match=r"takes 2\.15 GB"):
        next(fold_tasks(tensor, None, position=0))
