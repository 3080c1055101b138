"""Models and optimizers of all kinds, saved and loaded by one process: nothing comes back as something else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_ckpt import get_state_dict, load_state, save_state
from fsdp_ckpt.errors import Incompatible, UsageError
from fsdp_ckpt.train.ranks import Ranks

TYPES = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch).square().mean()
        loss.backward()
        return loss

    cast(Any, optimizer).step(closure)


def digest(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: digest(item) for key, item in value.items()}
    return [digest(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS", "NAdam", "Adagrad"])
def test_an_optimizer_goes_on_bit_by_bit(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    optimizer = getattr(torch.optim, kind)(model.parameters())
    for number in range(3):
        step(model, optimizer, number)
    save_state(tmp_path / "run", model, optimizer, durable=False)
    twin = nn.Linear(8, 5)
    fresh = getattr(torch.optim, kind)(twin.parameters())
    load_state(tmp_path / "run", twin, fresh)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(twin, fresh, number)
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.bias, twin.bias)
    assert digest(fresh.state_dict()["state"]) == digest(optimizer.state_dict()["state"])


class WithLists(torch.optim.Optimizer):
    """Keeps a history per parameter, as Shampoo and others do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    def fill(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"history": [param.detach().clone(), torch.ones(3)], "count": 2}


def test_tensors_in_lists_of_a_plain_parameter_come_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = WithLists(model.parameters())
    optimizer.fill()
    save_state(tmp_path / "run", model, optimizer, durable=False)
    fresh = WithLists(model.parameters())
    load_state(tmp_path / "run", model, fresh)
    assert digest(fresh.state_dict()["state"]) == digest(optimizer.state_dict()["state"])
    assert {tensor.device for tensor in fresh.state[model.weight]["history"]} == {model.weight.device}


class WithExtra(nn.Linear):
    """A module with extra state."""

    extra: Any = None
    found: Any = "nothing"

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.found = state


NESTED: dict[str, Callable[[], Any]] = {
    "number": lambda: 5,
    "none": lambda: None,
    "text": lambda: "a.b",
    "empty dictionary": dict,
    "empty list": list,
    "list": lambda: [1, 2.5, "x"],
    "tuple": lambda: (1, (2, 3)),
    "texts as keys": lambda: {"a": 1, "b": {"c": [1, 2]}},
    "numbers from 0 as keys": lambda: {0: 1.0, 1: 2.0},
    "numbers as keys": lambda: {3: 1.0, 7: 2.0},
    "numbers from 0 within": lambda: {"a": 1, "b": {0: 1.0, 1: 2.0}},
    "one number": lambda: {"k": {0: 1}},
    "true as a key": lambda: {True: 1, "a": 2},
    "none as a key": lambda: {None: 1},
    "a fraction as a key": lambda: {0.5: 1},
    "a tuple as a key": lambda: {(1, 2): 1},
    "dots in keys": lambda: {"a.b": 1, "a": {"b": 2}},
    "number and text": lambda: {1: "number", "1": "text"},
    "empty key": lambda: {"": 1},
    "list of dictionaries": lambda: [{"a": 1}, {"b": {}}],
    "list of a list of dictionaries": lambda: [[{"a": 1}], [{"b": 2}]],
    "tuple of dictionaries": lambda: ({"a": 1}, {0: 1}),
    "deep": lambda: {"a": {"b": {"c": {"d": {"e": [{"f": 1}]}}}}},
    "tensor": lambda: torch.ones(2),
    "dictionary with a tensor": lambda: {"a": torch.ones(2), "b": 1},
    "list of tensors": lambda: [torch.ones(2), torch.zeros(1)],
}


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return all(
            type(a) is type(b) and a == b and same(first[a], second[b]) for a, b in zip(first, second, strict=True)
        )
    if type(first) is type(second) and isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and bool(first == second)


ALWAYS_KEPT = {
    "number", "none", "text", "empty dictionary", "empty list", "list", "tuple", "texts as keys",
    "list of dictionaries", "numbers as keys", "deep",
}  # fmt: skip
"""What a full state dict can hold as well."""


def _is_refused(path: Path, style: Any, name: str, *subjects: Any) -> bool:
    refused: Incompatible | None = None
    try:
        save_state(path, *subjects, state_dict_type=style, durable=False)
    except Incompatible as error:
        refused = error
    if refused is None:
        return False
    assert style == "FULL_STATE_DICT"
    assert name not in ALWAYS_KEPT
    assert "SHARDED_STATE_DICT" in (refused.hint or "")
    assert not path.exists()
    return True


@pytest.mark.parametrize("style", TYPES)
@pytest.mark.parametrize("name", NESTED)
def test_extra_state_comes_back_as_it_was_or_is_refused_when_saving(tmp_path: Path, style: Any, name: str) -> None:
    model = WithExtra(2, 2)
    model.extra = NESTED[name]()
    if _is_refused(tmp_path / "run", style, name, model):
        return
    load_state(tmp_path / "run", model)
    assert same(model.found, model.extra), f"{model.extra!r} came back as {model.found!r}"


@pytest.mark.parametrize("style", TYPES)
@pytest.mark.parametrize("name", NESTED)
def test_group_options_come_back_as_they_were_or_are_refused_when_saving(tmp_path: Path, style: Any, name: str) -> None:
    model = nn.Linear(2, 2)
    value = NESTED[name]()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "option": value, "after": "kept"}], lr=0.5)
    if _is_refused(tmp_path / "run", style, name, model, optimizer):
        return
    fresh = torch.optim.SGD([{"params": model.parameters(), "option": copy.deepcopy(value), "after": ""}], lr=0.1)
    if not isinstance(value, Tensor):
        fresh.param_groups[0]["option"] = "another"
    load_state(tmp_path / "run", model, fresh)
    found = fresh.param_groups[0]
    assert (found["lr"], found["after"]) == (0.5, "kept")
    assert same(found["option"], value), f"{value!r} came back as {found['option']!r}"


def _stepped(model: nn.Module, kind: str, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    step(model, optimizer, 0)
    return optimizer


def test_state_of_another_class_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = nn.Linear(8, 5)
    save_state(tmp_path / "run", model, _stepped(model, "SGD", lr=0.1, momentum=0.9), durable=False)
    other = nn.Linear(8, 5)
    fresh = torch.optim.Adam(other.parameters(), lr=0.5)
    before = digest([other.state_dict(), fresh.state_dict()])
    with pytest.raises(Incompatible, match="is a SGD, this one a Adam"):
        load_state(tmp_path / "run", other, fresh)
    assert digest([other.state_dict(), fresh.state_dict()]) == before


def test_adam_state_goes_into_adamw(tmp_path: Path) -> None:
    model = nn.Linear(8, 5)
    adam = _stepped(model, "Adam")
    save_state(tmp_path / "run", model, adam, durable=False)
    adamw = torch.optim.AdamW(model.parameters())
    load_state(tmp_path / "run", model, adamw)
    assert digest(adamw.state_dict()["state"]) == digest(adam.state_dict()["state"])


@pytest.mark.parametrize("exclude", [(), ("*",)])
def test_moments_keep_their_own_dtype(tmp_path: Path, exclude: Any) -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param] = {"momentum_buffer": torch.full(param.shape, 1 / 3, dtype=torch.float32)}
    save_state(tmp_path / "run", model, optimizer, durable=False)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    report = load_state(tmp_path / "run", model, fresh, exclude=exclude)
    assert digest(fresh.state_dict()["state"]) == digest(optimizer.state_dict()["state"])
    assert report.cast == {}


def test_state_for_something_else_than_parameters_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(8, 5)
    optimizer = _stepped(model, "Adam")
    optimizer.state["counts"] = {"total": 3}  # type: ignore[index]
    with pytest.raises(Incompatible, match="'counts', which is in none of its groups"):
        save_state(tmp_path / "run", model, optimizer)
    assert not (tmp_path / "run").exists()


def test_the_whole_model_with_its_extra_state_fits_the_unwrapped_module() -> None:
    inner, found = WithExtra(2, 2), WithExtra(2, 2)
    inner.extra = {"scale": 3}
    model = nn.Sequential(inner, nn.BatchNorm1d(2))
    state = get_state_dict(nn.Sequential(checkpoint_wrapper(inner), model[1]))
    assert sorted(state) == sorted(model.state_dict())
    nn.Sequential(found, nn.BatchNorm1d(2)).load_state_dict(state, strict=True)
    assert found.found == {"scale": 3}
    assert torch.equal(found.weight, inner.weight)


@pytest.mark.parametrize("style", TYPES)
def test_extra_state_under_a_checkpoint_wrapper_comes_back(tmp_path: Path, style: Any) -> None:
    inner = WithExtra(2, 2)
    inner.extra = {"scale": 3}
    save_state(tmp_path / "run", nn.Sequential(checkpoint_wrapper(inner)), state_dict_type=style, durable=False)
    bare = nn.Sequential(WithExtra(2, 2))
    load_state(tmp_path / "run", bare)
    assert bare[0].found == {"scale": 3}
    wrapped = WithExtra(2, 2)
    load_state(tmp_path / "run", nn.Sequential(checkpoint_wrapper(wrapped)))
    assert wrapped.found == {"scale": 3}


@pytest.mark.parametrize("style", TYPES)
def test_a_buffer_whose_name_ends_like_extra_state_is_a_buffer(tmp_path: Path, style: Any) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("my_extra_state", torch.tensor([4.0, 5.0]))
    save_state(tmp_path / "run", model, state_dict_type=style, durable=False)
    model.get_buffer("my_extra_state").zero_()
    report = load_state(tmp_path / "run", model)
    assert model.get_buffer("my_extra_state").tolist() == [4.0, 5.0]
    assert (report.missing, report.unexpected) == ([], [])


def test_two_names_that_would_get_one_part_are_refused(tmp_path: Path) -> None:
    save_state(tmp_path / "run", {"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 2)}, durable=False)
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    before = digest([one.state_dict(), two.state_dict()])
    with pytest.raises(UsageError, match="`critic` and `1` would both be loaded from `pytorch_model_fsdp_1`"):
        load_state(tmp_path / "run", {"critic": one, "1": two})
    assert digest([one.state_dict(), two.state_dict()]) == before


def test_two_optimizers_of_one_model_get_their_own_state_in_any_order(tmp_path: Path) -> None:
    model = nn.Linear(8, 5)
    first = torch.optim.Adam([model.weight], lr=1.0)
    second = torch.optim.Adam([model.bias], lr=2.0)
    step(model, first, 0)
    second.step()
    save_state(tmp_path / "run", model, [first, second], durable=False)
    on_weight, on_bias = torch.optim.Adam([model.weight]), torch.optim.Adam([model.bias])
    load_state(tmp_path / "run", model, [on_bias, on_weight])
    assert digest(on_weight.state_dict()["state"]) == digest(first.state_dict()["state"])
    assert digest(on_bias.state_dict()["state"]) == digest(second.state_dict()["state"])
    assert (on_weight.param_groups[0]["lr"], on_bias.param_groups[0]["lr"]) == (1.0, 2.0)


def test_nothing_is_called_fresh_that_has_no_state_to_lose(tmp_path: Path) -> None:
    model = nn.Linear(8, 5)
    optimizer = _stepped(model, "SGD", lr=0.1)
    save_state(tmp_path / "plain", model, optimizer, durable=False)
    assert load_state(tmp_path / "plain", model, optimizer).optimizer_fresh == []
    model.bias.requires_grad_(False)
    save_state(tmp_path / "frozen", model, _stepped(model, "Adam"), durable=False)
    fresh = torch.optim.Adam(model.parameters())
    assert load_state(tmp_path / "frozen", model, fresh).optimizer_fresh == []
    model.bias.requires_grad_(True)
    assert load_state(tmp_path / "frozen", model, torch.optim.Adam(model.parameters())).optimizer_fresh == ["bias"]


def test_an_optimizer_in_accelerates_wrapper_is_recorded_as_what_it_is(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = nn.Linear(2, 2)
    try:
        wrapped = Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters()))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert type(wrapped).__name__ == "AcceleratedOptimizer"
    save_state(tmp_path / "run", model, wrapped, durable=False)
    manifest = json.loads((tmp_path / "run" / "fsdp_ckpt.json").read_text())
    assert [row["kind"] for row in manifest["optimizers"]] == ["AdamW"]


def test_a_float8_buffer_that_is_not_saved_does_not_stop_the_report(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scales", torch.ones(2).to(torch.float8_e4m3fn), persistent=False)
    save_state(tmp_path / "run", model, durable=False)
    assert load_state(tmp_path / "run", model).unsaved_buffers == ["scales"]


class Pair(nn.Module):
    """Two layers whose weights may be tied."""

    def __init__(self, *, tied: bool, equal: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if equal:
            self.b.load_state_dict(self.a.state_dict())
        if tied:
            self.b.weight = self.a.weight


@pytest.mark.parametrize("style", TYPES)
def test_values_that_tying_drops_are_reported(tmp_path: Path, style: Any) -> None:
    save_state(tmp_path / "run", Pair(tied=False), state_dict_type=style, durable=False)
    report = load_state(tmp_path / "run", Pair(tied=True))
    assert len(report.warnings) == 1
    assert "`a.weight`" in report.warnings[0]
    assert "`b.weight`" in report.warnings[0]


@pytest.mark.parametrize("style", TYPES)
@pytest.mark.parametrize("saved", [Pair(tied=True), Pair(tied=False, equal=True)], ids=["tied", "equal"])
def test_tied_weights_that_were_saved_twice_are_no_reason_for_a_warning(
    tmp_path: Path, style: Any, saved: Pair
) -> None:
    save_state(tmp_path / "run", saved, state_dict_type=style, durable=False)
    live = Pair(tied=True)
    report = load_state(tmp_path / "run", live)
    assert report.warnings == []
    assert torch.equal(live.a.weight, saved.a.weight)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_torch_saved_twice_are_compared(tmp_path: Path, equal: bool) -> None:
    """As Accelerate lays them out; see accelerate/utils/fsdp_utils.py, save_fsdp_model."""
    saved = Pair(tied=equal)
    state = {"model": {name: value.clone() for name, value in saved.state_dict().items()}}
    dcp.save(state, checkpoint_id=tmp_path / "run" / "pytorch_model_fsdp_0", no_dist=True)
    live = Pair(tied=True)
    report = load_state(tmp_path / "run", live)
    assert [text for text in report.warnings if "b.weight" in text] == report.warnings
    assert len(report.warnings) == (0 if equal else 1)
    assert torch.equal(live.a.weight, saved.a.weight)


def test_compiled_models_have_the_names_of_what_was_compiled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert sorted(get_state_dict(cast(nn.Module, torch.compile(model, backend="eager")))) == sorted(model.state_dict())
    inner = nn.Sequential(cast(nn.Module, torch.compile(model[0], backend="eager")), model[1])
    assert sorted(get_state_dict(inner)) == sorted(model.state_dict())


@pytest.mark.parametrize(("kinds", "expected"), [(["cpu", "cuda"], "cpu"), (["cuda", "cpu"], "cpu"), (["cpu"], "cpu")])
def test_tensors_travel_by_the_cpu_where_the_group_has_a_backend_for_it(kinds: list[str], expected: str) -> None:
    ranks = Ranks()
    ranks.group = cast(Any, SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds]))
    assert ranks._device() == torch.device(expected)


def test_tensors_travel_by_the_current_device_of_a_group_that_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    ranks = Ranks()
    ranks.group = cast(Any, SimpleNamespace(_device_types=[torch.device("cuda")]))
    assert ranks._device() == torch.device("cuda", 3)
