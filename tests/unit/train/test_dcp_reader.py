"""FastFileSystemReader in one process: what it reads, and where to, beside torch's own reader."""

from __future__ import annotations

import io
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

import fsdp_ckpt.train.dcp_reader
from fsdp_ckpt import FastFileSystemReader, save_state
from fsdp_ckpt.errors import ChecksumMismatch
from fsdp_ckpt.train.dcp_lanes import split_evenly
from tests.build import Box, rows, save_dcp
from tests.cases.check import assert_same, bits
from tests.compat.judges import read_item_by_item
from tests.compat.samples import EDGES, SAMPLES
from tests.unit.train.dcp_loads import flip, load_all, load_error, save_pieces, tensors_of


def folder_id(path: Path) -> str:
    return f"{path.parent.parent.name}-{path.parent.name}-{path.name}"


FOLDERS = sorted(
    {folder for sample in SAMPLES if not sample.is_wrong for folder in sample.dcp_folders()}
    | {path.parent for edge in EDGES for path in edge.rglob(".metadata")}
)
NEWER = [folder for folder in FOLDERS if "torch215" in str(folder) or "py313_style" in str(folder)]
"""Those that torch 2.13 cannot open: metadata of a later torch or Python."""


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("folder", FOLDERS, ids=folder_id)
def test_every_checkpoint_that_torch_wrote(folder: Path) -> None:
    """Tensors bit by bit, into memory that held something else; torch's reader or a plain one is the judge."""
    if folder in NEWER:
        expected = read_item_by_item(folder)
    elif "safetensors" in str(folder):  # written by torch, and not readable by it
        expected = safetensors_items(folder)
    else:
        expected = tensors_of(torch_reads_tensors(folder))
    assert expected or folder.name == "noflatten"  # one object
    target = {key: torch.empty_like(value) for key, value in expected.items()}
    for value in target.values():
        torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).fill_(1)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(dict(target), storage_reader=FastFileSystemReader(folder), planner=planner, no_dist=True)
    assert_same(target, expected)


def torch_reads_tensors(folder: Path) -> dict[str, Any]:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    found: dict[str, Any] = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=True)
    return found


def safetensors_items(folder: Path) -> dict[str, Tensor]:
    """By the safetensors library, piece by piece."""
    from safetensors.torch import load

    metadata = dcp.FileSystemReader(folder).read_metadata()
    found = {}
    for key, item in metadata.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            continue
        found[key] = torch.empty(item.size, dtype=item.properties.dtype)
        for chunk in item.chunks:
            info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            piece = load((folder / info.relative_path).read_bytes()[info.offset :])[key]
            box = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            found[key][box] = piece
    return found


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder not in NEWER], ids=folder_id)
def test_metadata_are_those_of_torch(folder: Path) -> None:
    right, found = dcp.FileSystemReader(folder).read_metadata(), FastFileSystemReader(folder).read_metadata()
    assert found.state_dict_metadata.keys() == right.state_dict_metadata.keys()
    for key, item in right.state_dict_metadata.items():
        mine = found.state_dict_metadata[key]
        assert type(mine) is type(item)
        if isinstance(item, TensorStorageMetadata):
            assert isinstance(mine, TensorStorageMetadata)
            assert (mine.size, mine.chunks) == (item.size, item.chunks)
            assert mine.properties.dtype == item.properties.dtype
            assert type(mine.size) is torch.Size
    assert (found.planner_data or {}) == (right.planner_data or {})
    assert found.storage_data == right.storage_data
    numbers = {(i.fqn, i.offset): i.index for i in right.storage_data}
    assert {(i.fqn, i.offset): i.index for i in found.storage_data} == numbers
    assert found.storage_meta is not None
    assert found.storage_meta.load_id


def test_objects_are_those_of_torch(tmp_path: Path) -> None:
    """Values, also compressed ones, and a buffer of values, as torchtitan has it."""
    buffer = io.BytesIO()
    torch.save([4.5, 3.25], buffer)
    state = {
        "step": 3,
        "optim": {"lr": 0.1, "betas": (0.9, 0.95), "names": ["a", None]},
        "losses": buffer,
        "w": torch.ones(3),
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "plain"), no_dist=True)
    from torch.distributed.checkpoint._extension import ZStandard

    writer = dcp.FileSystemWriter(tmp_path / "zstd", _extensions=[ZStandard()])
    dcp.save(state, storage_writer=writer, no_dist=True)
    for name in ("plain", "zstd"):
        found = load_all(FastFileSystemReader(tmp_path / name))
        losses = found.pop("losses")
        assert torch.load(io.BytesIO(losses.getvalue()), weights_only=True) == [4.5, 3.25]
        assert losses.tell() == buffer.tell()
        assert torch.equal(found.pop("w"), torch.ones(3))
        assert found == {"step": 3, "optim.lr": 0.1, "optim.betas": (0.9, 0.95), "optim.names": ["a", None]}


def test_compressed_items_that_several_threads_want(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread wants pieces of each item."""
    from torch.distributed.checkpoint._extension import ZStandard

    monkeypatch.setattr(fsdp_ckpt.train.dcp_reader, "_LANE_BYTES", 1)
    whole = torch.randn(64, 50)
    save_dcp(tmp_path / "run", {"w": rows(whole, 2)}, ranks=2, _extensions=[ZStandard()])
    for _ in range(5):
        held = Held.of(whole, [((row, 0), (1, 50)) for row in range(64)])
        dcp.load({"w": held}, storage_reader=FastFileSystemReader(tmp_path / "run", num_threads=8), no_dist=True)
        assert torch.equal(torch.cat([held.parts[torch.Size((row, 0))] for row in range(64)]), whole)


def test_a_part_of_what_save_state_wrote(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    save_state(tmp_path / "run", model, durable=False)
    state = {"model": torch.nn.Linear(4, 3).state_dict()}
    dcp.load(state, storage_reader=FastFileSystemReader(tmp_path / "run" / "pytorch_model_fsdp_0"), no_dist=True)
    assert_same(state["model"], model.state_dict())


def test_the_folder_may_be_named_in_the_call(tmp_path: Path) -> None:
    for number in (1, 2):
        dcp.save({"w": torch.full((3,), float(number))}, checkpoint_id=tmp_path / str(number), no_dist=True)
    reader = FastFileSystemReader(tmp_path / "1")
    for number in (2, 1, 2):
        state = {"w": torch.zeros(3)}
        dcp.load(state, checkpoint_id=str(tmp_path / str(number)), storage_reader=reader, no_dist=True)
        assert state["w"].tolist() == [number] * 3
        assert Path(reader.checkpoint_id) == tmp_path / str(number)
    assert FastFileSystemReader.validate_checkpoint_id(tmp_path)
    assert not FastFileSystemReader.validate_checkpoint_id("s3://bucket/run")


def test_metadata_may_come_from_another_reader(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(3.0)}, checkpoint_id=tmp_path, no_dist=True)

    class Mixed(FastFileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            found = dcp.FileSystemReader(tmp_path).read_metadata()
            found.planner_data = ["a planner's own"]
            return found

    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=Mixed(tmp_path), no_dist=True)
    assert state["w"].tolist() == [0, 1, 2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("saved") / "run"
    return folder, save_pieces(folder)


TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it was": torch.empty_like,
    "transposed": lambda value: torch.empty(tuple(value.shape)[::-1]).permute(tuple(range(value.dim()))[::-1]),
    "within a larger one": lambda value: torch.empty([2 * n for n in value.shape])[(slice(0, None, 2),) * value.dim()],
    "bfloat16": lambda value: torch.empty_like(value, dtype=torch.bfloat16),
    "float64": lambda value: torch.empty_like(value, dtype=torch.float64),
    "int64": lambda value: torch.empty_like(value, dtype=torch.int64),
    "a parameter": lambda value: torch.nn.Parameter(torch.empty_like(value)),
    "negated": lambda value: torch.empty_like(value, dtype=torch.complex64).conj().imag,
    "of a class": lambda value: torch.empty_like(value).as_subclass(Counted),
}  # fmt: skip


class Counted(Tensor):
    """Sees what is copied into it."""

    copies = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.copies += func is Tensor.copy_
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", TARGETS)
def test_into_tensors_of_all_kinds(saved: tuple[Path, dict[str, Tensor]], kind: str, verify: bool) -> None:
    """As torch's `copy_` fills them, with its conversions."""
    folder, whole = saved
    Counted.copies = 0
    state = {key: TARGETS[kind](value) for key, value in whole.items()}
    dcp.load(dict(state), storage_reader=FastFileSystemReader(folder, verify=verify), no_dist=True)
    assert Counted.copies or kind != "of a class"
    for key, value in whole.items():
        expected = TARGETS[kind](value).detach().copy_(value)
        assert torch.equal(bits(state[key].detach()), bits(expected))


def test_through_small_buffers(saved: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_ckpt.train.dcp_lanes.STAGE_BYTES", 24)
    folder, whole = saved
    state = {key: torch.empty_like(value, dtype=torch.float64) for key, value in whole.items()}
    dcp.load(dict(state), storage_reader=FastFileSystemReader(folder), no_dist=True)
    assert_same(state, {key: value.double() for key, value in whole.items()})


def test_what_torch_refuses_to_fill(saved: tuple[Path, dict[str, Tensor]]) -> None:
    """One element for many: NumPy would take the last one."""
    state = {"rows": torch.zeros(1, 7).expand(29, 7)}
    for reader in (dcp.FileSystemReader, FastFileSystemReader):
        with pytest.raises(
            CheckpointException, match="more than one element of the written-to tensor refers to a single"
        ):
            dcp.load(dict(state), storage_reader=reader(saved[0]), no_dist=True)


class Held(Tensor):
    """Boxes of a tensor that this rank holds, offered by torch's extension point for such classes."""

    parts: dict[torch.Size, Tensor]

    @staticmethod
    def of(whole: Tensor, boxes: Sequence[Box]) -> Held:
        held = torch.empty(whole.shape).as_subclass(Held)
        held.parts = {torch.Size(offsets): torch.zeros(lengths) for offsets, lengths in boxes}
        return held

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, part.size()) for offsets, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[index.offset]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("cut", [(2, 1), (1, 3), (5, 2), (7, 7)], ids=str)
def test_into_pieces_that_are_cut_otherwise(
    saved: tuple[Path, dict[str, Tensor]], cut: tuple[int, int], verify: bool
) -> None:
    """Each piece by itself, as a rank would, and all of them at once."""
    folder, whole = saved
    for key in ("rows", "grid", "columns"):
        value = whole[key]
        edges = [[size * n // parts for n in range(parts + 1)] for size, parts in zip(value.shape, cut, strict=True)]
        cells = itertools.product(*map(itertools.pairwise, edges))
        boxes = [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]
        boxes = [box for box in boxes if 0 not in box[1]]
        for some in ([box] for box in boxes), [boxes]:
            for held_here in some:
                held = Held.of(value, held_here)
                dcp.load({key: held}, storage_reader=FastFileSystemReader(folder, verify=verify), no_dist=True)
                for offsets, part in held.parts.items():
                    box = tuple(slice(a, a + n) for a, n in zip(offsets, part.shape, strict=True))
                    assert torch.equal(part, value[box])


class Lazy(DefaultLoadPlanner):
    """Makes memory when it is asked, and gets it back when it is full; not thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = self.most = 0
        self.is_busy = False
        self.asked: list[str] = []
        self.done: dict[str, Tensor] = {}

    def alone(self) -> None:
        assert not self.is_busy, "two threads at once"
        self.is_busy = True
        time.sleep(0.002)
        self.is_busy = False

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        self.alone()
        self.asked.append(read_item.storage_index.fqn)
        self.inside += 1
        self.most = max(self.most, self.inside)
        return torch.empty(read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.alone()
        self.inside -= 1
        self.done[f"{read_item.storage_index.fqn} {tuple(read_item.storage_index.offset or ())}"] = tensor


@pytest.mark.parametrize("threads", [1, 3])
def test_planners_that_make_memory_have_little_of_it_at_a_time(
    saved: tuple[Path, dict[str, Tensor]], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_ckpt.train.dcp_reader, "_LANE_BYTES", 1)
    folder, whole = saved
    planner = Lazy()
    state = {key: torch.empty(value.shape) for key, value in whole.items()}
    dcp.load(state, storage_reader=FastFileSystemReader(folder, num_threads=threads), planner=planner, no_dist=True)
    assert torch.equal(torch.cat([planner.done[f"rows ({start}, 0)"] for start in (0, 10, 20)]), whole["rows"])
    assert 1 <= planner.most <= threads
    assert planner.inside == 0


def test_threads_in_inference_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp_ckpt.train.dcp_reader, "_LANE_BYTES", 1)
    whole = {str(number): torch.full((5,), float(number)) for number in range(6)}
    dcp.save(dict(whole), checkpoint_id=tmp_path, no_dist=True)
    with torch.inference_mode():
        state = {key: torch.zeros(5, dtype=torch.float64) for key in whole}
        dcp.load(dict(state), storage_reader=FastFileSystemReader(tmp_path, num_threads=3), no_dist=True)
        assert [value.tolist() for value in state.values()] == [value.tolist() for value in whole.values()]


def test_the_first_failure_ends_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp_ckpt.train.dcp_reader, "_LANE_BYTES", 1)
    state = {f"{number:02}": torch.full((1000,), float(number)) for number in range(40)}
    dcp.save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / "__0_0.distcp"
    flip(file, file.read_bytes().index(struct.pack("<f", 1.0)))
    before, planner = threading.active_count(), Lazy()
    reader = FastFileSystemReader(tmp_path, num_threads=2)
    error = load_error(reader, {key: torch.zeros(1000) for key in state}, planner=planner, no_dist=True)
    assert isinstance(error, ChecksumMismatch)
    assert "`01`" in error.message
    assert len(planner.asked) < 10
    assert threading.active_count() == before


def test_files_are_read_in_their_order(tmp_path: Path) -> None:
    names = ["c", "a", "d", "b"]
    dcp.save({name: torch.ones(3) for name in names}, checkpoint_id=tmp_path, no_dist=True)
    places = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    right = [index.fqn for index, info in sorted(places.items(), key=lambda item: item[1].offset)]
    assert right != sorted(names)
    planner = Lazy()
    state = {name: torch.zeros(3) for name in names}
    dcp.load(state, storage_reader=FastFileSystemReader(tmp_path), planner=planner, no_dist=True)
    assert planner.asked == right


def test_descriptors_are_closed(saved: tuple[Path, dict[str, Tensor]]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = FastFileSystemReader(saved[0])
    for _ in range(3):
        dcp.load({"rows": torch.empty(29, 7)}, storage_reader=reader, no_dist=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_items_are_cut_evenly() -> None:
    assert split_evenly([1, 2, 3, 4], [10, 10, 10, 10], 2) == [[1, 2], [3, 4]]
    assert split_evenly([1, 2, 3], [1, 100, 1], 3) == [[1], [2], [3]]
    assert split_evenly([1, 2], [0, 0], 2) == [[1, 2], []]
