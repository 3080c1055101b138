"""FastFileSystemWriter in one process: what it writes, and from what. torch's own loader judges."""

from __future__ import annotations

import io
import os
import pickle
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

import fsdp_ckpt
from fsdp_ckpt import FastFileSystemReader, FastFileSystemWriter
from fsdp_ckpt.errors import Incompatible, UsageError
from fsdp_ckpt.train.dcp_staging import staging_candidates
from tests.cases.check import assert_same, merge_and_load
from tests.unit.train.dcp_loads import load_all, load_error, save, save_error, tensors_of

DTYPES = ("bfloat16", "float8_e4m3fn", "complex64", "bool", "int64", "uint16", "float64")


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = {dtype: torch.randn(40, 300).to(getattr(torch, dtype)) for dtype in DTYPES}
    found |= {
        "0-d": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "small": torch.arange(5),
        "transposed": torch.randn(70, 30).t(),
        "conjugate": torch.randn(4, 4, dtype=torch.complex64).conj(),
        "param": torch.nn.Parameter(torch.ones(3)),
    }
    return {"model": found, "optim": {"lr": 0.1, "groups": [{"params": [0, 1], "betas": (0.9, 0.99)}]}, "step": 7}


def torch_metadata(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


@pytest.mark.parametrize("files", [1, 3])
def test_torch_and_ours_read_it(tmp_path: Path, files: int) -> None:
    right = state()
    save(right, tmp_path / "run", files_per_rank=files, durable=files == 1)
    expected = flatten_state_dict(right)[0]
    for reader in (dcp.FileSystemReader, FastFileSystemReader):
        found = load_all(reader(tmp_path / "run"))
        assert found.keys() == expected.keys()
        assert_same(tensors_of(found), tensors_of(expected))
        others = {key for key, value in expected.items() if not isinstance(value, Tensor)}
        assert {key: found[key] for key in others} == {key: expected[key] for key in others}
    names = [".metadata", *(f"__0_{number}.distcp" for number in range(files))]
    assert sorted(os.listdir(tmp_path / "run")) == names


def test_metadata_are_those_that_torch_writes(tmp_path: Path) -> None:
    """Keys and their order, paths, boxes, number of each box; places differ."""
    returned = save(state(), tmp_path / "ours")
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "torch"), no_dist=True)
    found, right = torch_metadata(tmp_path / "ours"), torch_metadata(tmp_path / "torch")
    assert sorted(found.state_dict_metadata) == sorted(right.state_dict_metadata)
    for key, item in right.state_dict_metadata.items():
        mine = found.state_dict_metadata[key]
        assert type(mine) is type(item)
        if isinstance(item, TensorStorageMetadata):
            assert isinstance(mine, TensorStorageMetadata)
            assert (mine.size, mine.chunks) == (item.size, item.chunks)
            assert mine.properties.dtype == item.properties.dtype
            assert mine.properties.layout == item.properties.layout
            assert mine.properties.memory_format == item.properties.memory_format
    assert found.planner_data == right.planner_data
    assert found.storage_data.keys() == right.storage_data.keys()
    numbers = {(index.fqn, index.offset): index.index for index in right.storage_data}
    assert {(index.fqn, index.offset): index.index for index in found.storage_data} == numbers
    assert found.version == right.version
    assert found.storage_meta is not None
    assert found.storage_meta.save_id
    assert returned.storage_data == found.storage_data
    assert returned.storage_meta is not None
    assert returned.storage_meta.save_id == found.storage_meta.save_id


def test_every_item_is_an_aligned_archive_with_checksums(tmp_path: Path) -> None:
    """By Python's zip reader and torch.load, item by item."""
    save(state(), tmp_path, files_per_rank=2)
    right = flatten_state_dict(state())[0]
    large = 0
    for index, info in torch_metadata(tmp_path).storage_data.items():
        raw = (tmp_path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        value = torch.load(io.BytesIO(raw), weights_only=True)
        if not isinstance(value, Tensor):
            assert value == right[index.fqn]
            continue
        assert_same({"x": value}, {"x": right[index.fqn]})
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            assert archive.testzip() is None
            (name,) = (name for name in archive.namelist() if name.endswith("/data/0"))
            header = archive.getinfo(name).header_offset
            assert archive.getinfo(name).CRC or not value.numel()
        start = (
            info.offset
            + header
            + 30
            + sum(int.from_bytes(raw[header + at : header + at + 2], "little") for at in (26, 28))
        )
        assert start % (4096 if value.nbytes >= 4096 else 64) == 0
        large += value.nbytes >= 4096
    assert large >= len(DTYPES)


def test_the_rest_of_the_toolkit_reads_it(tmp_path: Path) -> None:
    right = {key: value for key, value in state()["model"].items() if key != "conjugate"}
    save(right, tmp_path / "run")
    (part,) = fsdp_ckpt.inspect(tmp_path / "run").parts
    assert list(part.problems) == []
    _, found = merge_and_load(tmp_path / "run", tmp_path / "out")
    assert_same(found, {key: value.detach() for key, value in right.items()})


def test_files_share_the_work(tmp_path: Path) -> None:
    """The largest tensor goes alone, the others are dealt out beside it."""
    save({"large": torch.zeros(300_000), **{str(n): torch.zeros(50_000) for n in range(6)}}, tmp_path, files_per_rank=2)
    sizes = [(tmp_path / f"__0_{number}.distcp").stat().st_size for number in range(2)]
    assert max(sizes) < 1.1 * min(sizes)


def test_a_file_for_nothing_is_not_made(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "one", files_per_rank=4)
    assert sorted(os.listdir(tmp_path / "one")) == [".metadata", "__0_0.distcp"]
    save({}, tmp_path / "none")
    assert os.listdir(tmp_path / "none") == [".metadata"]
    assert load_all(dcp.FileSystemReader(tmp_path / "none")) == {}


def test_objects_are_kept_as_torch_keeps_them(tmp_path: Path) -> None:
    """Also those of classes, which torch loads, and our reader refuses."""
    from types import SimpleNamespace

    kept = {"names": SimpleNamespace(a=1), "plain": {"x": [1, {"y": None}]}}
    save(kept, tmp_path)
    found = load_all(dcp.FileSystemReader(tmp_path))
    assert found["names"] == SimpleNamespace(a=1)
    loaded: dict[str, Any] = {"names": None}
    assert "SimpleNamespace" in load_error(FastFileSystemReader(tmp_path), loaded, no_dist=True).message


def test_without_flattening(tmp_path: Path) -> None:
    """A nested dictionary is one object, and there are no paths."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    writer = FastFileSystemWriter(tmp_path)
    dcp.save({"w": torch.ones(2), "all": {"x": torch.ones(3)}}, storage_writer=writer, planner=planner, no_dist=True)
    found = load_all(dcp.FileSystemReader(tmp_path))
    assert torch.equal(found["all"]["x"] if "all" in found else found["all.x"], torch.ones(3))


def test_the_folder_may_be_named_in_the_call(tmp_path: Path) -> None:
    writer = FastFileSystemWriter(tmp_path / "unused")
    ids = set()
    for number in (1, 2):
        folder = tmp_path / str(number)
        dcp.save({"w": torch.full((2,), float(number))}, checkpoint_id=str(folder), storage_writer=writer, no_dist=True)
        assert load_all(dcp.FileSystemReader(folder))["w"].tolist() == [number] * 2
        assert Path(writer.checkpoint_id) == folder
        meta = torch_metadata(folder).storage_meta
        assert meta is not None
        ids.add(meta.save_id)
    assert len(ids) == 2
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
    assert FastFileSystemWriter.validate_checkpoint_id(tmp_path)
    assert not FastFileSystemWriter.validate_checkpoint_id("gs://bucket/run")


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        save({"w": torch.ones(3)}, tmp_path / "new" / "run")
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*")}
    assert modes == {"run": 0o750, ".metadata": 0o640, "__0_0.distcp": 0o640}


@pytest.mark.parametrize("durable", [True, False])
def test_what_reaches_the_disk_before_the_name(tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data file and metadata, the hidden folder with their names, then the rename, then the folder above."""
    done: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real_fsync(fd)

    def rename(src: Any, dst: Any) -> None:
        done.append(f"-> {os.path.basename(dst)}")
        real_rename(src, dst)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save({"w": torch.ones(3)}, tmp_path / "run", durable=durable)
    hidden = staging_candidates(tmp_path / "run")[0].name
    if not durable:
        assert done == ["-> .metadata", "-> run"]
        return
    assert done[0] == "__0_0.distcp"
    commit = done.index("-> run")
    assert "metadata.index.json" in done[:commit]
    assert done[commit - 1] == hidden
    assert done.index("-> .metadata") < commit - 1
    assert tmp_path.name in done[commit:]


class Casting(DefaultSavePlanner):
    """Stores other values than it has planned."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(write_item).half()  # type: ignore[union-attr]


class Annotating(DefaultSavePlanner):
    """Has data of its own."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = ["mine"]
        return plans, metadata


@pytest.mark.parametrize(("planner", "message"), [(Casting, "has planned torch.float32"), (Annotating, "planner_data")])
def test_planners_whose_checkpoints_nobody_could_read(tmp_path: Path, planner: Any, message: str) -> None:
    save({"w": torch.ones(3)}, tmp_path / "run")
    writer = FastFileSystemWriter(tmp_path / "run")
    error = save_error(lambda: dcp.save({"w": torch.zeros(3)}, storage_writer=writer, planner=planner(), no_dist=True))
    assert isinstance(error, Incompatible)
    assert message in error.message
    assert load_all(dcp.FileSystemReader(tmp_path / "run"))["w"].tolist() == [1] * 3
    writer.close()
    assert os.listdir(tmp_path) == ["run"]


class Halving(DefaultSavePlanner):
    """Plans what it stores, as torch's documentation has it."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        found: Any = super().resolve_data(write_item)
        return found.half() if isinstance(found, Tensor) else found


def test_planners_that_convert(tmp_path: Path) -> None:
    writer = FastFileSystemWriter(tmp_path / "run")
    dcp.save({"w": torch.ones(3), "n": 1}, storage_writer=writer, planner=Halving(), no_dist=True)
    for reader in (dcp.FileSystemReader, FastFileSystemReader):
        assert load_all(reader(tmp_path / "run"))["w"].dtype == torch.float16


def test_sparse_tensors_are_refused(tmp_path: Path) -> None:
    error = save_error(lambda: save({"w": torch.ones(3).to_sparse()}, tmp_path / "run"))
    assert "no dense tensor (torch.sparse_coo)" in error.message


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no local path"):
        FastFileSystemWriter("s3://bucket/run")
    with pytest.raises(UsageError, match="files_per_rank"):
        FastFileSystemWriter(tmp_path, files_per_rank=0)
    with pytest.raises(UsageError, match="set_up_storage_writer"):
        FastFileSystemWriter(tmp_path).prepare_global_plan([])
