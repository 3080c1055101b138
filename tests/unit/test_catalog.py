from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fsdp_ckpt.catalog import (
    DTYPES,
    Checkpoint,
    Chunk,
    Part,
    Problem,
    Role,
    Severity,
    TensorEntry,
    contiguous_strides,
)

SHAPES = [(), (1,), (5,), (2, 3), (2, 3, 4), (4, 1, 1, 2), (1, 1), (7, 1)]


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_are_those_of_torch(name: str) -> None:
    dtype, judge = DTYPES[name], getattr(torch, name)
    assert isinstance(judge, torch.dtype)
    assert dtype.name == name == str(dtype)
    assert dtype.itemsize == judge.itemsize
    is_small_float = name.startswith(("float8", "float4"))
    kind = (
        "float8" if is_small_float else "float" if judge.is_floating_point else "complex" if judge.is_complex else "int"
    )
    assert dtype.kind == ("bool" if judge is torch.bool else kind)


@pytest.mark.parametrize("name", DTYPES)
def test_safetensors_codes_are_those_of_its_library(name: str, tmp_path: Path) -> None:
    dtype = DTYPES[name]
    tensor = torch.zeros(16, dtype=torch.uint8).view(getattr(torch, name))
    if dtype.safetensors is None:
        with pytest.raises((KeyError, safetensors.SafetensorError)):
            safetensors.torch.save_file({"w": tensor}, tmp_path / "x.safetensors")
        return
    safetensors.torch.save_file({"w": tensor}, tmp_path / "x.safetensors")
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.get_slice("w").get_dtype() == dtype.safetensors
        assert file.get_slice("w").get_shape() == [tensor.numel() * dtype.pack]


def test_every_dtype_of_torch_that_can_be_saved_is_there() -> None:
    # bits*, int1-7, uint1-7 and quantized types cannot be written by DCP at all.
    names = {
        name for name, value in vars(torch).items() if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
    }
    unsaveable = {name for name in names if name.startswith(("bits", "q", "int", "uint"))} - {
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    }  # fmt: skip
    assert set(DTYPES) == names - unsaveable


@pytest.mark.parametrize("shape", SHAPES)
def test_contiguous_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4), (0, 0)])
def test_contiguous_strides_of_empty_tensors_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize("permuted", [False, True])
def test_part_of_a_chunk(permuted: bool) -> None:
    # The judge: a slice of a torch tensor that lies at byte 100 of a file.
    base = torch.arange(24, dtype=torch.int16)
    whole = base.reshape(4, 6).t() if permuted else base.reshape(6, 4)
    chunk = Chunk((10, 20), (6, 4), "f", 100, 148, strides=tuple(whole.stride()) if permuted else None, crc32=7)
    view = whole[2:5, 1:3]
    part = chunk.part((12, 21), (3, 2), int(view.storage_offset()), 2)
    assert part.start == 100 + 2 * view.storage_offset()
    last = view[-1, -1]
    assert part.stop == 100 + 2 * (last.storage_offset() + 1)
    assert part.strides == view.stride()
    assert part.crc32 == 7
    assert part.crc_range == (100, 148), "the checksum still covers the whole record"
    assert (part.offsets, part.lengths) == ((12, 21), (3, 2))


def test_a_part_that_is_row_major_says_so() -> None:
    chunk = Chunk((0, 0), (6, 4), "f", 0, 48)
    assert chunk.part((2, 0), (3, 4), 8, 2).strides is None
    assert chunk.part((2, 0), (3, 4), 8, 2)[3:5] == (16, 40)


def test_an_empty_part_spans_nothing() -> None:
    part = Chunk((0, 0), (6, 4), "f", 0, 48).part((6, 0), (0, 4), 24, 2)
    assert part.start == part.stop


def test_counts() -> None:
    entry = TensorEntry(key="a", name="a", dtype=DTYPES["bfloat16"], shape=(3, 5), chunks=())
    scalar = TensorEntry(key="b", name="b", dtype=DTYPES["int64"], shape=(), chunks=())
    assert (entry.numel, entry.num_bytes) == (15, 30)
    assert (scalar.numel, scalar.num_bytes) == (1, 8)
    part = Part(name="m", role=Role.MODEL, dialect="dcp", tensors={"a": entry, "b": scalar})
    assert (part.numel, part.num_bytes) == (16, 38)


@pytest.mark.parametrize(
    ("severity", "complete"), [(Severity.ERROR, False), (Severity.WARNING, True), (Severity.NOTE, True)]
)
def test_only_errors_make_a_checkpoint_incomplete(severity: Severity, complete: bool) -> None:
    problem = Problem(severity=severity, code="c", where="w", message="m")
    sound = Part(name="m", role=Role.MODEL, dialect="dcp")
    odd = dataclasses.replace(sound, problems=[problem])
    assert odd.is_complete is complete
    assert Checkpoint(root=Path(), layout="dcp", title="", parts=[sound, odd]).is_complete is complete
    assert Checkpoint(root=Path(), layout="dcp", title="", parts=[sound], problems=[problem]).is_complete is complete
    assert Checkpoint(root=Path(), layout="dcp", title="", parts=[sound]).is_complete


def test_entries_cannot_be_changed() -> None:
    entry = TensorEntry(key="a", name="a", dtype=DTYPES["int8"], shape=(), chunks=())
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.name = "b"  # type: ignore[misc]
