"""What another copy of a checkpoint is taken for, and what it is not."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_ckpt import merge
from fsdp_ckpt.errors import CheckpointNotFound, UsageError
from fsdp_ckpt.ops.repair import repair
from tests.build import assert_same
from tests.cli.tool import flip
from tests.compat.judges import read_with_torch
from tests.compat.samples import FIXTURES
from tests.unit.ops.mended import copy, is_read, kinds, mend, unchanged
from tests.unit.ops.test_repair_boxes import MESH, hybrid, loads_as, save_own


def hf_set(folder: Path, step: int, *, state: bool = True) -> Path:
    """Two numbered files, of which the first is frozen: the same in every step."""
    folder.mkdir(parents=True)
    for number, content in enumerate(({"a": torch.arange(10.0)}, {"b": torch.arange(20.0) + step}), 1):
        save_file(content, folder / f"model-{number:05}-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text('{"model_type": "x"}')
    if state:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def test_a_frozen_file_is_no_evidence(tmp_path: Path) -> None:
    checkpoint = hf_set(tmp_path / "run/checkpoint-200", 200)
    hf_set(tmp_path / "run/checkpoint-100", 100)
    backup = hf_set(tmp_path / "backup", 200)
    lost = checkpoint / "model-00002-of-00002.safetensors"
    lost.unlink()
    (fault,) = unchanged(checkpoint, replica=tmp_path / "run/checkpoint-100").faults
    assert "not of the same save: trainer_state.json differs" in fault.why
    assert "cp " not in str(fault.hint)
    mend(checkpoint, lambda _: assert_same(load_file(lost), {"b": torch.arange(20.0) + 200}), replica=backup)


def test_without_anything_that_changes_people_decide(tmp_path: Path) -> None:
    checkpoint, backup = hf_set(tmp_path / "new", 200, state=False), hf_set(tmp_path / "old", 100, state=False)
    for place in (checkpoint, backup):
        torch.save({"lr": 0.1}, place / "training_args.bin")
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    (fault,) = unchanged(checkpoint, replica=backup).faults
    assert "nothing here tells whether" in fault.why
    name = "model-00002-of-00002.safetensors"
    assert fault.hint == f"if you know better: cp -a {backup}/{name} {checkpoint}/{name}"


def test_steps_in_the_names_of_folders(tmp_path: Path) -> None:
    checkpoint = hf_set(tmp_path / "checkpoint-200", 200, state=False)
    backup = hf_set(tmp_path / "checkpoint-100", 100, state=False)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    (fault,) = unchanged(checkpoint, replica=backup).faults
    assert "is of step 100 by its name" in fault.why
    assert "cp " not in str(fault.hint)


def test_no_command_to_copy_what_contradicts_or_is_not_there(tmp_path: Path) -> None:
    save_own(tmp_path / "run/step-3")
    save_own(tmp_path / "run/step-4", step=4)
    flip(tmp_path / "run/step-3/pytorch_model_fsdp_0/__0_0.distcp")
    (fault,) = unchanged(tmp_path / "run/step-3", replica=tmp_path / "run/step-4").faults
    assert "cp " not in str(fault.hint)
    (tmp_path / "run/step-4/pytorch_model_fsdp_0/__0_0.distcp").unlink()
    (fault,) = unchanged(tmp_path / "run/step-3", replica=tmp_path / "run/step-4").faults
    assert "has no pytorch_model_fsdp_0/__0_0.distcp" in fault.why
    assert "cp " not in str(fault.hint)


def test_stamps_tell_saves_apart_without_a_manifest(tmp_path: Path) -> None:
    """The same numbers, saved twice: every checksum agrees, and only the stamps do not."""
    for place in ("step", "again"):
        save_own(tmp_path / place)
        (tmp_path / place / "fsdp_ckpt.json").unlink()
    (tmp_path / "step/pytorch_model_fsdp_0/__0_0.distcp").unlink()
    (fault,) = unchanged(tmp_path / "step", replica=tmp_path / "again").faults
    assert "not of the same save: optimizer_0/__0_0.distcp differs" in fault.why
    shutil.copy(tmp_path / "step/optimizer_0/__0_0.distcp", tmp_path / "again/optimizer_0")
    (fault,) = unchanged(tmp_path / "step", replica=tmp_path / "again").faults
    assert "is of another save than optimizer_0/__0_0.distcp here" in fault.why


def test_files_of_two_saves_are_told(tmp_path: Path) -> None:
    """Without a manifest; every checksum in them is right."""
    save_own(tmp_path / "step")
    save_own(tmp_path / "other", step=4)
    backup = copy(tmp_path / "step", tmp_path / "backup")
    shutil.copy(tmp_path / "other/optimizer_0/__0_0.distcp", tmp_path / "step/optimizer_0")
    mend(copy(tmp_path / "step", tmp_path / "listed"), lambda _: None, replica=backup)
    (tmp_path / "step/fsdp_ckpt.json").unlink()
    assert any("is of another save" in fault.why for fault in unchanged(tmp_path / "step").faults)


def test_a_stamp_of_another_rank(tmp_path: Path) -> None:
    save_own(tmp_path / "step")
    (tmp_path / "step/fsdp_ckpt.json").unlink()
    backup = copy(tmp_path / "step", tmp_path / "backup")
    (tmp_path / "step/pytorch_model_fsdp_0/__0_0.distcp").unlink()
    file = backup / "pytorch_model_fsdp_0/__0_0.distcp"
    good = file.read_bytes()
    assert b" rank=0\n" in good[:64]
    file.write_bytes(good[:64].replace(b" rank=0\n", b" rank=1\n") + good[64:])
    (fault,) = unchanged(tmp_path / "step", replica=backup).faults
    assert "is of rank 1" in fault.why


def test_safetensors_of_a_set(tmp_path: Path) -> None:
    """They carry no checksums: the other files of the set have to be the same in every byte."""
    tensors = [{"a": torch.arange(10.0)}, {"b": torch.arange(20.0)}]
    for place in ("c", "backup"):
        (tmp_path / place).mkdir()
        for number, content in enumerate(tensors, 1):
            save_file(content, tmp_path / place / f"model-{number:05}-of-00002.safetensors")
        torch.save({"state": torch.arange(30.0)}, tmp_path / place / "optimizer.pt")
    repair(tmp_path / "c", apply=True)
    (tmp_path / "c/model-00002-of-00002.safetensors").unlink()
    mend(tmp_path / "c", lambda folder: assert_same(load_file(folder / "model-00002-of-00002.safetensors"), tensors[1]),
         replica=tmp_path / "backup")  # fmt: skip
    (tmp_path / "c/model-00002-of-00002.safetensors").unlink()
    save_file({"a": torch.arange(10.0) + 1}, tmp_path / "backup/model-00001-of-00002.safetensors")
    assert "not of the same save" in unchanged(tmp_path / "c", replica=tmp_path / "backup").faults[0].why


def test_copies_that_are_no_copies(tmp_path: Path) -> None:
    checkpoint = copy(MESH, tmp_path / "checkpoint-7")
    with pytest.raises(UsageError, match="itself"):
        repair(checkpoint, replica=checkpoint)
    with pytest.raises(CheckpointNotFound, match="--replica"):
        repair(checkpoint, replica=tmp_path / "nothing")
    with pytest.raises(CheckpointNotFound, match="--like"):
        repair(checkpoint, like=tmp_path / "nothing")


def test_a_file_that_leads_elsewhere_is_not_written_through(tmp_path: Path) -> None:
    checkpoint, backup = copy(MESH, tmp_path / "checkpoint-7"), copy(MESH, tmp_path / "backup")
    file = checkpoint / "pytorch_model_fsdp_0/__1_0.distcp"
    file.rename(checkpoint / "pytorch_model_fsdp_0/elsewhere")
    file.symlink_to("elsewhere")
    flip(checkpoint / "pytorch_model_fsdp_0/elsewhere")
    said = unchanged(checkpoint, replica=backup)
    assert "link" in said.faults[0].why


def test_the_merge_of_a_mended_checkpoint(tmp_path: Path) -> None:
    state = hybrid(tmp_path / "c")
    for rank in (0, 1, 2, 3):  # each box is damaged on one of its two ranks
        path = tmp_path / f"c/model_world_size_4_rank_{rank}.pt"
        data = bytearray(path.read_bytes())
        content = state["w"][8 * (rank % 2) :][:8].contiguous().numpy().tobytes()
        if rank in (0, 3):
            data[data.index(content) + 1] ^= 1
        path.write_bytes(data)
    assert repair(tmp_path / "c", apply=True).whole
    report = merge(tmp_path / "c", tmp_path / "out", fsync=False)
    assert report.recovered == []
    assert_same(load_file(tmp_path / "out/model.safetensors"), state)


def test_what_carries_no_checksum_is_told(tmp_path: Path) -> None:
    folder = copy(FIXTURES / "edge/nocrc", tmp_path / "c")
    report = repair(folder)
    assert report.whole
    assert any(re.search(r"4 pieces carry no checksum", note) for note in report.notes)


def test_metadata_that_can_be_read_but_are_not_those_of_the_manifest(tmp_path: Path) -> None:
    """One number in them is another one: only the checksum tells."""
    save_own(tmp_path / "run/step-3")
    model, _ = save_own(tmp_path / "run/step-4", step=4)
    file = tmp_path / "run/step-4/pytorch_model_fsdp_0/.metadata"
    data = bytearray(file.read_bytes())
    place = data.rindex(b"K\x1eK\x28")  # 30 x 40, the last of them in a shape
    data[place + 1] ^= 1
    file.write_bytes(data)
    said = mend(tmp_path / "run/step-4", loads_as(model))
    assert kinds(said) == [("rebuild-metadata", "write", "pytorch_model_fsdp_0/.metadata")]
    assert "the manifest says" in said.actions[0].why


def test_a_disk_that_cannot_read_a_file_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read of it fails, as of a bad sector; the other copy takes its place."""
    model, _ = save_own(tmp_path / "run/step-3")
    backup = copy(tmp_path / "run/step-3", tmp_path / "backup")
    bad = (tmp_path / "run/step-3/pytorch_model_fsdp_0/__0_0.distcp").stat().st_ino
    real = {name: getattr(os, name) for name in ("pread", "preadv")}

    def failing(name: str) -> Callable[..., Any]:
        def read(fd: int, *arguments: Any) -> Any:
            if os.fstat(fd).st_ino == bad:
                raise OSError(errno.EIO, "Input/output error")
            return real[name](fd, *arguments)

        return read

    for name in real:
        monkeypatch.setattr(os, name, failing(name))
    (fault,) = repair(tmp_path / "run/step-3").faults
    assert "Input/output error" in fault.why
    report = repair(tmp_path / "run/step-3", apply=True, replica=backup)
    assert report.whole, report.faults
    monkeypatch.undo()
    loads_as(model)(tmp_path / "run/step-3")


def test_the_share_of_one_node(tmp_path: Path) -> None:
    """Files of ranks of which nothing is here are on another node's disk: that folder serves as the other copy."""
    checkpoint, other = copy(MESH, tmp_path / "a"), copy(MESH, tmp_path / "b")
    for path in checkpoint.rglob("__1_*.distcp"):
        path.unlink()
    said = unchanged(checkpoint)
    assert any("give the folders of all nodes" in note for note in said.notes)
    expected = read_with_torch(MESH / "pytorch_model_fsdp_0")
    mend(checkpoint, lambda folder: is_read(expected)(folder / "pytorch_model_fsdp_0"), replica=other)


@pytest.mark.parametrize("damage", ["broken", "missing"])
def test_the_manifest_itself(damage: str, tmp_path: Path) -> None:
    model, _ = save_own(tmp_path / "run/step-3")
    backup = copy(tmp_path / "run/step-3", tmp_path / "backup")
    manifest = tmp_path / "run/step-3/fsdp_ckpt.json"
    if damage == "broken":
        manifest.write_bytes(manifest.read_bytes().replace(b'"step": 3', b'"step": 8'))
        assert "--replica BACKUP" in str(unchanged(tmp_path / "run/step-3").faults[0].hint)
    else:
        manifest.unlink()
    said = mend(tmp_path / "run/step-3", loads_as(model), replica=backup)
    assert kinds(said) == [("restore-box", "write", "fsdp_ckpt.json")]
    assert manifest.read_bytes() == (backup / "fsdp_ckpt.json").read_bytes()


def test_the_manifest_of_another_step_is_not_taken(tmp_path: Path) -> None:
    save_own(tmp_path / "run/step-3")
    save_own(tmp_path / "run/step-4", step=4)
    (tmp_path / "run/step-3/fsdp_ckpt.json").write_text("{")
    said = unchanged(tmp_path / "run/step-3", replica=tmp_path / "run/step-4")
    assert "does not list what is here" in said.faults[0].why


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    model, _ = save_own(tmp_path / "run/step-3")
    backup = copy(tmp_path / "run/step-3", tmp_path / "backup")
    shutil.rmtree(tmp_path / "run/step-3/optimizer_0")
    mend(tmp_path / "run/step-3", loads_as(model), replica=backup)
    assert (tmp_path / "run/step-3/optimizer_0/.metadata").read_bytes() == (
        backup / "optimizer_0/.metadata"
    ).read_bytes()
