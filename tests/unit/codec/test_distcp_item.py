"""Items of ``.distcp`` files that we lay out, as torch, zipfile and our own reader see them."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fsdp_ckpt.catalog import DTYPES, Chunk, DType, Encoding, Shape
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo
from fsdp_ckpt.codec.dcp_metadata_writer import write_metadata
from fsdp_ckpt.codec.distcp_item import ItemLayout, lay_out_item, recognise_item, seal_item
from fsdp_ckpt.codec.torchzip import resolve_item
from tests.build import Sharded, assert_same, full_bits, grid
from tests.unit.codec.test_torchzip import Bytes


def dtype_of(tensor: Tensor) -> DType:
    return DTYPES[str(tensor.dtype).removeprefix("torch.")]


def random_tensor(name: str, shape: Shape) -> Tensor:
    dtype: torch.dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(len(name))
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator).to(torch.uint8)
    return (raw & 1 if name == "bool" else raw).view(dtype).reshape(shape)


def add_item(file: bytearray, tensor: Tensor, *, gap: int = 0, alignment: int = 4096) -> ItemLayout:
    """Append a tensor as the next item; what lies between items is no zeros."""
    position = len(file) + gap
    layout = lay_out_item(dtype_of(tensor), tuple(tensor.shape), position, alignment=alignment)
    assert position <= layout.start <= layout.data_start <= layout.data_stop <= layout.stop
    data = full_bits(tensor)
    head, tail = seal_item(layout, zlib.crc32(data))
    assert len(head) == layout.data_start - layout.start
    assert len(data) == layout.data_stop - layout.data_start
    assert len(tail) == layout.stop - layout.data_stop
    file += b"\xa5" * (layout.start - len(file)) + head + data + tail
    return layout


def loaded(file: bytes | bytearray, layout: ItemLayout) -> Tensor:
    found = torch.load(io.BytesIO(file[layout.start : layout.stop]), weights_only=True)
    assert isinstance(found, Tensor)
    return found


SHAPES: list[Shape] = [
    (), (0,), (0, 3), (3, 0), (2**40, 0), (1,), (5,), (2, 3), (1023,), (1024,), (1025,), (70_000, 1, 3), (7, 2, 3, 4),
    (1,) * 64,
]  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name: str) -> None:
    file = bytearray(b"x" * 77)
    for shape in ((2, 3, 4), (), (0, 2), (3000, 2)):
        tensor = random_tensor(name, shape)
        layout = add_item(file, tensor)
        found = loaded(file, layout)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.is_contiguous()
        assert not found.requires_grad
        flat, wanted = found.reshape(-1), tensor.reshape(-1)
        assert torch.equal(flat.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape: Shape) -> None:
    file = bytearray(b"x")
    tensor = random_tensor("float32", shape)
    layout = add_item(file, tensor)
    assert_same({"it": loaded(file, layout)}, {"it": tensor})
    assert bytes(file[layout.data_start : layout.data_stop]) == full_bits(tensor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zipfile_agrees(shape: Shape) -> None:
    file = bytearray(b"x" * 5)
    tensor = random_tensor("bfloat16", shape)
    layout = add_item(file, tensor)
    with zipfile.ZipFile(io.BytesIO(file[layout.start : layout.stop])) as judge:
        assert judge.testzip() is None
        info = judge.getinfo("archive/data/0")
        assert zlib.crc32(full_bits(tensor)) == info.CRC
        assert info.file_size == tensor.numel() * 2
        assert judge.read(info) == full_bits(tensor)
        assert all(item.compress_type == zipfile.ZIP_STORED for item in judge.infolist())
        assert sorted(judge.namelist()) == sorted(
            f"archive/{n}" for n in ("data/0", "data.pkl", "byteorder", "version")
        )
        assert (judge.read("archive/byteorder"), judge.read("archive/version")) == (b"little", b"3\n")


def test_the_checksum_is_the_given_one() -> None:
    layout = lay_out_item(DTYPES["uint8"], (3,), 0)
    data = b"abc"
    assert zlib.crc32(data) == 0x352441C2
    for crc32, damaged in ((0x352441C2, None), (0x352441C3, "archive/data/0")):
        head, tail = seal_item(layout, crc32)
        with zipfile.ZipFile(io.BytesIO(head + data + tail)) as judge:
            assert crc32 == judge.getinfo("archive/data/0").CRC
            assert judge.testzip() == damaged


@pytest.mark.parametrize("alignment", [64, 512, 4096, 1 << 16])
@pytest.mark.parametrize("position", [0, 1, 63, 64, 3968, 3969, 4096, 10_000, 2**32 - 1, 2**40 + 1])
def test_elements_are_aligned_in_the_file(position: int, alignment: int) -> None:
    for num_bytes in (0, 1, alignment - 1, alignment, alignment + 1, 10 * alignment):
        layout = lay_out_item(DTYPES["uint8"], (num_bytes,), position, alignment=alignment)
        wanted = alignment if num_bytes >= alignment else 64
        assert layout.data_start % wanted == 0
        assert (layout.data_start - layout.start) % 64 == 0, "aligned in the archive as well, as torch's records are"
        assert layout.data_start - layout.start <= 128, "no padding inside of the item"
        assert 0 <= layout.start - position < wanted, "and no more than needed before it"
        assert layout.data_stop - layout.data_start == num_bytes


def test_places_by_hand() -> None:
    # Local header 30, name 14, 64-bit sizes 20, padding field 4: 68 bytes, 128 with the padding.
    layout = lay_out_item(DTYPES["float32"], (2, 512), 0)
    assert (layout.start, layout.data_start, layout.data_stop) == (4096 - 128, 4096, 4096 + 4096)
    layout = lay_out_item(DTYPES["float32"], (2, 511), 0)
    assert (layout.start, layout.data_start, layout.data_stop) == (0, 128, 128 + 4088)
    layout = lay_out_item(DTYPES["float32"], (2, 512), 4096 - 128 + 1)
    assert (layout.start, layout.data_start) == (8192 - 128, 8192)


@pytest.mark.parametrize("alignment", [0, -64, 1, 32, 4095])
def test_alignments_that_torch_does_not_have(alignment: int) -> None:
    with pytest.raises(ValueError, match="64"):
        lay_out_item(DTYPES["float32"], (4,), 0, alignment=alignment)


@pytest.mark.parametrize("name", DTYPES)
def test_small_tensors_are_cheap(name: str) -> None:
    layout = lay_out_item(DTYPES[name], (1,), 0)
    theirs = io.BytesIO()
    torch.save(random_tensor(name, (1,)), theirs)
    assert layout.stop - layout.start < min(1250, len(theirs.getvalue()))


def resolved(file: bytearray, layout: ItemLayout) -> tuple[Chunk, int]:
    reader = Bytes(bytes(file))
    chunk = Chunk(
        offsets=(0,) * len(layout.shape),
        lengths=layout.shape,
        file="f",
        start=layout.start,
        stop=layout.stop,
        encoding=Encoding.TORCH_ZIP,
    )
    return resolve_item(chunk, layout.dtype, reader, where="f"), reader.num_read


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_our_reader_finds_the_elements(shape: Shape) -> None:
    file = bytearray(b"x" * 1000)
    tensor = random_tensor("float32", shape)
    layout = add_item(file, tensor)
    found, num_read = resolved(file, layout)
    assert (found.start, found.stop) == (layout.data_start, layout.data_stop)
    assert (found.encoding, found.strides, found.crc_range) == (Encoding.RAW, None, None)
    assert found.crc32 == zlib.crc32(full_bits(tensor))
    if layout.stop - layout.start > 8192:
        assert num_read <= 2048 + 30, "the end of the item and one local header"


def test_an_item_beyond_4_gib(tmp_path: Path) -> None:
    count = (1 << 30) + 5
    layout = lay_out_item(DTYPES["float32"], (count,), 0, alignment=64)
    assert layout.data_stop - layout.data_start == 4 * count
    head, tail = seal_item(layout, 0)
    with open(tmp_path / "item.pt", "wb") as file:  # sparse
        file.write(head)
        file.seek(layout.data_stop - 4)
        file.write(full_bits(torch.tensor([6.5])) + tail)
    found = torch.load(tmp_path / "item.pt", weights_only=True, mmap=True)
    assert (found.shape, found[-1].item(), found[0].item()) == ((count,), 6.5, 0.0)
    with zipfile.ZipFile(tmp_path / "item.pt") as judge:
        assert judge.getinfo("archive/data/0").file_size == 4 * count


def write_checkpoint(folder: Path, state: Mapping[str, Sharded], *, alignment: int) -> None:
    """Write boxes into the files of their owners, tensor by tensor."""
    files: dict[str, bytearray] = {}
    tensors: dict[str, DcpTensor] = {}
    storage: dict[tuple[str, Shape | None], StorageInfo] = {}
    for key, cut in state.items():
        tensors[key] = DcpTensor(dtype=dtype_of(cut.tensor), shape=tuple(cut.tensor.shape), chunks=list(cut.boxes))
        for (offsets, lengths), owner in zip(cut.boxes, cut.owners, strict=True):
            name = f"__{owner}_0.distcp"
            piece = cut.tensor[tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))]
            layout = add_item(files.setdefault(name, bytearray()), piece, gap=owner * 100, alignment=alignment)
            storage[key, offsets] = (name, layout.start, layout.stop - layout.start, ())
    metadata = DcpMetadata(
        tensors=tensors,
        objects=[],
        paths={key: tuple(key.split(".")) for key in tensors},
        storage=storage,
        writer="",
    )
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / ".metadata").write_bytes(write_metadata(metadata, save_id="x"))


@pytest.mark.parametrize("alignment", [64, 4096])
def test_torch_loads_a_checkpoint_of_items(alignment: int, tmp_path: Path) -> None:
    whole = {
        "rows": random_tensor("bfloat16", (60, 70)),
        "boxes": random_tensor("int64", (90, 110)),
        "cube": random_tensor("uint8", (9, 10, 11)),
        "none": torch.zeros(0, 4),
        "step": torch.tensor(3.5),
        "größe.権重 x": torch.arange(7.0),
    }
    cuts = {"rows": [[20, 40], []], "boxes": [[1, 50], [3, 64]], "cube": [[4], [3, 7], [5]], "größe.権重 x": [[6]]}
    state = {
        key: grid(tensor, cuts.get(key, [[]] * tensor.dim()), ranks=3) for key, tensor in whole.items() if key != "step"
    }
    state["step"] = Sharded(whole["step"], [((), ())], [1])
    write_checkpoint(tmp_path, state, alignment=alignment)
    found = {key: torch.full_like(tensor, 1) for key, tensor in whole.items()}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert_same(found, whole)


def test_torch_makes_up_the_state_dict_by_itself(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    tensor = random_tensor("float32", (40, 50))
    write_checkpoint(tmp_path, {"model.w": grid(tensor, [[7], [11, 30]], ranks=2)}, alignment=4096)
    dcp_to_torch_save(tmp_path, tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_same(found["model"], {"w": tensor})


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex128"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (70_000, 1, 3)], ids=str)
def test_own_items_are_recognised_and_mean_what_zipfile_says(name: str, shape: Shape) -> None:
    file = bytearray(b"x" * 11)
    tensor = random_tensor(name, shape)
    layout = add_item(file, tensor)
    found = recognise_item(Bytes(bytes(file)), layout.start, layout.stop, layout.dtype, shape)
    with zipfile.ZipFile(io.BytesIO(file[layout.start : layout.stop])) as archive:
        info = archive.getinfo("archive/data/0")
    assert found is not None
    assert found[2] == info.CRC == zlib.crc32(full_bits(tensor))
    assert bytes(file[found[0] : found[1]]) == full_bits(tensor)


def test_an_item_that_differs_anywhere_but_in_its_elements_is_not_recognised() -> None:
    file = bytearray()
    layout = add_item(file, random_tensor("float32", (8, 8)))
    places = [*range(layout.start, layout.data_start), *range(layout.data_stop, layout.stop)]
    for place in places:
        broken = bytearray(file)
        broken[place] ^= 1
        assert recognise_item(Bytes(bytes(broken)), layout.start, layout.stop, layout.dtype, (8, 8)) is None, place
    broken = bytearray(file)
    broken[layout.data_start] ^= 1
    assert recognise_item(Bytes(bytes(broken)), layout.start, layout.stop, layout.dtype, (8, 8)) is not None
    for dtype, shape in ((DTYPES["int32"], (8, 8)), (layout.dtype, (8, 4)), (layout.dtype, (64,))):
        assert recognise_item(Bytes(bytes(file)), layout.start, layout.stop, dtype, shape) is None


def test_an_item_of_torch_is_not_recognised() -> None:
    buffer = io.BytesIO()
    torch.save(torch.ones(3), buffer)
    data = buffer.getvalue()
    assert recognise_item(Bytes(data), 0, len(data), DTYPES["float32"], (3,)) is None
    assert recognise_item(Bytes(data), 0, len(data), DTYPES["float32"], (2**62, 2**62)) is None
