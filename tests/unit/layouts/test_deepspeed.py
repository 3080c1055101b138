"""Reading DeepSpeed's ranks: small folders with vectors spelled out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt import merge
from fsdp_ckpt.catalog import Role
from fsdp_ckpt.errors import CorruptCheckpoint, IncompleteCheckpoint
from fsdp_ckpt.layouts.registry import read_checkpoint
from tests.build import assert_same
from tests.unit.layouts.made_deepspeed import (
    FIRST,
    SECOND,
    SHAPES,
    A,
    B,
    faults,
    numbers,
    part,
    save_model,
    save_rank,
    values,
    zero2,
    zero3,
)  # fmt: skip


@pytest.mark.parametrize("make", [zero2, zero3])
def test_weights_moments_and_groups(make: Any, tmp_path: Path) -> None:
    found = read_checkpoint(make(tmp_path / "global_step12"))
    assert_same(values(found), {"a": A, "b": B})
    step = torch.tensor(3.0)
    moments = {"a.step": step, "a.exp_avg": 10 * A, "b.step": step, "b.exp_avg": 10 * B}
    assert_same(values(found, "optimizer"), {f"state.{key}": tensor for key, tensor in moments.items()})
    optimizer = part(found, "optimizer")
    assert {entry.path: entry.value for entry in optimizer.objects.values()} == {
        ("param_groups", 0, "lr"): 0.1,
        ("param_groups", 0, "params"): ["a", "b"],
    }
    assert optimizer.role is Role.OPTIMIZER
    assert (found.step, found.world_size, found.is_complete) == (12, 2, True)
    assert {part.writer for part in found.parts} == {"DeepSpeed 0.19.8"}


def test_checksums_are_those_of_the_whole_vector(tmp_path: Path) -> None:
    found = read_checkpoint(zero2(tmp_path / "tag"))
    chunks = {entry.key: entry.chunks for entry in part(found, "model").tensors.values()}
    (b,) = chunks["b"]
    assert b.crc32 is not None
    assert b.crc_range == (b.start, b.stop)  # alone in its rank's vector
    file = found.root / SECOND
    data = bytearray(file.read_bytes())
    data[b.start] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        merge(tmp_path / "tag", tmp_path / "out")


def test_groups_of_options(tmp_path: Path) -> None:
    save_model(tmp_path, module={"a": A, "b": B}, shapes=[{"b": (3,)}, {"a": (2, 3)}])
    save_rank(tmp_path, 0, 1, [B, A.flatten()])
    found = read_checkpoint(tmp_path)
    assert_same(values(found), {"a": A, "b": B})
    assert list(part(found, "model").tensors) == ["a", "b"], "in the module's order"
    groups = {entry.path[1:]: entry.value for entry in part(found, "optimizer").objects.values()}
    assert groups == {(0, "lr"): 0.1, (0, "params"): ["b"], (1, "lr"): 0.1, (1, "params"): ["a"]}


def test_steps_that_are_no_tensors_and_options_that_are(tmp_path: Path) -> None:
    save_model(tmp_path, module={"b": B}, shapes=[{"b": (3,)}])
    group = {"lr": torch.tensor(0.5), "betas": (0.9, 0.95), "params": [0]}
    base = {"state": {0: {"step": 3, "exp_avg": B}}, "param_groups": [group]}
    save_rank(tmp_path, 0, 1, [B], base_optimizer_state=base)
    found = read_checkpoint(tmp_path)
    assert_same(values(found, "optimizer"), {"state.b.exp_avg": B, "param_groups.0.lr": torch.tensor(0.5)})
    objects = {entry.path: entry.value for entry in part(found, "optimizer").objects.values()}
    assert objects[("state", "b", "step")] == 3
    assert objects[("param_groups", 0, "betas")] == (0.9, 0.95)


def test_steps_of_any_kind_are_kept_as_they_are(tmp_path: Path) -> None:
    save_model(tmp_path, module={"b": B}, shapes=[{"b": (3,)}])
    for step in ((), "three", [torch.tensor(3)], None):
        base = {"state": {0: {"step": step, "exp_avg": B}}, "param_groups": [{"params": [0]}]}
        save_rank(tmp_path, 0, 1, [B], base_optimizer_state=base)
        optimizer = part(read_checkpoint(tmp_path), "optimizer")
        assert optimizer.problems == []
        assert type(optimizer.objects["state.b.step"].value) is type(step)


def test_no_moments_where_somebody_cut_them_out(tmp_path: Path) -> None:
    found = read_checkpoint(zero2(tmp_path, base_optimizer_state=None))
    assert_same(values(found), {"a": A, "b": B})
    assert part(found, "optimizer").tensors == {}


def test_shared_and_frozen_parameters_and_buffers(tmp_path: Path) -> None:
    more = {
        "buffer_names": ["steps"],
        "frozen_param_shapes": {"f": torch.Size([3]), "none": torch.Size([0, 2])},
        "shared_params": {"a2": "a", "f2": "f"},
    }
    empty, steps = torch.empty(0), torch.tensor(5)
    names = ("steps", "a2", "a", "b", "f", "f2", "none")
    module = {name: steps if name == "steps" else empty for name in names}
    for rank, fragment in enumerate((numbers(1, 2).half(), numbers(3, 0).half())):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        fragments = {"f": fragment, "none": torch.empty(0)}
        shared = more if rank == 0 else more | {"shared_params": {}}  # only the first rank looks for them
        save_model(tmp_path, name, module=module, shapes=[SHAPES], frozen_param_fragments=fragments, **shared)
    save_rank(tmp_path, 0, 2, [numbers(1, 2, 3, 7, 8)], stage=3)
    save_rank(tmp_path, 1, 2, [numbers(4, 5, 6, 9, 0)], stage=3)
    found = read_checkpoint(tmp_path)
    frozen = numbers(1, 2, 3).half()
    expected = {"steps": steps, "a2": A, "a": A, "b": B, "f": frozen, "f2": frozen, "none": torch.empty(0, 2)}
    assert_same(values(found), expected)
    assert list(part(found, "model").tensors) == list(names)
    assert found.is_complete
    (tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    lacking = part(read_checkpoint(tmp_path), "model")
    assert ("error", "missing-rank", "zero_pp_rank_1_mp_rank_00_model_states.pt") in faults(lacking.problems)
    assert ("error", "missing-shard", "f") in faults(lacking.problems)


def test_frozen_parameters_that_were_left_out(tmp_path: Path) -> None:
    empty = torch.empty(0)
    module = {"a": empty, "b": empty, "f": empty}
    save_model(tmp_path, "zero_pp_rank_0_mp_rank_00_model_states.pt", module=module, shapes=[SHAPES])
    save_rank(tmp_path, 0, 1, [numbers(*range(1, 10))], stage=3)
    found = read_checkpoint(tmp_path)
    assert_same(values(found), {"a": A, "b": B})
    assert faults(part(found, "model").problems) == [("warning", "missing-tensor", "f")]


def test_only_16_bit_weights(tmp_path: Path) -> None:
    zero2(tmp_path)
    for name in (FIRST, SECOND):
        (tmp_path / name).unlink()
    found = read_checkpoint(tmp_path)
    assert_same(values(found), {"a": A.bfloat16(), "b": B.bfloat16()})
    assert "fp32 weights are not there" in dict(found.facts)["weights"]
    zero3(tmp_path / "three")
    for name in (FIRST, SECOND):
        (tmp_path / "three" / name).unlink()
    with pytest.raises(IncompleteCheckpoint, match="weights of ZeRO-3 are in the ranks"):
        read_checkpoint(tmp_path / "three")
