"""What is held in memory while folders are laid out is bounded, over all parts and folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_ckpt import convert
from fsdp_ckpt.errors import NotEnoughSpace
from fsdp_ckpt.ops.conversion import layouts
from tests.build import save_dcp

VALUE = "x" * 30_000


@pytest.mark.parametrize(("limit", "fits"), [(59_000, False), (70_000, True)])
def test_values_of_all_folders_count_together(
    limit: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "MAX_VALUE_BYTES", limit)
    src = tmp_path / "src"
    save_dcp(src / "pytorch_model_fsdp_0", {"model": {"w": torch.ones(2), "text": VALUE}})
    group = {"lr": 0.1, "note": VALUE, "params": ["w"]}
    save_dcp(src / "optimizer_0", {"optimizer": {"state": {"w": {"m": torch.ones(2)}}, "param_groups": [group]}})
    if fits:
        convert(src, tmp_path / "out", to="accelerate")
        return
    with pytest.raises(NotEnoughSpace, match="values that are no tensors take more than 59 kB") as caught:
        convert(src, tmp_path / "out", to="accelerate")
    assert "--part" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()
    convert(src, tmp_path / "model", to="accelerate", part="model")
