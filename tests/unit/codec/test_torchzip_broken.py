"""Archives that are damaged, or that contradict themselves on purpose."""

from __future__ import annotations

import io
import struct

import pytest
import torch

from fsdp_ckpt.catalog import DTYPES, Chunk, Encoding
from fsdp_ckpt.codec.torchzip import locate, open_archive, resolve_item
from fsdp_ckpt.errors import CorruptCheckpoint, Incompatible, MalformedFile, UnsafePickle
from tests.unit.codec.raw_pickle import call, dump
from tests.unit.codec.raw_zip import Entry, build_zip
from tests.unit.codec.test_tensors import call_tensor, storage
from tests.unit.codec.test_torchzip import Bytes, opened, save

PICKLE = dump(call_tensor(storage(6), 0, (6,), (1,)), 2)
DATA = bytes(range(24))


def entries() -> list[Entry]:
    return [Entry("a/data.pkl", PICKLE), Entry("a/data/0", DATA), Entry("a/version", b"3\n")]


@pytest.mark.parametrize("zip64", [False, True])
def test_the_archive_below_is_sound(zip64: bool) -> None:
    data = build_zip(entries(), zip64=zip64)
    judge = torch.load(io.BytesIO(data), weights_only=True)
    archive = opened(data)
    chunk = locate(archive, archive.load(), "f", (0,), (6,))
    assert data[chunk.start : chunk.stop] == DATA == bytes(judge.view(torch.uint8).numpy())


def changed(index: int, **fields: object) -> bytes:
    records = entries()
    for name, value in fields.items():
        setattr(records[index], name, value)
    return build_zip(records)


BROKEN = {
    "deflated": changed(1, method=8),
    "encrypted": changed(1, flags=0x0801),
    "two of one name": build_zip([*entries(), Entry("a/data.pkl", PICKLE)]),
    "two prefixes": build_zip([*entries(), Entry("b/data/1", DATA)]),
    "no prefix": build_zip([*entries(), Entry("c", DATA)]),
    "a prefix only": build_zip([*entries(), Entry("a/", b"")]),
    "larger than the file": changed(1, size=1 << 30),
    "runs into the directory": changed(2, size=1000),
    "runs into the next record": changed(1, size=24 + 30 + len("a/version") + 1),
    "header elsewhere": changed(1, header_at=5),
    "header beyond the end": changed(1, header_at=1 << 30),
    "two headers at one place": changed(2, header_at=0, name="a/data.pk2"),
    "local name of another length": changed(1, local_name="a/data/00"),
    "local header is none": changed(1, local_magic=b"PK\3\5"),
    "more records than there are": build_zip(entries(), count=4),
    "far too many records": build_zip(entries(), count=60_000),
    "name is no text": build_zip(entries()).replace(b"a/version", b"a/versi\xff\xfe"),
    "no end": build_zip(entries())[:-22],
    "nothing": b"",
    "a few bytes": b"PK\3\4",
    "other data": b"x" * 5000,
    "text of the end only": b"x" * 100 + b"PK\5\6" + b"\xff" * 18,
}


@pytest.mark.parametrize("name", BROKEN)
def test_contradictions_are_malformed(name: str) -> None:
    def read() -> None:
        archive = opened(BROKEN[name])
        locate(archive, archive.load(), "f", (0,), (6,))

    with pytest.raises(MalformedFile, match=r"^f"):
        read()


@pytest.mark.parametrize("position", [4, 8, 16, 24, 32, 40, 48])
def test_the_64_bit_end_record_may_not_lie(position: int) -> None:
    data = build_zip(entries(), zip64=True)
    at = data.rindex(b"PK\6\6") + position
    broken = data[:at] + struct.pack("<Q", 1 << 62) + data[at + 8 :]
    if position in (4, 8):  # lengths and versions nobody needs
        assert len(opened(broken).records) == 3
    else:
        with pytest.raises(MalformedFile):
            opened(broken)


def test_a_missing_64_bit_size() -> None:
    data = build_zip(entries(), zip64=True)
    for extra in (struct.pack("<2H", 1, 8), struct.pack("<2H", 0, 24), struct.pack("<2H", 1, 0)):
        with pytest.raises(MalformedFile):
            opened(data.replace(struct.pack("<2H", 1, 24), extra))


def test_every_truncation_is_noticed() -> None:
    data = save({"w": torch.arange(6.0)})
    for stop in range(0, len(data), 7):
        with pytest.raises(MalformedFile):
            opened(data[:stop])


def test_every_changed_byte_is_read_or_refused() -> None:
    data = save(torch.arange(6.0))
    read = 0
    for position in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            broken = data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]
            try:
                chunk = Chunk((0,), (6,), "f", 0, len(data), Encoding.TORCH_ZIP)
                raw = resolve_item(chunk, DTYPES["float32"], Bytes(broken), where="f")
                assert 0 <= raw.start <= raw.stop <= len(data)
                read += 1
            except (CorruptCheckpoint, Incompatible):
                pass
    assert 0 < read < 3 * len(data)


def test_big_endian_machines() -> None:
    with pytest.raises(Incompatible, match="big-endian"):
        opened(build_zip([*entries(), Entry("a/byteorder", b"big")])).load()


def test_an_archive_without_pickle_or_storage() -> None:
    with pytest.raises(MalformedFile, match=r"no record `data.pkl`"):
        opened(build_zip(entries()[1:])).load()
    archive = opened(build_zip([entries()[0], entries()[2]]))
    with pytest.raises(MalformedFile, match="storage `data/0` is missing"):
        locate(archive, archive.load(), "f", (0,), (6,))


@pytest.mark.parametrize(
    "args",
    [
        (storage(7), 0, (6,), (1,)),  # the storage is longer than its record
        (storage(6), 1, (6,), (1,)),
        (storage(6), 0, (7,), (1,)),
        (storage(6), 0, (3,), (3,)),
        (storage(6), 0, (2, 3), (4, 1)),
        (storage(6), 0, (2,), (2**62,)),
        (storage(6), 2**62, (1,), (1,)),
        (storage(6), 7, (0,), (1,)),
        (storage(6), 0, (2**31, 2**31), (1, 1)),
    ],
)
def test_tensors_that_reach_beyond_their_storage(args: tuple[object, ...]) -> None:
    records = [Entry("a/data.pkl", dump(call_tensor(*args), 2)), *entries()[1:]]
    archive = opened(build_zip(records))
    ref = archive.load()
    with pytest.raises(MalformedFile):
        locate(archive, ref, "f", (0,) * len(ref.shape), ref.shape)


def test_a_storage_may_be_larger_than_the_pickle_says() -> None:
    # Two-dimensional meshes save padded storages.
    records = [Entry("a/data.pkl", dump(call_tensor(storage(4), 0, (4,), (1,)), 2)), *entries()[1:]]
    archive = opened(build_zip(records))
    chunk = locate(archive, archive.load(), "f", (0,), (4,))
    assert chunk.stop - chunk.start == 16


def test_code_in_an_item_is_refused() -> None:
    data = build_zip([Entry("a/data.pkl", dump(call("os", "system", "true"), 2)), *entries()[1:]])
    with pytest.raises(UnsafePickle, match=r"os\.system"):
        resolve_item(
            Chunk((0,), (6,), "f", 0, len(data), Encoding.TORCH_ZIP), DTYPES["float32"], Bytes(data), where="f"
        )


def test_an_absurd_pickle_is_not_read() -> None:
    source = Bytes(build_zip(entries()))
    archive = open_archive(source, 0, len(source.data), where="f")
    record = archive.records["data.pkl"]
    archive.records = {"data.pkl": type(record)(name="data.pkl", start=0, size=(1 << 30) + 1, crc32=0)}
    with pytest.raises(MalformedFile, match="absurd size"):
        archive.load()


def test_overlapping_storages_are_refused_even_when_empty_ones_touch() -> None:
    sound = build_zip([*entries(), Entry("a/data/1", b""), Entry("a/data/2", b"")])
    assert set(opened(sound).records) == {"data.pkl", "data/0", "version", "data/1", "data/2"}
