from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_ckpt.names import clean_fqn, strip_wrappers

NAMES = {
    "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.w": "layers.0.w",
    "_orig_mod._orig_mod.w": "w",
    "a._fpw_module.b": "a.b",
    "module.w": "module.w",  # may be a module of the user's
    "module._orig_mod.module.w": "module.module.w",
    "layers._orig_mod_.w": "layers._orig_mod_.w",
    "x_orig_mod.w": "x_orig_mod.w",
    "w._orig_mod": "w._orig_mod",
    "_orig_mod.": "",
    "a._orig_mod.": "a.",
    "": "",
}


@pytest.mark.parametrize("name", NAMES)
def test_wrappers_go_and_nothing_else(name: str) -> None:
    assert strip_wrappers(name) == NAMES[name]
    assert strip_wrappers(NAMES[name]) == NAMES[name]


def test_a_module_called_module_is_kept_where_clean_fqn_drops_it() -> None:
    assert (strip_wrappers("module.w"), clean_fqn("module.w")) == ("module.w", "w")


def test_torchs_own_wrappers_leave_the_names_of_the_plain_model() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"module": nn.Linear(2, 2)}))

    plain = build()
    wrapped = build()
    wrapped[0] = checkpoint_wrapper(wrapped[0])
    inner: Any = wrapped[1]
    inner["module"] = torch.compile(inner["module"], backend="eager")
    outer: Any = torch.compile(wrapped, backend="eager")
    names = [name for name, _ in outer.named_parameters()]
    assert names != [name for name, _ in plain.named_parameters()]
    assert [strip_wrappers(name) for name in names] == [name for name, _ in plain.named_parameters()]
