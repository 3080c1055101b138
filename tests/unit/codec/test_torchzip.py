"""Archives that torch.save wrote: records as Python's zipfile sees them, tensors where torch put them."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.serialization import config

from fsdp_ckpt.catalog import DTYPES, Chunk, Encoding
from fsdp_ckpt.codec.tensors import TensorRef
from fsdp_ckpt.codec.torchzip import Archive, locate, open_archive, resolve_item
from fsdp_ckpt.errors import MalformedFile
from tests.build import full_bits
from tests.unit.codec.raw_pickle import dump
from tests.unit.codec.raw_zip import Entry, write_sparse
from tests.unit.codec.test_tensors import call_tensor, storage, views


class Bytes:
    """A file in memory, and what was read of it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.num_read = 0

    def __call__(self, start: int, num_bytes: int, /) -> bytes:
        assert 0 <= start <= start + num_bytes <= len(self.data), "reads stay inside of the file"
        self.num_read += num_bytes
        return self.data[start : start + num_bytes]


def save(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def opened(data: bytes, before: bytes = b"", after: bytes = b"") -> Archive:
    return open_archive(Bytes(before + data + after), len(before), len(before) + len(data), where="f")


def values(data: bytes, chunk: Chunk, like: torch.Tensor) -> torch.Tensor:
    """Put a chunk together with torch: its bytes, viewed with its strides, conj and neg bits."""
    raw = torch.frombuffer(bytearray(data[chunk.start : chunk.stop] or b"\0" * 16), dtype=torch.uint8)
    shape, strides = chunk.lengths, chunk.strides or torch.empty(chunk.lengths).stride()
    if not chunk.numel:
        return torch.zeros(0, dtype=torch.uint8)
    tensor = raw.view(like.dtype).as_strided(shape, strides)
    tensor = tensor.conj() if chunk.conj else tensor
    return torch._neg_view(tensor) if chunk.neg else tensor


STATE: dict[str, Any] = {
    "small": {"w": torch.arange(6.0)},
    "nested": {"model": {"a": torch.arange(6.0), "b": [torch.zeros(3, dtype=torch.bfloat16)]}, "step": 7},
    "many": {f"layers.{i}.w": torch.full((i % 5, 3), i, dtype=torch.int32) for i in range(300)},
    "large": {"w": torch.arange(50_000, dtype=torch.int64)},
    "shared": {"a": (base := torch.arange(10.0)), "b": base[3:], "c": base.view(2, 5)},
    "nothing": {},
    "one tensor": torch.arange(6.0),
    "long name": {"x" * 3000: torch.zeros(1)},
}


@pytest.mark.parametrize("before", [b"", b"x" * 777])
@pytest.mark.parametrize("name", STATE)
def test_records_are_those_of_zipfile(name: str, before: bytes) -> None:
    data = save(STATE[name])
    archive = opened(data, before, b"tail of another item")
    with zipfile.ZipFile(io.BytesIO(data)) as judge:
        infos = {info.filename.partition("/")[2]: info for info in judge.infolist()}
        assert set(archive.records) == set(infos)
        for key, record in archive.records.items():
            content = (before + data)[record.start : record.start + record.size]
            assert content == judge.read(infos[key])
            assert record.crc32 == infos[key].CRC == zlib.crc32(content)
    assert archive.has_crc


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_views_of_every_dtype_are_found(name: str) -> None:
    tensors = views(getattr(torch, name))
    for key, tensor in tensors.items():
        random = torch.randint(0, 255, (tensor.untyped_storage().nbytes(),), dtype=torch.uint8)
        tensor.untyped_storage().copy_(random.untyped_storage())
        data = save(tensor)
        archive = opened(data)
        chunk = locate(archive, archive.load(), "f", (0,) * tensor.dim(), tuple(tensor.shape))
        assert full_bits(values(data, chunk, tensor)) == full_bits(tensor), key
        assert chunk.encoding is Encoding.RAW
        assert chunk.file == "f"
        if chunk.strides is None and chunk.numel:
            assert tensor.is_contiguous()


def test_conj_and_neg() -> None:
    base = torch.tensor([1 + 2j, -3 + 4j, 5 - 6j])
    for tensor in (base.conj(), base.clone().conj().imag, torch._neg_view(base.clone().conj()), base.conj()[1]):
        data = save(tensor)
        archive = opened(data)
        chunk = locate(archive, archive.load(), "f", (0,) * tensor.dim(), tuple(tensor.shape))
        assert (chunk.conj, chunk.neg) == (tensor.is_conj(), tensor.is_neg())
        assert full_bits(values(data, chunk, tensor)) == full_bits(tensor)


def test_a_tensor_that_fills_its_record_is_covered_by_its_checksum() -> None:
    tensor = torch.arange(6.0)
    data = save(tensor)
    archive = opened(data)
    chunk = locate(archive, archive.load(), "f", (0,), (6,))
    assert chunk.crc_range is None
    assert chunk.crc32 == zlib.crc32(full_bits(tensor))


def test_the_checksum_of_a_view_covers_its_whole_storage() -> None:
    base = torch.arange(10.0)
    data = save(base[3:7])
    archive = opened(data)
    chunk = locate(archive, archive.load(), "f", (0,), (4,))
    assert chunk.crc_range is not None
    start, stop = chunk.crc_range
    assert data[start:stop] == full_bits(base)
    assert chunk.crc32 == zlib.crc32(full_bits(base))
    assert data[chunk.start : chunk.stop] == full_bits(base[3:7])


@contextmanager
def option(name: str, value: Any) -> Iterator[None]:
    before = getattr(config.save, name)
    setattr(config.save, name, value)
    try:
        yield
    finally:
        setattr(config.save, name, before)


def test_checksums_that_were_not_computed_are_none() -> None:
    with option("compute_crc32", False):
        data = save(torch.arange(6.0))
    archive = opened(data)
    assert not archive.has_crc
    assert locate(archive, archive.load(), "f", (0,), (6,)).crc32 is None


@pytest.mark.parametrize("alignment", [64, 256, 4096])
def test_alignment_of_storages(alignment: int, tmp_path: Path) -> None:
    with option("storage_alignment", alignment):
        torch.save({"a": torch.arange(3.0), "b": torch.arange(5.0)}, tmp_path / "x.pt")
    archive = opened((tmp_path / "x.pt").read_bytes())
    for ref in archive.load().values():
        assert locate(archive, ref, "f", (0,), ref.shape).start % alignment == 0


@pytest.mark.parametrize("comment", [b"x", b"PK\3\4 is in here", b"c" * 65535])
def test_a_comment_at_the_end(comment: bytes) -> None:
    data = save(STATE["many"])
    assert data[-2:] == b"\0\0"
    data = data[:-2] + len(comment).to_bytes(2, "little") + comment
    with zipfile.ZipFile(io.BytesIO(data)) as judge:
        assert judge.comment == comment
    assert len(opened(data).load()) == 300


def test_archives_without_64_bit_records() -> None:
    # Written by Python's zipfile, as some tools repack them.
    data, out = save({"w": torch.arange(6.0)}), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    archive = opened(out.getvalue())
    chunk = locate(archive, archive.load()["w"], "f", (0,), (6,))
    assert out.getvalue()[chunk.start : chunk.stop] == full_bits(torch.arange(6.0))


def test_storages_beyond_4_gib(tmp_path: Path) -> None:
    count = (1 << 30) + 5
    path = tmp_path / "large.pt"
    pickle = dump(call_tensor(storage(count), 0, (count,), (1,)), 2)
    small = [Entry("large/data.pkl", pickle), Entry("large/byteorder", b"little"), Entry("large/version", b"3\n")]
    start = write_sparse(path, small, "large/data/0", count * 4, full_bits(torch.tensor([6.5, 7.5])))
    judge = torch.load(path, mmap=True, weights_only=True)
    assert judge.shape == (count,)
    assert judge[-2:].tolist() == [6.5, 7.5]

    size = path.stat().st_size
    with open(path, "rb") as file:

        def read_at(at: int, num_bytes: int, /) -> bytes:
            file.seek(at)
            return file.read(num_bytes)

        archive = open_archive(read_at, 0, size, where="f")
        chunk = locate(archive, archive.load(), "f", (0,), (count,))
        assert (chunk.start, chunk.stop) == (start, start + count * 4)
        assert read_at(chunk.stop - 8, 8) == full_bits(torch.tensor([6.5, 7.5]))


def test_only_the_ends_of_a_large_archive_are_read() -> None:
    source = Bytes(save({"w": torch.zeros(1_000_000)}))
    open_archive(source, 0, len(source.data), where="f").load()
    assert source.num_read < 10_000


def test_items_of_a_distcp_file() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    before, item = b"z" * 41, save(tensor)
    data = before + item
    chunk = Chunk((4, 0), (4, 3), "__0_0.distcp", 41, 41 + len(item), Encoding.TORCH_ZIP)
    raw = resolve_item(chunk, DTYPES["float32"], Bytes(data), where="f")
    assert (raw.offsets, raw.lengths, raw.file, raw.encoding) == ((4, 0), (4, 3), "__0_0.distcp", Encoding.RAW)
    assert full_bits(values(data, raw, tensor)) == full_bits(tensor)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.zeros(3, dtype=torch.float64), "the metadata says float32, the item holds float64"),
        (torch.zeros(4), "shape"),
        (torch.zeros(3, 1), "shape"),
        ([torch.zeros(3)], "a tensor was expected"),
        (5, "a tensor was expected"),
    ],
)
def test_items_that_are_not_what_the_metadata_say(value: Any, reason: str) -> None:
    data = save(value)
    chunk = Chunk((0,), (3,), "f", 0, len(data), Encoding.TORCH_ZIP)
    for _ in range(2):  # the second time from memory
        with pytest.raises(MalformedFile, match=reason):
            resolve_item(chunk, DTYPES["float32"], Bytes(data), where="f")


def test_equal_pickles_with_other_places() -> None:
    # Shards of one shape have equal data.pkl; where their bytes lie must not be taken from the first one.
    first, second = torch.arange(6.0), torch.arange(6.0) + 100
    for tensor, before in ((first, b""), (second, b"y" * 33)):
        data = before + save(tensor)
        chunk = Chunk((0,), (6,), "f", len(before), len(data), Encoding.TORCH_ZIP)
        raw = resolve_item(chunk, DTYPES["float32"], Bytes(data), where="f")
        assert data[raw.start : raw.stop] == full_bits(tensor)


def test_refs_of_one_value() -> None:
    assert isinstance(opened(save(torch.zeros(3))).load(), TensorRef)
