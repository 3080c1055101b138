"""Whatever form an optimizer was saved in, by name it is what torch's state_dict API returns, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fsdp_ckpt.catalog import ObjectEntry, Part, Role
from fsdp_ckpt.errors import FlatParameters, Incompatible, MalformedFile, NameCollision
from fsdp_ckpt.ops.conversion.optimizer import canonical_optimizer
from tests.build import save_dcp
from tests.unit.ops.conversion.saved_optimizers import (
    FORMS,
    OPTIMIZERS,
    Alike,
    Unlike,
    assert_equal,
    by_name,
    canonical,
    content,
    parts_of,
    save,
    sharded,
    train,
)

FIXTURES = Path(__file__).parents[4] / "fixtures"
MEDIA = ["dcp", "old dcp", "file"]


def trained(kind: str, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = model or Unlike()
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer)
    return model, optimizer


def expected_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what torch says, without parameters that have no state, which nobody stores."""
    expected = by_name(model, optimizer)
    return expected | {"state": {name: kinds for name, kinds in expected["state"].items() if kinds}}


def expected_state(folder: Path) -> dict[str, Any]:
    """Return the state of a fixture's optimizer, as its maker has written it down."""
    state: dict[str, Any] = {}
    for name, tensor in load_file(folder / "expected_optim.safetensors").items():
        fqn, _, kind = name.rpartition(".")
        state.setdefault(fqn, {})[kind] = tensor
    return state


@pytest.mark.parametrize("medium", ["dcp", "accelerate", "file"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_form_becomes_what_torch_returns_by_name(kind: str, form: str, medium: str, tmp_path: Path) -> None:
    model, optimizer = trained(kind)
    state = {"model": model.state_dict(), "optimizer": FORMS[form](model, optimizer)}
    saved = canonical(save(tmp_path / "x", state, medium))
    expected = expected_of(model, optimizer)
    if form == "flattened":
        expected["param_groups"] = [group for group in expected["param_groups"] if group["params"]]
    assert saved.found.form == form
    assert_equal(content(saved.found.part, saved.checkpoint), expected)
    assert [bool(saved.found.notes)] == [form != "by name"]


@pytest.mark.parametrize("medium", ["dcp", "file"])
def test_one_group_of_layers_that_are_alike_follows_the_order_of_the_modules(medium: str, tmp_path: Path) -> None:
    model, optimizer = trained("AdamW", Alike(12))  # ten and more: sorted by name they would stand otherwise
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = canonical(save(tmp_path / "x", state, medium))
    assert_equal(content(saved.found.part, saved.checkpoint), expected_of(model, optimizer))
    assert "order of the tensors" in saved.found.notes[0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model, optimizer: {"state": {"model": model, "optimizers": {"AdamW": optimizer}}},  # Composer
        lambda model, optimizer: {"state_dict": model, "optimizer_states": [optimizer]},  # Lightning, one file
        lambda model, optimizer: {"model": model, "optimizer_0": optimizer},  # Lightning, sharded
        lambda model, optimizer: {"model": model, "optim": optimizer},
    ],
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("medium", MEDIA)
def test_levels_that_frameworks_put_around(wrap: Any, form: str, medium: str, tmp_path: Path) -> None:
    model, optimizer = trained("AdamW, two groups")
    state = wrap(model.state_dict(), FORMS[form](model, optimizer))
    saved = canonical(save(tmp_path / "x", state, medium))
    assert_equal(content(saved.found.part, saved.checkpoint), expected_of(model, optimizer))


def test_records_that_need_no_change_can_be_copied_as_they_are(tmp_path: Path) -> None:
    model, optimizer = trained("AdamW, three groups, one of them empty")
    saved = canonical(save(tmp_path / "x", {"optimizer": by_name(model, optimizer)}, "dcp"))
    assert all(entry.source is not None for entry in saved.found.part.objects)
    lists = {entry.path: entry.value for entry in saved.found.part.objects if entry.path[-1] == "params"}
    assert lists == {
        ("param_groups", 0, "params"): ["up.weight", "down.weight", "unused.weight"],
        ("param_groups", 1, "params"): ["scale", "up.bias", "down.bias"],
        ("param_groups", 2, "params"): [],
    }


def test_parameters_without_state_stay_in_their_groups(tmp_path: Path) -> None:
    # `unused` never had a gradient; `up.bias` is frozen after it was given to the optimizer.
    torch.manual_seed(1)
    model = Unlike()
    model.up.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    for form in ("by index", "by name"):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if form == "by name":
            state["optimizer"] = by_name(model, optimizer)
        saved = canonical(save(tmp_path / form, state, "dcp"))
        found = content(saved.found.part, saved.checkpoint)
        assert sorted(found["state"]) == ["down.bias", "down.weight", "scale", "up.weight"]
        assert found["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]


def test_wrappers_go_from_state_and_groups_alike(tmp_path: Path) -> None:
    model, optimizer = trained("AdamW")
    expected = expected_of(model, optimizer)

    def wrapped(name: str) -> str:
        return f"module._orig_mod.{name.replace('up.', 'up._checkpoint_wrapped_module.')}"

    state = {
        "state": {wrapped(name): kinds for name, kinds in expected["state"].items()},
        "param_groups": [group | {"params": [*map(wrapped, group["params"])]} for group in expected["param_groups"]],
    }
    for medium in MEDIA:
        saved = canonical(save(tmp_path / medium, {"optimizer": state}, medium))
        assert_equal(content(saved.found.part, saved.checkpoint), expected)


def test_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    state = {"state": {name: {"m": torch.ones(2)} for name in ("w", "module.w")}, "param_groups": [{"params": ["w"]}]}
    with pytest.raises(NameCollision, match=r"`w` and `module\.w`"):
        canonical(save(tmp_path / "x", {"optimizer": state}, "dcp"))


@pytest.mark.parametrize(
    ("folder", "inner"),
    [
        ("torch-2.3.1/titan_flat_w2", "step-10"),
        ("torch-2.5.1/fsdp1_sharded_flat_w2", "optimizer_0"),
        ("torch-2.13.0/fsdp2_sharded_w2", "optimizer_0"),
        ("torch-2.13.0/full_w2", ""),
    ],
)
def test_what_releases_of_torch_have_written_on_two_ranks(folder: str, inner: str) -> None:
    saved = canonical(FIXTURES / folder / inner)
    found = content(saved.found.part, saved.checkpoint)
    expected = expected_state(FIXTURES / folder)
    for kinds in (*found["state"].values(), *expected.values()):
        kinds["step"] = float(kinds["step"])  # of FSDP1 a tensor on some ranks, on others a number
    assert_equal(found["state"], expected)
    listed = [name for group in found["param_groups"] for name in group["params"]]
    assert sorted(listed) == sorted(expected)
    if len(found["param_groups"]) == 2:
        assert [group["weight_decay"] for group in found["param_groups"]] == [0.01, 0.0]
        matrices = [name for name in expected if expected[name]["exp_avg"].dim() > 1]
        assert sorted(found["param_groups"][0]["params"]) == sorted(matrices)


def test_a_flattened_optimizer_that_lacks_options_is_refused() -> None:
    # This fixture was made smaller by leaving out the options of all parameters but two.
    message = r"`layers\.0\.up\.weight` has state, but no options.* 2 parameters"
    with pytest.raises(Incompatible, match=message) as caught:
        canonical(FIXTURES / "torch-2.5.1" / "titan_w2" / "step-10")
    assert "--part model" in str(caught.value.hint)
    assert "reshard" in str(caught.value.hint)


@pytest.mark.parametrize("form", ["model_optim", "model_optim_dsd", "model_optim_dsd_flat"])
def test_three_forms_that_torch_has_written_are_one(form: str) -> None:
    one, other = (canonical(FIXTURES / "edge" / name) for name in (form, "model_optim_dsd"))
    found, expected = (content(saved.found.part, saved.checkpoint) for saved in (one, other))
    assert [*found["param_groups"][0]["params"]] == [*expected["param_groups"][0]["params"]]
    assert {name: set(kinds) for name, kinds in found["state"].items()} == {
        name: set(kinds) for name, kinds in expected["state"].items()
    }


def test_rank_files_by_index_need_names() -> None:
    folder = FIXTURES / "torch-2.13.0" / "rank_files_fsdp2_w2"
    _, _, part = parts_of(folder)
    shapes = {name: tensor.shape for name, tensor in part.tensors.items() if name.endswith("exp_avg")}
    assert len(shapes) == 13
    with pytest.raises(Incompatible, match=r"`layers\.0\.up\.weight` and `layers\.1\.up\.weight`"):
        canonical(folder)
    expected = expected_state(folder)
    matrices = [f"layers.{n}.{name}.weight" for n in (0, 1) for name in ("up", "down")]
    rest = [f"layers.{n}.{name}" for n in (0, 1) for name in ("up.bias", "norm.weight", "norm.bias")]
    saved = canonical(folder, param_names=["embed.weight", *matrices, "scale", *rest, "odd.vec"])
    assert_equal(content(saved.found.part, saved.checkpoint)["state"], expected)


def test_two_optimizers_in_one_part_are_refused() -> None:
    entries = [
        ObjectEntry(key=f"{name}.param_groups", name="", file="", start=0, stop=0, path=(name, "param_groups"))
        for name in ("AdamW", "SGD")
    ]
    objects = {entry.key: entry for entry in entries}
    part = Part(name="optimizers", role=Role.OPTIMIZER, dialect="dcp", objects=objects)
    with pytest.raises(Incompatible, match="2 optimizers") as caught:
        canonical_optimizer(part, lambda _: [])
    assert "--part model" in str(caught.value.hint)


def test_what_belongs_to_no_parameter_is_not_lost_silently(tmp_path: Path) -> None:
    model, optimizer = trained("AdamW")
    state = by_name(model, optimizer) | {"loss_scale": torch.ones(1)}
    path = save(tmp_path / "x", {"optimizer": state}, "dcp")
    with pytest.raises(Incompatible, match=r"`optimizer\.loss_scale` is neither") as caught:
        canonical(path)
    assert caught.value.hint == "leave it out with --exclude 'optimizer.loss_scale'"
    for exclude in (["optimizer.loss_scale"], ["*"]):  # which is about such things only
        saved = canonical(path, exclude=exclude)
        assert_equal(content(saved.found.part, saved.checkpoint), expected_of(model, optimizer))


def _groups(*groups: Any) -> dict[str, Any]:
    return {"state": {"w": {"m": torch.ones(2)}}, "param_groups": list(groups)}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (_groups({"lr": 1.0}), "group 0 does not say which parameters"),
        (_groups({"lr": 1.0, "params": [1.5]}), "neither names nor numbers"),
        (_groups({"params": ["w"]}, {"params": [0]}), "both names and numbers"),
        (_groups({"params": ["w"]}, {"params": ["w"]}), "more than once"),
        (_groups({"params": [0, 1]}), "state for `w`, which is in no group"),
        ({"state": {"7": {"m": torch.ones(2)}}, "param_groups": [{"params": [0]}]}, "state for `7`"),
        ({"state": {"w": {"m": torch.ones(2)}}, "param_groups": 5}, "is a int"),
    ],
)
def test_what_no_optimizer_would_write(state: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedFile, match=message):
        canonical(save(tmp_path / "x", {"optimizer": state}, "dcp"))


def test_flat_parameters_are_refused() -> None:
    part = Part(name="optim", role=Role.OPTIMIZER, dialect="rank-files", flat="`state.0.exp_avg` is a local slice")
    with pytest.raises(FlatParameters, match="local slice"):
        canonical_optimizer(part, lambda entry: entry.value)


def test_groups_of_a_flattened_optimizer_are_told_apart_by_type_and_value(tmp_path: Path) -> None:
    options: dict[str, dict[str, Any]] = {
        "a": {"lr": 1, "x": None},
        "b": {"lr": 1.0, "x": None},
        "c": {"lr": 1, "x": None},
        "d": {"lr": True},
    }
    state = {f"param_groups.{name}.{key}": value for name, row in options.items() for key, value in row.items()}
    state |= {f"state.{name}.m": torch.ones(2) for name in "abcd"}
    saved = canonical(save_dcp(tmp_path / "x", {"optimizer": sharded(state)}))
    found = content(saved.found.part, saved.checkpoint)["param_groups"]
    assert [group["params"] for group in found] == [["a", "c"], ["b"], ["d"]]
    assert json.dumps([group["lr"] for group in found]) == "[1, 1.0, true]"
    assert "3 in all" in saved.found.notes[0]
