"""What is laid out is a file that torch loads with weights_only, value for value."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdp_ckpt.catalog import DTYPES
from fsdp_ckpt.codec.nested_archive import lay_out_nested
from fsdp_ckpt.codec.torchzip_writer import ArchiveTensor, seal_archive
from fsdp_ckpt.errors import Incompatible


def _write(value: Any, contents: dict[int, bytes]) -> bytes:
    layout = lay_out_nested(value, prefix="optimizer")
    data = bytearray(layout.size)
    for storage, content in contents.items():
        start, stop = layout.storages[storage]
        assert stop - start == len(content)
        data[start:stop] = content
    for position, part in seal_archive(layout, {number: zlib.crc32(content) for number, content in contents.items()}):
        data[position : position + len(part)] = part
    return bytes(data)


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _entry(tensor: Tensor, storage: int) -> ArchiveTensor:
    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    return ArchiveTensor(name="", dtype=dtype, shape=tuple(tensor.shape), storage=storage)


def test_an_optimizer_state_is_read_back_by_torch(tmp_path: Path) -> None:
    tensors = {
        0: torch.arange(12.0).reshape(4, 3),
        1: torch.tensor(7.0),
        2: torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        3: torch.empty(0, 5),
        4: torch.tensor([True, False]),
        5: torch.tensor([2**40, -3]),
        6: torch.tensor([1 + 2j], dtype=torch.complex64),
    }
    entries = {number: _entry(tensor, number) for number, tensor in tensors.items()}
    rest: dict[Any, Any] = {
        "betas": (0.9, 0.999), "none": None, "flags": [True, False], "big": 2**70, "low": -(2**31), "text": "é\n",
        "list": [1, [2, (3, {})]], "empty": [], 5: "a number as a key", "inf": float("inf"), "tiny": 5e-324,
    }  # fmt: skip
    value = {"state": {"w": entries}, "param_groups": [rest], "tied": entries[0]}
    path = tmp_path / "optimizer.bin"
    path.write_bytes(_write(value, {number: _bits(tensor) for number, tensor in tensors.items()}))
    found = torch.load(path, weights_only=True)
    assert found["param_groups"] == [rest]
    assert type(found["param_groups"][0]["betas"]) is tuple
    for number, tensor in tensors.items():
        have = found["state"]["w"][number]
        assert (have.dtype, have.shape, _bits(have)) == (tensor.dtype, tensor.shape, _bits(tensor))
    assert found["tied"].data_ptr() == found["state"]["w"][0].data_ptr()


def test_the_archive_is_a_sound_zip_file() -> None:
    tensor = torch.arange(1000.0)
    data = _write({"w": _entry(tensor, 0)}, {0: _bits(tensor)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert sorted(archive.namelist()) == [
            f"optimizer/{name}" for name in ("byteorder", "data.pkl", "data/0", "version")
        ]


_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-5, 5), inner, max_size=3)
    ),
    max_leaves=15,
)


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(_VALUES)
def test_any_nesting_is_read_back_by_torch(value: Any) -> None:
    found = torch.load(io.BytesIO(_write({"value": value}, {})), weights_only=True)
    assert repr(found) == repr({"value": value})  # tells 1 from True and 1.0, and () from []


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", 1j, object(), torch.float32, range(3)])
def test_other_values_are_refused_with_what_to_do(value: Any) -> None:
    with pytest.raises(Incompatible, match="cannot be stored in a full state dict") as caught:
        lay_out_nested({"x": [value]}, prefix="p")
    assert "SHARDED_STATE_DICT" in str(caught.value.hint)


def test_nesting_without_end_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises((Incompatible, RecursionError)):
        lay_out_nested(value, prefix="p")
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    with pytest.raises(Incompatible, match="nested too deep"):
        lay_out_nested(deep, prefix="p")


def test_an_integer_of_thousands_of_bits_is_refused() -> None:
    with pytest.raises(Incompatible, match="thousands of bits"):
        lay_out_nested(1 << 5000, prefix="p")
