"""What each target holds of a checkpoint, and what it says that it leaves behind. Judge: torch.load of the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fsdp_ckpt import ConvertReport, convert, inspect, validate
from fsdp_ckpt.errors import AmbiguousPart, UsageError
from tests.build import assert_same, read_bin, read_safetensors, rows, save_dcp
from tests.property.conversions import read_dcp

TENSOR = torch.arange(40.0).reshape(8, 5)
MODEL = {"embed.weight": TENSOR, "lm_head.weight": TENSOR, "norm.scale": TENSOR[0].clone()}
GROUPS = [{"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.0, "params": list(MODEL)}]
SCHEDULER = {"last_epoch": 3, "_last_lr": [0.1], "milestones": {0: 1, 5: 1}}


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """A folder with everything in one state dict."""
    state = {
        "model": {key: rows(tensor, 2) for key, tensor in MODEL.items()},
        "optimizer": {"state": {"embed.weight": {"exp_avg": rows(TENSOR + 1, 2)}}, "param_groups": GROUPS},
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"seen": torch.arange(7)},
    }
    return save_dcp(tmp_path / "src", state)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A folder as Accelerate's."""
    src = tmp_path / "src"
    save_dcp(src / "pytorch_model_fsdp_0", {"model": {key: rows(tensor, 2) for key, tensor in MODEL.items()}})
    optimizer = {"state": {"embed.weight": {"exp_avg": rows(TENSOR + 1, 2)}}, "param_groups": GROUPS}
    save_dcp(src / "optimizer_0", {"optimizer": optimizer})
    torch.save(SCHEDULER, src / "scheduler.bin")
    for rank in range(2):
        torch.save({"torch_manual_seed": torch.get_rng_state(), "rank": rank}, src / f"random_states_{rank}.pkl")
    (src / "config.json").write_text('{"model_type": "nobody-knows-it", "tie_word_embeddings": true}')
    return src


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def left(report: ConvertReport) -> list[str]:
    return [sentence.partition(" ")[0] for sentence in report.left]


def test_accelerate_keeps_every_file(folders: Path, tmp_path: Path) -> None:
    report = convert(folders, tmp_path / "out", to="accelerate", world_size=3)
    shards = {".metadata", *(f"__{rank}_0.distcp" for rank in range(3))}
    assert names(tmp_path / "out") == {
        *(f"pytorch_model_fsdp_0/{name}" for name in shards), *(f"optimizer_0/{name}" for name in shards),
        "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl", "config.json",
    }  # fmt: skip
    for file in ("scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"):
        assert (tmp_path / "out" / file).read_bytes() == (folders / file).read_bytes()
    assert report.left == []
    assert_same(read_dcp(tmp_path / "out" / "pytorch_model_fsdp_0")[0], MODEL)
    assert validate(tmp_path / "out", level="deep").errors == 0


def test_accelerate_from_one_folder(nested: Path, tmp_path: Path) -> None:
    report = convert(nested, tmp_path / "out", to="accelerate")
    assert torch.load(tmp_path / "out" / "scheduler.bin", weights_only=True) == {"last_epoch": 3}
    assert left(report) == ["dataloader"]
    assert "--to dcp keeps it" in report.left[0]
    assert report.world_size == 2, "as many as saved it"
    assert [(part.role, part.written_as) for part in report.parts] == [
        ("model", "pytorch_model_fsdp_0"), ("optimizer", "optimizer_0"), ("scheduler", "scheduler.bin"),
    ]  # fmt: skip
    assert validate(tmp_path / "out", level="deep").errors == 0


def test_dcp_keeps_what_has_a_place_in_it(nested: Path, tmp_path: Path) -> None:
    report = convert(nested, tmp_path / "out", to="dcp")
    assert report.left == []
    keys = read_dcp(tmp_path / "out", "")[0].keys()
    assert keys == {*(f"model.{key}" for key in MODEL), "optimizer.state.embed.weight.exp_avg", "dataloader.seen"}
    assert {part.role for part in inspect(tmp_path / "out").parts} == {"model", "optimizer", "scheduler", "dataloader"}


def test_dcp_names_what_it_leaves(folders: Path, tmp_path: Path) -> None:
    report = convert(folders, tmp_path / "out", to="dcp")
    assert report.left == [
        "scheduler (1 value): no place in a single folder; --to accelerate keeps it",
        "random_states_0 and 1 more: no place in a single folder; --to accelerate keeps it",
    ]
    assert all(len(f"warning: left behind: {sentence}") < 105 for sentence in report.left)


def test_torch_and_full_files_are_what_torch_saves(folders: Path, tmp_path: Path) -> None:
    report = convert(folders, tmp_path / "bin", to="torch", tie=False)
    assert names(tmp_path / "bin") == {"pytorch_model.bin", "optimizer.bin", "config.json"}
    assert_same(read_bin(tmp_path / "bin"), MODEL)
    assert sorted(left(report)) == ["random_states_0", "scheduler"]
    report = convert(folders, tmp_path / "full", to="accelerate", full=True)
    assert names(tmp_path / "full") == {
        "pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl",
        "config.json",
    }  # fmt: skip
    assert report.left == []
    for file in (tmp_path / "bin" / "optimizer.bin", tmp_path / "full" / "optimizer.bin"):
        state: dict[str, Any] = torch.load(file, weights_only=True)
        assert state["param_groups"] == GROUPS
        assert_same(state["state"]["embed.weight"], {"exp_avg": TENSOR + 1})
        assert state["state"].keys() == {"embed.weight"}


def test_an_optimizer_by_index_is_loaded_by_torch(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    (tmp_path / "names.json").write_text(json.dumps([name for name, _ in net.named_parameters()]))
    options: dict[str, Any] = {"optimizer_form": "by-index", "param_names": tmp_path / "names.json"}
    convert(tmp_path / "x.pt", tmp_path / "out", to="torch", **options)
    state = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)
    fresh = torch.optim.AdamW(torch.nn.Linear(3, 4).parameters())
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["lr"] == 0.5
    for number in (0, 1):
        assert_same(state["state"][number], optimizer.state_dict()["state"][number])
    for full in (False, True):
        with pytest.raises(UsageError, match="neither Accelerate nor load_state would load it"):
            convert(tmp_path / "x.pt", tmp_path / "other", to="accelerate", full=full, **options)


def test_tied_heads_are_left_out_where_the_config_says_so(folders: Path, tmp_path: Path) -> None:
    for to, read in (("safetensors", read_safetensors), ("hf", read_safetensors)):
        report = convert(folders, tmp_path / to, to=to)
        assert report.tied == {"lm_head.weight": "embed.weight"}
        found = read(tmp_path / to)
        assert_same(found, {key: MODEL[key] for key in ("embed.weight", "norm.scale")})
    convert(folders, tmp_path / "kept", tie=False)
    assert_same(read_safetensors(tmp_path / "kept"), MODEL)


def test_names_filters_and_dtype_reach_model_and_optimizer(nested: Path, tmp_path: Path) -> None:
    report = convert(
        nested, tmp_path / "out", to="accelerate", rename=["embed=tokens"], exclude=["lm_head*"], dtype="bfloat16"
    )
    model = read_dcp(tmp_path / "out" / "pytorch_model_fsdp_0")[0]
    assert_same(model, {"tokens.weight": TENSOR.bfloat16(), "norm.scale": TENSOR[0].bfloat16()})
    optimizer = read_dcp(tmp_path / "out" / "optimizer_0", "optimizer.")[0]
    assert_same(optimizer, {"state.tokens.weight.exp_avg": TENSOR + 1})
    convert(tmp_path / "out", tmp_path / "bin", to="torch", part="optimizer")
    groups = torch.load(tmp_path / "bin" / "optimizer.bin", weights_only=True)["param_groups"]
    assert groups == [{**GROUPS[0], "params": ["tokens.weight", "norm.scale"]}]
    assert report.cast == {"float32 -> bfloat16": 2}
    assert report.excluded == 1
    assert names(tmp_path / "bin") == {"optimizer.bin"}


def test_several_models(tmp_path: Path) -> None:
    for number in range(2):
        save_dcp(tmp_path / "src" / f"pytorch_model_fsdp_{number}", {"model": {"w": TENSOR + number}})
    convert(tmp_path / "src", tmp_path / "acc", to="accelerate")
    convert(tmp_path / "src", tmp_path / "dcp", to="dcp")
    for number in range(2):
        folder = tmp_path / "acc" / f"pytorch_model_fsdp_{number}"
        assert_same(read_dcp(folder)[0], {"w": TENSOR + number})
        assert_same(
            {key: tensor for key, tensor in read_dcp(tmp_path / "dcp", f"model_{number}.")[0].items() if key == "w"},
            {"w": TENSOR + number},
        )
    for to in ("safetensors", "torch", "hf"):
        with pytest.raises(AmbiguousPart):
            convert(tmp_path / "src", tmp_path / "one", to=to)
    convert(tmp_path / "src", tmp_path / "one", part="pytorch_model_fsdp_1")
    assert_same(load_file(tmp_path / "one" / "model.safetensors"), {"w": TENSOR + 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "onnx"}, "--to onnx is not possible"),
        ({"to": "dcp", "optimizer_form": "by-colour"}, "by-colour"),
        ({"to": "safetensors", "world_size": 2}, "is not sharded"),
        ({"to": "accelerate", "full": True, "mesh": "2"}, "is not sharded"),
        ({"to": "dcp", "world_size": 2, "mesh": "2"}, "same thing"),
        ({"to": "dcp", "world_size": 0}, "at least 1"),
        ({"to": "torch", "full": True}, "--full is for"),
        ({"to": "hf", "part": "optimizer"}, "holds a model only"),
        ({"to": "adapter", "fold_lora": True}, "does not go with it"),
        ({"to": "dcp", "config_from": "x"}, "--config-from is for --to hf"),
        ({"to": "dcp", "jobs": 0}, "--jobs"),
        ({"to": "dcp", "remove_source": True, "verify": False}, "--no-verify"),
        ({"to": "dcp", "colour": "red"}, "unknown option: colour"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        convert(tmp_path / "nowhere", tmp_path / "out", **options)
