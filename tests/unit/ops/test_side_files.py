from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_ckpt.ops.side_files import SideFiles, find_side_files

CONFIG = {"model_type": "llama", "tie_word_embeddings": True}
# What save_pretrained of models, tokenizers and processors leaves beside the weights.
WANTED = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "modeling_custom.py",
    "configuration_custom.py",
    "adapter_config.json",
    "qwen.tiktoken",
]
UNWANTED = [
    "optimizer.pt",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
    "rng_state.pth",
    "model.safetensors",
    "pytorch_model.bin",
    "README.md",
    "train.py",
    "events.out.tfevents",
    "random_states_0.pkl",
    ".metadata",
    "__0_0.distcp",
    "fsdp_config.json.bak",
    "notes.txt",
]


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(json.dumps(CONFIG) if name == "config.json" else name)
    return folder


def names(found: SideFiles, folder: Path) -> dict[str, str]:
    return {name: str(path.parent.relative_to(folder)) for name, path in found.files.items()}


def test_what_a_model_needs_is_found_and_nothing_else(tmp_path: Path) -> None:
    found = find_side_files(fill(tmp_path / "model", *WANTED, *UNWANTED))
    assert set(found.files) == set(WANTED)
    assert found.missing == ()
    assert found.config == CONFIG


def test_folders_above_a_part(tmp_path: Path) -> None:
    # Case P21: checkpoint-2000/pytorch_model_fsdp_0, with the files of the model beside and above it.
    fill(tmp_path, "tokenizer.json", "tokenizer_config.json", "config.json")
    fill(tmp_path / "checkpoint-2000", "config.json", "generation_config.json", "trainer_state.json")
    part = fill(tmp_path / "checkpoint-2000" / "pytorch_model_fsdp_0", ".metadata")
    found = find_side_files(part)
    assert names(found, tmp_path) == {
        "config.json": "checkpoint-2000", "generation_config.json": "checkpoint-2000", "tokenizer.json": ".",
        "tokenizer_config.json": ".",
    }  # fmt: skip
    assert found.missing == ()


def test_verl_keeps_them_in_a_folder_of_their_own(tmp_path: Path) -> None:
    actor = fill(tmp_path / "global_step_10" / "actor", "model_world_size_2_rank_0.pt")
    fill(actor / "huggingface", "config.json", "tokenizer.json")
    assert names(find_side_files(actor), actor) == {"config.json": "huggingface", "tokenizer.json": "huggingface"}


@pytest.mark.parametrize("name", ["my-model", "weights-final", "run7"])
def test_other_folders_are_not_left_upwards(name: str, tmp_path: Path) -> None:
    fill(tmp_path, "config.json", "tokenizer.json")
    found = find_side_files(fill(tmp_path / name, "x"))
    assert not found.files
    assert found.missing == ("config.json", "tokenizer_config.json")


def test_a_config_of_something_else_is_passed_over(tmp_path: Path) -> None:
    fill(tmp_path, "config.json")
    below = fill(tmp_path / "checkpoint-1", "tokenizer.json")
    (below / "config.json").write_text('{"lr": 0.1}')
    assert names(find_side_files(below), tmp_path) == {"tokenizer.json": "checkpoint-1", "config.json": "."}


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"model_type": ', "\xff", "5"])
def test_a_broken_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    found = find_side_files(tmp_path)
    assert "config.json" in found.missing
    assert found.config == {}


def test_links_within_the_folder_are_followed_and_others_left_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    model = fill(tmp_path / "model", "tokenizer-v2.bak")
    (model / "tokenizer.json").symlink_to("tokenizer-v2.bak")
    (model / "vocab.txt").symlink_to("../secret")
    (model / "vocab.json").mkdir()
    (model / "merges.txt").symlink_to("nowhere")
    found = find_side_files(model)
    assert set(found.files) == {"tokenizer.json"}
    assert found.files["tokenizer.json"].read_text() == "tokenizer-v2.bak"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert find_side_files(tmp_path / "nothing").files == {}
