"""Items that are stored through zstd."""

from __future__ import annotations

import io
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from torch.distributed.checkpoint._extension import ZStandard

from fsdp_ckpt import merge, open_checkpoint
from fsdp_ckpt.catalog import DTYPES, Chunk, Encoding, TensorEntry
from fsdp_ckpt.errors import MalformedFile
from fsdp_ckpt.run.sources import Sources
from tests.build import assert_same, full_bits, grid, read_safetensors, rows, save_dcp

F32 = DTYPES["float32"]


def item(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def entry(data: bytes, shape: tuple[int, ...], folder: Path, encoding: Encoding) -> TensorEntry:
    (folder / "f").write_bytes(b"x" * 5 + data + b"y" * 7)
    chunk = Chunk((0,) * len(shape), shape, "f", 5, 5 + len(data), encoding)
    return TensorEntry(key="w", name="w", dtype=F32, shape=shape, chunks=(chunk,))


def test_raw_bytes_are_found_as_they_are(tmp_path: Path) -> None:
    tensor = entry(full_bits(torch.arange(6.0)), (6,), tmp_path, Encoding.RAW)
    with Sources(tmp_path) as sources:
        assert sources.resolve(tensor, tensor.chunks[0]) == (sources.store, tensor.chunks[0])


@pytest.mark.parametrize("encoding", [Encoding.TORCH_ZIP, Encoding.ZSTD_TORCH_ZIP])
def test_items(encoding: Encoding, tmp_path: Path) -> None:
    data = item(torch.arange(6.0))
    data = zstandard.compress(data) if encoding is Encoding.ZSTD_TORCH_ZIP else data
    tensor = entry(data, (6,), tmp_path, encoding)
    with Sources(tmp_path) as sources:
        for _ in range(2):
            store, raw = sources.resolve(tensor, tensor.chunks[0])
            assert raw.encoding is Encoding.RAW
            assert store.reader(raw.file)(raw.start, raw.stop - raw.start) == full_bits(torch.arange(6.0))
    assert os.listdir(tmp_path) == ["f"]


def test_what_torch_writes_through_zstd(tmp_path: Path) -> None:
    tensor = torch.arange(60_000.0).reshape(200, 300)
    state = {"model": {"rows": rows(tensor, 2), "columns": grid(tensor, [[], [100]], ranks=2)}}
    folder = save_dcp(tmp_path / "ckpt", state, _extensions=[ZStandard()])
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2 * tensor.numel() * 4
    before = set(os.listdir(tempfile.gettempdir()))
    merge(folder, tmp_path / "out")
    expected = {"rows": tensor, "columns": tensor}
    assert_same(read_safetensors(tmp_path / "out"), expected)
    with open_checkpoint(folder, framework="pt") as view:
        assert_same({key: view.get_tensor(key) for key in view}, expected)
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "out"]
    left = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in left if "fsdp-ckpt" in name]


@pytest.mark.parametrize("what", ["bomb", "no zstd", "cut off", "damaged", "empty"])
def test_streams_that_are_not_what_they_should_be(what: str, tmp_path: Path) -> None:
    sound = zstandard.compress(item(torch.arange(6.0)))
    data = {
        "bomb": zstandard.compress(bytes(300 << 20)),  # 300 MiB in 10 kB
        "no zstd": item(torch.arange(6.0)),
        "cut off": sound[: len(sound) // 2],
        "damaged": sound[:30] + b"\xff" * 30 + sound[60:],
        "empty": b"",
    }[what]
    tensor = entry(data, (6,), tmp_path, Encoding.ZSTD_TORCH_ZIP)
    with Sources(tmp_path, spill=tmp_path) as sources:
        with pytest.raises(MalformedFile):
            sources.resolve(tensor, tensor.chunks[0])
        spilled = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and path.name != "f")
        assert spilled < 10 << 20
    assert os.listdir(tmp_path) == ["f"]


def test_threads_that_want_one_item_expand_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = torch.arange(6.0)
    tensor = entry(zstandard.compress(item(wanted)), (6,), tmp_path, Encoding.ZSTD_TORCH_ZIP)
    decompress, calls = Sources._decompress, []

    def slow(*arguments: Any) -> int:
        calls.append(arguments)
        time.sleep(0.1)
        return decompress(*arguments)

    monkeypatch.setattr(Sources, "_decompress", slow)
    with Sources(tmp_path) as sources, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: sources.resolve(tensor, tensor.chunks[0]), range(4)))
        assert len(calls) == 1
        for store, raw in found:
            assert store.reader(raw.file)(raw.start, raw.stop - raw.start) == full_bits(wanted)
