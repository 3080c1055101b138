from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.ops.validate import validate
from tests.build import rows, save_dcp
from tests.cli.tool import FIXTURES
from tests.unit.ops.validation.broken import edit, faults, item, message, model, patch, place


class Own:
    """A class of the writer's."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model(tmp_path / "ckpt", extra={"lr": 0.5})


def test_heads_are_counted(folder: Path) -> None:
    assert validate(folder, level="headers").checked.num_items == 5
    assert validate(folder, level="geometry").checked.num_items == 0


def test_another_dtype_than_the_metadata_say(folder: Path) -> None:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["model.a.weight"].properties.dtype = torch.int32

    edit(folder, change)
    assert faults(folder, "geometry") == []
    assert faults(folder) == [("E204", "model.a.weight"), ("E204", "model.a.weight")]


def test_files_that_were_swapped(tmp_path: Path) -> None:
    """Of nine rows, one rank has five."""
    folder = save_dcp(tmp_path / "c", {"w": rows(torch.arange(9.0), 2), "v": rows(torch.arange(6.0), 2)})
    first, second = (folder / name for name in ("__0_0.distcp", "__1_0.distcp"))
    data = first.read_bytes(), second.read_bytes()
    if len(data[0]) != len(data[1]):
        pytest.skip("torch gives items another size here")
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    assert {code for code, _ in faults(folder)} == {"E204"}


def test_an_item_that_is_no_archive(folder: Path) -> None:
    file, start, stop = item(folder, "model.b", 1)
    data = bytearray(file.read_bytes())
    data[stop - 22 : stop] = bytes(22)
    file.write_bytes(data)
    assert faults(folder) == [("E302", "model.b")]
    assert file.name in message(folder, "E302")
    assert start < stop


def test_a_pickle_that_was_changed(folder: Path) -> None:
    """Small records are compared at this level, too."""
    file, start, _ = item(folder, "model.b")
    patch(file, file.read_bytes().index(b"_rebuild_tensor_v2", start) + 3)
    assert faults(folder) == [("E301", "model.b")]


def test_an_archive_without_its_version(folder: Path) -> None:
    """torch refuses it; its elements are unharmed."""
    file, start, _ = item(folder, "model.b")
    at = file.read_bytes().index(b"/versionPK", start) + 1
    patch(file, at, 2)
    assert faults(folder) == [("E302", "model.b")]
    assert "no version" in message(folder, "E302")


def test_a_record_that_poses_as_a_folder(folder: Path) -> None:
    """torch then reads nothing, and gives what was in memory."""
    file, start, stop = item(folder, "model.b")
    data = file.read_bytes()
    entry = data.index(b"PK\1\2", start)
    patch(file, entry + 38, 0x10)
    assert entry < stop
    assert faults(folder) == [("E302", "model.b")]


def test_an_object_of_a_class_of_ones_own(tmp_path: Path) -> None:
    folder = model(tmp_path / "c", extra={"own": Own()})
    (one,) = [one for one in validate(folder).findings if one.code == "E111"]
    assert (one.severity, one.where) == ("warning", "extra.own")
    assert f"`{Own.__module__}.Own`" in one.message


def test_an_object_that_runs_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return eval, ("1",)

    folder = model(tmp_path / "c", extra={"evil": Evil()})
    assert validate(folder).errors == 1
    assert faults(folder, "geometry") == []
    assert faults(folder) == [("E111", "extra.evil")]


def test_bytesio_is_no_class_to_be_warned_of(tmp_path: Path) -> None:
    """torchtitan's train state holds one."""
    folder = model(tmp_path / "c", extra={"losses": io.BytesIO(b"123")})
    assert faults(folder, "deep") == []


def test_a_file_copied_over_another_one(tmp_path: Path) -> None:
    """All heads fit, as all shards have one shape."""
    folder = model(tmp_path / "c")
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")
    found = faults(folder)
    assert [code for code, _ in found if code == "E123"] == ["E123"]
    assert "the same bytes as __0_0.distcp" in message(folder, "E123")


def test_equal_shards_of_equal_elements_are_all_right(tmp_path: Path) -> None:
    """As an optimizer that has not stepped."""
    state = {"a": rows(torch.zeros(8, 6), 2), "b": rows(torch.ones(64), 2)}
    assert faults(save_dcp(tmp_path / "c", state), "deep") == []


def test_replicas_that_differ(tmp_path: Path) -> None:
    """Of a buffer a warning; of a matrix it is more."""
    for rank in range(2):
        state = {"buffer": torch.full((3,), float(rank)), "weight": torch.full((2, 2), float(rank))}
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    found = [(one.severity, one.code, one.where) for one in validate(tmp_path).findings if one.code == "E303"]
    assert sorted(set(found)) == [("error", "E303", "weight"), ("warning", "E303", "buffer")]


def test_geometry_reads_no_data(folder: Path) -> None:
    """Whatever stands in the data files."""
    for file in folder.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    assert faults(folder, "geometry") == []
    assert {code for code, _ in faults(folder)} == {"E302"}


def test_keys_and_paths_that_contradict_each_other(folder: Path) -> None:
    def change(metadata: Any) -> None:
        metadata.planner_data["model.b"] = ("model", "c")
        del metadata.planner_data["extra.lr"]
        assert place(metadata, "extra.lr")

    edit(folder, change)
    assert sorted(set(faults(folder, "geometry"))) == [("E209", "extra.lr"), ("E209", "model.b")]


def test_metadata_of_two_ranks_swapped(tmp_path: Path) -> None:
    source = FIXTURES / "torch-2.13.0/dcp_nocollectives_w2/dcp"
    folder = Path(shutil.copytree(source, tmp_path / "c"))
    assert faults(folder) == []
    first, second = (folder / f"__{rank}.metadata" for rank in range(2))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert faults(folder, "geometry") == [("E121", "__0.metadata"), ("E121", "__1.metadata")]


@pytest.mark.parametrize("name", ["rank_files_fsdp1_w2", "rank_files_fsdp2_w2"])
def test_files_of_two_ranks_swapped(name: str, tmp_path: Path) -> None:
    for rank in range(2):
        source = FIXTURES / f"torch-2.13.0/{name}/model_world_size_2_rank_{rank}.pt"
        shutil.copy(source, tmp_path / f"model_world_size_2_rank_{1 - rank}.pt")
    found = [where for code, where in faults(tmp_path) if code == "E121"]
    assert found == ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]


def test_numbered_files_without_their_index(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "torch-2.13.0/hf_w1/hf", tmp_path / "c"))
    assert faults(folder) == []
    (folder / "model.safetensors.index.json").unlink()
    assert faults(folder) == [("E604", "model.safetensors.index.json")]


def test_numbered_files_swapped(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "torch-2.13.0/hf_w1/hf", tmp_path / "c"))
    first, second = sorted(folder.glob("*.safetensors"))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    found = faults(folder)
    assert {code for code, _ in found} == {"E107"}
    assert len(found) == 15


def test_a_rank_shard_copied_over_another(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "torch-2.13.0/hf_sharded_w2/hf", tmp_path / "c"))
    assert faults(folder) == []
    name = "shard-0000{}-model-00001-of-00002.safetensors"
    shutil.copy(folder / name.format(1), folder / name.format(2))
    assert "E208" in {code for code, _ in faults(folder)}
