"""Cases of theme 2 and 9 on conversions of adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cases.check import assert_same, load, run
from tests.cases.models import adapted

P = "base_model.model."


def adapter_under_compile(source: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Write P11's folder; return the values under the names that PEFT would match, and the configuration."""
    source.mkdir()
    generator = torch.Generator().manual_seed(11)
    tensors = {
        f"{P}layers.{layer}.q_proj.lora_{side}.weight": torch.randn(shape, generator=generator)
        for layer in (0, 1)
        for side, shape in (("A", (2, 6)), ("B", (8, 2)))
    }
    save_file({f"_orig_mod.{name}": value for name, value in tensors.items()}, source / "adapter_model.safetensors")
    config = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 16, "target_modules": ["q_proj"]}, indent=1)
    (source / "adapter_config.json").write_text(config)
    return tensors, config


def test_p11_an_adapter_saved_under_compile(tmp_path: Path) -> None:
    """MakazhanAlpamys/Soup#335, #351: names begin as PEFT has them, values and configuration are the same."""
    source = tmp_path / "adapter"
    tensors, config = adapter_under_compile(source)
    result = run("convert", source, tmp_path / "out", "--to", "adapter")
    assert result.returncode == 0, result.stderr
    assert_same(load(tmp_path / "out"), tensors)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (tmp_path / "out/adapter_config.json").read_text() == config


def test_p11_an_adapter_alone_stays_one(tmp_path: Path) -> None:
    """In another format it has the same names, and its configuration beside it."""
    tensors, config = adapter_under_compile(tmp_path / "adapter")
    result = run("convert", tmp_path / "adapter", tmp_path / "out", "--to", "torch")
    assert result.returncode == 0, result.stderr
    assert_same(load(tmp_path / "out"), tensors)
    assert (tmp_path / "out/adapter_config.json").read_text() == config
    result = run("convert", tmp_path / "adapter", tmp_path / "folded", "--to", "torch", "--fold-lora")
    assert result.returncode == 8
    assert "without the model that it is for" in result.stderr


def test_p51_the_base_model_and_the_adapter(built: Path, tmp_path: Path) -> None:
    """huggingface/peft#2945, accelerate#3732: plain names, the trained head, and a word on every tensor left out."""
    whole = adapted()
    layer = "layers.0.q_proj"
    result = run("convert", built / "p51", tmp_path / "base", "--to", "safetensors")
    assert result.returncode == 0, result.stderr
    expected = {
        f"{layer}.weight": whole[f"{P}{layer}.base_layer.weight"],
        "norm.weight": whole[f"{P}norm.weight"],
        "score.weight": torch.ones(3, 6),
    }
    assert_same(load(tmp_path / "base"), expected)
    told = " ".join((result.stdout + result.stderr).split())
    assert "2 tensors of the adapter left out" in told
    assert "left out, as they were before training: `score.weight`" in told
    result = run("convert", built / "p51", tmp_path / "adapter", "--to", "adapter")
    assert result.returncode == 0, result.stderr
    expected = {
        f"{P}{layer}.lora_A.weight": whole[f"{P}{layer}.lora_A.default.weight"],
        f"{P}{layer}.lora_B.weight": whole[f"{P}{layer}.lora_B.default.weight"],
        f"{P}score.weight": torch.ones(3, 6),
    }
    assert_same(load(tmp_path / "adapter"), expected)
    told = " ".join((result.stdout + result.stderr).split())
    assert "2 tensors of the base model left out" in told
    assert "left out, as they were before training: `score.weight`" in told
    assert "no adapter_config.json" in told


def test_p51_folded(built: Path, tmp_path: Path) -> None:
    """The sum by hand: 16 / 2 times B A; whole numbers, which float32 has exactly."""
    whole = adapted()
    layer = f"{P}layers.0.q_proj"
    result = run("convert", built / "p51", tmp_path / "refused", "--to", "safetensors", "--fold-lora")
    assert result.returncode == 2
    assert "adapter_config.json" in result.stderr
    assert "--lora-alpha" in result.stderr
    assert not (tmp_path / "refused").exists()
    result = run("convert", built / "p51", tmp_path / "out", "--to", "safetensors", "--fold-lora", "--lora-alpha", "16")
    assert result.returncode == 0, result.stderr
    product = whole[f"{layer}.lora_B.default.weight"] @ whole[f"{layer}.lora_A.default.weight"]
    found = load(tmp_path / "out")
    assert torch.equal(found["layers.0.q_proj.weight"], whole[f"{layer}.base_layer.weight"] + 8 * product)
    assert sorted(found) == ["layers.0.q_proj.weight", "norm.weight", "score.weight"]


@pytest.mark.parametrize("target", ["safetensors", "torch", "dcp"])
def test_p51_a_folded_model_is_no_adapter(target: str, built: Path, tmp_path: Path) -> None:
    """Beside a whole model adapter_config.json makes transformers look for an adapter."""
    shutil.copytree(built / "p51", tmp_path / "run")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (tmp_path / "run/adapter_config.json").write_text(json.dumps(config))
    result = run("convert", tmp_path / "run", tmp_path / "out", "--to", target, "--fold-lora")
    assert result.returncode == 0, result.stderr
    assert "adapter_config.json" not in [path.name for path in (tmp_path / "out").iterdir()]
