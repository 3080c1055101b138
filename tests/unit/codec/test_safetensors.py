"""Both directions against the safetensors library."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from fsdp_ckpt.catalog import DTYPES, DType, Shape
from fsdp_ckpt.codec.safetensors import ALIGNMENT, Header, plan_header, read_header
from fsdp_ckpt.errors import Incompatible
from tests.build import assert_same, full_bits
from tests.unit.codec.test_torchzip import Bytes

SAVABLE = {name: dtype for name, dtype in DTYPES.items() if dtype.safetensors}


def sample(dtype: DType, shape: Shape) -> torch.Tensor:
    count = int(torch.tensor(shape).prod()) if shape else 1
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    raw = raw & 1 if dtype.name == "bool" else raw
    return raw.view(getattr(torch, dtype.name)).reshape(shape)


def states() -> dict[str, dict[str, torch.Tensor]]:
    f32 = SAVABLE["float32"]
    shapes: list[Shape] = [(), (1,), (0,), (0, 3), (2, 0), (5,), (2, 3), (1, 1, 1, 1, 1), (7, 2, 3, 4)]
    return {
        "dtypes": {name: sample(dtype, (2, 3, 4)) for name, dtype in SAVABLE.items()},
        "shapes": {f"s{shape}": sample(f32, shape) for shape in shapes},
        "names": {
            name: sample(f32, (2,))
            for name in ("a", "ümlaut", "権重", 'quote"', "back\\slash", "new\nline", "\x00", "")
        },
        "many": {f"layers.{i}.weight": sample(f32, (i % 7,)) for i in range(500)},
        "none": {},
    }


STATES = states()


def read(data: bytes, before: bytes = b"") -> Header:
    return read_header(Bytes(before + data + b"behind"), len(before), len(before) + len(data), where="f")


@pytest.mark.parametrize("before", [b"", b"x" * 17])
@pytest.mark.parametrize("name", STATES)
def test_reading_what_the_library_writes(name: str, before: bytes) -> None:
    state = STATES[name]
    data = safetensors.torch.save(state, metadata={"format": "pt", "note": "ü"})
    header = read(data, before)
    assert header.metadata == {"format": "pt", "note": "ü"}
    assert {tensor.name for tensor in header.tensors} == set(state)
    for tensor in header.tensors:
        want = state[tensor.name]
        assert (tensor.dtype.name, tensor.shape) == (str(want.dtype).removeprefix("torch."), tuple(want.shape))
        assert (before + data)[tensor.start : tensor.stop] == full_bits(want)
    starts = [tensor.start for tensor in header.tensors]
    assert starts == sorted(starts)


def test_a_file_without_metadata() -> None:
    assert read(safetensors.torch.save({"w": torch.zeros(3)})).metadata == {}


@pytest.mark.parametrize("name", STATES)
def test_the_library_reads_what_was_planned(name: str, tmp_path: Path) -> None:
    state = STATES[name]
    rows = [(key, DTYPES[str(t.dtype).removeprefix("torch.")], tuple(t.shape)) for key, t in state.items()]
    first, ranges = plan_header(rows, {"format": "pt"})
    assert len(first) % ALIGNMENT == 0
    data = bytearray(max([stop for _, stop in ranges.values()], default=len(first)))
    data[: len(first)] = first
    for key, (start, stop) in ranges.items():
        data[start:stop] = full_bits(state[key])
    (tmp_path / "x.safetensors").write_bytes(data)
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert_same({key: file.get_tensor(key) for key in file.keys()}, state)  # noqa: SIM118  # no mapping


def test_the_data_begin_on_a_block_and_whole_blocks_come_first() -> None:
    f32, bf16 = SAVABLE["float32"], SAVABLE["bfloat16"]
    rows = [("tail", f32, (3,)), ("block", f32, (1024,)), ("odd", bf16, (5,)), ("two blocks", bf16, (64, 64)),
            ("byte", SAVABLE["int8"], (3,)),
            ("empty", f32, (0,)), ("double", SAVABLE["float64"], (1,))]  # fmt: skip
    first, ranges = plan_header(rows, {})
    assert len(first) % 4096 == 0
    assert min(start for start, _ in ranges.values()) == len(first)
    sizes = {"block": 4096, "two blocks": 8192}
    for name, size in sizes.items():
        start, stop = ranges[name]
        assert (start % 4096, stop - start) == (0, size)
    last_block = max(ranges[name][1] for name in sizes)
    assert all(ranges[name][0] >= last_block for name in ("tail", "odd", "byte", "double"))
    for name, dtype, _ in rows:
        assert ranges[name][0] % dtype.itemsize == 0, "every tensor lies on a multiple of its element"


def test_the_header_says_what_the_ranges_say() -> None:
    first, ranges = plan_header([("b", SAVABLE["int64"], (2,)), ("a", SAVABLE["int8"], (3,))], {"k": "v"})
    (length,) = struct.unpack("<Q", first[:8])
    assert length == len(first) - 8
    header = json.loads(first[8:])
    assert header.pop("__metadata__") == {"k": "v"}
    assert {name: [len(first) + offset for offset in item["data_offsets"]] for name, item in header.items()} == {
        name: list(span) for name, span in ranges.items()
    }


def test_no_metadata_means_no_entry() -> None:
    first, _ = plan_header([("a", SAVABLE["int8"], (3,))], {})
    assert b"__metadata__" not in first


@pytest.mark.parametrize("name", sorted(DTYPES.keys() - SAVABLE.keys()))
def test_dtypes_that_the_format_lacks(name: str) -> None:
    with pytest.raises(Incompatible, match=name) as caught:
        plan_header([("w", DTYPES[name], (2,))], {})
    assert caught.value.hint is not None


def test_float4_needs_a_dimension() -> None:
    with pytest.raises(Incompatible, match="without dimensions"):
        plan_header([("w", DTYPES["float4_e2m1fn_x2"], ())], {})


def test_names_that_are_no_unicode_are_refused() -> None:
    # A pickle can hold a lone surrogate; UTF-8, and so the format, cannot.
    with pytest.raises(Incompatible, match="w"):
        plan_header([("w\ud800", SAVABLE["float32"], (2,))], {})
