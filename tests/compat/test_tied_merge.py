"""A checkpoint of ``save_state`` with tied weights: merged as torch's own reader sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsdp_ckpt import merge, save_state


@pytest.mark.parametrize("tie", [None, True])
def test_tied_weights_are_merged(tmp_path: Path, tie: bool | None) -> None:
    embedding, head = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 3, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleDict({"embed_tokens": embedding, "lm_head": head})
    save_state(tmp_path / "step-1", model, step=1)
    report = merge(tmp_path / "step-1", tmp_path / "out", tie=tie)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    names = {"embed_tokens.weight"} if tie else {"embed_tokens.weight", "lm_head.weight"}
    assert merged.keys() == names
    for tensor in merged.values():
        assert torch.equal(tensor, embedding.weight)
    told = report.tied if tie else report.aliases
    assert told == {"lm_head.weight": "embed_tokens.weight"}
