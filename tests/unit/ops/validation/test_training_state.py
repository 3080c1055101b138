from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from fsdp_ckpt.catalog import Problem
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.validation.training_state import check_training_state
from tests.build import save_dcp
from tests.compat.samples import EDGES, FIXTURES, SAMPLES, Sample, sample_id
from tests.unit.ops.validation.made import codes, found

HERE = [sample for sample in SAMPLES if sample.folder.is_relative_to(FIXTURES)]


def problems_of(folder: Path) -> list[Problem]:
    return list(check_training_state(read_checkpoint(folder)))


def accelerate(folder: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Any], *, ranks: int = 2) -> Path:
    """Lay a model and an optimizer out as Accelerate does."""
    save_dcp(folder / "pytorch_model_fsdp_0", {"model": dict(model)}, ranks=ranks)
    save_dcp(folder / "optimizer_0", {"optimizer": dict(optimizer)}, ranks=ranks)
    return folder


def state(**moments: Tensor) -> dict[str, Any]:
    """Return an optimizer's state by name, with the names in its only group."""
    names = {name.replace("__", "."): value for name, value in moments.items()}
    kinds = {name: {"step": torch.tensor(2.0), "exp_avg": value} for name, value in names.items()}
    return {"state": kinds, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(names)}]}


MODEL = {"up.weight": torch.ones(4, 3), "up.bias": torch.ones(4), "down.weight": torch.ones(3, 4)}
WHOLE = {"up__weight": torch.ones(4, 3), "up__bias": torch.ones(4), "down__weight": torch.ones(3, 4)}


@pytest.mark.parametrize("sample", HERE, ids=sample_id)
def test_nothing_is_wrong_with_what_torch_wrote(sample: Sample, tmp_path: Path) -> None:
    assert codes(problems_of(sample.copy(tmp_path / "ck"))) == []


@pytest.mark.parametrize("folder", EDGES, ids=sample_id)
def test_nothing_is_wrong_in_the_corners_of_the_format(folder: Path) -> None:
    kinds = [problem.code for problem in problems_of(folder)]
    assert kinds == (["numbered-optimizer"] if folder.name == "model_optim" else [])


def test_a_whole_optimizer(tmp_path: Path) -> None:
    assert problems_of(accelerate(tmp_path, MODEL, state(**WHOLE))) == []


def test_wrappers_are_taken_off_on_both_sides(tmp_path: Path) -> None:
    model = {f"_orig_mod.{name}": value for name, value in MODEL.items()}
    optimizer = state(**{f"module__{name}": value for name, value in WHOLE.items()})
    assert problems_of(accelerate(tmp_path, model, optimizer)) == []


def test_an_optimizer_without_state(tmp_path: Path) -> None:
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["up.weight"]}]}
    assert found(problems_of(accelerate(tmp_path, MODEL, optimizer))) == [
        ("W", "optimizer-without-state", "optimizer_0")
    ]


@pytest.mark.parametrize("is_blob", [False, True], ids=["flattened", "blob"])
@pytest.mark.parametrize(("momentum", "letter"), [(0, "N"), (0.0, "N"), (0.9, "W")])
def test_plain_sgd_needs_no_state(momentum: float, letter: str, is_blob: bool, tmp_path: Path) -> None:
    # Case P36 (d). torch 2.3 and older keep all of it in one object.
    groups: Any = [{"lr": 0.1, "momentum": momentum, "nesterov": False, "params": ["up.weight"]}]
    save_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": dict(MODEL)})
    (tmp_path / "optimizer_0").mkdir()
    if is_blob:
        save_old(tmp_path / "optimizer_0", {"optimizer": {"state": {}, "param_groups": groups}})
    else:
        save_dcp(tmp_path / "optimizer_0", {"optimizer": {"state": {}, "param_groups": groups}})
    assert found(problems_of(tmp_path)) == [(letter, "optimizer-without-state", "optimizer_0")]


def save_old(folder: Path, state_dict: Mapping[str, Any]) -> None:
    """Save as torch 2.3 does: containers without tensors are one object."""
    import torch.distributed.checkpoint._version as dcp_version

    dcp_version._derived_version = "2_3"
    try:
        dcp.save(dict(state_dict), checkpoint_id=folder, no_dist=True)
    finally:
        dcp_version._derived_version = None


def test_state_of_parameters_that_the_model_does_not_have(tmp_path: Path) -> None:
    optimizer = state(**WHOLE, extra__weight=torch.ones(2))
    (problem,) = problems_of(accelerate(tmp_path, MODEL, optimizer))
    assert (problem.code, problem.severity) == ("state-without-parameter", "warning")
    assert problem.message == "1 of 4 parameters with state is not in the model: `extra.weight`"


def test_a_parameter_that_never_got_a_gradient(tmp_path: Path) -> None:
    # Case P36 (a): it is in a group, so that torch's loader looks for its state.
    optimizer = state(**WHOLE)
    del optimizer["state"]["up.bias"]
    (problem,) = problems_of(accelerate(tmp_path, MODEL, optimizer))
    assert (problem.code, problem.severity) == ("parameter-without-state", "warning")
    assert problem.message == "1 of 3 parameters of the optimizer has no state: `up.bias`"


def test_frozen_parameters_are_in_no_group(tmp_path: Path) -> None:
    assert problems_of(accelerate(tmp_path, MODEL, state(up__weight=torch.ones(4, 3)))) == []


def test_moments_of_another_shape(tmp_path: Path) -> None:
    optimizer = state(**WHOLE | {"up__weight": torch.ones(6, 3)})
    optimizer["state"]["down.weight"] |= {"exp_avg_sq": torch.ones(12), "exp_avg_sq_row": torch.ones(3)}
    problems = problems_of(accelerate(tmp_path, MODEL, optimizer))
    assert found(problems) == [
        ("E", "moment-shape", "optimizer.state.up.weight.exp_avg"),
        ("E", "moment-shape", "optimizer.state.down.weight.exp_avg_sq"),
    ]
    assert problems[0].message == "has the shape (6, 3); `up.weight` has (4, 3)"


def test_moments_in_eight_bits_or_of_a_projection(tmp_path: Path) -> None:
    optimizer = state(**WHOLE | {"up__weight": torch.ones(6, dtype=torch.uint8)})
    optimizer["state"]["down.weight"] |= {"exp_avg": torch.ones(2, 4), "projector": torch.ones(3, 2)}
    assert problems_of(accelerate(tmp_path, MODEL, optimizer)) == []


@pytest.mark.parametrize("layout", ["by name", "flattened"])
def test_layouts_of_torch(layout: str, tmp_path: Path) -> None:
    # Case P37 (ii) and (iii), of which one parameter gets other moments.
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "flattened")
    saved = get_optimizer_state_dict(net, optimizer, options=options)
    dcp.save({"model": net.state_dict(), "optim": saved}, checkpoint_id=tmp_path / "whole", no_dist=True)
    assert problems_of(tmp_path / "whole") == []
    other = net.state_dict() | {"0.weight": torch.ones(5, 3)}
    del other["1.bias"]
    dcp.save({"model": other, "optim": saved}, checkpoint_id=tmp_path / "other", no_dist=True)
    assert found(problems_of(tmp_path / "other")) == [
        ("W", "state-without-parameter", "optim"),
        ("E", "moment-shape", "optim.state.0.weight.exp_avg"),
        ("E", "moment-shape", "optim.state.0.weight.exp_avg_sq"),
    ]


def test_an_optimizer_that_counts(tmp_path: Path) -> None:
    # Case P37 (i): which number is which parameter cannot be told, so that nothing more is.
    optimizer = {"state": {"0": {"exp_avg": torch.ones(9)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    assert found(problems_of(accelerate(tmp_path, MODEL, optimizer))) == [("N", "numbered-optimizer", "optimizer_0")]


def test_an_optimizer_alone(tmp_path: Path) -> None:
    save_dcp(tmp_path / "optimizer_0", {"optimizer": state(**WHOLE)})
    assert problems_of(tmp_path / "optimizer_0") == []


def test_random_states_of_some_ranks(tmp_path: Path) -> None:
    accelerate(tmp_path, MODEL, state(**WHOLE), ranks=4)
    for rank in (0, 1, 3):
        torch.save({"step": 1}, tmp_path / f"random_states_{rank}.pkl")
    (problem,) = problems_of(tmp_path)
    assert (problem.code, problem.severity, problem.where) == ("missing-rng", "warning", "random_states_2.pkl")
    assert "of rank 2;" in problem.message
    torch.save({"step": 1}, tmp_path / "random_states_2.pkl")
    assert problems_of(tmp_path) == []


def test_the_last_ranks_are_missed_where_shards_tell_of_them(tmp_path: Path) -> None:
    accelerate(tmp_path, MODEL, state(**WHOLE), ranks=4)
    torch.save({"step": 1}, tmp_path / "rng_state_0.pth")
    (problem,) = problems_of(tmp_path)
    assert (problem.code, problem.where) == ("missing-rng", "rng_state_1.pth")
    assert "of ranks 1-3;" in problem.message


def test_no_random_states_at_all_are_nobodys_loss(tmp_path: Path) -> None:
    accelerate(tmp_path, MODEL, state(**WHOLE), ranks=4)
    assert problems_of(tmp_path) == []


def test_positions_of_some_ranks(tmp_path: Path) -> None:
    accelerate(tmp_path, MODEL, state(**WHOLE), ranks=2)
    torch.save({"0": {"pos": 1}}, tmp_path / "dl_states_1.pkl")
    assert found(problems_of(tmp_path)) == [("W", "missing-position", "dl_states_0.pkl")]


def test_positions_within_a_distributed_checkpoint(tmp_path: Path) -> None:
    # Case P40, with one rank's entry lost.
    loader = {f"dp_rank_{rank}": {"pos": 10 * rank} for rank in (0, 1, 3)}
    save_dcp(tmp_path / "ck", {"model": dict(MODEL), "dataloader": loader}, ranks=4)
    (problem,) = problems_of(tmp_path / "ck")
    assert (problem.code, problem.message) == ("missing-position", "no position in the data of rank 2")


@pytest.mark.parametrize("is_first", [False, True], ids=["Composer", "Megatron-core"])
def test_other_ways_to_nest_state(is_first: bool, tmp_path: Path) -> None:
    # Composer names the class of the optimizer, Megatron-core the kind before the parameter.
    entries = {"up.weight": torch.ones(4, 3), "gone.weight": torch.ones(2)}
    if is_first:
        optimizer: dict[str, Any] = {f"state.exp_avg.{name}": value for name, value in entries.items()}
    else:
        optimizer = {"DecoupledAdamW": {"state": {name: {"exp_avg": value} for name, value in entries.items()}}}
    save_dcp(tmp_path / "ck", {"model": dict(MODEL), "optimizers": optimizer})
    (problem,) = problems_of(tmp_path / "ck")
    assert problem.code == "state-without-parameter"
    assert problem.message == "1 of 2 parameters with state is not in the model: `gone.weight`"


def test_an_optimizer_of_another_make_is_not_judged(tmp_path: Path) -> None:
    save_dcp(tmp_path / "ck", {"model": dict(MODEL), "optimizer": {"master": torch.ones(3), "count": 3}})
    assert problems_of(tmp_path / "ck") == []


def test_an_adapter_is_not_what_its_optimizer_was_made_for(tmp_path: Path) -> None:
    # PEFT saves `lora_A.weight`, the optimizer of the live model has state of `lora_A.default.weight`.
    save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 6)}, tmp_path / "adapter_model.safetensors")
    name = "base_model.model.q.lora_A.default.weight"
    torch.save(state(**{name.replace(".", "__"): torch.ones(2, 6)}), tmp_path / "optimizer.bin")
    assert problems_of(tmp_path) == []
