"""Cases of theme 2, key names and wrappers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from fsdp_ckpt import FsdpCkptError, merge
from tests.cases.check import assert_same, inspect_json, merge_and_load, run
from tests.cases.models import Layered, reference


def test_p09_a_compiled_block_in_activation_checkpointing(built: Path, tmp_path: Path) -> None:
    """pytorch/torchtitan#2622, pytorch/pytorch#117399, mosaicml/composer#2745: `_orig_mod` in the middle of keys.

    convert: test_convert. load_state: test_state_model.
    """
    report, found = merge_and_load(built / "p09", tmp_path / "out")
    expected = reference(Layered())
    assert_same(found, expected)
    leaked = {f"model.{name.replace('layers.0.', 'layers.0._orig_mod.')}": name for name in expected}
    assert report.renamed == leaked


def test_p09_all_wrappers_at_once(tmp_path: Path) -> None:
    """The command says how many keys were renamed."""
    state = {
        "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.attn.weight": torch.arange(4.0),
        "module.layers.0.mlp.weight": torch.arange(4.0) + 10,
        "layers.0.attn.bias": torch.arange(2.0),
    }
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ck")
    result = run("merge", tmp_path / "ck", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "2 renamed" in result.stdout
    (tmp_path / "again").mkdir()
    _, found = merge_and_load(tmp_path / "ck", tmp_path / "again")
    expected = dict(
        zip(("layers.0.attn.weight", "layers.0.mlp.weight", "layers.0.attn.bias"), state.values(), strict=True)
    )
    assert_same(found, expected)


def test_p12_local_flat_parameters_are_explained_not_guessed(tmp_path: Path) -> None:
    """facebookresearch/dinov2#487, #544: flat parameters without names, shapes and order."""
    for rank in (0, 1):
        flat = torch.arange(61.0) + 61 * rank
        state = {"student.backbone._fsdp_wrapped_module._flat_param": flat}
        torch.save({"model": state}, tmp_path / f"model_final.rank_{rank}.pth")
    described = inspect_json(tmp_path)
    assert described["world_size"] == 2
    (part,) = described["parts"]
    assert "flat parameter" in part["flat"]
    assert "names and shapes" in part["flat"]
    result = run("merge", tmp_path, tmp_path / "out")
    assert result.returncode == 8
    assert "names and shapes of the tensors in it are not in the files" in result.stderr
    assert "wrapped model" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def rank_zero_slices(tmp_path: Path) -> Path:
    """P13's folder: what rank 0 alone saw of a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 16, "hidden_size": 4, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(32),
        "model.norm.weight": torch.zeros(0),
        "lm_head.weight": torch.zeros(0),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_p13_inspect_shows_the_shapes_of_slices(rank_zero_slices: Path) -> None:
    """axolotl#1947, huggingface/transformers#34080, texttron/tevatron#203: a 1-D embedding, empty norm and head.

    validate: test_validate. convert and reshard: test_convert.
    """
    (part,) = inspect_json(rank_zero_slices)["parts"]
    assert {tensor["name"]: tensor["shape"] for tensor in part["tensors"]} == {
        "model.embed_tokens.weight": [32],
        "model.norm.weight": [0],
        "lm_head.weight": [0],
        "model.layers.0.self_attn.q_proj.weight": [4, 4],
    }
    shown = run("inspect", rank_zero_slices).stdout
    row = next(line for line in shown.splitlines() if line.startswith("lm_head.weight"))
    assert row.split()[1:] == ["0", "float32", "1", "0", "B"]


def test_p12_a_refusal_is_the_same_error_in_python(tmp_path: Path) -> None:
    """The Python API raises what the command prints."""
    torch.save({"model": {"_flat_param": torch.arange(4.0)}}, tmp_path / "model_final.rank_0.pth")
    with pytest.raises(FsdpCkptError, match="_flat_param") as caught:
        merge(tmp_path, tmp_path / "out")
    assert caught.value.exit_code == 8
