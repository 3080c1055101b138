"""How much an adapter counts, by its configuration. Right values: PEFT's LoraLayer (alpha / r, alpha / sqrt(r))."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.errors import CheckpointNotFound, Incompatible, UsageError
from fsdp_ckpt.ops.conversion.adapter_config import AdapterConfig, find_adapter_config, read_adapter_config
from fsdp_ckpt.ops.side_files import SideFiles, find_side_files

Q = "model.layers.0.self_attn.q_proj"


def config(**values: Any) -> AdapterConfig:
    return AdapterConfig(source="`adapter_config.json`", values=values)


@pytest.mark.parametrize(
    ("values", "rank", "scale"),
    [
        ({"r": 8, "lora_alpha": 16}, 8, 2.0),
        ({"r": 8, "lora_alpha": 4}, 8, 0.5),
        ({"r": 16, "lora_alpha": 16, "use_rslora": True}, 16, 4.0),
        ({"r": 16, "lora_alpha": 2.5}, 16, 0.15625),
        ({"lora_alpha": 16}, 4, 4.0),
        ({"r": 8, "lora_alpha": 16, "rank_pattern": {"q_proj": 4}}, 4, 4.0),
        ({"r": 8, "lora_alpha": 16, "rank_pattern": {"k_proj": 4}}, 8, 2.0),
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {"q_proj": 24}}, 8, 3.0),
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {Q: 24, "q_proj": 8}}, 8, 3.0),
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {"q_proj": 8, Q: 24}}, 8, 1.0),  # the first that fits
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {"proj": 24}}, 8, 2.0),  # whole components only
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {r"model\.layers\.0\.self_attn\.q_proj": 24}}, 8, 3.0),
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {"^model.layers.0.*q_proj": 24}}, 8, 3.0),
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {r"layers\.[12]\..*": 24}}, 8, 2.0),
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {"q_proj|k_proj": 24}}, 8, 3.0),
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": None, "rank_pattern": None}, 8, 2.0),
    ],
)
def test_scales(values: dict[str, Any], rank: int, scale: float) -> None:
    assert config(**values).scale(Q, rank) == scale


def test_the_judge_agrees_on_patterns() -> None:
    # What LoraModel looks a module's rank and alpha up with.
    other = pytest.importorskip("peft.utils.other", reason="the judge; part of the test extra")
    patterns = [
        "proj",
        "q_proj",
        Q,
        r"layers\.0\..*",
        "^q_proj",
        "k_proj|q_proj",
        ".*q_proj",
        "self_attn.q_proj",
        "attn",
    ]
    for pattern in patterns:
        fits = other.get_pattern_key([pattern], Q) == pattern
        scale = config(lora_alpha=2, alpha_pattern={pattern: 6}).scale(Q, 2)
        assert scale == (3.0 if fits else 1.0), pattern


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"r": 8}, "tells no lora_alpha"),
        ({"r": 4, "lora_alpha": 8}, "rank 8; by `adapter_config.json` it is 4"),
        ({"r": 8, "lora_alpha": 8, "rank_pattern": {"q_proj": 2}}, "it is 2"),
        ({"lora_alpha": 8, "alpha_pattern": {"q_proj": "x"}}, "tells no lora_alpha"),
        ({"lora_alpha": 8, "alpha_pattern": {"(": 2}}, "no pattern"),
        ({"lora_alpha": 8, "alpha_pattern": {"(a+)+": 2}}, "too intricate"),
        ({"lora_alpha": 8, "alpha_pattern": {".*a.*a.*a.*a.*a.*a": 2}}, "too intricate"),
        ({"lora_alpha": 8, "alpha_pattern": {"a|" * 600: 2}}, "too intricate"),
    ],
)
def test_what_does_not_tell(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Incompatible, match=reason.replace(".", r"\.")):
        config(**values).scale(Q, 8)


def test_the_worst_pattern_that_is_taken_ends_soon() -> None:
    begun = time.process_time()
    intricate = config(lora_alpha=8, alpha_pattern={".*a.*a.*b": 2})
    intricate.scale("a" * 300, 8)
    assert time.process_time() - begun < 5
    with pytest.raises(Incompatible, match="too intricate"):
        intricate.scale("a" * 301, 8)


def test_found_beside_the_checkpoint_or_where_it_is_named(tmp_path: Path) -> None:
    data = json.dumps({"r": 4, "lora_alpha": 8}, indent=3).encode()
    (tmp_path / "adapter_config.json").write_bytes(data)
    for asked in (None, tmp_path, tmp_path / "adapter_config.json"):
        side = find_side_files(tmp_path) if asked is None else SideFiles()
        found = find_adapter_config(asked, side)
        assert found is not None
        assert (found.data, found.scale("m", 4)) == (data, 2.0)
        assert str(tmp_path / "adapter_config.json") in found.source
    assert find_adapter_config(None, SideFiles()) is None


def test_what_the_user_says(tmp_path: Path) -> None:
    found = find_adapter_config(None, SideFiles(), alpha=8, use_rslora=True)
    assert found is not None
    assert (found.data, found.source, found.scale("m", 16)) == (None, "--lora-alpha", 2.0)
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 16}')
    assert find_adapter_config(tmp_path, SideFiles(), alpha=16) is not None
    with pytest.raises(UsageError, match=r"--lora-alpha is 8, but .* says 16"):
        find_adapter_config(tmp_path, SideFiles(), alpha=8)
    with pytest.raises(UsageError, match=r"--rslora, but .* does not say use_rslora"):
        find_adapter_config(tmp_path, SideFiles(), alpha=16, use_rslora=True)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b" " * (5 << 20)])
def test_files_that_are_none(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(data)
    with pytest.raises(UsageError, match="no configuration of an adapter"):
        read_adapter_config(tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "x.json"):
        with pytest.raises(CheckpointNotFound, match="cannot be read"):
            read_adapter_config(path)
