"""Cases of themes 2 and 9, as validate sees them: wrappers, flat parameters, and slices that pose as tensors."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cases.check import run


def validate(*arguments: str | Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code, and the findings that are more than notes."""
    result: subprocess.CompletedProcess[str] = run("validate", "--json", *arguments)
    assert result.returncode in (0, 1), result.stderr
    (report,) = json.loads(result.stdout)["checkpoints"]
    return result.returncode, [one for one in report["findings"] if one["severity"] != "note"]


def test_p09_a_compiled_block_in_activation_checkpointing(built: Path) -> None:
    """pytorch/torchtitan#2622: a warning with the number of names, and nothing else."""
    code, (one,) = validate(built / "p09")
    assert (code, one["name"], one["severity"]) == (0, "wrapper-prefix", "warning")
    assert one["where"].startswith("model.layers.0._orig_mod.")
    assert "`_orig_mod.`" in one["message"]


def test_p11_an_adapter_that_peft_would_not_match(tmp_path: Path) -> None:
    """MakazhanAlpamys/Soup#335, #351: a warning that names the prefix and 4 keys."""
    tensors = {
        f"_orig_mod.base_model.model.layers.{layer}.q_proj.lora_{kind}.weight": torch.ones(shape)
        for layer in (0, 1)
        for kind, shape in (("A", (2, 6)), ("B", (8, 2)))
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 16}))
    code, (one,) = validate(tmp_path)
    assert (code, one["name"]) == (0, "adapter-prefix")
    assert "4 of 4 names" in one["message"]
    assert "`_orig_mod.`" in one["message"]
    assert validate(tmp_path, "--strict")[0] == 1


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model._orig_mod.model.layers.0.q_proj.lora_A.weight",
        "base_model.model.model.layers.0._fsdp_wrapped_module.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.q_proj.lora_A.default.weight",
    ],
)
def test_p11_names_that_begin_as_peft_has_them(name: str, tmp_path: Path) -> None:
    """The wrapper, or the adapter's name, stands further inside."""
    save_file({name: torch.ones(2, 6)}, tmp_path / "adapter_model.safetensors")
    code, (one,) = validate(tmp_path)
    assert (code, one["name"], one["where"]) == (0, "adapter-prefix", name)
    out = tmp_path.with_name(f"{tmp_path.name}-out")
    typed = shlex.split(one["next"].replace("OUT", str(out)))
    assert typed[0] == "fsdp-ckpt"
    assert run(*typed[1:]).returncode == 0
    assert validate(out) == (0, [])


def test_p12_local_flat_parameters(tmp_path: Path) -> None:
    """facebookresearch/dinov2#487, #544: said, with what it means."""
    for rank in (0, 1):
        flat = torch.arange(61.0) + 61 * rank
        state = {"student.backbone._fsdp_wrapped_module._flat_param": flat}
        torch.save({"model": state}, tmp_path / f"model_final.rank_{rank}.pth")
    code, findings = validate(tmp_path)
    assert code == 1
    (one,) = [one for one in findings if one["name"] == "flat-parameters"]
    assert one["severity"] == "error"
    assert "names and shapes of the tensors in it are not in the files" in one["message"]


@pytest.mark.parametrize("has_config", [True, False])
def test_p13_what_rank_zero_alone_saw(has_config: bool, tmp_path: Path) -> None:
    """axolotl#1947, huggingface/transformers#34080, texttron/tevatron#203: exactly the three that are wrong."""
    tensors = {
        "model.embed_tokens.weight": torch.zeros(32),
        "model.norm.weight": torch.zeros(0),
        "lm_head.weight": torch.zeros(0),
        "model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if has_config:
        config = {"vocab_size": 16, "hidden_size": 4, "num_hidden_layers": 1}
        (tmp_path / "config.json").write_text(json.dumps(config))
    code, findings = validate(tmp_path)
    assert code == 1
    told = {one["where"]: one["message"] for one in findings if one["severity"] == "error"}
    assert sorted(told) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    assert "(32,)" in told["model.embed_tokens.weight"]
    assert "(0,)" in told["model.norm.weight"]
    shaped = sorted(name for name, message in told.items() if "(16, 4)" in message)
    assert shaped == (["lm_head.weight", "model.embed_tokens.weight"] if has_config else [])


def test_p49_rank_zeros_slice(built: Path) -> None:
    """accelerate#4206, huggingface/peft#3251: shard 0 of 2 of both tensors, by their names and shapes nothing more."""
    code, findings = validate(built / "p49")
    assert code == 1
    told = {one["where"]: one for one in findings}
    assert sorted(told) == ["lora_A.weight", "lora_B.weight"]
    assert {one["name"] for one in findings} == {"one-shard-only"}
    assert "2 of 4 rows" in told["lora_A.weight"]["message"]
    assert "4 of 8 rows" in told["lora_B.weight"]["message"]


@pytest.mark.parametrize(
    "case", ["p01/dcp", "p05/fsdp2", "p05/fsdp1", "p14", "p17", "p22", "p34", "p44/old", "p44/new"]
)
def test_whole_checkpoints_give_no_finding(case: str, built: Path) -> None:
    """Of the cases in which nothing is wrong with names and training state."""
    assert validate(built / case) == (0, [])
