"""Values that are no tensors become archives that torch loads, copied as they are where they can be."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._extension import ZStandard

from fsdp_ckpt.catalog import ObjectEntry
from fsdp_ckpt.errors import FsdpCkptError, Incompatible
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.conversion.objects import archive_of, value_of
from fsdp_ckpt.plan.output import OutputObject
from fsdp_ckpt.store.local import LocalStore
from tests.build import save_dcp

VALUES: dict[str, Any] = {
    "number": 0.1,
    "text": "größe",
    "nothing": None,
    "pair": (0.9, 0.999),
    "nested": ({"a": [1, {"b": (2, 3)}], 4: {5, 6}}, [7]),
    "bytes": b"\x00\xff" * 999,
    "dtype": torch.bfloat16,
}


def entry_of(path: Path, key: str) -> tuple[ObjectEntry, LocalStore]:
    checkpoint = read_checkpoint(path)
    (entry,) = (part.objects[key] for part in checkpoint.parts if key in part.objects)
    return entry, LocalStore(checkpoint.roots)


def load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.parametrize("key", VALUES)
def test_records_are_copied_byte_by_byte(key: str, tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "x", {"w": torch.ones(2), key: VALUES[key]})
    entry, store = entry_of(path, key)
    data = archive_of(OutputObject(path=(key,), source=entry), store)
    assert data == (path / entry.file).read_bytes()[entry.start : entry.stop]
    assert load(data) == VALUES[key]


@pytest.mark.parametrize("key", VALUES)
def test_compressed_records_are_expanded(key: str, tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "x", {"w": torch.ones(2), key: VALUES[key]}, _extensions=[ZStandard()])
    entry, store = entry_of(path, key)
    assert load(archive_of(OutputObject(path=(key,), source=entry), store)) == VALUES[key]


@pytest.mark.parametrize("key", VALUES)
def test_values_of_a_file_are_encoded_anew(key: str, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, key: VALUES[key]}, tmp_path / "x.pt")
    checkpoint = read_checkpoint(tmp_path / "x.pt")
    (entry,) = (entry for part in checkpoint.parts for entry in part.objects.values())
    found = load(archive_of(OutputObject(path=(key,), source=entry), LocalStore(checkpoint.roots)))
    assert found == VALUES[key]
    assert type(found) is type(VALUES[key])


@pytest.mark.parametrize("legacy", [False, True])
def test_a_whole_file_is_a_value(legacy: bool, tmp_path: Path) -> None:
    torch.save({"seen": [1, 2]}, tmp_path / "custom.pkl", _use_new_zipfile_serialization=not legacy)
    size = (tmp_path / "custom.pkl").stat().st_size
    entry = ObjectEntry(key="custom", name="custom", file="custom.pkl", start=0, stop=size)
    value = OutputObject(path=("custom",), source=entry)
    assert load(archive_of(value, LocalStore(tmp_path))) == {"seen": [1, 2]}
    assert value_of(value, LocalStore(tmp_path)) == {"seen": [1, 2]}


@pytest.mark.parametrize("key", VALUES)
def test_values_of_our_own(key: str, tmp_path: Path) -> None:
    if key != "dtype":
        assert load(archive_of(OutputObject(path=(key,), value=VALUES[key]), LocalStore(tmp_path))) == VALUES[key]
    with pytest.raises(Incompatible, match=r"a\.b"):
        archive_of(OutputObject(path=("a", "b"), value=object()), LocalStore(tmp_path))


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "x", {"w": torch.ones(2), "text": "x" * 3000})
    entry, store = entry_of(path, "text")
    sound = (path / entry.file).read_bytes()
    refused = 0
    for place in range(entry.start, entry.stop, 7):
        (path / entry.file).write_bytes(sound[:place] + bytes([sound[place] ^ 0x41]) + sound[place + 1 :])
        try:
            data = archive_of(OutputObject(path=("text",), source=entry), store)
        except FsdpCkptError:
            refused += 1
            continue
        assert load(data) == "x" * 3000, place
    assert refused > 400, "every byte of the value counts"
