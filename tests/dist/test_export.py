"""What get_state_dict and save_model give is the unsharded model, bit for bit, and costs one tensor of memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor

from tests.build import assert_same, read_safetensors
from tests.cases.launch import build_once, run_module
from tests.dist.export_ranks import LAYERS, MIXED, ONE_BYTES, SHARD, SIDE, WRAPPED
from tests.dist.matrix_variants import TARGETS
from tests.dist.stage import outcomes

pytestmark = pytest.mark.dist

SLACK_BYTES = 64 << 20
NAMES = [*(f"exported_{name}" for name in WRAPPED), *MIXED]
TIED = [f"exported_{name}" for name in WRAPPED if TARGETS[name].tied]


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scenarios but those that measure memory, which run in processes of their own."""

    def build(folder: Path) -> None:
        with mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="1000000"):  # what is freed goes back at once
            run_module("tests.dist.export_ranks", str(folder), "large_fsdp2", "large_fsdp1", timeout_s=80)
        others = [*NAMES, "llama", "llama_tied", "a_folder_in_the_way", "a_disk_that_fills_up", "of_one_group"]
        run_module("tests.dist.export_ranks", str(folder), *others, timeout_s=80)

    return build_once(tmp_path_factory, "export_ranks", build)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_rank_gets_the_unsharded_model_the_others_nothing(played: Path, name: str) -> None:
    first, *others = outcomes(played, name)
    assert_same(first["state"], first["expected"])
    assert_same(first["after"], first["expected"])
    for rank in others:
        assert rank["state"] == {} == rank["after"]


@pytest.mark.parametrize("name", NAMES)
def test_state_is_detached_and_on_the_cpu(played: Path, name: str) -> None:
    for value in outcomes(played, name)[0]["state"].values():
        assert type(value) is Tensor
        assert (value.requires_grad, value.device.type, value.is_contiguous()) == (False, "cpu", True)


@pytest.mark.parametrize("name", [*TIED, *MIXED])
def test_tied_weights_share_memory(played: Path, name: str) -> None:
    assert outcomes(played, name)[0]["tied"] == [True]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_holds_the_unsharded_model_each_tied_weight_once(played: Path, name: str) -> None:
    expected = outcomes(played, name)[0]["expected"]
    tied = {"head.weight"} if name in TIED else {"right.weight"} if name in MIXED else set()
    found = read_safetensors(played / name / "place" / "hf")
    assert_same(found, {key: value for key, value in expected.items() if key not in tied})


@pytest.mark.parametrize("name", MIXED)
def test_the_report_names_what_a_tied_weight_is_kept_as(played: Path, name: str) -> None:
    for rank in outcomes(played, name):
        assert rank["alias"] == {"right.weight": "left.weight"}


@pytest.mark.parametrize("name", ["large_fsdp2", "large_fsdp1"])
def test_beyond_the_result_one_tensor_is_held_at_a_time(played: Path, name: str) -> None:
    first, second = outcomes(played, name)
    assert first["names"] == sorted(f"{number}.weight" for number in range(LAYERS))
    assert first["right"] is True
    result = LAYERS * ONE_BYTES
    assert result <= first["get"] + SLACK_BYTES  # what is measured shows
    assert first["get"] - result <= ONE_BYTES + SLACK_BYTES
    assert second["get"] <= ONE_BYTES + SLACK_BYTES


@pytest.mark.parametrize("name", ["large_fsdp2", "large_fsdp1"])
def test_no_rank_holds_the_model_while_it_is_saved(played: Path, name: str) -> None:
    for rank in outcomes(played, name):
        assert rank["save"] <= 2 * ONE_BYTES + (4 << 20)  # one tensor, and a part of it as it came


@pytest.mark.parametrize("name", ["large_fsdp2", "large_fsdp1"])
def test_files_and_index_are_those_of_huggingface_hub(played: Path, name: str) -> None:
    folder = played / name / "place" / "hf"
    with torch.device("meta"):
        state = {f"{number}.weight": torch.empty(SIDE, SIDE) for number in range(LAYERS)}
    split = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(split.filename_to_tensors) > 2
    assert index["weight_map"] == split.tensor_to_filename
    assert index["metadata"]["total_size"] == split.metadata["total_size"] == LAYERS * ONE_BYTES
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*split.filename_to_tensors, "model.safetensors.index.json"]
    )
    for file, names in split.filename_to_tensors.items():
        with safe_open(folder / file, "pt") as opened:
            assert sorted(opened.keys()) == sorted(names)
            assert opened.metadata() == {"format": "pt"}
            for key in names:
                number = int(key.partition(".")[0])
                value = opened.get_tensor(key)
                assert tuple(value.shape) == (SIDE, SIDE)
                assert bool((value == number + 1).all())


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_transformers_loads_the_folder(played: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    folder = played / name / "place" / "hf"
    first = outcomes(played, name)[0]
    assert "config.json" in first["side"]
    assert (folder / "config.json").exists()
    assert len(first["files"]) > 2
    for file, size in first["files"].items():
        assert (folder / file).stat().st_size == size
    for cls in (LlamaForCausalLM, AutoModelForCausalLM):
        model, info = cls.from_pretrained(folder, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert_same(dict(model.state_dict()), first["expected"])
    assert first["tied"] == ({"lm_head.weight": "model.embed_tokens.weight"} if name == "llama_tied" else {})


def test_a_folder_with_content_is_refused_unless_it_may_be_replaced(played: Path) -> None:
    found = outcomes(played, "a_folder_in_the_way")
    place = played / "a_folder_in_the_way" / "place"
    for rank in found:
        assert rank["refused"]["kind"] == "DestinationExists"
        assert "overwrite=True" in rank["refused"]["hint"]
        assert rank["untouched"]
        assert rank["left"] == ["empty", "hf"]
        assert rank["destination"] == str(place / "hf")
    for out in ("hf", "empty"):
        assert [path.name for path in (place / out).iterdir()] == ["model.safetensors"]
        assert_same(read_safetensors(place / out), found[0]["expected"])


def test_a_disk_that_fills_up_on_one_rank_is_told_to_all(played: Path) -> None:
    found = outcomes(played, "a_disk_that_fills_up")
    for rank in found:
        assert rank["kind"] == "NotEnoughSpace"
        assert "rank 1: OSError: [Errno 28] No space left on device" in rank["message"]
        assert rank["left"] == []
    assert (played / "a_disk_that_fills_up" / "place" / "hf" / "model.safetensors.index.json").exists()


def test_a_group_of_ranks_exports_on_its_own(played: Path) -> None:
    found = outcomes(played, "of_one_group")
    assert_same(found[2]["state"], found[2]["expected"])
    assert [len(rank["state"]) for rank in found] == [0, 0, 2, 0]
