"""``.metadata`` for another torch, and ``.metadata`` that were lost: torch itself reads what comes out."""

from __future__ import annotations

import pickle
import pickletools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from fsdp_ckpt import merge, save_state
from fsdp_ckpt.codec.dcp_metadata import read_metadata
from fsdp_ckpt.codec.dcp_metadata_writer import write_metadata
from fsdp_ckpt.errors import Incompatible, UsageError
from fsdp_ckpt.ops.repair import repair
from tests.build import assert_same, rows, save_dcp
from tests.cli.tool import snapshot
from tests.compat.judges import read_item_by_item, read_with_torch
from tests.compat.samples import EDGE, FIXTURES
from tests.unit.ops.mended import copy, is_read, kinds, mend, renamed, unchanged


def globals_of(path: Path) -> set[str]:
    """Return the globals of a pickle, as Python's own disassembler sees them."""
    found, texts = set(), list[str]()
    for code, argument, _ in pickletools.genops(path.read_bytes()):
        if isinstance(argument, str) and "UNICODE" in code.name:
            texts.append(argument)
        if code.name == "GLOBAL":
            found.add(str(argument).replace(" ", "."))
        if code.name == "STACK_GLOBAL":
            found.add(".".join(texts[-2:]))
    return found


# ------------------------------------------------------------------------------------------------- for another torch


@pytest.mark.parametrize("name", ["torch215_hand2", "torch215_hand4", "py313_style"])
def test_metadata_that_this_torch_cannot_read(name: str, tmp_path: Path) -> None:
    folder = copy(EDGE / name, tmp_path / "c")
    with pytest.raises(BaseException, match=r"unpack|pathlib|metadata"):
        read_with_torch(folder)
    said = mend(folder, is_read(read_item_by_item(EDGE / name)), for_torch="2.13")
    assert kinds(said) == [("metadata-for-torch", "write", ".metadata")]
    assert ("torch 2.15" if "215" in name else "Python 3.13") in said.actions[0].why


def test_the_sister_of_torch_213_has_the_same_values(tmp_path: Path) -> None:
    """torch 2.15 and 2.13 saved the same state: what torch reads from the one must be what it reads from the other."""
    folder = copy(EDGE / "torch215_hand2", tmp_path / "c")
    repair(folder, apply=True, for_torch="2.13")
    found, expected = read_with_torch(folder), read_with_torch(EDGE / "torch213_hand2")
    assert len(found.keys() & expected.keys()) >= 6
    assert_same(
        {key: found[key] for key in expected if key in found}, {k: v for k, v in expected.items() if k in found}
    )


def test_a_file_for_torch_215_stays_as_it_is(tmp_path: Path) -> None:
    folder = copy(EDGE / "torch215_hand2", tmp_path / "c")
    before = snapshot(folder)
    report = repair(folder, apply=True, for_torch="2.15")
    assert (report.actions, report.whole, snapshot(folder)) == ([], True, before)
    assert repair(folder).actions == [], "only when it is asked for"


def test_enums_by_getattr_become_calls(tmp_path: Path) -> None:
    folder = copy(EDGE / "py3112", tmp_path / "c")
    assert "builtins.getattr" in globals_of(folder / ".metadata")
    mend(folder, is_read(read_with_torch(EDGE / "py3112")), for_torch="2.9")
    assert "builtins.getattr" not in globals_of(folder / ".metadata")


@pytest.mark.parametrize(("version", "has"), [("2.3.1", False), ("2.4", True), ("2.13.0+cu126", True)])
def test_the_class_of_the_save_id_came_with_torch_24(version: str, has: bool, tmp_path: Path) -> None:
    folder = copy(EDGE / "torch215_hand2", tmp_path / "c")
    with (folder / ".metadata").open("rb") as file:
        save_id = b"5c4d2fc9-4a9c-4e06-af65-f6232d89a10f"
        assert save_id in file.read()
    mend(folder, is_read(read_item_by_item(EDGE / "torch215_hand2")), for_torch=version)
    assert ("torch.distributed.checkpoint.metadata.StorageMeta" in globals_of(folder / ".metadata")) is has
    assert (save_id in (folder / ".metadata").read_bytes()) is has


def test_classes_of_megatron_become_those_of_torch(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "c", {"w": rows(torch.arange(12.0).reshape(6, 2), 2), "step": 3})
    expected = read_with_torch(folder)
    (folder / ".metadata").write_bytes(_megatron(folder))
    with pytest.raises(BaseException, match="megatron"):
        read_with_torch(folder)
    said = mend(folder, is_read(expected), for_torch="2.9")
    assert "Megatron-core" in said.actions[0].why


def _megatron(folder: Path) -> bytes:
    """Pickle the metadata of a folder as a subclass in a module of Megatron's name would be."""
    import sys
    import types

    from torch.distributed.checkpoint.metadata import Metadata

    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    names = ["megatron", "core", "dist_checkpointing", "strategies", "torch"]
    modules = {".".join(names[: n + 1]): types.ModuleType(".".join(names[: n + 1])) for n in range(len(names))}
    owner = ".".join(names)
    cls = type("MCoreMetadata", (Metadata,), {"__module__": owner})
    modules[owner].MCoreMetadata = cls  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        return pickle.dumps(cls(**vars(metadata)), protocol=4)
    finally:
        for name in modules:
            del sys.modules[name]


def test_strides_of_single_items_are_kept_and_explained(tmp_path: Path) -> None:
    matrix = torch.arange(24.0).reshape(6, 4)
    folder = save_dcp(tmp_path / "c", {"t": matrix.t(), "row": matrix.clone()}, ranks=1)
    six = _six_fields(folder)
    (folder / ".metadata").write_bytes(six)
    said = mend(folder, is_read({"t": matrix.t(), "row": matrix}), for_torch="2.9")
    assert any("1 tensors are stored with strides" in note and "`t`" in note for note in said.notes)


def _six_fields(folder: Path) -> bytes:
    """Pickle the metadata of a folder with a sixth field, strides, as torch 2.15 does."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    real = TensorProperties.__getstate__
    TensorProperties.__getstate__ = lambda self: (*real(self), (1,))  # type: ignore[method-assign,no-untyped-call]
    try:
        return pickle.dumps(metadata, protocol=4)
    finally:
        TensorProperties.__getstate__ = real  # type: ignore[method-assign]


@pytest.mark.parametrize("version", ["2.2", "2.1.2", "1.13"])
def test_torch_before_23_is_refused(version: str) -> None:
    with pytest.raises(Incompatible, match=r"2\.3"):
        repair(EDGE / "torch215_hand2", for_torch=version)


@pytest.mark.parametrize("version", ["", "two", "2", "2.x", "torch2.9", "2.9;rm"])
def test_what_is_no_version(version: str) -> None:
    with pytest.raises(UsageError, match="version"):
        repair(EDGE / "torch215_hand2", for_torch=version)


@pytest.mark.parametrize(
    ("name", "version", "why"),
    [
        ("zstd", "2.6", "compressed"),
        ("dtypes", "2.6", "float4_e2m1fn_x2"),
        ("safetensors_fmt", "2.13", "safetensors"),
    ],
)
def test_items_that_the_torch_cannot_read_whatever_the_metadata_say(
    name: str, version: str, why: str, tmp_path: Path
) -> None:
    said = unchanged(copy(EDGE / name, tmp_path / "c"), for_torch=version)
    assert why in said.faults[0].why
    assert "fsdp-ckpt merge" in str(said.faults[0].hint)


def test_several_parts_and_only_those_that_need_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-5"
    copy(EDGE / "torch215_hand2", checkpoint / "pytorch_model_fsdp_0")
    copy(EDGE / "torch213_hand2", checkpoint / "optimizer_0")
    expected = read_item_by_item(EDGE / "torch215_hand2")
    said = mend(checkpoint, lambda folder: is_read(expected)(folder / "pytorch_model_fsdp_0"), for_torch="2.9")
    assert kinds(said) == [("metadata-for-torch", "write", "pytorch_model_fsdp_0/.metadata")]
    assert any(note.startswith("optimizer_0/.metadata can be read") for note in said.notes)


# ------------------------------------------------------------------------------------------------ metadata of each rank

NO_COLLECTIVES = FIXTURES / "torch-2.13.0/dcp_nocollectives_w2"


def test_metadata_of_ranks_become_one(tmp_path: Path) -> None:
    folder = copy(NO_COLLECTIVES / "dcp", tmp_path / "c")
    assert repair(folder).whole, "torch 2.9 and newer need nothing"
    expected = renamed(load_file(NO_COLLECTIVES / "expected.safetensors"), "model.")
    said = mend(folder, is_read(expected), for_torch="2.6")
    assert kinds(said) == [("rebuild-metadata", "write", ".metadata")]


def test_a_rank_whose_metadata_are_missing_leaves_holes(tmp_path: Path) -> None:
    folder = copy(NO_COLLECTIVES / "dcp", tmp_path / "c")
    (folder / "__1.metadata").unlink()
    said = unchanged(folder, for_torch="2.6")
    assert "holes" in said.faults[0].why
    assert said.faults[0].where == ".metadata"


def test_a_broken_metadata_beside_those_of_the_ranks(tmp_path: Path) -> None:
    folder = copy(NO_COLLECTIVES / "dcp", tmp_path / "c")
    (folder / ".metadata").write_bytes(b"\x80\x04")
    mend(folder, is_read(renamed(load_file(NO_COLLECTIVES / "expected.safetensors"), "model.")))


# -------------------------------------------------------------------------------------------------------- lost metadata

STATE = {"model": {"w": rows(torch.arange(48.0).reshape(12, 4), 2), "b": torch.ones(5)}, "step": 10, "name": "one"}


def another(step: int, name: str) -> dict[str, Any]:
    model = {"w": rows(torch.arange(48.0).reshape(12, 4) + step, 2), "b": torch.ones(5) * step}
    return {"model": model, "step": step, "name": name}


def test_metadata_that_a_save_had_not_put_in_its_place(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "c", STATE)
    expected = read_with_torch(folder)
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    said = mend(folder, is_read(expected))
    assert kinds(said) == [
        ("rebuild-metadata", "write", ".metadata"),
        ("rebuild-metadata", "set aside", ".metadata.tmp"),
    ]


@pytest.mark.parametrize("damage", ["item", "number", "cut"])
def test_unfinished_metadata_are_not_taken_when_an_item_does_not_fit(damage: str, tmp_path: Path) -> None:
    """Whatever it is: a save that was cut off had perhaps not written everything."""
    folder = save_dcp(tmp_path / "c", STATE)
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    file = folder / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    if damage == "cut":
        data = data[:-1]
    elif damage == "number":
        data[data.index(torch.arange(48.0).reshape(12, 4)[6:].numpy().tobytes()) + 5] ^= 1
    else:
        data[data.index(b"torch._utils")] ^= 1
    file.write_bytes(data)
    said = unchanged(folder)
    assert ".metadata.tmp does not do" in said.faults[0].why


def test_an_old_metadata_beside_the_data_of_a_newer_save(tmp_path: Path) -> None:
    """torch 2.3 and newer write over the data files first; killed before the rename, the old metadata are wrong."""
    old = save_dcp(tmp_path / "old", {"w": rows(torch.zeros(6, 2), 2)})
    folder = save_dcp(tmp_path / "c", STATE)
    expected = read_with_torch(folder)
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    shutil.copy(old / ".metadata", folder)
    said = mend(folder, is_read(expected))
    assert kinds(said)[0] == ("rebuild-metadata", "write", ".metadata")


def test_a_broken_metadata_is_made_again_like_that_of_another_step(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "step-20", another(20, "two"))
    expected = read_with_torch(folder)
    save_dcp(tmp_path / "step-10", another(10, "one"))
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-9])
    said = mend(folder, is_read(expected), like=tmp_path / "step-10")
    assert kinds(said) == [("rebuild-metadata", "write", ".metadata")]
    assert said.actions[0].source == str(tmp_path / "step-10/.metadata")
    assert any("all names come from" in note for note in said.notes)


def test_values_of_other_lengths_move_the_items(tmp_path: Path) -> None:
    """Objects differ in length from step to step, so that the places of all that follows differ."""
    folder = save_dcp(tmp_path / "step-20", another(20, "a much longer name " * 50))
    expected, step = read_with_torch(folder), {"step": 0, "name": ""}
    other = save_dcp(tmp_path / "step-10", another(10, "one"))
    sizes = [[(place / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)] for place in (folder, other)]
    assert sizes[0] != sizes[1]
    (folder / ".metadata").unlink()
    mend(folder, is_read(expected), like=other)
    dcp.load(step, checkpoint_id=folder, no_dist=True)
    assert step == {"step": 20, "name": "a much longer name " * 50}


def test_what_the_hint_says_can_be_typed(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "run/step-20", STATE)
    save_dcp(tmp_path / "run/step-10", STATE)
    (folder / ".metadata").unlink()
    (fault,) = repair(folder).faults
    assert fault.where == ".metadata"
    assert fault.hint == f"fsdp-ckpt repair {folder} --like {tmp_path}/run/step-10"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another shape": ({"w": rows(torch.zeros(12, 8), 2), "b": torch.ones(5), "step": 1}, "shape"),
    "transposed": ({"w": rows(torch.zeros(8, 6), 2), "b": torch.ones(5), "step": 1}, "shape"),
    "another dtype": ({"w": rows(torch.zeros(12, 4, dtype=torch.int32), 2), "b": torch.ones(5), "step": 1}, "int32"),
    "a tensor more": ({"w": rows(torch.zeros(12, 4), 2), "b": torch.ones(5), "c": torch.ones(5), "step": 1}, "items"),
    "a tensor less": ({"w": rows(torch.zeros(12, 4), 2), "step": 1}, "items"),
    "another value": ({"w": rows(torch.zeros(12, 4), 2), "b": torch.ones(5), "step": {"a": [1, 2]}}, "another kind"),
    "other ranks": ({"w": rows(torch.zeros(12, 4), 1), "b": torch.ones(5), "step": 1}, "__1_0.distcp"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    mine = {"w": rows(torch.arange(48.0).reshape(12, 4), 2), "b": torch.ones(5), "step": 1}
    folder = save_dcp(tmp_path / "c", mine)
    state, why = WRONG[name]
    other = save_dcp(
        tmp_path / "other", state, ranks=1 if name == "other ranks" else 2, flatten=name != "another value"
    )
    (folder / ".metadata").unlink()
    said = unchanged(folder, like=other)
    assert "does not fit" in said.faults[0].why
    assert why in said.faults[0].why


def test_a_byte_after_the_last_item_makes_it_ambiguous(tmp_path: Path) -> None:
    folder, other = save_dcp(tmp_path / "c", STATE), save_dcp(tmp_path / "other", STATE)
    (folder / ".metadata").unlink()
    with (folder / "__1_0.distcp").open("ab") as file:
        file.write(b"x")
    assert "does not fit" in unchanged(folder, like=other).faults[0].why


def test_zips_within_tensors_are_not_taken_for_items(tmp_path: Path) -> None:
    """A tensor of bytes may hold a whole .distcp file, ends of archives and all."""
    inner = torch.frombuffer(
        bytearray((save_dcp(tmp_path / "in", STATE) / "__0_0.distcp").read_bytes()), dtype=torch.uint8
    )
    other = save_dcp(tmp_path / "other", {"w": torch.zeros_like(inner), "b": torch.ones(5), "name": "x" * 9}, ranks=1)
    folder = save_dcp(tmp_path / "c", {"w": inner, "b": torch.ones(5), "name": "x" * 999}, ranks=1)
    expected = read_with_torch(folder)
    (folder / ".metadata").unlink()
    mend(folder, is_read(expected), like=other)


def test_compressed_items_are_refused_where_their_places_differ(tmp_path: Path) -> None:
    folder, other = copy(EDGE / "zstd", tmp_path / "c"), copy(EDGE / "zstd", tmp_path / "other")
    (folder / ".metadata").unlink()
    with (folder / "__0_0.distcp").open("ab") as file:
        file.write(b"\0" * 7)
    assert "compressed" in unchanged(folder, like=other).faults[0].why


def test_nothing_to_go_by(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "c", STATE)
    (folder / ".metadata").unlink()
    (fault,) = unchanged(folder).faults
    assert "names of the tensors are nowhere" in fault.why
    assert "--like" in str(fault.hint)


def _with_names_of_another_model(path: Path, other: Path) -> Path:
    """Copy a checkpoint of ours, without its manifest, with other names of the same lengths."""
    shutil.copytree(path, other)
    (other / "fsdp_ckpt.json").unlink()
    file = other / "pytorch_model_fsdp_0/.metadata"
    metadata = read_metadata(file.read_bytes(), where="x")

    def name(key: str) -> str:
        return key.replace("weight", "thgiew")

    file.write_bytes(
        write_metadata(
            replace(
                metadata,
                tensors={name(key): tensor for key, tensor in metadata.tensors.items()},
                paths={name(key): tuple(name(key).split(".")) for key in metadata.paths},
                storage={(name(key), box): info for (key, box), info in metadata.storage.items()},
            )
        )
    )
    return other


@pytest.mark.parametrize("option", ["like", "replica"])
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_names_that_are_not_those_of_the_manifest(option: str, has_optimizer: bool, tmp_path: Path) -> None:
    """The manifest has the CRC-32 of what was saved: it is never changed to fit another model's names."""
    path = tmp_path / "run/step-1"
    model = nn.Linear(6, 5)
    save_state(path, model, *([torch.optim.AdamW(model.parameters())] if has_optimizer else []), durable=False)
    other = _with_names_of_another_model(path, tmp_path / "other")
    expected = read_with_torch(path / "pytorch_model_fsdp_0")
    good = copy(path, tmp_path / "good")
    (good / "fsdp_ckpt.json").unlink()
    (path / "pytorch_model_fsdp_0/.metadata").unlink()
    (fault,) = unchanged(path, **{option: other}).faults
    assert "CRC-32" in fault.why
    mend(path, lambda folder: is_read(expected)(folder / "pytorch_model_fsdp_0"), **{option: good})


def test_unfinished_metadata_that_are_not_those_of_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "run/step-1"
    save_state(path, nn.Linear(6, 5), durable=False)
    other = _with_names_of_another_model(path, tmp_path / "other")
    (path / "pytorch_model_fsdp_0/.metadata").unlink()
    shutil.copy(other / "pytorch_model_fsdp_0/.metadata", path / "pytorch_model_fsdp_0/.metadata.tmp")
    assert any("lists another CRC-32" in fault.why for fault in unchanged(path).faults)


def test_names_that_the_optimizer_does_not_have(tmp_path: Path) -> None:
    """Without a manifest, what the optimizer beside it says still tells models apart."""
    path = tmp_path / "run/step-1"
    model = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    save_state(path, model, optimizer, durable=False)
    other = _with_names_of_another_model(path, tmp_path / "other")
    (path / "fsdp_ckpt.json").unlink()
    good, expected = copy(path, tmp_path / "good"), read_with_torch(path / "pytorch_model_fsdp_0")
    (path / "pytorch_model_fsdp_0/.metadata").unlink()
    (fault,) = unchanged(path, like=other).faults
    assert "the optimizer has state of `weight`" in fault.why
    mend(path, lambda folder: is_read(expected)(folder / "pytorch_model_fsdp_0"), like=good)


# ---------------------------------------------------------------------------------------------------- safetensors items

BLOBS = FIXTURES / "torch-2.13.0/dcp_safetensors_w2"


def test_headers_of_safetensors_items_say_everything(tmp_path: Path) -> None:
    folder = copy(BLOBS / "dcp", tmp_path / "c")
    (folder / ".metadata").unlink()

    expected = load_file(BLOBS / "expected.safetensors")
    del expected["lm_head.weight"]  # torch's writer lost it, see fixtures/MANIFEST.json

    def judge(place: Path) -> None:
        merge(place, tmp_path / "out", fsync=False, overwrite=True)
        assert_same(load_file(tmp_path / "out/model.safetensors"), expected)

    said = mend(folder, judge)
    assert any("furthest corners" in note for note in said.notes)


def test_safetensors_items_of_a_rank_are_missing(tmp_path: Path) -> None:
    folder = copy(BLOBS / "dcp", tmp_path / "c")
    (folder / ".metadata").unlink()
    (folder / "__0_0.distcp").unlink()
    assert "missing" in unchanged(folder).faults[0].why


def test_objects_beside_safetensors_items_have_no_names(tmp_path: Path) -> None:
    folder = copy(EDGE / "safetensors_fmt", tmp_path / "c")
    (folder / ".metadata").unlink()
    assert unchanged(folder).faults
