"""Options of a run: what is refused, and the way through a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.driver.options import TrainOptions
from fsdp_ckpt.train.driver.start import settle_options


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"steps": 10, "kill_at": 11}, "kill_at: 11 is not possible; allowed: 1 to 10"),
        ({"save_every": 0}, "save_every: 0 is not possible; allowed: a whole number from 1"),
        ({"lr": 0.0}, "lr: 0.0"),
        ({"hidden": 65}, "multiples of 8"),
        ({"kv_heads": 3}, "divisors of 4"),
        ({"keep": 0}, "keep: 0 is not possible; allowed: a whole number from 1"),
        ({"steps": 0}, "steps: 0"),
        ({"steps": True}, "steps: True"),
        ({"kill_at": 0}, "kill_at: 0"),
        ({"batch_size": "8"}, "batch_size: '8'"),
        ({"seed": -1}, "seed: -1 is not possible; allowed: a whole number from 0"),
        ({"lr": "fast"}, "lr: 'fast' is not possible; allowed: a number above 0"),
        ({"lr": float("nan")}, "lr: nan"),
        ({"resume": ""}, "resume: '' is not possible; allowed: a local path"),
        ({"model": 1}, "model: 1"),
        ({"fsdp": {"sharding": 1}}, "there is no option `sharding`"),
        ({"fsdp": []}, "fsdp: [] is not possible"),
        ({"fsdp": {"mixed_precision": "fp16"}}, "allowed: no, bf16"),
        ({"fsdp": {"mixed_precision_policy": {"param_dtype": "fp16"}}}, "allowed: no, bf16"),
    ],
)
def test_what_is_not_possible(values: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        TrainOptions(folder="run", **values)
    assert text in str(caught.value)


def test_through_a_file(tmp_path: Path) -> None:
    options = TrainOptions(
        folder="run", steps=10, save_every=4, resume="auto", keep=None, kill_at=3, lr=1e-2, model="config.json",
        fsdp=MappingProxyType({"fsdp_version": 1, "transformer_layer_cls_to_wrap": ["DecoderLayer"]}),
    )  # fmt: skip
    options.write(tmp_path / "o.json")
    assert TrainOptions.read(tmp_path / "o.json") == options
    assert [step for step in range(1, 11) if options.saves_at(step)] == [4, 8, 10]
    (tmp_path / "o.json").write_text('{"folder": "x", "stepps": 1}')
    with pytest.raises(UsageError, match="stepps"):
        TrainOptions.read(tmp_path / "o.json")


@pytest.mark.parametrize("text", ["", "[]", '{"steps": 3}', '{"folder": ""}'])
def test_a_file_that_holds_no_options(tmp_path: Path, text: str) -> None:
    (tmp_path / "o.json").write_text(text)
    with pytest.raises(UsageError):
        TrainOptions.read(tmp_path / "o.json")
    with pytest.raises(UsageError, match=r"none\.json` cannot be read: No such file"):
        TrainOptions.read(tmp_path / "none.json")


def test_options_and_log_do_not_import_torch() -> None:
    code = "import sys, fsdp_ckpt.train.driver.options, fsdp_ckpt.train.driver.events; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_run_is_trained_in_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none called ``s3:`` is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="`s3://bucket/run` is a URL"):
        settle_options("s3://bucket/run", {})
    assert list(tmp_path.iterdir()) == []
