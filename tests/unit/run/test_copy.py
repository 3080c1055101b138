"""Bytes on their way from checkpoint to result: blocks, bands, tasks, checksums. The judge is the unsharded tensor."""

from __future__ import annotations

import os
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt import merge
from fsdp_ckpt.catalog import DTYPES, Chunk, TensorEntry
from fsdp_ckpt.errors import ChecksumMismatch, FsdpCkptError
from fsdp_ckpt.plan.boxes import check_coverage
from fsdp_ckpt.run import checksum
from fsdp_ckpt.run.progress import Meter, Progress
from fsdp_ckpt.run.tasks import cut_tasks
from tests.build import Sharded, assert_same, full_bits, grid, read_bin, read_safetensors, rows, save_dcp

BLOCK = 1 << 20


def large() -> dict[str, Sharded]:
    """Tensors around the sizes at which blocks, bands and tasks are cut."""
    wide = torch.arange(1200 * 1100, dtype=torch.int32).reshape(1200, 1100)  # 5 MiB
    floats = torch.randn(1200, 1100, generator=torch.Generator().manual_seed(1))
    longest_row = torch.arange(2 * (BLOCK // 4 + 77), dtype=torch.int32).reshape(2, -1)  # a row is more than a block
    huge = torch.arange(9_000_003, dtype=torch.int32)  # more than 32 MiB, so that it becomes several tasks
    return {
        "rows": rows(wide, 3),
        "columns": grid(wide, [[], [333, 800]], ranks=3),
        "grid": grid(wide, [[500], [7]], ranks=3),
        "by columns": Sharded(wide, rows(wide, 2).boxes, [0, 2], by_columns=True),
        "floats": rows(floats, 3),
        "float columns": grid(floats, [[], [1099]], ranks=3),
        "longest row": grid(longest_row, [[], [5]], ranks=3),
        "huge": rows(huge, 3),
        "one block": rows(torch.arange(BLOCK // 4, dtype=torch.int32), 1),
        "one block and a byte": rows((torch.arange(BLOCK + 1) % 251).to(torch.uint8), 2),
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    state = large()
    folder = save_dcp(tmp_path_factory.mktemp("copy") / "ckpt", {"model": state}, ranks=3)
    return folder, {key: sharded.tensor for key, sharded in state.items()}


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_tensors_of_many_blocks(
    kind: Any, jobs: int, checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, tensors = checkpoint
    seen: list[Progress] = []
    report = merge(folder, tmp_path / "out", format=kind, jobs=jobs, max_shard_size="20MB", listener=seen.append)
    assert_same((read_bin if kind == "bin" else read_safetensors)(tmp_path / "out"), tensors)
    total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    assert report.verified_bytes == report.tensor_bytes == total
    done = [progress.done_bytes for progress in seen]
    assert done == sorted(done)
    assert (done[-1], {progress.total_bytes for progress in seen}) == (total, {total})


def test_conversions_of_many_blocks(checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = checkpoint
    merge(folder, tmp_path / "out", dtype="bfloat16", include=["float*"])
    found = read_safetensors(tmp_path / "out")
    assert_same(found, {key: tensors[key].to(torch.bfloat16) for key in ("floats", "float columns")})


def test_without_checksums_the_bytes_are_the_same(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, tensors = checkpoint
    report = merge(folder, tmp_path / "out", verify=False, fsync=False)
    assert_same(read_safetensors(tmp_path / "out"), tensors)
    assert report.verified_bytes == 0


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {
        "w": torch.arange(60.0).reshape(12, 5),
        "columns": torch.arange(24, dtype=torch.int16).reshape(4, 6),
        "flipped": torch.arange(15.0).reshape(3, 5),
    }
    state = {
        "w": rows(tensors["w"], 2),
        "columns": grid(tensors["columns"], [[], [2]], ranks=2),
        "flipped": Sharded(tensors["flipped"], [((0, 0), (3, 5))], [1], by_columns=True),
    }
    return save_dcp(tmp_path / "ckpt", {"model": state}), tensors


def test_every_flipped_bit_is_noticed_or_does_no_harm(
    small: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, tensors = small
    refused = harmless = 0
    for path in sorted(folder.glob("*.distcp")):
        sound = path.read_bytes()
        for position in range(len(sound) % 19, len(sound), 19):
            path.write_bytes(sound[:position] + bytes([sound[position] ^ (1 << position % 8)]) + sound[position + 1 :])
            try:
                merge(folder, tmp_path / "out", overwrite=True, fsync=False, jobs=1)
            except FsdpCkptError:
                refused += 1
            else:
                found = read_safetensors(tmp_path / "out")
                wrong = [key for key in tensors if full_bits(found[key]) != full_bits(tensors[key])]
                assert not wrong, f"byte {position} of {path.name}, in {sound[max(position - 9, 0) : position + 9]!r}"
                harmless += 1
        path.write_bytes(sound)
    assert refused > 40
    assert harmless > 40, "padding, and what torch writes for itself"


@pytest.mark.parametrize("key", ["w", "columns", "flipped"])
def test_damage_leaves_nothing_behind(key: str, small: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = small
    path = folder / "__1_0.distcp"
    stored = {"w": tensors["w"][6:], "columns": tensors["columns"][:, 2:], "flipped": tensors["flipped"].t()}
    needle = full_bits(stored[key])
    data = bytearray(path.read_bytes())
    assert data.count(needle) == 1
    data[data.index(needle) + 5] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match=f"`model.{key}` is damaged"):
        merge(folder, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["ckpt"]
    merge(folder, tmp_path / "out", verify=False)
    assert not torch.equal(read_safetensors(tmp_path / "out")[key], tensors[key])


def entry(shape: tuple[int, ...], boxes: list[Any], dtype: str = "float32") -> TensorEntry:
    chunks = [Chunk(offsets, lengths, "f", 0, 1) for offsets, lengths in boxes]
    return TensorEntry(key="w", name="w", dtype=DTYPES[dtype], shape=shape, chunks=chunks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "boxes", "count"),
    [
        ((6,), [((0,), (6,))], 1),
        ((6, 2), [((0, 0), (3, 2)), ((3, 0), (3, 2))], 1),  # small: together
        ((1 << 24, 2), [((1 << 23, 0), (1 << 23, 2)), ((0, 0), (1 << 23, 2))], 2),  # large rows: one by one
        ((1 << 24, 2), [((0, 0), (1 << 24, 1)), ((0, 1), (1 << 24, 1))], 1),  # large columns: together
        ((), [((), ())], 1),
        ((0, 3), [], 0),
        ((1,), [((0,), (1,)), ((1,), (0,))], 1),
    ],
)
def test_tasks(shape: tuple[int, ...], boxes: list[Any], count: int, dtype: str) -> None:
    tensor, target = entry(shape, boxes), DTYPES[dtype]
    tasks = list(cut_tasks(tensor, target, position=4096))
    assert len(tasks) == count
    assert check_coverage(shape, [task.box for task in tasks]).is_exact
    position = 4096
    for task in tasks:
        assert task.position == position, "one unbroken run after the other"
        position += task.num_bytes
        assert {chunk.lengths for chunk in task.chunks} <= {lengths for _, lengths in boxes}
    assert position == 4096 + tensor.numel * target.itemsize


def test_meters_add_up_over_threads() -> None:
    seen: list[int] = []
    meter = Meter(80_000, lambda progress: seen.append(progress.done_bytes))

    def work() -> None:
        for _ in range(10_000):
            meter.add(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.done_bytes == 80_000
    assert seen[-1] == 80_000, "the last word is that everything is there"
    assert seen == sorted(seen)
    Meter(5, None).add(5)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("can_combine", [False, True])
def test_checksums_of_the_archive_are_those_of_its_bytes(
    can_combine: bool,
    verify: bool,
    checkpoint: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not can_combine:  # as where there is no wheel of isal
        monkeypatch.setattr(checksum, "_combine", None)
    merge(checkpoint[0], tmp_path / "out", format="bin", verify=verify, fsync=False, dtype="float16")
    with zipfile.ZipFile(tmp_path / "out" / "pytorch_model.bin") as judge:
        assert judge.testzip() is None
        crcs = {info.CRC for info in judge.infolist() if "/data/" in info.filename}
    halved = {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in checkpoint[1].items()}
    assert crcs == {zlib.crc32(full_bits(tensor)) for tensor in halved.values()}
