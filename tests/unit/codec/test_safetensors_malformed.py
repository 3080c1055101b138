"""Files that the safetensors library refuses are refused here, too."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import safetensors
import torch

from fsdp_ckpt.errors import Incompatible, MalformedFile
from tests.unit.codec.test_safetensors import read


def deserialize(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Ask the library."""
    return safetensors.deserialize(data)  # type: ignore[no-any-return, no-untyped-call]


def entry(dtype: Any = "F32", shape: Any = (2,), start: Any = 0, stop: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [start, stop]}


def build(header: Any, data: bytes = b"\0" * 8, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in entry().items() if key not in names}


MALFORMED: dict[str, bytes] = {
    # The length.
    "nothing": b"",
    "less than a length": b"\x08\0\0\0",
    "a length without header": struct.pack("<Q", 5),
    "a header beyond the file": build({"a": entry()}, length=1000),
    "a header of 2^63 bytes": build({"a": entry()}, length=1 << 63),
    "a header of 100 MB and one byte": struct.pack("<Q", 100_000_001) + b"{" + b" " * 50,
    "an empty header": build(b"", b""),
    # The JSON.
    "no JSON": build(b"hello, world"),
    "cut off": build(b'{"a":'),
    "a list": build([1]),
    "a number": build(5),
    "not UTF-8": build(b'{"\xff":' + json.dumps(entry()).encode() + b"}"),
    "UTF-16": build(json.dumps({"a": entry()}).encode("utf-16")),
    "a byte order mark": build(b"\xef\xbb\xbf" + json.dumps({"a": entry()}).encode()),
    "a lone surrogate": build(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}"),
    "more behind": build(json.dumps({"a": entry()}).encode() + b"{}"),
    "deep nesting": build(b"[" * 50_000 + b"]" * 50_000),
    "metadata are numbers": build({"__metadata__": {"a": 1}, "a": entry()}),
    "metadata are a list": build({"__metadata__": ["a"], "a": entry()}),
    "NaN": build(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'),
    # The entries.
    "entry is a list": build({"a": [1]}),
    "entry is null": build({"a": None}),
    "no dtype": build({"a": without("dtype")}),
    "no shape": build({"a": without("shape")}),
    "no offsets": build({"a": without("data_offsets")}),
    "unknown dtype": build({"a": entry("F31")}),
    "dtype is a number": build({"a": entry(32)}),
    "dtype in lower case": build({"a": entry("f32")}),
    "negative size": build({"a": entry(shape=(-2,))}),
    "two negative sizes": build({"a": entry(shape=(-1, -2))}),
    "size is a float": build({"a": entry(shape=(2.0,))}),
    "size is a text": build({"a": entry(shape=("2",))}),
    "size is true": build({"a": entry(shape=(2, True))}),
    "shape is a number": build({"a": entry(shape=2)}),
    "size of 2^64": build({"a": entry(shape=(2**64,))}),
    "a product beyond 64 bits": build({"a": entry(shape=(2**33, 2**33))}),
    "a product that wraps to the right size": build({"a": entry(shape=(2**63 + 1, 2))}),
    "one offset": build({"a": {**entry(), "data_offsets": [8]}}),
    "three offsets": build({"a": {**entry(), "data_offsets": [0, 8, 8]}}),
    "negative offset": build({"a": entry(start=-8, stop=0)}),
    "offset is a float": build({"a": entry(start=0.0)}),
    # The layout of the data.
    "start behind stop": build({"a": entry(start=8, stop=0)}),
    "more bytes than elements": build({"a": entry(shape=(1,))}),
    "fewer bytes than elements": build({"a": entry(shape=(3,))}),
    "beyond the file": build({"a": entry(shape=(4,), stop=16)}),
    "bytes that belong to nothing": build({"a": entry()}, b"\0" * 9),
    "a hole in front": build({"a": entry(shape=(1,), start=4, stop=8)}),
    "a hole in between": build({"a": entry(shape=(1,), stop=4), "b": entry(shape=(1,), start=8, stop=12)}, b"\0" * 12),
    "an overlap": build({"a": entry(), "b": entry(start=4, stop=12)}, b"\0" * 12),
    "the same bytes twice": build({"a": entry(), "b": entry()}),
    "an empty tensor in the middle of another": build({"a": entry(), "b": entry(shape=(0,), start=4, stop=4)}),
    "half a byte": build({"a": entry("F4", shape=(3,), stop=2)}, b"\0" * 2),
    "a polyglot with a zip behind": build({"a": entry()}, b"\0" * 8 + b"PK\5\6" + b"\0" * 18),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_the_library_refuses_is_malformed(name: str) -> None:
    with pytest.raises(safetensors.SafetensorError):
        deserialize(MALFORMED[name])
    with pytest.raises(MalformedFile, match=r"^f"):
        read(MALFORMED[name])


ODD_BUT_RIGHT: dict[str, bytes] = {
    "spaces in front": build(b"  " + json.dumps({"a": entry()}).encode()),
    "spaces behind": build(json.dumps({"a": entry()}).encode() + b"   "),
    "no tensors": build({}, b""),
    "only metadata": build({"__metadata__": {"a": "b"}}, b""),
    "empty tensors at the ends": build(
        {"a": entry(shape=(0,), stop=0), "b": entry(), "c": entry(shape=(0, 5), start=8, stop=8)}
    ),
    "a scalar": build({"a": entry("F64", shape=())}),
    "in any order": build({"b": entry(shape=(1,), start=4, stop=8), "a": entry(shape=(1,), stop=4)}),
    "escapes": build(b'{"\\u0061\\n":' + json.dumps(entry()).encode() + b"}"),
    "a surrogate pair": build(b'{"\\ud83d\\ude00":' + json.dumps(entry()).encode() + b"}"),
}


@pytest.mark.parametrize("name", ODD_BUT_RIGHT)
def test_what_the_library_reads_is_read(name: str) -> None:
    judge = {key: (item["dtype"], item["shape"]) for key, item in deserialize(ODD_BUT_RIGHT[name])}
    found = {
        tensor.name: (tensor.dtype.safetensors, list(tensor.shape)) for tensor in read(ODD_BUT_RIGHT[name]).tensors
    }
    assert found == judge


def test_one_name_twice_is_malformed() -> None:
    # The library takes the last one; the format's description forbids it.
    one, two = json.dumps(entry()).encode(), json.dumps(entry("I64", (1,))).encode()
    with pytest.raises(MalformedFile, match="twice"):
        read(build(b'{"a":' + one + b',"a":' + two + b"}"))


@pytest.mark.parametrize("code", ["F6_E2M3", "F6_E3M2"])
def test_dtypes_of_the_format_that_torch_lacks(code: str) -> None:
    with pytest.raises(Incompatible, match=code):
        read(build({"a": entry(code, shape=(4,), stop=3)}, b"\0" * 3))


def test_every_truncation_is_noticed() -> None:
    import safetensors.torch

    data = safetensors.torch.save({"a": torch.arange(6.0), "b": torch.arange(3)})
    for stop in range(len(data)):
        with pytest.raises(MalformedFile):
            read(data[:stop])


def test_every_changed_byte_of_the_header_is_as_the_library_says() -> None:
    import safetensors.torch

    data = safetensors.torch.save({"a": torch.arange(6.0), "b": torch.arange(3)})
    (length,) = struct.unpack("<Q", data[:8])
    read_both = 0
    for position in range(8 + length):
        for mask in (0x01, 0x04, 0x10, 0x80):
            broken = data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]
            try:
                judge = {key: item["shape"] for key, item in deserialize(broken)}
            except safetensors.SafetensorError:
                with pytest.raises((MalformedFile, Incompatible)):
                    read(broken)
            else:
                assert {tensor.name: list(tensor.shape) for tensor in read(broken).tensors} == judge
                read_both += 1
    assert read_both
