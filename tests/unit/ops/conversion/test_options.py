"""Options that contradict each other, or that nothing would look at, are refused before anything is read."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.ops.conversion.options import ConvertOptions, as_typed, check_options, sharding_of


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"to": "dcp", "config_from": "gpt2"}, "--config-from"),
        ({"to": "dcp", "tie": True}, "--tie"),
        ({"to": "accelerate", "full": True, "max_shard_size": "1GB"}, "--max-shard-size"),
        ({"to": "hf", "optimizer_form": "flattened"}, "--optimizer-form"),
        ({"to": "dcp", "part": "model", "optimizer_form": "by-index"}, "--optimizer-form"),
        ({"to": "hf", "lora_alpha": 16.0}, "--lora-alpha"),
        ({"to": "torch", "adapter_config": "adapter_config.json"}, "--adapter-config"),
        ({"to": "adapter", "rslora": True}, "--rslora"),
        ({"to": "dcp", "adapter": "default"}, "--adapter"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError, match=f"^{option} is for ") as found:
        check_options(ConvertOptions(**options))
    assert found.value.hint == f"leave out {option}"


@pytest.mark.parametrize(
    "options",
    [
        {"to": "hf", "config_from": "gpt2", "tie": True, "max_shard_size": "1GB", "adapter": "default"},
        {"to": "torch", "optimizer_form": "by-index", "tie": True},
        {"to": "dcp", "optimizer_form": "flattened", "tie": False},
        {"to": "dcp", "fold_lora": True, "lora_alpha": 16.0, "rslora": True, "adapter": "default"},
        {"to": "adapter", "adapter_config": "adapter_config.json", "adapter": "default"},
    ],
)
def test_options_with_effect_are_not(options: dict[str, Any]) -> None:
    check_options(ConvertOptions(**options))


@pytest.mark.parametrize("world_size", [0, -1, 65537])
def test_a_world_that_cannot_be(world_size: int) -> None:
    with pytest.raises(UsageError, match="--world-size must be at least 1, and at most 65536"):
        check_options(ConvertOptions(to="dcp", world_size=world_size))


def test_a_source_may_say_anything_about_its_world() -> None:
    assert sharding_of(ConvertOptions(to="dcp"), 6).mesh.num_ranks == 6
    assert sharding_of(ConvertOptions(to="dcp"), None).mesh.num_ranks == 1
    with pytest.raises(UsageError, match="1099511627776 ranks wrote it, more than 65536"):
        sharding_of(ConvertOptions(to="dcp"), 1 << 40)
    assert sharding_of(ConvertOptions(to="dcp", world_size=2), 1 << 40).mesh.num_ranks == 2


def test_commands_in_hints_have_what_they_cannot_do_without() -> None:
    assert as_typed(ConvertOptions(to="hf"), "convert") == "convert --to hf"
    assert as_typed(ConvertOptions(to="accelerate", world_size=6), "reshard") == "reshard --world-size 6"
    assert as_typed(ConvertOptions(to="accelerate", mesh="2x4"), "reshard") == "reshard --mesh 2x4"
