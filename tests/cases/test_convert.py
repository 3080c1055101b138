"""What the cases ask of `convert` and `reshard`: geometry, names, dtypes, formats, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import fsdp_ckpt
from fsdp_ckpt.errors import FsdpCkptError
from tests.cases.check import assert_same, bits, load, load_file, run
from tests.cases.judge import stock
from tests.cases.models import Buffers, Mlp, Odd, Tied, mixed, oddly_named, reference

ODD = Path("w t") / "run_lr=[1e-3, 2e-3]_é*" / "epoch=0-step=10.ckpt"


@pytest.mark.parametrize("variant", ["verl", "dcp"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_p03_strided_shards_become_row_shards(variant: str, world_size: int, built: Path, tmp_path: Path) -> None:
    """pytorch/torchtitan#1483: FSDP over tensor parallelism, converted for FSDP alone."""
    out = tmp_path / "out"
    fsdp_ckpt.convert(built / "p03" / variant, out, to="dcp", world_size=world_size)
    assert_same(stock(out)["model"], reference(Mlp()))
    assert sorted(path.name for path in out.glob("*.distcp")) == [f"__{rank}_0.distcp" for rank in range(world_size)]


@pytest.mark.parametrize("variant", ["verl", "one", "dcp"])
def test_p01_replicated_buffers_are_stored_once(variant: str, built: Path, tmp_path: Path) -> None:
    """verl-project/verl#7610: buffers on every rank are no shards of anything."""
    out = tmp_path / "out"
    fsdp_ckpt.convert(built / "p01" / variant, out, to="accelerate", world_size=2)
    expected = reference(Buffers())
    assert_same(stock(out / "pytorch_model_fsdp_0")["model"], expected)
    stored = sum(file.stat().st_size for file in (out / "pytorch_model_fsdp_0").glob("*.distcp"))
    assert stored >= sum(value.nbytes for value in expected.values())


@pytest.mark.parametrize("variant", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("world_size", [3, 8])
def test_p05_ranks_without_rows(variant: str, world_size: int, built: Path, tmp_path: Path) -> None:
    """pytorch/pytorch#108869: dimensions smaller than the world, from four ranks to three and to eight."""
    out = tmp_path / "out"
    fsdp_ckpt.reshard(built / "p05" / variant, out, world_size)
    folder = out if (out / ".metadata").exists() else out / "pytorch_model_fsdp_0"
    found = stock(folder)
    assert_same(found.get("model", found), reference(Odd()))
    assert len(list(folder.glob("*.distcp"))) == world_size
    report = fsdp_ckpt.merge(out, tmp_path / "merged")
    assert_same(load(tmp_path / "merged"), reference(Odd()))
    assert report.num_tensors == 3


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize(("mesh", "placements"), [("4", []), ("2x2", ["weight=0,r"])])
def test_p06_one_row_for_four_ranks(suffix: str, mesh: str, placements: list[str], tmp_path: Path) -> None:
    """pytorch/pytorch#136228: (1, 17) is one rank's, the others have (0, 17)."""
    weight = torch.arange(17.0).view(1, 17)
    source, out = tmp_path / f"full.{suffix}", tmp_path / "out"
    if suffix == "pt":
        torch.save({"weight": weight}, source)
    else:
        save_file({"weight": weight}, source)
    fsdp_ckpt.convert(source, out, to="dcp", mesh=mesh, placements=placements)
    assert_same(stock(out)["model"], {"weight": weight})
    fsdp_ckpt.merge(out, tmp_path / "merged")
    assert_same(load(tmp_path / "merged"), {"weight": weight})


@pytest.mark.parametrize("variant", ["dcp", "verl"])
def test_p08_one_copy_of_every_replica(variant: str, built: Path, tmp_path: Path) -> None:
    """pytorch/torchtitan#799: HSDP on 2 x 2 ranks, resharded for 2 x 2 again: 488 bytes, not 976."""
    out = tmp_path / "out"
    fsdp_ckpt.reshard(built / "p08" / variant, out, mesh="2x2")
    folder = out if (out / ".metadata").exists() else out / "pytorch_model_fsdp_0"
    assert_same(stock(folder)["model"], reference(Mlp()))
    assert payload_of(folder) == 488


def payload_of(folder: Path) -> int:
    """Return the bytes of all tensors that torch finds in a checkpoint."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    return sum(
        chunk.sizes.numel() * item.properties.dtype.itemsize
        for item in metadata.values()
        if isinstance(item, TensorStorageMetadata)
        for chunk in item.chunks
    )


@pytest.mark.parametrize("target", ["dcp", "accelerate", "torch"])
def test_p09_wrappers_leave_the_names(target: str, built: Path, tmp_path: Path) -> None:
    """pytorch/torchtitan#2622: `_orig_mod` and its like reach no converted checkpoint."""
    for variant in sorted(path for path in (built / "p09").iterdir() if path.is_dir()):
        out = tmp_path / variant.name
        report = fsdp_ckpt.convert(variant, out, to=target)
        found = model_of(out)
        assert not [name for name in found if name.startswith("module.") or "_orig_mod" in name or "_wrapped" in name]
        assert report.renamed


def model_of(folder: Path) -> dict[str, Any]:
    """Return the model of a converted folder as torch reads it."""
    if (folder / "pytorch_model.bin").exists():
        return load_file(folder / "pytorch_model.bin")
    place = folder if (folder / ".metadata").exists() else folder / "pytorch_model_fsdp_0"
    model: dict[str, Any] = stock(place)["model"]
    return model


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("command", ["convert", "reshard"])
def test_p13_one_ranks_view_is_refused(command: str, with_config: bool, tmp_path: Path) -> None:
    """axolotl-ai-cloud/axolotl#1947: a 1-D embedding, a norm and a head of size 0 are no model."""
    folder = tmp_path / "model"
    folder.mkdir()
    if with_config:
        config = {"vocab_size": 16, "hidden_size": 4, "num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(32),
        "model.norm.weight": torch.zeros(0),
        "lm_head.weight": torch.zeros(0),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    options = ["--to", "accelerate"] if command == "convert" else []
    result = run(command, folder, tmp_path / "out", "--world-size", "2", *options)
    assert result.returncode == 4
    assert "one rank's view of the model" in result.stderr
    assert f"fsdp-ckpt validate {folder}" in result.stderr
    assert not (tmp_path / "out").exists()


def test_p14_a_tied_head_rides_along(built: Path, tmp_path: Path) -> None:
    """EvolvingLMMs-Lab/lmms-engine#157: a training checkpoint keeps both names; loading is strict."""
    fsdp_ckpt.convert(built / "p14", tmp_path / "out", to="accelerate", world_size=3)
    model = Tied()
    model.load_state_dict(model_of(tmp_path / "out"), strict=True)
    assert_same(model.state_dict(), reference(Tied()))


def test_p15_full_to_safetensors(tmp_path: Path) -> None:
    """safetensors#98, #304, #469: shared storages, transposed tensors, halves of one storage."""
    weight, big = torch.arange(64.0).reshape(16, 4), torch.arange(4000.0).reshape(4, 1000)
    state = {
        "embed.weight": weight,
        "lm_head.weight": weight,
        "mid.weight": torch.arange(16.0).reshape(4, 4).t(),
        "a": big[0:2],
        "b": big[2:4],
    }
    torch.save(state, tmp_path / "full.pt")
    out = tmp_path / "out"
    fsdp_ckpt.convert(tmp_path / "full.pt", out, to="safetensors")
    found = load_file(out / "model.safetensors")
    assert_same(found, state)
    assert found["mid.weight"].is_contiguous()
    assert found["a"].nbytes + found["b"].nbytes == 16_000
    fsdp_ckpt.convert(tmp_path / "full.pt", tmp_path / "dcp", to="dcp", world_size=3)
    assert_same(stock(tmp_path / "dcp")["model"], state)


@pytest.mark.parametrize("target", ["dcp", "torch", "safetensors"])
def test_p17_dtypes_stay_and_casts_round_as_torch(target: str, built: Path, tmp_path: Path) -> None:
    """meta-llama/llama-cookbook#289: nothing is converted unasked; when asked, as tensor.to() does."""
    kept, cast = tmp_path / "kept", tmp_path / "cast"
    fsdp_ckpt.convert(built / "p17", kept, to=target)
    assert_same(weights_of(kept), mixed())
    report = fsdp_ckpt.convert(built / "p17", cast, to=target, dtype="bfloat16")
    found, expected = weights_of(cast), {name: value.to(torch.bfloat16) for name, value in mixed().items()}
    for name, value in expected.items():
        is_nan = value.isnan()
        assert found[name].dtype is torch.bfloat16
        assert torch.equal(found[name].isnan(), is_nan)
        assert torch.equal(bits(found[name][~is_nan]), bits(value[~is_nan]))
    assert sum(report.cast.values()) == 2


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the model of a converted folder, whatever it was converted to."""
    return load(folder) if (folder / "model.safetensors").exists() else model_of(folder)


def test_p19_small_files_and_their_index(built: Path, tmp_path: Path) -> None:
    """pytorch/torchtitan#2137: 488 bytes in files of 200 at most, an index that lists each name once."""
    fsdp_ckpt.convert(built / "p22", tmp_path / "out", to="safetensors", max_shard_size=200)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 488
    assert_same(load(tmp_path / "out"), reference(Mlp()))
    fsdp_ckpt.convert(built / "p22", tmp_path / "one", to="safetensors")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["model.safetensors"]


def test_p37_each_form_becomes_the_one_by_name(built: Path, tmp_path: Path) -> None:
    """huggingface/accelerate#3971: by name and flattened as they are, by index with the names of the model."""
    expected = stock(built / "p37/name")["optimizer"]
    names = expected["param_groups"][0]["params"] + expected["param_groups"][1]["params"]
    (tmp_path / "names.json").write_text(json.dumps(names))
    for form in ("name", "flat", "index"):
        given = tmp_path / "names.json" if form == "index" else None
        fsdp_ckpt.convert(built / "p37" / form, tmp_path / form, to="accelerate", world_size=3, param_names=given)
        found = stock(tmp_path / form / "optimizer_0")["optimizer"]
        assert sorted(found["state"]) == sorted(expected["state"])
        for name, state in expected["state"].items():
            assert_same(found["state"][name], state)
        assert [{**group, "params": sorted(group["params"])} for group in found["param_groups"]] == [
            {**group, "params": sorted(group["params"])} for group in expected["param_groups"]
        ]


def test_p37_an_index_is_never_guessed(built: Path, tmp_path: Path) -> None:
    """The command line alone has no names: the message says what to pass."""
    result = run("convert", built / "p37/index", tmp_path / "out", "--to", "accelerate")
    assert result.returncode == 8
    assert "--param-names" in result.stderr
    assert not (tmp_path / "out").exists()


def test_p44_blobs_of_torch_2_3_are_flattened(built: Path, tmp_path: Path) -> None:
    """pytorch/pytorch#133923: the old layout converted is the new one."""
    expected = stock(built / "p44/new")
    fsdp_ckpt.convert(built / "p44/old", tmp_path / "out", to="accelerate")
    assert_same(stock(tmp_path / "out/pytorch_model_fsdp_0")["model"], expected["model"])
    found = stock(tmp_path / "out/optimizer_0")["optimizer"]
    for name, state in expected["optim"]["state"].items():
        assert_same(found["state"][name], state)
    assert found["param_groups"] == expected["optim"]["param_groups"]


@pytest.mark.parametrize("command", ["convert", "reshard"])
def test_p49_rank_zeros_slice_is_refused(command: str, built: Path, tmp_path: Path) -> None:
    """accelerate#4206: neither (2, 8) nor a zero-filled (4, 8)."""
    options = ["--to", "dcp"] if command == "convert" else []
    result = run(command, built / "p49", tmp_path / "out", "--world-size", "2", *options)
    assert result.returncode == 4
    assert "2 of 4 rows" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["dcp", "verl", "safetensors"])
def test_p54_odd_paths_and_names(kind: str, built: Path, tmp_path: Path) -> None:
    """ray-project/ray#15367: brackets, spaces, stars; a tensor's name survives byte for byte."""
    source = tmp_path / ODD
    if kind == "safetensors":
        source.mkdir(parents=True)
        save_file(oddly_named(), source / "model.safetensors")
    else:
        shutil.copytree(built / "p54" / kind, source)
    out = tmp_path / "out [1]" / "*"
    fsdp_ckpt.reshard(source, out, 3)
    folder = out if (out / ".metadata").exists() else out / "pytorch_model_fsdp_0"
    found = stock(folder)
    assert_same(found.get("model", found), oddly_named())


@pytest.mark.parametrize("variant", ["dcp", "verl"])
def test_p25_nothing_comes_of_an_incomplete_checkpoint(variant: str, built: Path, tmp_path: Path) -> None:
    """awsome-distributed-ai#190: a missing shard ends the conversion before anything is written."""
    shutil.copytree(built / "p01" / variant, tmp_path / "ck")
    next(iter(sorted((tmp_path / "ck").glob("*1*")))).unlink()
    with pytest.raises(FsdpCkptError) as caught:
        fsdp_ckpt.convert(tmp_path / "ck", tmp_path / "out", to="dcp", world_size=2)
    assert caught.value.exit_code == 4
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
