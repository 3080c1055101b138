from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.catalog import Role
from fsdp_ckpt.layouts.optimizer_paths import has_numbered_groups, optimizer_place
from fsdp_ckpt.layouts.registry import read_checkpoint

PARAMS = {"a.w", "a.w.x"}


def place(*path: str | int, is_numbered: bool = False) -> tuple[Any, ...]:
    found = optimizer_place(path, is_param=PARAMS.__contains__, is_numbered=is_numbered)
    return found.prefix, found.head, found.owner, found.rest


@pytest.mark.parametrize(
    ("path", "is_numbered", "expected"),
    [
        # nested, as DCP's planner or a file keeps it
        (("state", "a.w", "exp_avg"), True, ((), "state", "a.w", ("exp_avg",))),
        (("state", 3, "exp_avg"), True, ((), "state", "3", ("exp_avg",))),
        (("state", "b.w", "factors", "L"), True, ((), "state", "b.w", ("factors", "L"))),
        (("param_groups", 1, "lr"), True, ((), "param_groups", 1, ("lr",))),
        (("param_groups", 1, "lr"), False, ((), "param_groups", 1, ("lr",))),
        (("param_groups", "1", "lr"), True, ((), "param_groups", 1, ("lr",))),
        (("param_groups", "b.w", "lr"), False, ((), "param_groups", "b.w", ("lr",))),
        # joined with dots
        (("state.b.w.exp_avg",), True, ((), "state", "b.w", ("exp_avg",))),
        (("state.a.w.exp_avg",), True, ((), "state", "a.w", ("exp_avg",))),
        (("state.a.w.x.exp_avg",), True, ((), "state", "a.w.x", ("exp_avg",))),
        (("state.a.w.factors.L",), True, ((), "state", "a.w", ("factors", "L"))),
        (("param_groups.0.lr",), True, ((), "param_groups", 0, ("lr",))),
        (("param_groups.0.lr",), False, ((), "param_groups", "0", ("lr",))),
        (("param_groups.0.weight.lr",), False, ((), "param_groups", "0.weight", ("lr",))),
        (("param_groups.0.extra.lr",), True, ((), "param_groups", 0, ("extra", "lr"))),
        # several in one object
        (("state",), False, ((), "state", None, ())),
        (("param_groups",), True, ((), "param_groups", None, ())),
        (("state", "layers.0.weight"), False, ((), "state", "layers.0.weight", ())),
        # levels before
        (("AdamW", "state", "a.w", "step"), True, (("AdamW",), "state", "a.w", ("step",))),
        ((0, "param_groups", 0, "lr"), True, ((0,), "param_groups", 0, ("lr",))),
        (("optimizers", "AdamW", "state.b.w.step"), True, (("optimizers", "AdamW"), "state", "b.w", ("step",))),
        (("AdamW.state.b.w.step",), True, (("AdamW",), "state", "b.w", ("step",))),
        (("optimizers.AdamW.param_groups",), True, (("optimizers", "AdamW"), "param_groups", None, ())),
        # neither
        (("scaler", "scale"), True, (("scaler", "scale"), None, None, ())),
        (("a", "b", "c", "state", "w"), True, (("a", "b", "c", "state", "w"), None, None, ())),
        (("statement.w.x",), True, (("statement.w.x",), None, None, ())),
        (("",), True, (("",), None, None, ())),
    ],
)
def test_places(path: tuple[str | int, ...], is_numbered: bool, expected: tuple[Any, ...]) -> None:
    assert place(*path, is_numbered=is_numbered) == expected


def test_numbers_that_nobody_would_count_to_stay_texts() -> None:
    assert place("param_groups", "9" * 5000, "lr", is_numbered=True)[2] == "9" * 5000


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["param_groups.0.lr", "param_groups.0.params"], True),
        (["param_groups"], True),
        (["AdamW.param_groups.12.params"], True),
        (["param_groups.0.weight.lr", "state.params"], False),
        (["param_groups.0.params.lr"], False),
        ([], False),
    ],
)
def test_numbered_groups_have_a_list_of_parameters(names: list[str], expected: bool) -> None:
    assert has_numbered_groups(names) is expected


@pytest.mark.parametrize("by_name", [False, True])
def test_a_file_that_is_an_optimizer_and_nothing_else(by_name: bool, tmp_path: Path) -> None:
    params = {name: torch.nn.Parameter(torch.ones(3)) for name in ("a.w", "b.w")}
    optimizer = torch.optim.SGD(params.items() if by_name else params.values(), lr=0.1, momentum=0.9)
    for param in params.values():
        param.grad = torch.ones(3)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (part,) = read_checkpoint(tmp_path / "optimizer.pt").parts
    assert part.role is Role.OPTIMIZER
    assert sorted(part.tensors) == ["state.0.momentum_buffer", "state.1.momentum_buffer"]
