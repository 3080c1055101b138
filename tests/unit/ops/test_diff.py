"""Whole checkpoints: which parts and names correspond, and what is said about them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fsdp_ckpt import merge
from fsdp_ckpt.errors import (
    ChecksumMismatch,
    CorruptCheckpoint,
    FlatParameters,
    IncompleteCheckpoint,
    NameCollision,
    UsageError,
)
from fsdp_ckpt.ops.diff import Change, DiffReport, PartDiff, diff
from tests.build import Sharded, rows, save_dcp
from tests.cli.tool import FIXTURES, flip

NEW = FIXTURES / "torch-2.13.0"
MODEL = "pytorch_model_fsdp_0"


def changes(report: DiffReport) -> dict[str, Change]:
    return {tensor.name: tensor.change for part in report.parts for tensor in part.tensors}


def only(report: DiffReport) -> PartDiff:
    (part,) = report.parts
    return part


def weights() -> dict[str, Tensor]:
    return {f"layers.{i}.weight": torch.arange(24.0).reshape(6, 4) + 100 * i for i in range(3)} | {
        "norm.weight": torch.ones(4)
    }


def dcp(folder: Path, model: Mapping[str, Tensor], ranks: int = 2, **rest: Any) -> Path:
    return save_dcp(folder, {"model": {key: rows(value, ranks) for key, value in model.items()}, **rest}, ranks=ranks)


def file(path: Path, model: Mapping[str, Tensor]) -> Path:
    save_file(dict(model), path)
    return path


def training(folder: Path, *, ranks: int = 2, lr: float = 0.1, step: int = 5, **changed: Tensor) -> Path:
    """A checkpoint with an optimizer and a scheduler."""
    model = weights() | {key.replace("_", "."): value for key, value in changed.items()}
    state = {
        key: {"exp_avg": rows(value / 10, ranks), "step": torch.tensor(float(step))} for key, value in model.items()
    }
    groups = [{"lr": lr, "betas": (0.9, 0.95), "params": list(model)}]
    optimizer = {"state": state, "param_groups": groups}
    return dcp(folder, model, ranks, optimizer=optimizer, scheduler={"last_epoch": step, "base_lrs": [0.1]})


# ------------------------------------------------------------------------------------------------- real checkpoints


SAME_MODEL = [
    (NEW / "fsdp2_sharded_w2" / MODEL, NEW / "fsdp2_sharded_w3" / MODEL),
    (NEW / "fsdp1_sharded_w2" / MODEL, NEW / "fsdp1_sharded_w3" / MODEL),
    (NEW / "fsdp1_sharded_w2" / MODEL, NEW / "fsdp2_sharded_w3" / MODEL),
    (NEW / "fsdp2_sharded_w2" / MODEL, NEW / "full_w2/pytorch_model_fsdp.bin"),
    (NEW / "fsdp2_sharded_w2" / MODEL, NEW / "fsdp2_sharded_w2/expected.safetensors"),
    (NEW / "fsdp2_sharded_w2" / MODEL, FIXTURES / "torch-2.3.1/fsdp2_sharded_w2" / MODEL),
    (NEW / "tp_fsdp_w4" / MODEL, NEW / "fsdp1_hybrid_w4" / MODEL),
    (NEW / "hf_sharded_w2/hf", NEW / "fsdp2_sharded_w2" / MODEL),
    (NEW / "dcp_zstd_w2/dcp", NEW / "full_w2/pytorch_model_fsdp.bin"),
    (FIXTURES / "torch-2.5.1/titan_w2/step-10", NEW / "full_w2/pytorch_model_fsdp.bin"),
]


@pytest.mark.parametrize(("a", "b"), SAME_MODEL, ids=lambda path: "-".join(path.parts[-2:]))
def test_one_model_however_it_was_saved(a: Path, b: Path) -> None:
    for first, second in ((a, b), (b, a)):
        report = diff(first, second, part="model")
        assert report.is_equal, report
        part = only(report)
        # torch's HuggingFace writer stores a tied weight once.
        tied = {"lm_head.weight": "embed.weight"} if "hf" in a.parts else {}
        assert (part.num_tensors, part.num_equal, part.tied) == (16 - len(tied), 16 - len(tied), tied)
        assert list(part.tensors) == []


def test_other_numbers_of_ranks_are_settled_by_checksums() -> None:
    report = diff(NEW / "fsdp2_sharded_w2" / MODEL, NEW / "fsdp2_sharded_w3" / MODEL)
    assert (report.is_equal, report.num_settled, report.num_same_file, report.read_bytes) == (True, 16, 0, 0)
    full = diff(NEW / "fsdp2_sharded_w2" / MODEL, NEW / "fsdp2_sharded_w3" / MODEL, trust_crc=False)
    # 5.79 kB on each side, but the tensor without elements that neither of them has.
    assert (full.is_equal, full.num_settled, full.read_bytes) == (True, 0, full.num_bytes)


def test_optimizers_of_other_layouts() -> None:
    report = diff(NEW / "fsdp2_sharded_w2/optimizer_0", NEW / "full_w2/optimizer.bin")
    part = only(report)
    assert report.is_equal
    assert (part.role, part.num_tensors, part.num_equal) == ("optimizer", 39, 39)
    assert part.num_objects == 24  # twelve options in each of two groups


def test_grouped_and_flattened_optimizers() -> None:
    report = diff(FIXTURES / "edge/model_optim_dsd_flat", FIXTURES / "edge/model_optim_dsd", part="optimizer")
    assert report.is_equal
    assert only(report).num_objects == 66  # eleven options of six parameters


@pytest.mark.parametrize("swap", [False, True])
def test_an_optimizer_by_index_cannot_be_matched_with_one_by_name(swap: bool) -> None:
    paths = [FIXTURES / "edge/model_optim", FIXTURES / "edge/model_optim_dsd"]
    report = diff(*(paths[::-1] if swap else paths), part=["model", "optimizer"])
    model, optimizer = report.parts
    assert model.is_equal
    assert optimizer.incomparable is not None
    assert optimizer.incomparable.startswith(f"{'BA'[not swap]} keeps its state by index")
    assert (list(optimizer.tensors), list(optimizer.objects), report.is_equal) == ([], [], False)


def whole_checkpoints() -> list[Path]:
    """The folders of all fixtures that a model can be read from."""
    found = sorted(
        {path.parent for path in FIXTURES.rglob(".metadata")} | {path.parent for path in FIXTURES.rglob("*.pt")}
    )
    odd = ("local_state_dict", "deepspeed", "frameworks/")  # the last two hold optimizers and small files alone, too
    return [path for path in found if not any(word in str(path) for word in odd)]


@pytest.mark.parametrize("path", whole_checkpoints(), ids=lambda path: "-".join(path.parts[-2:]))
def test_every_checkpoint_equals_its_copy_read_in_full(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / path.name)
    report = diff(path, tmp_path / path.name, trust_crc=False)
    assert report.is_equal, report
    assert report.num_equal == report.num_tensors
    assert report.read_bytes == report.num_bytes
    assert report.num_tensors + sum(part.num_objects for part in report.parts) > 0


# ----------------------------------------------------------------------------------------------------- differences


def test_every_kind_of_difference(tmp_path: Path) -> None:
    a, b = weights(), weights()
    b["layers.1.weight"][5, 3] += 0.5
    b["layers.2.weight"] = b["layers.2.weight"].bfloat16()
    b["norm.weight"] = torch.ones(5)
    del b["layers.0.weight"]
    b["new.weight"] = torch.zeros(2)
    report = diff(dcp(tmp_path / "a", a, 2), dcp(tmp_path / "b", b, 3))
    assert changes(report) == {
        "layers.0.weight": Change.REMOVED,
        "layers.1.weight": Change.CHANGED,
        "layers.2.weight": Change.RETYPED,
        "norm.weight": Change.RESHAPED,
        "new.weight": Change.ADDED,
    }
    assert not report.is_equal
    by_name = {tensor.name: tensor for tensor in only(report).tensors}
    assert list(by_name) == ["layers.0.weight", "layers.1.weight", "layers.2.weight", "norm.weight", "new.weight"]
    stats = by_name["layers.1.weight"].stats
    assert stats is not None
    assert (stats.num_changed, stats.share_changed, stats.max_abs) == (1, 1 / 24, 0.5)
    assert (stats.largest_at, stats.largest_a, stats.largest_b) == ((5, 3), 123.0, 123.5)
    norm = np.linalg.norm(a["layers.1.weight"].numpy().astype(np.float64))
    assert stats.relative_l2 == pytest.approx(0.5 / norm, rel=1e-12)
    assert stats.max_ulp == 2**16  # 123 has 6 bits before the point: a step is 2**-17
    retyped = by_name["layers.2.weight"]
    assert (retyped.dtype_a, retyped.dtype_b, retyped.cast) == ("float32", "bfloat16", "both")  # 200..223 fit 8 bits
    reshaped = by_name["norm.weight"]
    assert (reshaped.shape_a, reshaped.shape_b, reshaped.stats) == ((4,), (5,), None)
    added = by_name["new.weight"]
    assert (added.dtype_a, added.shape_a, added.dtype_b, added.shape_b) == (None, None, "float32", (2,))
    assert (report.num_tensors, report.num_equal) == (3, 0)


def test_close_is_no_difference(tmp_path: Path) -> None:
    a, b = weights(), weights()
    b["layers.0.weight"] += 0.25
    b["norm.weight"] = torch.tensor([1.0, 1.0, 1.0, 1.2]).bfloat16()
    paths = file(tmp_path / "a.safetensors", a), file(tmp_path / "b.safetensors", b)
    report = diff(*paths, tolerance=0.25)
    assert changes(report) == {"layers.0.weight": Change.CLOSE, "norm.weight": Change.CLOSE}
    assert (report.is_equal, only(report).num_close, report.num_equal, report.tolerance) == (True, 2, 2, 0.25)
    assert only(report).different == []
    report = diff(*paths, tolerance=0.2)
    assert changes(report) == {"layers.0.weight": Change.CHANGED, "norm.weight": Change.RETYPED}
    assert not report.is_equal
    relative = diff(*paths, rtol=0.21, exclude=["layers.*"])
    assert (relative.is_equal, relative.tolerance, relative.rtol) == (True, 0.0, 0.21)


def test_without_statistics_the_same_tensors_differ(tmp_path: Path) -> None:
    a, b = weights(), weights()
    b["layers.0.weight"][0, 0] = math.nan
    b["norm.weight"] = b["norm.weight"].double()
    sharded = dcp(tmp_path / "a", a), dcp(tmp_path / "b", b)
    report = diff(*sharded, statistics=False)
    assert changes(report) == {"layers.0.weight": Change.CHANGED, "norm.weight": Change.RETYPED}
    assert report.read_bytes == 0, "checksums tell that they differ"
    assert all(tensor.stats is None for tensor in only(report).tensors)


def test_data_that_checksums_settle_are_not_read(tmp_path: Path) -> None:
    a, b = dcp(tmp_path / "a", weights(), 2), dcp(tmp_path / "b", weights(), 3)
    flip(b / "__1_0.distcp")  # the bytes are not those that the checksum is of: whoever reads them sees it
    report = diff(a, b)
    assert (report.is_equal, report.num_settled, report.read_bytes) == (True, 4, 0)
    with pytest.raises(ChecksumMismatch, match=r"^B "):
        diff(a, b, trust_crc=False)


def test_a_checkpoint_and_itself(tmp_path: Path) -> None:
    path = file(tmp_path / "a.safetensors", weights())
    (tmp_path / "link").symlink_to(tmp_path)
    report = diff(path, tmp_path / "link/a.safetensors", trust_crc=False)
    assert (report.is_equal, report.num_settled, report.num_same_file, report.read_bytes) == (True, 4, 4, 0)


# ------------------------------------------------------------------------------------------------ parts that correspond


def test_training_states(tmp_path: Path) -> None:
    a = training(tmp_path / "a", ranks=2)
    assert diff(a, training(tmp_path / "b", ranks=4)).is_equal
    report = diff(a, training(tmp_path / "c", ranks=4, lr=0.05, step=6))
    model, optimizer, scheduler = report.parts
    assert model.is_equal
    assert {tensor.name for tensor in optimizer.tensors} == {f"state.{name}.step" for name in weights()}
    stats = optimizer.tensors[0].stats
    assert stats is not None
    assert (stats.largest_a, stats.largest_b, stats.relative_l2) == (5.0, 6.0, 0.2)
    assert [(value.name, value.a, value.b) for value in optimizer.objects] == [("param_groups.0.lr", 0.1, 0.05)]
    assert [(value.name, value.a, value.b) for value in scheduler.objects] == [("last_epoch", 5, 6)]


def test_what_was_merged_from_a_checkpoint_equals_it(tmp_path: Path) -> None:
    path = training(tmp_path / "step-5")
    merge(path, tmp_path / "merged", fsync=False)
    report = diff(path, tmp_path / "merged")
    assert report.is_equal
    assert (report.aside_a, report.aside_b) == (["optimizer", "scheduler"], [])
    swapped = diff(tmp_path / "merged", path)
    assert (swapped.is_equal, swapped.aside_a, swapped.aside_b) == (True, [], ["optimizer", "scheduler"])


def test_a_part_that_only_one_side_has_is_a_difference(tmp_path: Path) -> None:
    path = training(tmp_path / "a")
    report = diff(path, dcp(tmp_path / "b", weights(), scheduler={"last_epoch": 5, "base_lrs": [0.1]}))
    assert (report.is_equal, report.only_in_a, report.aside_a) == (False, ["optimizer"], [])
    assert all(part.is_equal for part in report.parts)
    assert diff(path, tmp_path / "b", part="model").is_equal
    assert diff(tmp_path / "b", path).only_in_b == ["optimizer"]
    roles = [part.role for part in diff(path, path, part=["scheduler", "model"]).parts]
    assert roles == ["model", "scheduler"]


@pytest.mark.parametrize("kind", ["dcp", "file", "folder", "accelerate"])
def test_only_models_are_compared_where_one_side_holds_models_only(kind: str, tmp_path: Path) -> None:
    """In whatever layout it is."""
    path, other = training(tmp_path / "a"), tmp_path / "b"
    other.mkdir()
    match kind:
        case "dcp":
            dcp(other, weights())
        case "file":
            other = file(other / "b.safetensors", weights())
        case "folder":
            file(other / "model.safetensors", weights())
        case _:
            dcp(other / MODEL, weights())
    report = diff(path, other)
    assert (report.is_equal, report.only_in_a, report.aside_a) == (True, [], ["optimizer", "scheduler"])
    swapped = diff(other, path)
    assert (swapped.is_equal, swapped.only_in_b, swapped.aside_b) == (True, [], ["optimizer", "scheduler"])
    insisted = diff(path, other, part=["model", "optimizer"])
    assert (insisted.is_equal, insisted.only_in_a, insisted.aside_a) == (False, ["optimizer"], [])


def test_a_model_that_only_one_side_has_is_a_difference_whatever_else_there_is(tmp_path: Path) -> None:
    a = accelerate(tmp_path / "a", {"pytorch_model_fsdp_0": weights(), "pytorch_model_fsdp_1": weights()})
    torch.save({"last_epoch": 1}, a / "scheduler.bin")
    report = diff(a, file(tmp_path / "b.safetensors", weights()))
    assert (report.only_in_a, report.aside_a, report.is_equal) == (["pytorch_model_fsdp_1"], ["scheduler"], False)


def save_folder(folder: Path, rng: Any, scheduler: Any) -> Path:
    dcp(folder / MODEL, weights())
    torch.save(rng, folder / "random_states_0.pkl")
    torch.save(scheduler, folder / "scheduler.bin")
    return folder


def accelerate(folder: Path, models: Mapping[str, Mapping[str, Tensor]]) -> Path:
    for name, model in models.items():
        dcp(folder / name, model)
    return folder


def test_several_models_go_by_name_then_by_order(tmp_path: Path) -> None:
    first, second = weights(), {key: value + 1 for key, value in weights().items()}
    a = accelerate(tmp_path / "a", {"pytorch_model_fsdp_0": first, "pytorch_model_fsdp_1": second})
    report = diff(a, accelerate(tmp_path / "b", {"pytorch_model_fsdp_1": second}))
    assert [(part.part_a, part.part_b) for part in report.parts] == [("pytorch_model_fsdp_1", "pytorch_model_fsdp_1")]
    assert (report.only_in_a, report.is_equal) == (["pytorch_model_fsdp_0"], False)
    old = accelerate(tmp_path / "c", {"pytorch_model_0": first, "pytorch_model_1": second})
    report = diff(a, old)
    assert [(part.part_a, part.part_b) for part in report.parts] == [
        ("pytorch_model_fsdp_0", "pytorch_model_0"),
        ("pytorch_model_fsdp_1", "pytorch_model_1"),
    ]
    assert report.is_equal
    one = diff(a, file(tmp_path / "second.safetensors", second), part="pytorch_model_fsdp_1")
    assert (one.is_equal, len(one.parts)) == (True, 1)


def test_parts_that_nobody_has(tmp_path: Path) -> None:
    a, b = dcp(tmp_path / "a", weights()), dcp(tmp_path / "b", weights(), scheduler={"last_epoch": 1})
    with pytest.raises(UsageError, match="neither side has a part `optimizer`") as caught:
        diff(a, b, part="optimizer")
    assert caught.value.hint == "A has model; B has model, scheduler"


# -------------------------------------------------------------------------------------------------------------- names


def test_wrapper_prefixes_make_no_difference(tmp_path: Path) -> None:
    wrapped = {
        f"module._fsdp_wrapped_module.{key.replace('weight', '_orig_mod.weight')}": v for key, v in weights().items()
    }
    a, b = file(tmp_path / "a.safetensors", wrapped), file(tmp_path / "b.safetensors", weights())
    report = diff(a, b)
    assert report.is_equal
    assert only(report).notes == ["A: 4 names compared without `_fsdp_wrapped_module.`, `_orig_mod.`, `module.`"]
    assert only(diff(b, a)).notes[0].startswith("B: 4 names ")
    assert only(diff(a, a)).notes == []
    state = {key: {"exp_avg": value} for key, value in wrapped.items()}
    other = {key: {"exp_avg": value} for key, value in weights().items()}
    for folder, content, names in (("c", state, wrapped), ("d", other, weights())):
        optimizer = {"state": content, "param_groups": [{"lr": 0.1, "params": list(names)}]}
        dcp(tmp_path / folder, weights(), optimizer=optimizer)
    report = diff(tmp_path / "c", tmp_path / "d")
    assert report.is_equal
    assert [part.num_tensors for part in report.parts] == [4, 4]
    assert report.parts[1].notes == ["A: 4 names compared without `_fsdp_wrapped_module.`, `_orig_mod.`, `module.`"]


def test_rename(tmp_path: Path) -> None:
    a = file(tmp_path / "a.safetensors", {f"model.{key}": value for key, value in weights().items()})
    b = file(tmp_path / "b.safetensors", weights())
    report = diff(a, b)
    assert len(changes(report)) == 8
    assert "try --rename 'model.='" in only(report).notes[0]
    assert diff(a, b, rename=["model.="]).is_equal
    back = diff(b, a)
    assert "try --rename 's/^/model./'" in only(back).notes[0]
    assert diff(b, a, rename=["s/^/model./"]).is_equal


def test_filters(tmp_path: Path) -> None:
    changed = weights()
    changed["norm.weight"] += 1
    a, b = training(tmp_path / "a"), training(tmp_path / "b", norm_weight=changed["norm.weight"])
    assert set(changes(diff(a, b))) == {"norm.weight", "state.norm.weight.exp_avg"}
    report = diff(a, b, include=["layers.*"])
    assert report.is_equal
    assert [part.num_tensors for part in report.parts[:2]] == [3, 6]
    assert report.parts[0].excluded == 2
    assert not diff(a, b, exclude=["layers.*"]).is_equal
    assert diff(a, b, exclude=["norm.*"]).is_equal
    with pytest.raises(UsageError, match="no name is left"):
        diff(a, b, include=["nothing"])


def test_names_that_collide(tmp_path: Path) -> None:
    a = file(tmp_path / "a.safetensors", {"module.w": torch.ones(1), "w": torch.ones(1)})
    with pytest.raises(NameCollision, match=r"^A .*`module.w` and `w` would both be named `w`"):
        diff(a, a)


def test_a_head_that_is_the_embedding_is_no_difference(tmp_path: Path) -> None:
    embedding = torch.arange(12.0).reshape(4, 3)
    both = {"embed_tokens.weight": embedding, "lm_head.weight": embedding.clone(), "norm.weight": torch.ones(3)}
    one = {key: value for key, value in both.items() if key != "lm_head.weight"}
    a, b = dcp(tmp_path / "a", both), file(tmp_path / "b.safetensors", one)
    for report in (diff(a, b), diff(b, a)):
        assert report.is_equal
        assert only(report).tied == {"lm_head.weight": "embed_tokens.weight"}
    both["lm_head.weight"][0, 0] = 9
    assert changes(diff(dcp(tmp_path / "c", both), b)) == {"lm_head.weight": Change.REMOVED}


# ------------------------------------------------------------------------------------------------------- other values


@pytest.mark.parametrize("side", ["A", "B"])
def test_what_is_incomplete_is_refused(side: str, tmp_path: Path) -> None:
    good, bad = dcp(tmp_path / "good", weights()), dcp(tmp_path / "bad", weights())
    (bad / "__1_0.distcp").unlink()
    with pytest.raises(CorruptCheckpoint, match=rf"^{side} \(`.*/bad`\)") as caught:
        diff(*((bad, good) if side == "A" else (good, bad)))
    assert caught.value.hint == f"fsdp-ckpt validate {bad}"


def test_what_is_not_compared_may_be_damaged(tmp_path: Path) -> None:
    a = save_folder(tmp_path / "a", {}, {})
    dcp(a / "optimizer_0", weights())
    shutil.copytree(a, tmp_path / "b")
    (tmp_path / "b/optimizer_0/.metadata").write_bytes(b"broken")
    with pytest.raises(IncompleteCheckpoint, match=r"^B "):
        diff(a, tmp_path / "b")
    assert diff(a, tmp_path / "b", part="model").is_equal


def test_flat_parameters_are_refused() -> None:
    with pytest.raises(FlatParameters, match=r"^A .*flat parameter"):
        diff(NEW / "local_state_dict_w2", NEW / "fsdp2_sharded_w2" / MODEL, part="model")


@pytest.mark.parametrize("options", [{"tolerance": -1.0}, {"rtol": math.nan}, {"tolerance": math.inf}, {"jobs": 0}])
def test_options_that_make_no_sense(options: dict[str, Any], tmp_path: Path) -> None:
    path = file(tmp_path / "a.safetensors", weights())
    with pytest.raises(UsageError):
        diff(path, path, **options)


def test_several_folders_of_one_save(tmp_path: Path) -> None:
    whole = dcp(tmp_path / "whole", weights())
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for number, node in enumerate(nodes):
        shutil.copytree(whole, node)
        (node / f"__{1 - number}_0.distcp").unlink()
    report = diff(nodes, dcp(tmp_path / "again", {key: value.clone() for key, value in weights().items()}, 4))
    assert report.is_equal
    assert report.a == f"{nodes[0]} + {nodes[1]}"


def test_columns_and_rows(tmp_path: Path) -> None:
    tensor = torch.arange(48.0).reshape(8, 6)
    columns = Sharded(tensor, [((0, 0), (8, 2)), ((0, 2), (8, 4))], [0, 1])
    a = save_dcp(tmp_path / "a", {"model": {"w": columns}})
    b = save_dcp(tmp_path / "b", {"model": {"w": rows(tensor, 3)}}, ranks=3)
    report = diff(a, b)
    assert (report.is_equal, report.read_bytes) == (True, 2 * 48 * 4)
    moved = tensor.clone()
    moved[2, 3], moved[3, 2] = tensor[3, 2], tensor[2, 3]
    (found,) = only(diff(a, save_dcp(tmp_path / "c", {"model": {"w": rows(moved, 3)}}, ranks=3))).tensors
    assert found.stats is not None
    assert (found.stats.num_changed, found.stats.max_abs) == (2, 5.0)  # 15 and 20
    assert found.stats.relative_l2 == pytest.approx(math.sqrt(50) / np.linalg.norm(np.arange(48.0)), rel=1e-12)
