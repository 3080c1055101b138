"""What a conversion must not lose, and what it may take up from an interrupted run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_optimizer_state_dict

from fsdp_ckpt import convert
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.run.progress import Progress

MODULES = ("layers.0.q_proj", "layers.1.q_proj")


def wrapped(folder: Path) -> dict[str, Tensor]:
    """Save two matrices with an adapter each, as PEFT names them."""
    torch.manual_seed(0)
    state = {}
    for module in MODULES:
        where = f"base_model.model.{module}"
        state[f"{where}.base_layer.weight"] = torch.randn(8, 8)
        state[f"{where}.lora_A.default.weight"] = torch.randn(2, 8)
        state[f"{where}.lora_B.default.weight"] = torch.randn(8, 2)
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    return state


@pytest.mark.parametrize(
    "options", [{"to": "adapter", "lora_alpha": 4.0}, {"to": "safetensors"}], ids=lambda o: o["to"]
)
def test_a_source_that_is_kept_in_part_only_is_not_removed(options: dict[str, Any], tmp_path: Path) -> None:
    wrapped(tmp_path / "src")
    with pytest.raises(UsageError, match=r"this would be lost: `base_model\.model\.layers\.0\.q_proj\."):
        convert(tmp_path / "src", tmp_path / "out", remove_source=True, **options)
    assert (tmp_path / "src" / "pytorch_model.bin").is_file()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"to": "dcp"}, {"to": "safetensors", "fold_lora": True, "lora_alpha": 4.0}])
def test_a_source_that_is_kept_whole_is_removed(options: dict[str, Any], tmp_path: Path) -> None:
    wrapped(tmp_path / "src")
    assert convert(tmp_path / "src", tmp_path / "out", remove_source=True, **options).source_removed
    assert not (tmp_path / "src").exists()


def test_tied_weights_are_no_loss(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    weight = torch.randn(6, 4)
    state = {"model.embed_tokens.weight": weight, "lm_head.weight": weight.clone()}
    torch.save(state, tmp_path / "src" / "pytorch_model.bin")
    report = convert(tmp_path / "src", tmp_path / "out", to="safetensors", tie=True, remove_source=True)
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert not (tmp_path / "src").exists()


def test_the_memory_that_is_said_to_be_needed_includes_the_adapter(tmp_path: Path) -> None:
    wrapped(tmp_path / "src")
    options: dict[str, Any] = {"to": "safetensors", "dry_run": True, "jobs": 1}
    plain = convert(tmp_path / "src", tmp_path / "out", **options)
    folded = convert(tmp_path / "src", tmp_path / "out", fold_lora=True, lora_alpha=4.0, **options)
    assert folded.peak_memory_bytes - plain.peak_memory_bytes == (2 * 8 + 8 * 2) * 4


def test_another_alpha_is_another_result(tmp_path: Path) -> None:
    """Files that a run with the old configuration finished are not taken for those of the new one."""
    state = wrapped(tmp_path / "src")
    config = tmp_path / "adapter_config.json"
    options: dict[str, Any] = {
        "to": "safetensors", "fold_lora": True, "adapter_config": config, "max_shard_size": 300, "jobs": 1
    }  # fmt: skip

    def stop(_: Progress) -> None:
        if any(tmp_path.rglob(".*.done")):
            raise KeyboardInterrupt

    config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "fan_in_fan_out": False}))
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "src", tmp_path / "out", listener=stop, **options)
    assert any(tmp_path.rglob(".*.done"))
    config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 200, "fan_in_fan_out": False}))
    convert(tmp_path / "src", tmp_path / "out", resume=True, **options)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 2
    found = {name: value for file in files for name, value in load_file(file).items()}
    for module in MODULES:
        base, down, up = (
            state[f"base_model.model.{module}.{part}.weight"]
            for part in ("base_layer", "lora_A.default", "lora_B.default")
        )
        assert torch.allclose(found[f"{module}.weight"], base + 100 * up @ down, rtol=1e-4, atol=1e-3)


def test_a_flattened_optimizer_in_a_file_is_one_that_torch_loads(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        model = torch.nn.Linear(4, 3)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    (tmp_path / "src").mkdir()
    torch.save(weights, tmp_path / "src" / "pytorch_model_fsdp.bin")
    torch.save(state, tmp_path / "src" / "optimizer.bin")
    convert(tmp_path / "src", tmp_path / "out", to="torch", optimizer_form="flattened")
    found = torch.load(tmp_path / "out" / "optimizer.bin")
    assert {key.partition(".")[1] for key in found} == {"."}
    other, fresh = made()
    set_optimizer_state_dict(other, fresh, found, options=StateDictOptions(flatten_optimizer_state_dict=True))
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(fresh.state[other.weight][name], optimizer.state[model.weight][name])
    again = convert(tmp_path / "out", tmp_path / "again", to="dcp")
    assert [part.role for part in again.parts] == ["model", "optimizer"]
