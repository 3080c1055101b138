"""What we write opens in the libraries that people use, and is what Accelerate's own merge writes."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import accelerate.utils
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

import fsdp_ckpt
from tests.cases.check import assert_same, inspect_json, load, merge_and_load

SHARDED = pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "fsdp2_tied"])
ALL = pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "fsdp2_full", "fsdp2_tied"])


def reference(llama: Path, name: str) -> dict[str, Tensor]:
    """Return the model's state dict from before it was wrapped."""
    found: dict[str, Tensor] = load_file(llama / f"{name}.safetensors")
    return found


def from_pretrained(folder: Path) -> dict[str, Tensor]:
    """Load a folder as a user does; return the state dict of the model, of which nothing may be missing."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return dict(model.state_dict())


@ALL
@pytest.mark.parametrize(
    "options",
    [{}, {"max_shard_size": "20KB"}, {"format": "bin"}, {"format": "bin", "max_shard_size": "20KB"}],
    ids=["one", "sharded", "bin", "bin-sharded"],
)
def test_from_pretrained_loads_what_was_saved(name: str, options: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    """Config, index, dtype and tied weights included: the folder is a model folder."""
    report = fsdp_ckpt.merge(llama / name, tmp_path / "out", **options)
    assert (len(report.files) > 1) == ("max_shard_size" in options)
    assert_same(from_pretrained(tmp_path / "out"), reference(llama, name))


def test_a_tied_model_is_written_once_and_loads_whole(llama: Path, tmp_path: Path) -> None:
    """config.json says that the head is the embedding; 97 x 32 bf16 are saved."""
    report = fsdp_ckpt.merge(llama / "fsdp2_tied", tmp_path / "out")
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    whole = reference(llama, "fsdp2_tied")
    assert report.tensor_bytes == sum(value.nbytes for value in whole.values()) - 97 * 32 * 2
    assert_same(from_pretrained(tmp_path / "out"), whole)


@ALL
def test_safetensors_and_torch_open_it(name: str, llama: Path, tmp_path: Path) -> None:
    """`safe_open` with format=pt, `torch.load` without running anything, with and without mmap."""
    whole = reference(llama, name)
    fsdp_ckpt.merge(llama / name, tmp_path / "st", tie=False)
    with safe_open(tmp_path / "st/model.safetensors", framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        assert_same({key: tensors.get_tensor(key) for key in tensors.keys()}, whole)  # noqa: SIM118
    with safe_open(tmp_path / "st/model.safetensors", framework="np") as tensors:
        assert sorted(tensors.keys()) == sorted(whole)
    fsdp_ckpt.merge(llama / name, tmp_path / "bin", tie=False, format="bin")
    for mmap in (False, True):
        assert_same(torch.load(tmp_path / "bin/pytorch_model.bin", weights_only=True, mmap=mmap), whole)


@SHARDED
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_accelerate_writes_the_same(name: str, safe: bool, llama: Path, tmp_path: Path) -> None:
    """Same file, same header metadata, same tensors, for FSDP1 and FSDP2."""
    source = llama / name / "pytorch_model_fsdp_0"
    accelerate.utils.merge_fsdp_weights(str(source), str(tmp_path / "theirs"), safe_serialization=safe)
    report = fsdp_ckpt.merge(source, tmp_path / "ours", format="safetensors" if safe else "bin", tie=False)
    (file,) = [path.name for path in (tmp_path / "theirs").iterdir()]
    assert list(report.files) == [file]
    theirs = load(tmp_path / "theirs")
    assert_same(theirs, reference(llama, name))
    assert_same(load(tmp_path / "ours"), theirs)
    if safe:
        headers = []
        for folder in ("theirs", "ours"):
            with safe_open(tmp_path / folder / file, framework="pt") as tensors:
                headers.append(tensors.metadata())
        assert headers[0] == headers[1]


def test_the_drop_in_takes_the_same_arguments() -> None:
    """Names, order, kinds and defaults, so that an import can simply be exchanged."""
    theirs = inspect.signature(accelerate.utils.merge_fsdp_weights).parameters.values()
    ours = inspect.signature(fsdp_ckpt.merge_fsdp_weights).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_the_drop_in_does_the_same(name: str, safe: bool, llama: Path, tmp_path: Path) -> None:
    """Into a folder that exists and holds something, which both leave alone; the source is kept."""
    found = []
    for label, merge in (("theirs", accelerate.utils.merge_fsdp_weights), ("ours", fsdp_ckpt.merge_fsdp_weights)):
        source, out = tmp_path / f"{label}-src/pytorch_model_fsdp_0", tmp_path / label
        shutil.copytree(llama / name / "pytorch_model_fsdp_0", source)
        out.mkdir()
        (out / "notes.txt").write_text("mine")
        merge(str(source), str(out), safe)
        assert source.is_dir()
        assert (out / "notes.txt").read_text() == "mine"
        (out / "notes.txt").unlink()
        assert [path.name for path in out.iterdir()] == ["model.safetensors" if safe else "pytorch_model.bin"]
        found.append(load(out))
    assert_same(found[1], found[0])
    assert_same(found[1], reference(llama, name))


def test_the_drop_in_removes_the_source_when_asked(llama: Path, tmp_path: Path) -> None:
    """As Accelerate does."""
    for label, merge in (("theirs", accelerate.utils.merge_fsdp_weights), ("ours", fsdp_ckpt.merge_fsdp_weights)):
        source = tmp_path / label / "pytorch_model_fsdp_0"
        shutil.copytree(llama / "fsdp2/pytorch_model_fsdp_0", source)
        merge(str(source), str(tmp_path / f"{label}-out"), True, True)
        assert not source.exists()
        assert_same(load(tmp_path / f"{label}-out"), reference(llama, "fsdp2"))


@SHARDED
def test_accelerates_optimizer_is_described(name: str, llama: Path) -> None:
    """Learning rate, betas, and weight decay of the group; moments and step of every parameter."""
    described = inspect_json(llama / name, "--objects")
    assert described["layout"] == "accelerate"
    (optimizer,) = [part for part in described["parts"] if part["role"] == "optimizer"]
    options = {key: optimizer["objects"][f"param_groups.0.{key}"] for key in ("lr", "betas", "weight_decay")}
    assert options == {"lr": 0.25, "betas": [0.5, 0.75], "weight_decay": 0.125}
    metadata = FileSystemReader(llama / name / "optimizer_0").read_metadata().state_dict_metadata
    keys = {key.removeprefix("optimizer.") for key, value in metadata.items() if hasattr(value, "chunks")}
    shown = {tensor["name"]: (tensor["dtype"], tensor["shape"]) for tensor in optimizer["tensors"]}
    assert shown.keys() == keys
    whole = reference(llama, name)
    assert sorted(optimizer["objects"]["param_groups.0.params"]) == sorted(
        key.removeprefix("state.").removesuffix(".exp_avg") for key in keys if key.endswith(".exp_avg")
    )
    for parameter in optimizer["objects"]["param_groups.0.params"]:
        value = whole[parameter]
        for moment in ("exp_avg", "exp_avg_sq"):
            dtype, shape = shown[f"state.{parameter}.{moment}"]
            assert (f"torch.{dtype}", shape) == (str(value.dtype), list(value.shape))
        assert shown[f"state.{parameter}.step"][1] == []


def test_full_optimizers_are_described(llama: Path) -> None:
    """`optimizer.bin`, whose groups are a list."""
    described = inspect_json(llama / "fsdp2_full", "--objects")
    (optimizer,) = [part for part in described["parts"] if part["role"] == "optimizer"]
    saved = torch.load(llama / "fsdp2_full/optimizer.bin", weights_only=True)
    assert optimizer["num_tensors"] == sum(len(state) for state in saved["state"].values())
    text = json.dumps(optimizer["objects"])
    assert "0.25" in text
    assert "0.125" in text


def test_the_view_reads_the_model_as_it_will_be_merged(llama: Path) -> None:
    """`open_checkpoint` answers like safe_open, a tied name included."""
    whole = reference(llama, "fsdp2_tied")
    with fsdp_ckpt.open_checkpoint(llama / "fsdp2_tied", framework="pt") as view:
        assert sorted(view.keys()) == sorted(whole)
        assert_same({key: view.get_tensor(key) for key in view.keys()}, whole)  # noqa: SIM118
    with fsdp_ckpt.open_checkpoint(llama / "fsdp1", framework="np") as view:
        for key, value in reference(llama, "fsdp1").items():
            assert (view.get_tensor(key) == value.numpy()).all()


def test_merged_models_can_be_merged_again(llama: Path, tmp_path: Path) -> None:
    """Our own output is a source like any other."""
    fsdp_ckpt.merge(llama / "fsdp2", tmp_path / "once", max_shard_size="20KB")
    _, found = merge_and_load(tmp_path / "once", tmp_path / "twice", format="bin")
    assert_same(found, reference(llama, "fsdp2"))
