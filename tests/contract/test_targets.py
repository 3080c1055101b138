"""Every target of `convert`, and `reshard`, from one source of each family of layouts.

The result is recognised for what it is, holds the tensors that torch or the framework itself gathered when the source
was saved, and `diff` finds no difference to the source, optimizer included.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fsdp_ckpt import convert, diff, inspect, reshard, validate
from fsdp_ckpt.layouts.registry import read_checkpoint
from tests.build import assert_same, read_bin, read_safetensors
from tests.contract.optimizers import read_optimizer
from tests.contract.suite import FIXTURES
from tests.property.conversions import read_dcp

FAMILIES: dict[str, tuple[str, str]] = {
    "accelerate": ("torch-2.13.0/fsdp2_sharded_w2", "."),
    "accelerate, fsdp1 on three ranks": ("torch-2.13.0/fsdp1_sharded_w3", "."),
    "accelerate, old": ("torch-2.1.2/fsdp1_sharded_w2", "."),
    "dcp": ("torch-2.13.0/dcp_flat_w2", "."),
    "dcp, safetensors items": ("torch-2.13.0/dcp_safetensors_w2", "."),
    "tensor parallel": ("torch-2.13.0/tp_fsdp_w4", "."),
    "full files": ("torch-2.13.0/full_w2", "."),
    "rank files": ("torch-2.13.0/rank_files_fsdp1_mesh_w2", "."),
    "hf": ("torch-2.13.0/hf_w1", "."),
    "hf, sharded by torch": ("torch-2.13.0/hf_sharded_w2", "."),
    "torchtitan": ("frameworks/torchtitan", "checkpoint/step-4"),
    "lightning": ("frameworks/lightning_model_parallel", "epoch=0-step=2.ckpt"),
    "composer": ("frameworks/composer", "ep0-ba2"),
    "composer, rank files": ("frameworks/composer_ranks", "."),
    "verl": ("frameworks/verl_hsdp", "global_step_2"),
    "megatron": ("frameworks/megatron", "iter_0000002"),
    "deepspeed, stage 1": ("deepspeed/zero1_fp32_w2", "."),
    "deepspeed, stage 3": ("deepspeed/zero3_fp32_w3", "."),
    "deepspeed, universal": ("deepspeed/universal1_w2", "."),
}
_JUDGES = shutil.ignore_patterns("expected*", "layout.json")
RESHARDED = ("accelerate", "accelerate, fsdp1 on three ranks", "dcp", "composer", "torchtitan", "megatron")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def src(family: str, tmp_path: Path) -> Path:
    fixture, inner = FAMILIES[family]
    shutil.copytree(FIXTURES / fixture, tmp_path / "src", ignore=_JUDGES)
    return (tmp_path / "src" / inner).resolve()


def expected(family: str) -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / FAMILIES[family][0] / "expected.safetensors")


def _roles(path: Path) -> list[str]:
    return sorted(part.role for part in inspect(path).parts if part.role in ("model", "optimizer"))


def _check(src: Path, out: Path, family: str, tensors: dict[str, torch.Tensor], *, whole: bool = True) -> None:
    wanted = {key: tensor for key, tensor in expected(family).items() if key in tensors}
    saved = {
        entry.name for part in read_checkpoint(src).parts if part.role == "model" for entry in part.tensors.values()
    }
    assert set(tensors) == saved, "every tensor that was saved, and no other"
    assert len(wanted) >= len(tensors) - len(saved - expected(family).keys())
    assert_same({key: tensors[key] for key in wanted}, wanted)
    assert wanted
    roles = _roles(src) if whole else ["model"]
    assert _roles(out) == roles
    report = diff(src, out, part=_comparable(family, roles))
    assert all(not part.tensors for part in report.parts), report.parts
    # Megatron's model has values that are no tensors; the report of the conversion says when they are left out.
    assert report.is_equal or family == "megatron", report.parts
    assert report.num_tensors >= len(tensors)
    if "optimizer" in roles:
        moments = load_file(FIXTURES / FAMILIES[family][0] / "expected_optim.safetensors")
        found = {key.removeprefix("state."): tensor for key, tensor in read_optimizer(out).items()}
        steps = {key for key in found.keys() - moments.keys() if key.endswith(".step")}  # DeepSpeed keeps one for all
        assert_same({key: tensor for key, tensor in found.items() if key not in steps}, moments)
    checked = validate(out, level="deep")
    errors = [finding for finding in checked.findings if finding.severity == "error"]
    # verl's fixture has a config.json of another width beside its model.
    assert [finding for finding in errors if (finding.name, family) != ("shape-differs", "verl")] == []


def _comparable(family: str, roles: Sequence[str]) -> list[str]:
    """Return the roles that `diff` can compare: verl's optimizer is by index, Megatron's has no groups."""
    return sorted(set(roles) - ({"optimizer"} if family in ("verl", "megatron") else set()))


def test_safetensors(src: Path, family: str, tmp_path: Path) -> None:
    report = convert(src, tmp_path / "out", fsync=False)
    assert [part.role for part in report.parts] == ["model"]
    _check(src, tmp_path / "out", family, read_safetensors(tmp_path / "out"), whole=False)
    assert inspect(tmp_path / "out").layout == "hf-safetensors"


def test_hf(src: Path, family: str, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"model_type": "nobody-knows-it"}')
    convert(src, tmp_path / "out", to="hf", config_from=str(tmp_path / "config"), fsync=False)
    _check(src, tmp_path / "out", family, read_safetensors(tmp_path / "out"), whole=False)
    assert (tmp_path / "out" / "config.json").exists()


def test_torch(src: Path, family: str, tmp_path: Path) -> None:
    report = convert(src, tmp_path / "out", to="torch", fsync=False)
    assert sorted(part.role for part in report.parts) == _roles(src)
    _check(src, tmp_path / "out", family, read_bin(tmp_path / "out"))
    for file in (tmp_path / "out").glob("optimizer*.bin"):
        state: dict[str, Any] = torch.load(file, weights_only=True)
        assert state.keys() == {"state", "param_groups"}


def test_dcp(src: Path, family: str, tmp_path: Path) -> None:
    report = convert(src, tmp_path / "out", to="dcp", world_size=3, fsync=False)
    assert report.world_size == 3
    tensors = read_dcp(tmp_path / "out")[0]
    heads = {part.name for part in read_checkpoint(tmp_path / "out").parts}
    model = {key: tensor for key, tensor in tensors.items() if key.partition(".")[0] not in heads - {"model"}}
    _check(src, tmp_path / "out", family, model)
    assert inspect(tmp_path / "out").layout == ("torchtitan" if family == "torchtitan" else "dcp")


def test_accelerate(src: Path, family: str, tmp_path: Path) -> None:
    convert(src, tmp_path / "out", to="accelerate", mesh="2x2", fsync=False)
    folder = tmp_path / "out" / "pytorch_model_fsdp_0"
    assert len(list(folder.glob("__*_0.distcp"))) == 4
    _check(src, tmp_path / "out", family, read_dcp(folder)[0])
    assert inspect(tmp_path / "out").layout == "accelerate"


def test_accelerate_full(src: Path, family: str, tmp_path: Path) -> None:
    convert(src, tmp_path / "out", to="accelerate", full=True, fsync=False)
    _check(src, tmp_path / "out", family, torch.load(tmp_path / "out" / "pytorch_model_fsdp.bin", weights_only=True))
    assert inspect(tmp_path / "out").layout == "accelerate"


def test_reshard(src: Path, family: str, tmp_path: Path) -> None:
    reshard(src, tmp_path / "out", 3, fsync=False)
    if family in RESHARDED:
        assert inspect(tmp_path / "out").layout == inspect(src).layout
        before, after = read_checkpoint(src), read_checkpoint(tmp_path / "out")
        assert [(part.name, part.role, list(part.tensors), list(part.objects)) for part in after.parts] == [
            (part.name, part.role, list(part.tensors), list(part.objects)) for part in before.parts
        ]
        assert diff(src, tmp_path / "out").is_equal
    else:
        assert diff(src, tmp_path / "out", part=_comparable(family, _roles(src))).is_equal
