"""Shapes beside a checkpoint: what is read from JSON and weights, and when their order is believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fsdp_ckpt.errors import CheckpointNotFound, NoModelWeights, UsageError
from fsdp_ckpt.layouts.flat_shapes import order_doubt, read_shapes
from tests.build import save_rank_files


class Net(nn.Module):
    """Its names are in no alphabetical order."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(11)])
        self.conv = nn.Conv2d(2, 3, (2, 4))
        self.register_buffer("table", torch.zeros(4))


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("pairs", [True, False])
def test_json(pairs: bool, tmp_path: Path) -> None:
    rows = [(name, list(tensor.shape)) for name, tensor in Net().named_parameters()]
    found = read_shapes(write(tmp_path / "shapes.json", rows if pairs else dict(rows)))
    assert [*found.shapes.items()] == [(name, tuple(shape)) for name, shape in rows]
    assert (found.source, found.doubt, found.aliases, found.orders) == ("shapes.json", None, {}, {})


def test_json_may_tell_strides(tmp_path: Path) -> None:
    model = Net()
    model.conv.weight.data = model.conv.weight.data.to(memory_format=torch.channels_last)
    rows = [[name, tensor.shape, tensor.stride()] for name, tensor in model.named_parameters()]
    found = read_shapes(write(tmp_path / "shapes.json", rows))
    assert found.shapes["conv.weight"] == (3, 2, 2, 4)
    assert found.orders == {"conv.weight": (0, 2, 3, 1)}


def test_wrappers_in_names_are_left_out(tmp_path: Path) -> None:
    found = read_shapes(write(tmp_path / "shapes.json", [["_fsdp_wrapped_module.layers.0._orig_mod.weight", [3]]]))
    assert found.shapes == {"layers.0.weight": (3,)}


@pytest.mark.parametrize(
    "value",
    [
        {}, [], 3, "weight", [["w"]], [["w", [1], [1], [1]]], [["w", 3]], [["w", [-1]]], [["w", [1.0]]],
        [["w", [True]]], [[3, [3]]], {"w": {"shape": [3]}}, [["w", [2, 3], [1]]], [["w", [1 << 40, 1 << 40]]],
        {"model_type": "llama", "hidden_size": 8},
        [["w", [1] * 65]],
    ],
)  # fmt: skip
def test_other_json_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no list of shapes") as caught:
        read_shapes(write(tmp_path / "shapes.json", value))
    assert "named_parameters()" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_what_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text(text)
    with pytest.raises(UsageError, match="is no JSON"):
        read_shapes(tmp_path / "shapes.json")


def test_a_name_that_stands_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text('{"w": [1], "w": [2]}')
    with pytest.raises(UsageError, match="two tensors named `w`"):
        read_shapes(tmp_path / "shapes.json")


def test_nothing_there(tmp_path: Path) -> None:
    for name in ("shapes.json", "model.pt"):
        with pytest.raises(CheckpointNotFound):
            read_shapes(tmp_path / name)


def test_an_optimizer_has_no_shapes(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], momentum=0.5)
    parameter.grad = torch.ones(3)
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "optimizer.pt")
    with pytest.raises(NoModelWeights):
        read_shapes(tmp_path / "optimizer.pt")


def test_a_state_dict_has_the_modules_order_and_shared_names(tmp_path: Path) -> None:
    model = Net()
    model.head = nn.Linear(2, 5, bias=False)
    model.head.weight = model.words.weight
    model.conv.weight.data = model.conv.weight.data.to(memory_format=torch.channels_last)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found = read_shapes(tmp_path / "model.pt")
    assert [*found.shapes.items()] == [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    assert found.doubt is None
    assert found.aliases == {"head.weight": "words.weight"}
    assert found.orders == {"conv.weight": (0, 2, 3, 1)}


def test_a_sorted_state_dict_is_not_believed(tmp_path: Path) -> None:
    torch.save(dict(sorted(Net().state_dict().items())), tmp_path / "model.pt")
    assert read_shapes(tmp_path / "model.pt").doubt == "the names are sorted"


def test_safetensors_have_no_order(tmp_path: Path) -> None:
    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    found = read_shapes(tmp_path / "model.safetensors")
    assert found.doubt == "safetensors files do not keep the order"
    assert dict(found.shapes) == {name: tuple(tensor.shape) for name, tensor in Net().state_dict().items()}


def test_files_of_ranks_have_the_order(tmp_path: Path) -> None:
    state = {"words.weight": torch.ones(4, 2), "norm.weight": torch.ones(4), "layer.weight": torch.ones(6)}
    found = read_shapes(save_rank_files(tmp_path / "actor", state, mesh=(2,), placements={}))
    assert [*found.shapes] == [*state]
    assert found.doubt is None


@pytest.mark.parametrize(
    ("names", "doubt"),
    [
        ([], None),
        (["weight"], None),
        (["a.weight", "b.weight"], "the names are sorted"),
        (["layers.0.weight", "layers.10.weight", "layers.2.weight"], "the names are sorted"),
        (["layers.0.weight", "layers.2.weight", "layers.10.weight"], None),
        (["norm.weight", "layers.1.weight", "layers.0.weight"], "`layers.0` comes after `layers.1`"),
        (["norm.weight", "layers.1.a.b", "layers.0.a.b"], "`layers.0` comes after `layers.1`"),
        (["b.weight", "a.weight", "b.bias"], "what is in `b` does not stand together"),
        (["m.b.weight", "m.a.weight", "n.weight", "m.c.weight"], "what is in `m` does not stand together"),
        (["z", "b.weight", "a.weight"], None),
        (["b.weight", "a"], "`a` comes after what is in `b`"),
        (["b.c.weight", "b.weight", "a.weight"], "`b.weight` comes after what is in `b.c`"),
        (["model.words.w", "model.layers.0.q.w", "model.layers.0.k.w", "model.layers.1.q.w", "head.w"], None),
    ],
)
def test_orders_that_no_module_has(names: list[str], doubt: str | None) -> None:
    assert order_doubt(names) == doubt
