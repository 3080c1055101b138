"""What each target makes of what is no model and no optimizer: it keeps it, or says what it leaves."""

from __future__ import annotations

from pathlib import Path

import torch

from fsdp_ckpt import convert
from tests.build import rows, save_dcp


def test_files_of_one_name_do_not_replace_each_other(tmp_path: Path) -> None:
    """OLMo-core's and NeMo's folders each have a file of rank 0; Accelerate's has no folders for them."""
    save_dcp(tmp_path / "src" / "model", {"w": rows(torch.arange(6.0), 1)}, ranks=1)
    for folder in ("rng", "dataloader"):
        (tmp_path / "src" / folder).mkdir()
        torch.save({"from": folder}, tmp_path / "src" / folder / "rank0.pt")
    report = convert(tmp_path / "src", tmp_path / "out", to="accelerate")
    assert [(part.name, part.written_as) for part in report.parts] == [
        ("model", "pytorch_model_fsdp_0"), ("rng", "rank0.pt")
    ]  # fmt: skip
    assert torch.load(tmp_path / "out" / "rank0.pt") == {"from": "rng"}
    assert report.left == ["dataloader (1 value): another `rank0.pt` is in the result already"]
