"""Headers there and back, with the safetensors library on the other side."""

from __future__ import annotations

from pathlib import Path

import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.catalog import DTYPES, DType, Shape
from fsdp_ckpt.codec.safetensors import plan_header, read_header
from fsdp_ckpt.errors import MalformedFile
from tests.property.tilings import shapes

Rows = list[tuple[str, DType, Shape]]
SAVABLE = [dtype for dtype in DTYPES.values() if dtype.safetensors]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda name: name != "__metadata__")
BYTES = b'0123456789-{}[]":,.eEFIUB \\\x80\xff'
METADATA = st.dictionaries(NAMES, NAMES, max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Rows:
    found = []
    for name in draw(st.lists(NAMES, unique=True, max_size=8)):
        dtype = draw(st.sampled_from(SAVABLE))
        shape = draw(shapes(max_dims=5, max_side=6))
        if dtype.pack > 1 and not shape:
            shape = (2,)
        if draw(st.booleans()):
            shape = (*shape, 4096)  # blocks and tails side by side
        found.append((name, dtype, shape))
    return found


def as_file(first: bytes, ranges: dict[str, tuple[int, int]]) -> bytes:
    return first + bytes(max([stop for _, stop in ranges.values()], default=len(first)) - len(first))


@given(tensors(), METADATA)
def test_the_library_and_we_read_what_was_planned(rows: Rows, metadata: dict[str, str]) -> None:
    first, ranges = plan_header(rows, metadata)
    data = as_file(first, ranges)
    header = read_header(lambda start, size: data[start : start + size], 0, len(data), where="f")
    assert {t.name: (t.dtype, t.shape, (t.start, t.stop)) for t in header.tensors} == {
        name: (dtype, shape, ranges[name]) for name, dtype, shape in rows
    }
    assert header.metadata == metadata
    assert header.data_start == len(first)
    assert len(first) % 4096 == 0

    judge = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    assert set(judge) == {name for name, _, _ in rows}
    for name, dtype, shape in rows:
        packed = (*shape[:-1], shape[-1] * dtype.pack) if shape else shape
        assert (judge[name]["dtype"], tuple(judge[name]["shape"])) == (dtype.safetensors, packed)
        assert len(judge[name]["data"]) == ranges[name][1] - ranges[name][0]
        assert ranges[name][0] % dtype.itemsize == 0


@settings(max_examples=50)
@given(tensors(), METADATA)
def test_metadata_as_safe_open_sees_them(tmp_path: Path, rows: Rows, metadata: dict[str, str]) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(as_file(*plan_header(rows, metadata)))
    with safetensors.safe_open(path, "np") as file:
        assert (file.metadata() or {}) == metadata


@settings(max_examples=300)
@given(tensors(), st.data())
def test_damaged_headers_are_judged_as_by_the_library(rows: Rows, data: st.DataObject) -> None:
    first, ranges = plan_header(rows, {"format": "pt"})
    damaged = bytearray(as_file(first, ranges))
    text_end = len(first.rstrip())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(8, text_end - 1))] = data.draw(
            st.sampled_from(b'0123456789-{}[]":,.eEFIUB \\\x80\xff')
        )
    raw = bytes(damaged)
    try:
        judge = dict(safetensors.deserialize(raw))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        judge = None
    try:
        header = read_header(lambda start, size: raw[start : start + size], 0, len(raw), where="f")
    except MalformedFile:
        return  # we may be stricter: a name that stands twice, a field that nobody knows
    assert judge is not None, "the library refuses what we read"
    assert {t.name: (t.dtype.safetensors, t.stop - t.start) for t in header.tensors} == {
        name: (item["dtype"], len(item["data"])) for name, item in judge.items()
    }
