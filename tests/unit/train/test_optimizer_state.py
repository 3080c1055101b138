from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from fsdp_ckpt.catalog import ObjectEntry, Part, Role, TensorEntry
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.train.optimizer_state import SavedOptimizer, read_optimizer
from fsdp_ckpt.train.reader import Reader
from tests.build import save_dcp


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
        self.scale = nn.Parameter(torch.ones(2))


NAMES = ["inner.0.weight", "inner.0.bias", "inner.1.weight", "scale"]


@pytest.fixture
def trained() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Model()
    groups = [{"params": list(model.inner.parameters()), "lr": 0.25}, {"params": [model.scale], "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.125)
    (model.inner(torch.ones(1, 3)) * model.scale).sum().backward()
    optimizer.step()
    return model, optimizer


def _read(
    folder: Path, state: dict[str, Any], *, order: Sequence[str] | None = NAMES, file: bool = False, prefix: str = ""
) -> tuple[SavedOptimizer, Reader]:
    if file:
        folder.mkdir()
        torch.save(state, folder / "optimizer.bin")
        torch.save({"w": torch.zeros(1)}, folder / "pytorch_model_fsdp.bin")
    else:
        save_dcp(folder, {"optim": state}, ranks=1)
    checkpoint = read_checkpoint(folder)
    part = next(part for part in checkpoint.parts if part.role is Role.OPTIMIZER)
    reader = Reader(checkpoint)
    names = {name: name for name in NAMES} | {"tied": "scale"}
    return read_optimizer(part, names, order, reader.value, reader.read), reader


def _expect(found: SavedOptimizer, reader: Reader, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Every moment and step, by the names that the model gives."""
    assert sorted(found.state) == sorted(NAMES)
    for name, param in model.named_parameters():
        live = optimizer.state[param]
        assert sorted(found.state[name]) == ["exp_avg", "exp_avg_sq", "step"]
        for kind, entry in found.state[name].items():
            have: Any = reader.read(entry) if isinstance(entry, TensorEntry) else reader.value(entry)
            assert torch.equal(torch.as_tensor(have), live[kind])


def _groups(found: SavedOptimizer) -> list[tuple[Any, Any, Any]]:
    assert found.groups is not None
    return [(group["lr"], group["weight_decay"], sorted(group["params"])) for group in found.groups]


EXPECTED_GROUPS = [(0.25, 0.01, sorted(NAMES[:3])), (0.125, 0.5, ["scale"])]


@pytest.mark.parametrize("file", [False, True])
def test_by_name(trained: tuple[Model, torch.optim.Optimizer], tmp_path: Path, file: bool) -> None:
    state = get_optimizer_state_dict(*trained)
    found, reader = _read(tmp_path / "at", dict(state), file=file)
    _expect(found, reader, *trained)
    assert (_groups(found), found.layout) == (EXPECTED_GROUPS, "by name")


@pytest.mark.parametrize("file", [False, True])
def test_by_index(trained: tuple[Model, torch.optim.Optimizer], tmp_path: Path, file: bool) -> None:
    state: dict[str, Any] = trained[1].state_dict()
    found, reader = _read(tmp_path / "at", state, file=file)
    _expect(found, reader, *trained)
    assert (_groups(found), found.layout) == (EXPECTED_GROUPS, "by index")


def test_flattened(trained: tuple[Model, torch.optim.Optimizer], tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    found, reader = _read(tmp_path / "at", dict(get_optimizer_state_dict(*trained, options=options)))
    _expect(found, reader, *trained)
    assert (found.groups, found.layout) == (None, "flattened")
    assert {name: options["lr"] for name, options in found.options.items()} == {
        **dict.fromkeys(NAMES[:3], 0.25),
        "scale": 0.125,
    }


def test_names_lose_their_wrappers(trained: tuple[Model, torch.optim.Optimizer], tmp_path: Path) -> None:
    state: Any = get_optimizer_state_dict(*trained)
    wrapped = {name: f"_orig_mod._fsdp_wrapped_module.{name}" for name in NAMES}
    renamed = {
        "state": {wrapped[name]: kinds for name, kinds in state["state"].items()},
        "param_groups": [
            {**group, "params": [wrapped[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }
    found, reader = _read(tmp_path / "at", renamed)
    _expect(found, reader, *trained)
    assert _groups(found) == EXPECTED_GROUPS


def test_another_name_of_a_tied_parameter_is_the_live_one(tmp_path: Path) -> None:
    state = {"state": {"tied": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1.0, "params": ["tied"]}]}
    found, _ = _read(tmp_path / "at", state)
    assert list(found.state) == ["scale"]


def _part(*objects: tuple[tuple[str | int, ...], Any]) -> Part:
    entries = {
        ".".join(map(str, path)): ObjectEntry(
            key=".".join(map(str, path)), name=".".join(map(str, path)), file="f", start=0, stop=0, value=value,
            decoded=True, path=path,
        )
        for path, value in objects
    }  # fmt: skip
    return Part(name="optimizer_0", role=Role.OPTIMIZER, dialect="dcp", objects=entries)


def _parse(part: Part, order: Sequence[str] | None = NAMES) -> SavedOptimizer:
    def value(entry: ObjectEntry) -> Any:
        return entry.value

    def tensor(entry: TensorEntry) -> Tensor:
        raise AssertionError(entry)

    return read_optimizer(part, {name: name for name in NAMES}, order, value, tensor)


def test_groups_in_one_blob() -> None:
    found = _parse(_part((("param_groups",), [{"lr": 0.5, "params": ["scale"]}, {"lr": 0.25, "params": []}])))
    assert found.groups == [{"lr": 0.5, "params": ["scale"]}, {"lr": 0.25, "params": []}]
    assert found.layout == "groups in one blob"


def test_without_places_names_are_taken_apart_by_what_is_known() -> None:
    part = _part((("state", "inner.0.weight", "step"), 4.0), (("param_groups", "inner.0.weight", "lr"), 0.5))
    dotted = {key: replace(entry, path=()) for key, entry in part.objects.items()}
    found = _parse(replace(part, objects=dotted))
    assert list(found.state) == ["inner.0.weight"]
    assert list(found.state["inner.0.weight"]) == ["step"]
    assert found.options == {"inner.0.weight": {"lr": 0.5}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"lr": 1}, "`param_groups` is no list of groups"),
        ([1, 2], "`param_groups` is no list of groups"),
        (None, "`param_groups` is no list of groups"),
    ],
)
def test_a_blob_that_holds_no_groups_is_refused(content: Any, text: str) -> None:
    with pytest.raises(MalformedFile, match=text):
        _parse(_part((("param_groups",), content)))


def test_groups_that_are_not_counted_from_0_are_refused() -> None:
    with pytest.raises(MalformedFile, match=r"groups \[0, 2\] are not numbered from 0"):
        _parse(_part((("param_groups", 0, "lr"), 1.0), (("param_groups", 2, "lr"), 1.0)))


def test_indices_of_another_number_of_parameters_are_refused() -> None:
    part = _part((("param_groups", 0, "params"), [0, 1, 2]))
    with pytest.raises(Incompatible, match="for 3 parameters; this optimizer has 4") as caught:
        _parse(part)
    assert "save it by name" in str(caught.value.hint)


def test_indices_mean_nothing_where_one_object_holds_several_parameters() -> None:
    with pytest.raises(Incompatible, match="flattened parameters of several names") as caught:
        _parse(_part((("param_groups", 0, "params"), [0, 1, 2, 3])), order=None)
    assert "use_orig_params=True" in str(caught.value.hint)


def test_state_of_an_index_that_is_in_no_group_is_refused() -> None:
    part = _part((("param_groups", 0, "params"), [0, 1, 2, 3]), (("state", "9", "step"), 1.0))
    with pytest.raises(MalformedFile, match="which is in no group"):
        _parse(part)


def test_an_empty_optimizer_has_no_groups() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _parse(_part()) == SavedOptimizer()
