"""A distributed checkpoint for other ranks keeps its keys, its values and the files beside it. Judge: torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_ckpt import diff, inspect, reshard
from fsdp_ckpt.errors import CheckpointNotFound, Incompatible, NoModelWeights, UsageError
from fsdp_ckpt.ops.list_run import list_run
from tests.build import Sharded, assert_same, grid, rows, save_dcp
from tests.contract.suite import FIXTURES
from tests.property.conversions import read_dcp

TENSOR = torch.arange(40.0).reshape(8, 5)
GROUPS = [{"lr": 0.1, "betas": (0.9, 0.999), "params": ["w"]}]

STATES: dict[str, dict[str, Any]] = {
    "model": {"model": {"layers.0.w": rows(TENSOR, 2)}},
    "bare": {"layers.0.w": rows(TENSOR, 2), "scale": torch.tensor(2.0)},
    "all": {
        "model": {"w": rows(TENSOR, 2)},
        "optimizer": {
            "state": {"w": {"exp_avg": rows(TENSOR + 1, 2), "step": torch.tensor(3.0)}},
            "param_groups": GROUPS,
        },
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"seen": torch.arange(7)},
        "step": 5,
    },
    "wrapped": {
        "state": {
            "model": {"w": rows(TENSOR, 2)},
            "optim": {"state": {"w": {"m": TENSOR}}, "param_groups": GROUPS},
        }
    },
    "dots": {"model": {"w": TENSOR}, "extra.dots": {"a.b": TENSOR + 1, "l": [{"x": TENSOR + 2}, {"y": 3}]}},
    "by index": {
        "model": {"w": TENSOR},
        "opt": {"state": {0: {"m": TENSOR}}, "param_groups": [{"lr": 1.0, "params": [0]}]},
    },
    "flat optimizer": {"model": {"w": TENSOR}, "optim": {"state.w.exp_avg": TENSOR, "param_groups.w.lr": 0.1}},
    "columns": {
        "model": {
            "w": grid(TENSOR, [[3], [2]], ranks=3),
            "t": Sharded(TENSOR, [((0, 0), (8, 5))], [1], by_columns=True),
        }
    },
}


def _listed(value: Any) -> Any:
    """Return what can be compared: of tensors their values, of dictionaries no order."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", STATES)
def test_keys_paths_and_values_stay(name: str, ranks: int, tmp_path: Path) -> None:
    src = save_dcp(tmp_path / "src", STATES[name], ranks=3)
    report = reshard(src, tmp_path / "out", ranks, fsync=False)
    before, after = (dcp.FileSystemReader(folder).read_metadata() for folder in (src, tmp_path / "out"))
    assert after.state_dict_metadata.keys() == before.state_dict_metadata.keys()
    assert after.planner_data == before.planner_data
    for key, entry in before.state_dict_metadata.items():
        other = after.state_dict_metadata[key]
        assert type(other) is type(entry)
        if isinstance(entry, TensorStorageMetadata):
            assert isinstance(other, TensorStorageMetadata)
            assert (other.size, other.properties.dtype) == (entry.size, entry.properties.dtype)
    assert_same(read_dcp(tmp_path / "out", "")[0], read_dcp(src, "")[0])
    whole = []
    for folder in (src, tmp_path / "out"):
        dcp_to_torch_save(folder, tmp_path / "whole.pt")
        whole.append(torch.load(tmp_path / "whole.pt", weights_only=True))
    assert _listed(whole[0]) == _listed(whole[1]), "objects, too, in the same nesting"
    assert report.left == []
    assert sum(part.num_tensors + part.num_objects for part in report.parts) == len(before.state_dict_metadata)


@pytest.mark.parametrize(
    "fixture",
    [
        "megatron/iter_0000002", "composer/ep0-ba2", "torchtitan/checkpoint/step-4", "olmo_core/step2",
        "bytecheckpoint/global_step_2", "veomni/global_step_2",
    ],
)  # fmt: skip
def test_checkpoints_of_frameworks(fixture: str, tmp_path: Path) -> None:
    src = tmp_path / "src" / Path(fixture).name
    shutil.copytree(FIXTURES / "frameworks" / fixture, src)
    out = tmp_path / "out" / src.name
    reshard(src, out, 3, fsync=False)
    folders = [path.parent.relative_to(src) for path in src.rglob(".metadata")]
    assert [path.parent.relative_to(out) for path in out.rglob(".metadata")] == folders
    for folder in folders:
        found = read_dcp(out / folder, "")[0]  # torch reads it, also where the source needs its own library for that
        if fixture.partition("/")[0] not in ("olmo_core", "bytecheckpoint"):
            assert_same(found, read_dcp(src / folder, "")[0])
        assert len(list((out / folder).glob("*.distcp"))) == 3
    beside = [
        path for path in src.rglob("*") if path.is_file() and path.suffix != ".distcp" and path.name != ".metadata"
    ]
    for path in beside:
        assert (out / path.relative_to(src)).read_bytes() == path.read_bytes()
    layout = inspect(src).layout
    # ByteCheckpoint's is known by the classes in its metadata; the result has torch's own, which it reads as well.
    assert inspect(out).layout == ("dcp" if layout == "bytecheckpoint" else layout)
    assert inspect(out).complete
    assert diff(src, out, trust_crc=False).is_equal


def test_files_beside_come_along_and_links_out_are_said(tmp_path: Path) -> None:
    src = save_dcp(tmp_path / "src", STATES["model"])
    (src / "config.json").write_text('{"hidden_size": 3}')
    (src / "huggingface").mkdir()
    (src / "huggingface" / "tokenizer.json").write_text("{}")
    (src / ".out.tmp-fsdp-ckpt-0123456789abcdef").mkdir()
    (tmp_path / "secret").write_text("s")
    (src / "link.json").symlink_to(tmp_path / "secret")
    (src / "__9_0.distcp").write_bytes(b"left over from more ranks")
    report = reshard(src, tmp_path / "out", 2)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp", "config.json", "huggingface/tokenizer.json"}
    assert len(report.left) == 1
    assert "link.json" in report.left[0]


def test_a_part_alone(tmp_path: Path) -> None:
    src = save_dcp(tmp_path / "src", STATES["all"])
    reshard(src, tmp_path / "out", 2, part="optimizer", fsync=False)
    assert read_dcp(tmp_path / "out", "")[0].keys() == {"optimizer.state.w.exp_avg", "optimizer.state.w.step"}
    with pytest.raises((NoModelWeights, UsageError)):
        reshard(src, tmp_path / "wrong", 2, part="nobody")


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    src = save_dcp(tmp_path / "src", STATES["model"])
    wrong: list[tuple[type[Exception], str, int | None, dict[str, Any]]] = [
        (UsageError, "number of ranks", None, {}),
        (UsageError, "at least 1", 0, {}),
        (UsageError, "same thing", 2, {"mesh": "2"}),
        (UsageError, "unknown option: dtype", 2, {"dtype": "bfloat16"}),
        (UsageError, "no mesh", None, {"mesh": "2by4"}),
        (UsageError, "entries", 2, {"placements": ["*=0,1"]}),
        (Incompatible, "dimension 5", 2, {"placements": ["*=5"]}),
    ]
    for kind, message, ranks, options in wrong:
        with pytest.raises(kind, match=message):
            reshard(src, tmp_path / "out", ranks, **options)
    with pytest.raises(CheckpointNotFound):
        reshard(tmp_path / "nowhere", tmp_path / "out", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]


def test_a_placement_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    src = save_dcp(tmp_path / "src", STATES["model"])
    for wrong in (["layers.0.v=1"], ["*=0", "layers.0.w=1"]):
        with pytest.raises(UsageError, match=rf"--placement {wrong[-1][:-2]}: no tensor has such a name, or an"):
            reshard(src, tmp_path / "out", 2, placements=wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]
    report = reshard(src, tmp_path / "out", 2, placements=["layers.0.w=1"], fsync=False)
    assert (report.world_size, report.mesh) == (2, (2,))


def test_other_layouts_become_accelerates(tmp_path: Path) -> None:
    torch.save({"w": TENSOR}, tmp_path / "model.pt")
    report = reshard(tmp_path / "model.pt", tmp_path / "run" / "checkpoint_1", 3, fsync=False)
    assert_same(read_dcp(tmp_path / "run" / "checkpoint_1" / "pytorch_model_fsdp_0")[0], {"w": TENSOR})
    assert any("Accelerate folder" in note for note in report.notes)
    assert len(list_run(tmp_path / "run").checkpoints) == 1


@pytest.mark.parametrize("given", ["pytorch_model_fsdp_0", ".."])
def test_a_folder_of_it_or_one_above(given: str, tmp_path: Path) -> None:
    src = tmp_path / "run" / "checkpoint-5"
    save_dcp(src / "pytorch_model_fsdp_0", STATES["model"])
    torch.save({"a": 1}, src / "random_states_0.pkl")
    (tmp_path / "run" / "notes.txt").write_text("of the run, not of the checkpoint")
    reshard((src / given).resolve(), tmp_path / "out", 3, fsync=False)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    shards = {".metadata", *(f"__{rank}_0.distcp" for rank in range(3))}
    if given == "..":
        assert names == {"random_states_0.pkl"} | {f"pytorch_model_fsdp_0/{name}" for name in shards}
    else:
        assert names == shards
