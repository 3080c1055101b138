from __future__ import annotations

import sys
import unicodedata
from typing import Any

import pytest

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.names import clean_fqn, glob_filter, is_flat_param, parse_rename, printable

CLEAN = {
    # Case P09: names that reach disk under FSDP1, activation checkpointing and torch.compile.
    "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.attn.weight": "layers.0.attn.weight",
    "layers.0._orig_mod.attn.weight": "layers.0.attn.weight",
    "layers.0._orig_mod.attn.bias": "layers.0.attn.bias",
    "module.layers.0.mlp.weight": "layers.0.mlp.weight",
    "_orig_mod.weight": "weight",
    "_fpw_module.weight": "weight",
    "a._fpw_module.b._fsdp_wrapped_module.c": "a.b.c",
    "_orig_mod._fsdp_wrapped_module._checkpoint_wrapped_module.w": "w",
    "_orig_mod.module.w": "w",
    "module._orig_mod.w": "w",
    # Nothing to remove.
    "weight": "weight",
    "layers.0.module.weight": "layers.0.module.weight",
    "my_orig_mod.weight": "my_orig_mod.weight",
    "x_fsdp_wrapped_module.weight": "x_fsdp_wrapped_module.weight",
    "_orig_mod_.weight": "_orig_mod_.weight",
    "weight._orig_mod": "weight._orig_mod",
    "modules.weight": "modules.weight",
    "": "",
}


@pytest.mark.parametrize("name", CLEAN)
def test_wrapper_components_are_removed_at_any_depth(name: str) -> None:
    assert clean_fqn(name) == CLEAN[name]


@pytest.mark.parametrize("name", CLEAN)
def test_cleaning_twice_changes_nothing_more(name: str) -> None:
    assert clean_fqn(CLEAN[name]) == CLEAN[name]


def test_torch_names_its_wrappers_as_we_expect() -> None:
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE

    inner = torch.nn.Sequential(torch.nn.Linear(2, 2))
    compiled: Any = torch.compile(checkpoint_wrapper(inner), backend="eager")
    names = [f"{FSDP_WRAPPED_MODULE}.{name}" for name, _ in compiled.named_parameters()]
    # named_parameters of the wrapper itself leaves its prefix in place.
    assert names != ["0.weight", "0.bias"]
    assert [clean_fqn(name) for name in names] == ["0.weight", "0.bias"]


@pytest.mark.parametrize(
    ("name", "is_flat"),
    [
        ("_flat_param", True),
        ("layers.0._flat_param", True),
        ("student.backbone._fsdp_wrapped_module._flat_param", True),
        ("encoder.flat_param_0", True),
        ("flat_param_12", True),
        ("my_flat_param", False),
        ("_flat_param.weight", False),
        ("flat_param_", False),
        ("flat_parameter", False),
    ],
)
def test_flat_parameters(name: str, is_flat: bool) -> None:
    assert is_flat_param(name) is is_flat


@pytest.mark.parametrize(
    ("rule", "name", "expected"),
    [
        ("transformer.=model.", "transformer.h.0.w", "model.h.0.w"),
        ("transformer.=model.", "x.transformer.h", "x.transformer.h"),
        ("model.=", "model.model.w", "model.w"),
        ("a.b=c", "aXb.w", "aXb.w"),  # a prefix is no pattern
        ("a=b=c", "a.w", "b=c.w"),
        (r"a=\1", "a.w", r"\1.w"),
        ("=x", None, None),
        (r"s/^h\.(\d+)/layers.\1/", "h.12.w", "layers.12.w"),
        (r"s/\.gamma$/.weight/", "norm.gamma", "norm.weight"),
        ("s/a/b/", "banana", "bbnbnb"),
        (r"s/a\/b/c\/d/", "a/b", "c/d"),
        ("s/x//", "axbx", "ab"),
        ("s/(/x/", None, None),
        (r"s/a/\1/", None, None),
        ("s/a/b", None, None),
        ("s//b/", None, None),
        ("nothing", None, None),
    ],
)
def test_renames(rule: str, name: str | None, expected: str | None) -> None:
    if name is None:
        with pytest.raises(UsageError, match="is not a"):
            parse_rename([rule])
    else:
        assert parse_rename([rule])[0](name) == expected


def test_rules_keep_their_order() -> None:
    first, second = parse_rename(["a.=b.", "b.=c."])
    assert second(first("a.w")) == "c.w"


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        ([], [], ["layers.0.w", "layers.1.w", "layers.10.w", "head.w", "a\nb"]),
        (["layers.*"], [], ["layers.0.w", "layers.1.w", "layers.10.w"]),
        (["layers.?.w"], [], ["layers.0.w", "layers.1.w"]),
        (["layers.[01].*"], [], ["layers.0.w", "layers.1.w"]),
        (["head", "layers.1.*"], [], ["layers.1.w"]),
        (["head*", "layers.1.*"], [], ["layers.1.w", "head.w"]),
        ([], ["layers.*"], ["head.w", "a\nb"]),
        (["layers.*"], ["*.1*"], ["layers.0.w"]),
        (["*"], ["*"], []),
        ([], ["head", "b"], ["layers.0.w", "layers.1.w", "layers.10.w", "head.w", "a\nb"]),
        (["a*b"], [], ["a\nb"]),
    ],
)
def test_globs(include: list[str], exclude: list[str], kept: list[str]) -> None:
    keep = glob_filter(include, exclude)
    names = ["layers.0.w", "layers.1.w", "layers.10.w", "head.w", "a\nb"]
    assert [name for name in names if keep.match(name)] == kept


def test_globs_are_not_patterns() -> None:
    assert glob_filter(["a.b"], []).match("aXb") is None
    assert glob_filter(["(a|b)+"], []).match("ab") is None
    assert glob_filter([], ["x|y"]).match("x") is not None


def test_invisible_characters_cannot_act_on_a_terminal() -> None:
    # Controls, formats (bidirectional overrides, zero-width, tags), surrogates, line and paragraph separators.
    acting = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    ]
    assert [hex(ord(char)) for char in acting if char in printable(f"a{char}b")] == []


def test_visible_characters_stay() -> None:
    for text in ("layers.0.weight", "größe.権重.ωeight", "a b-c_d/é", "[red]x[/red]", "\\x1b"):
        assert printable(text) == text


def test_escapes_are_python_escapes() -> None:
    assert printable("layers.\x1b[31mw\n\u202e") == "layers.\\x1b[31mw\\n\\u202e"


@pytest.mark.parametrize("text", ["w\ud800", "\udcff.weight"])
def test_names_with_lone_surrogates_can_be_printed(text: str) -> None:
    # Pickles can hold them ("surrogatepass"); a terminal in UTF-8 cannot.
    shown = printable(text).encode("utf-8")
    assert b"w" in shown
