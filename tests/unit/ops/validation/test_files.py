from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdp_ckpt import save_state
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, write_manifest
from fsdp_ckpt.ops.validate import validate
from tests.build import rows, save_dcp
from tests.cli.tool import FIXTURES
from tests.unit.ops.validation.broken import edit, faults, message, model, place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model(tmp_path / "step-3")


@pytest.mark.parametrize("level", ["geometry", "headers", "deep"])
def test_a_whole_checkpoint_has_no_faults(level: str, folder: Path) -> None:
    assert faults(folder, level) == []


def test_a_missing_file(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()
    assert faults(folder, "geometry") == [("E102", "__1_0.distcp")]
    assert "(of rank 1)" in message(folder, "E102")


def test_missing_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()
    assert faults(folder, "geometry") == [("E103", ".metadata")]


def test_a_file_cut_short(folder: Path) -> None:
    size = (folder / "__1_0.distcp").stat().st_size
    os.truncate(folder / "__1_0.distcp", size - 1)
    assert faults(folder, "geometry") == [("E104", "__1_0.distcp")]
    assert message(folder, "E104").startswith(f"has {size - 1} bytes, but holds items up to byte {size}")


def test_an_item_without_a_place(folder: Path) -> None:
    def change(metadata: object) -> None:
        storage = metadata.storage_data  # type: ignore[attr-defined]
        for index in [index for index in storage if index.fqn == "model.b"]:
            del storage[index]

    edit(folder, change)
    codes = {code for code, _ in faults(folder, "geometry")}
    assert {"E108", "E101", "W116"} <= codes


def test_a_stale_file(folder: Path) -> None:
    shutil.copy(folder / "__1_0.distcp", folder / "__2_0.distcp")
    assert faults(folder, "geometry") == [("W113", "__2_0.distcp")]
    assert validate(folder).ok
    assert not validate(folder, strict=True).ok


def test_unfinished_metadata(folder: Path) -> None:
    shutil.copy(folder / ".metadata", folder / ".metadata.tmp")
    assert faults(folder, "geometry") == [("W114", ".metadata.tmp")]


@pytest.mark.parametrize("level", ["geometry", "headers"])
def test_bytes_that_nobody_claims(level: str, folder: Path) -> None:
    """Behind the last item, whatever they are; between items, unless they are padding."""
    with open(folder / "__0_0.distcp", "ab") as out:
        out.write(b"\0" * 10)
    assert faults(folder, level) == [("W116", "__0_0.distcp")]
    assert "10 B of" in message(folder, "W116")


def test_bytes_of_a_key_that_the_metadata_lack(folder: Path) -> None:
    def change(metadata: object) -> None:
        del metadata.state_dict_metadata["model.b"]  # type: ignore[attr-defined]
        del metadata.planner_data["model.b"]  # type: ignore[attr-defined]
        storage = metadata.storage_data  # type: ignore[attr-defined]
        for index in [index for index in storage if index.fqn == "model.b"]:
            del storage[index]

    edit(folder, change)
    assert faults(folder, "headers") == [("W116", "__0_0.distcp"), ("W116", "__1_0.distcp")]


def test_two_items_that_claim_the_same_bytes(folder: Path) -> None:
    def change(metadata: object) -> None:
        first, second = (place(metadata, "model.a.weight", number) for number in (0, 1))
        second.relative_path, second.offset, second.length = first.relative_path, first.offset, first.length

    edit(folder, change)
    assert ("E203", "model.a.weight") in faults(folder, "geometry")


def test_data_newer_than_metadata_on_some_ranks_only(folder: Path) -> None:
    """A note, as copying does that as well; a warning where a save that did not end has left its mark."""
    now = (folder / ".metadata").stat().st_mtime
    os.utime(folder / "__0_0.distcp", (now - 5, now - 5))
    os.utime(folder / "__1_0.distcp", (now + 60, now + 60))
    (one,) = [one for one in validate(folder).findings if one.name == "mixed-times"]
    assert (one.severity, one.where) == ("note", "__1_0.distcp")
    assert "1 of 2 data files" in one.message
    shutil.copy(folder / ".metadata", folder / ".metadata.tmp")
    assert ("E118", "__1_0.distcp") in faults(folder)


def test_leftovers_beside_it(folder: Path) -> None:
    (folder.parent / ".step-3.fsdp-ckpt-0123abcd.old").mkdir()
    found = faults(folder)
    assert [code for code, _ in found] == ["W117"]


def test_no_tensors_at_all(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-1", {"lr": 0.5}, ranks=1)
    (one,) = [one for one in validate(tmp_path / "step-1").findings if one.code == "E109"]
    assert one.severity == "warning"
    assert "but objects" in one.message


def _with_manifest(folder: Path) -> Path:
    """Add a manifest as save_state writes it."""
    part = folder / "pytorch_model_fsdp_0"
    part.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(part / path.name)
    files = {f"{part.name}/{path.name}": (path.stat().st_size, "00000000") for path in part.iterdir()}
    manifest = Manifest(
        save_id="1", step=3, world_size=2, state_dict_type="SHARDED_STATE_DICT", created="", versions={}, files=files
    )
    (folder / MANIFEST).write_bytes(write_manifest(manifest))
    return folder


def test_what_the_manifest_says(folder: Path) -> None:
    _with_manifest(folder)
    assert faults(folder, "geometry") == []
    (folder / "notes.txt").write_text("?")
    assert faults(folder, "geometry") == [("W115", "notes.txt")]
    file = "pytorch_model_fsdp_0/__1_0.distcp"
    os.truncate(folder / file, 100)
    found = faults(folder, "geometry")
    assert ("E105", file) in found
    assert ("W115", "notes.txt") in found


def test_a_broken_manifest(folder: Path) -> None:
    _with_manifest(folder)
    data = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(data | {"step": 4}))
    assert faults(folder, "geometry") == [("E112", MANIFEST)]


def test_a_model_in_the_place_of_an_optimizer(tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURES / "torch-2.13.0/full_w2", tmp_path / "c", ignore=shutil.ignore_patterns("exp*"))
    assert faults(source) == []
    shutil.copy(source / "pytorch_model_fsdp.bin", source / "optimizer.bin")
    assert ("E121", "optimizer.bin") in faults(source)


def test_optimizers_of_any_form_are_none(tmp_path: Path) -> None:
    """Nested, or with flattened names."""
    for number, state in enumerate(
        (
            {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
            {"state.a.exp_avg": torch.ones(2), "param_groups.a.lr": 0.1},
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
        torch.save(state, folder / "optimizer.bin")
        assert "E121" not in {code for code, _ in faults(folder)}


def test_a_saved_state_without_its_manifest(tmp_path: Path) -> None:
    """It looks like Accelerate's, but items and small files are as only save_state writes them."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    save_state(tmp_path / "step-1", net, optimizer, scheduler, step=1)
    assert faults(tmp_path / "step-1", "deep") == []
    (tmp_path / "step-1" / MANIFEST).unlink()
    assert faults(tmp_path / "step-1", "geometry") == []
    assert faults(tmp_path / "step-1") == [("E122", MANIFEST)]


def test_a_link_to_another_disk_is_one_fault_and_the_rest_is_looked_at(folder: Path, tmp_path: Path) -> None:
    elsewhere = shutil.move(folder / "__1_0.distcp", tmp_path / "elsewhere")
    (folder / "__1_0.distcp").symlink_to(elsewhere)
    assert faults(folder) == [("E110", "__1_0.distcp")]
    assert validate(folder).checked.num_tensors > 0


def test_a_link_to_nothing_is_a_missing_file(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()
    (folder / "__1_0.distcp").symlink_to("/nowhere/at/all")
    assert faults(folder) == [("E102", "__1_0.distcp")]
    assert "a link to `/nowhere/at/all`, which does not exist (of rank 1)" in message(folder, "E102")


def test_a_stale_file_is_of_no_rank(folder: Path) -> None:
    assert validate(folder).world_size == 2
    shutil.copy(folder / "__1_0.distcp", folder / "__7_0.distcp")
    assert validate(folder).world_size == 2


def test_an_empty_file_says_so(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"")
    assert faults(folder) == [("E112", ".metadata")]
    assert "the file is empty" in message(folder, "E112")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_what_git_lfs_left_says_so(tmp_path: Path, name: str) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    (tmp_path / name).write_bytes(pointer)
    assert faults(tmp_path) == [("E112", name)]
    assert "a pointer of git-lfs" in message(tmp_path, "E112")


def test_one_file_of_a_numbered_set_is_judged_by_itself(tmp_path: Path) -> None:
    names = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]
    for name, key in zip(names, "ab", strict=True):
        save_file({key: torch.ones(2)}, tmp_path / name)
    index = {"metadata": {"total_size": 16}, "weight_map": dict(zip("ab", names, strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert faults(tmp_path) == faults(tmp_path / names[0]) == []
    (tmp_path / names[1]).unlink()
    assert faults(tmp_path) == [("E102", names[1])]


def test_a_missing_rank_is_named_by_its_own_file(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "torch-2.13.0/rank_files_fsdp2_w2", tmp_path / "c")
    (tmp_path / "c/model_world_size_2_rank_0.pt").unlink()
    assert ("E106", "model_world_size_2_rank_0.pt") in faults(tmp_path / "c")
    assert validate(tmp_path / "c").findings[0].code == "E106", "the cause comes first"


def test_a_file_in_which_nothing_is_right_is_one_finding(tmp_path: Path) -> None:
    tensors = {f"layers.{n}.weight": rows(torch.arange(8.0) + n, 2) for n in range(9)}
    folder = save_dcp(tmp_path / "c", tensors)
    size = (folder / "__1_0.distcp").stat().st_size
    (folder / "__1_0.distcp").write_bytes(bytes(size))
    found = [one for one in validate(folder).findings if one.severity == "error"]
    assert [(one.code, one.where) for one in found] == [("E204", "__1_0.distcp")]
    assert "none of its 9 tensors" in found[0].message
