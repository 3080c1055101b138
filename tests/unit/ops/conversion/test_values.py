"""Objects are read whole, wherever they lie; what cannot be read raises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._extension import ZStandard

from fsdp_ckpt.catalog import DTYPES, Chunk, Encoding, ObjectEntry, TensorEntry
from fsdp_ckpt.codec.pickles import Opaque, Record
from fsdp_ckpt.errors import CorruptCheckpoint, Incompatible, MalformedFile
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.conversion.values import expand, load_value, read_small_tensor
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.store.local import LocalStore
from tests.build import full_bits, save_dcp


class Mine:
    """A class that is on no list."""


VALUES: dict[str, Any] = {
    "long_list": list(range(1000)),
    "long_text": "x" * 5000,
    "deep": [[[[[[[[[[[[1]]]]]]]]]]]],
    "bytes": b"\x00\xff" * 400,
    "set": {1, 2, 3},
    "tuple": (0.9, 0.999),
    "none": None,
}


def entry_of(path: Path, key: str) -> tuple[ObjectEntry, LocalStore]:
    checkpoint = read_checkpoint(path)
    (entry,) = (part.objects[key] for part in checkpoint.parts if key in part.objects)
    return entry, LocalStore(checkpoint.root)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("key", VALUES)
def test_values_are_not_cut(key: str, compressed: bool, tmp_path: Path) -> None:
    options: Any = {"_extensions": [ZStandard()]} if compressed else {}
    path = save_dcp(tmp_path / "x", {"w": torch.ones(2), key: VALUES[key]}, **options)
    entry, store = entry_of(path, key)
    assert (entry.encoding is Encoding.ZSTD_TORCH_ZIP) == compressed
    found = load_value(entry, store)
    assert found == VALUES[key]
    assert type(found) is type(VALUES[key])


def test_values_of_files_that_were_decoded_with_the_index(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "x.pt")
    entry, store = entry_of(tmp_path / "x.pt", "epoch")
    assert entry.decoded
    assert load_value(entry, store) == 3


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_that_is_one_object(legacy: bool, tmp_path: Path) -> None:
    torch.save({"seen": [1, 2, 3]}, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    entry = ObjectEntry(key="x.pt", name="x.pt", file="x.pt", start=0, stop=(tmp_path / "x.pt").stat().st_size)
    assert load_value(entry, LocalStore(tmp_path)) == {"seen": [1, 2, 3]}


def test_records_stay_records_and_nothing_is_made_of_other_classes(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "x", {"w": torch.ones(2), "device": torch.device("cuda", 1), "mine": Mine()})
    device = load_value(*entry_of(path, "device"))
    assert (type(device), device.cls, device.args) == (Record, "torch.device", ("cuda", 1))
    mine = load_value(*entry_of(path, "mine"))
    assert type(mine) is Opaque
    assert mine.cls.endswith(".Mine")


def test_damage_raises(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "x", {"w": torch.ones(2), "o": [1, 2]})
    entry, store = entry_of(path, "o")
    with pytest.raises(CorruptCheckpoint):
        load_value(replace(entry, start=entry.start + 1), store)
    with pytest.raises(MalformedFile, match="zstd"):
        load_value(replace(entry, encoding=Encoding.ZSTD_TORCH_ZIP), store)
    with pytest.raises(MalformedFile, match=r"f: broken zstd stream"):
        expand(b"nothing of the kind", "f")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64"])
@pytest.mark.parametrize("compressed", [False, True])
def test_small_tensors_are_read_as_bytes(dtype: str, compressed: bool, tmp_path: Path) -> None:
    options: Any = {"_extensions": [ZStandard()]} if compressed else {}
    tensors = {"lr": torch.tensor(3, dtype=getattr(torch, dtype)), "betas": torch.ones(2, dtype=getattr(torch, dtype))}
    checkpoint = read_checkpoint(save_dcp(tmp_path / "x", tensors, **options))
    entries = {key: entry for part in checkpoint.parts for key, entry in part.tensors.items()}
    with Sources(checkpoint.roots) as sources:
        for key, tensor in tensors.items():
            assert read_small_tensor(entries[key], sources) == full_bits(tensor)


def test_large_tensors_are_no_numbers(tmp_path: Path) -> None:
    shape = (10**5,)
    chunk = Chunk(offsets=(0,), lengths=shape, file="f", start=0, stop=10**6)
    entry = TensorEntry(key="lr", name="lr", dtype=DTYPES["float32"], shape=shape, chunks=(chunk,))
    with Sources(tmp_path) as sources, pytest.raises(Incompatible, match=r"`lr` is a tensor of shape \(100000,\)"):
        read_small_tensor(entry, sources)


def test_a_stream_that_holds_more_than_is_read_is_refused_not_cut() -> None:
    import zstandard

    limit = 64 << 20
    for extra in (0, 1, 5 << 20):
        stream = zstandard.ZstdCompressor(level=1).compress(bytes(limit + extra))
        if not extra:
            assert len(expand(stream, "f (`x`)")) == limit
            continue
        with pytest.raises(Incompatible, match=r"f \(`x`\) .* more than 67\.1 MB when expanded"):
            expand(stream, "f (`x`)")
