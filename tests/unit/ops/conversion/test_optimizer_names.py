"""An index gets the name that the model gives it for certain, and is refused where two names would do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ckpt.catalog import DTYPES, Chunk, Part, Role, Shape, TensorEntry
from fsdp_ckpt.errors import Incompatible, NameCollision
from fsdp_ckpt.ops.conversion.optimizer_names import Indices, name_indices, parameter_candidates
from tests.build import save_dcp
from tests.unit.ops.conversion.saved_optimizers import (
    OPTIMIZERS,
    Alike,
    assert_equal,
    by_name,
    canonical,
    content,
    parts_of,
    save,
    sharded,
    train,
)


def model_part(shapes: dict[str, Shape], *, dialect: str = "safetensors", **dtypes: str) -> Part:
    tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        chunk = Chunk(offsets=(0,) * len(shape), lengths=shape, file="f", start=1000 * number, stop=1000 * number + 9)
        dtype = DTYPES[dtypes.get(name.rpartition(".")[2], "float32")]
        tensors[name] = TensorEntry(key=name, name=name, dtype=dtype, shape=shape, chunks=(chunk,))
    return Part(name="model", role=Role.MODEL, dialect=dialect, tensors=tensors)


def names(
    groups: list[list[int]], shapes: dict[int, Shape], model: Part | None, param_names: list[str] | None = None
) -> list[str]:
    found, _ = name_indices(
        Indices(groups=groups, shapes=shapes), where="`optimizer`", model=model, param_names=param_names
    )
    return [found[index] for index in sorted(found)]


def test_shapes_that_are_all_different_force_the_names_in_any_order() -> None:
    model = model_part({"a": (2,), "b": (3,), "c": (4,)})
    assert names([[2, 0], [1]], {0: (4,), 1: (2,), 2: (3,)}, model) == ["c", "a", "b"]


def test_one_parameter_without_state_is_the_one_that_is_left() -> None:
    model = model_part({"a": (2,), "b": (3,), "c": (4,)})
    assert names([[0, 1], [2]], {0: (4,), 2: (2,)}, model) == ["c", "b", "a"]


def test_parameters_of_one_group_without_state_need_not_be_told_apart() -> None:
    model = model_part({"a": (2,), "b": (2,), "c": (4,)})
    assert sorted(names([[0], [1, 2]], {0: (4,)}, model)) == ["a", "b", "c"]
    with pytest.raises(Incompatible, match="2 parameters of several groups"):
        names([[1], [0, 2]], {0: (4,)}, model)


def test_steps_that_differ_are_not_given_to_any_parameter() -> None:
    model = model_part({"a": (2,), "b": (2,), "c": (4,)})
    indices = Indices(groups=[[0, 1, 2]], shapes={2: (4,)}, shapeless=[0, 1])
    with pytest.raises(Incompatible, match="that of index 0 shows no shape: whether it is `a` or `b`"):
        name_indices(indices, where="`optimizer`", model=model, param_names=None)
    found, _ = name_indices(indices, where="`optimizer`", model=model, param_names=["a", "b", "c"])
    assert found == {0: "a", 1: "b", 2: "c"}


@pytest.mark.parametrize("second", [{"step": 7}, {"step": torch.tensor(7.0)}], ids=["number", "tensor"])
def test_state_without_a_shape_is_seen_in_the_file(second: dict[str, Any], tmp_path: Path) -> None:
    """State of SGD without momentum is None for every parameter: it may be anyone's, a number of steps may not."""
    model = {"b.w": torch.zeros(2), "a.w": torch.zeros(2)}

    def saved(one: dict[str, Any], two: dict[str, Any], name: str) -> Path:
        state = {"state": {0: one, 1: two}, "param_groups": [{"lr": 0.1, "params": [1, 0]}]}
        return save(tmp_path / name, {"model": model, "optimizer": state}, "file")

    canonical(saved({"momentum_buffer": None}, {"momentum_buffer": None}, "x"))
    with pytest.raises(Incompatible, match=r"that of index [01] shows no shape"):
        canonical(saved({"step": 3}, second, "y"))


@pytest.mark.parametrize(
    ("groups", "shapes", "message"),
    [
        (
            [[0, 1, 2]],
            {0: (2,), 1: (2,), 2: (4,)},
            r"`a` and `b` have the same shape \(2,\), and which of them is index",
        ),
        ([[0, 1, 2]], {0: (2,), 2: (4,)}, r"which of them is index 0 cannot be told"),
        ([[0, 1, 2]], {0: (5,), 1: (2,), 2: (2,)}, r"1 of its parameters have shape \(5,\), of those of `model` 0"),
        ([[0, 1]], {0: (2,), 1: (4,)}, "for 2 parameters; the model `model` has 3 tensors"),
        ([[0, 1, 2, 3]], {}, "for 4 parameters; the model `model` has 3 tensors"),
    ],
)
def test_what_cannot_be_told_is_refused(groups: Any, shapes: Any, message: str) -> None:
    with pytest.raises(Incompatible, match=message) as caught:
        names(groups, shapes, model_part({"a": (2,), "b": (2,), "c": (4,)}))
    assert "--param-names" in str(caught.value.hint)


def test_without_a_model_there_are_no_names() -> None:
    with pytest.raises(Incompatible, match="nothing says which parameter") as caught:
        names([[0]], {0: (2,)}, None)
    assert "--param-names" in str(caught.value.hint)


def test_buffers_do_not_count() -> None:
    shapes: dict[str, Shape] = {
        "norm.running_mean": (3,), "norm.running_var": (3,), "norm.num_batches_tracked": (), "rotary.inv_freq": (3,),
        "position_ids": (3,), "w": (3,),
    }  # fmt: skip
    model = model_part(shapes, num_batches_tracked="int64", position_ids="int64")
    assert names([[0]], {0: (3,)}, model) == ["w"]


def test_a_buffer_that_nobody_knows_lets_it_be_refused() -> None:
    # The order of the modules would give every index the wrong name, and all shapes would fit.
    model = model_part({"buffer": (3,), "v": (3,), "w": (3,)}, dialect="torch-file")
    with pytest.raises(Incompatible, match="for 2 parameters"):
        names([[0, 1]], {0: (3,), 1: (3,)}, model)


def test_the_order_of_modules_counts_for_one_group_in_its_order_only() -> None:
    model = model_part({"z": (3,), "a": (3,)}, dialect="torch-file")
    shapes: dict[int, Shape] = {0: (3,), 1: (3,)}
    assert names([[0, 1]], shapes, model) == ["z", "a"]
    assert names([[0, 1], []], shapes, model) == ["z", "a"]
    for groups in ([[1, 0]], [[0], [1]]):
        with pytest.raises(Incompatible, match="`z` and `a`"):
            names(groups, shapes, model)


ATTENTION = ("q", "k", "v", "o")


def attention(layers: Iterable[int], parts: Sequence[str] = ATTENTION) -> dict[str, Shape]:
    return {f"layers.{number}.attn.{part}": (3, 3) for number in layers for part in parts}


@pytest.mark.parametrize(
    "shapes",
    [
        attention(range(3), sorted(ATTENTION)),  # sorted by name
        attention((0, 1, 10, 2)),  # sorted by name as far as numbers go
        # Two files of safetensors, the first of which ends within a layer.
        attention((0, 1), sorted(ATTENTION)) | attention((2,), ("k", "q")) | attention((2,), ("o", "v")),
        {f"{number}": (3, 3) for number in range(3)},  # nothing but numbers
    ],
)
def test_tensors_that_may_be_sorted_by_name_say_nothing_about_the_order_of_modules(shapes: dict[str, Shape]) -> None:
    by_index: dict[int, Shape] = dict.fromkeys(range(len(shapes)), (3, 3))
    for dialect in ("dcp", "rank-files", "torch-file"):
        with pytest.raises(Incompatible, match="have the same shape"):
            names([list(by_index)], by_index, model_part(shapes, dialect=dialect))


@pytest.mark.parametrize(("dialect", "counts"), [("dcp", True), ("rank-files", True), ("torch-file", True),
                                                 ("safetensors", False)])  # fmt: skip
def test_tensors_in_the_order_of_modules(dialect: str, counts: bool) -> None:
    shapes = attention(range(12))
    by_index: dict[int, Shape] = dict.fromkeys(range(len(shapes)), (3, 3))
    model = model_part(shapes, dialect=dialect)
    if counts:
        assert names([list(by_index)], by_index, model) == list(shapes)
        return
    with pytest.raises(Incompatible, match="have the same shape"):
        names([list(by_index)], by_index, model)


def test_the_order_of_modules_does_not_count_against_the_shapes() -> None:
    model = model_part({"z": (3,), "a": (4,)}, dialect="torch-file")
    assert names([[0, 1]], {0: (4,), 1: (3,)}, model) == ["a", "z"]


def test_names_from_the_user_go_first_and_are_compared_with_the_model() -> None:
    model = model_part({"module.a": (2,), "b": (2,)})
    shapes: dict[int, Shape] = {0: (2,), 1: (2,)}
    assert names([[0], [1]], shapes, model, ["b", "_orig_mod.a"]) == ["b", "a"]
    with pytest.raises(Incompatible, match="1 names, for 2 parameters"):
        names([[0], [1]], shapes, model, ["b"])
    with pytest.raises(Incompatible, match="`b` more than once"):
        names([[0], [1]], shapes, model, ["b", "module.b"])
    with pytest.raises(Incompatible, match=r"index 1 would be `a`, but its state has shape \(9,\)"):
        names([[0], [1]], {1: (9,)}, model, ["b", "a"])


def test_candidates_that_would_have_one_name() -> None:
    with pytest.raises(NameCollision, match="`a`"):
        parameter_candidates(model_part({"a": (2,), "module.a": (2,)}))


def test_a_tied_tensor_is_one_parameter(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "mid": nn.Linear(4, 4), "head": nn.Linear(4, 6, bias=False)})
    head: Any = model["head"]
    head.weight = model["embed"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = canonical(save(tmp_path / "x", state, "file"))
    assert sorted(content(saved.found.part, saved.checkpoint)["state"]) == ["embed.weight", "mid.bias", "mid.weight"]


@pytest.mark.parametrize("medium", ["dcp", "file"])
def test_names_that_torch_has_kept_with_the_optimizer(medium: str, tmp_path: Path) -> None:
    # torch 2.6 and newer, given named_parameters(): no model is needed.
    torch.manual_seed(1)
    model = Alike()
    named = list(model.named_parameters())
    groups: list[Any] = [{"params": named[::2], "lr": 0.1}, {"params": named[1::2]}]
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer)
    saved = canonical(save(tmp_path / "x", {"optimizer": optimizer.state_dict()}, medium))
    assert_equal(content(saved.found.part, saved.checkpoint), by_name(model, optimizer))
    assert "itself has kept" in saved.found.notes[0]


def test_two_groups_of_layers_that_are_alike_need_a_list(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Alike()
    optimizer = OPTIMIZERS["AdamW, two groups"](model)
    train(model, optimizer)
    path = save(tmp_path / "x", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "dcp")
    with pytest.raises(Incompatible, match=r"`layers\.\d\.\w+` and `layers\.\d\.\w+` have the same shape"):
        canonical(path)
    with pytest.raises(Incompatible, match="nothing says which parameter"):
        canonical(path, use_model=False)
    # As the hint says to make it.
    by_param = {param: name for name, param in model.named_parameters()}
    listed = [by_param[param] for group in optimizer.param_groups for param in group["params"]]
    for use_model in (True, False):
        saved = canonical(path, param_names=listed, use_model=use_model)
        assert_equal(content(saved.found.part, saved.checkpoint), by_name(model, optimizer))


def test_a_model_of_hybrid_shards_keeps_the_order_of_its_state_dict(tmp_path: Path) -> None:
    # torch lets a rank write what several ranks have, in turn, so that items are in another order than keys.
    torch.manual_seed(1)
    model = Alike(4)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": sharded(optimizer.state_dict())}
    path = save_dcp(tmp_path / "x", state, ranks=3)  # the model's tensors are replicas
    _, part, _ = parts_of(path)
    assert part is not None
    assert list(part.tensors.values())
    assert [entry.name for entry in part.tensors.values()] == list(model.state_dict())
    saved = canonical(path)
    assert_equal(content(saved.found.part, saved.checkpoint), by_name(model, optimizer))


def test_state_that_is_not_of_its_parameters_shape_is_not_matched_by_shape(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    optimizer = torch.optim.Adafactor(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    path = save(tmp_path / "x", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "file")
    with pytest.raises(Incompatible, match="index 0 does not have its parameter's shape"):
        canonical(path)
    saved = canonical(path, param_names=[name for name, _ in model.named_parameters()])
    assert_equal(content(saved.found.part, saved.checkpoint), by_name(model, optimizer))
