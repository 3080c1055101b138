"""The model card says what the files say, in Markdown that no name in them can break."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.sharing.hub_address import parse_hub_address
from fsdp_ckpt.ops.sharing.model_card import write_card

FIXTURES = Path(__file__).parents[4] / "fixtures"
ADDRESS = parse_hub_address("hf://owner/name@side/step-2")


def card_of(path: Path, **changes: object) -> str:
    checkpoint = replace(read_checkpoint(path), **changes)  # type: ignore[arg-type]
    return write_card(checkpoint, checkpoint.parts, ADDRESS)


def test_facts_stand_in_it_and_the_hub_library_reads_it() -> None:
    text = card_of(FIXTURES / "frameworks/trainer/checkpoint-2")
    card = ModelCard(text)
    data = {name: value for name, value in vars(card.data).items() if value is not None}
    assert data == {"tags": ["pytorch", "checkpoint", "fsdp-ckpt"], "library_name": "transformers"}
    assert "| training step | 2 |" in text
    assert "680 parameters, 2.72 kB (12 tensors float32)" in text  # 12 tensors of 680 elements, four bytes each
    assert "fsdp-ckpt pull hf://owner/name/step-2 checkpoint" in text
    assert str(FIXTURES) not in text


def test_a_sharded_checkpoint_says_how_to_merge_it() -> None:
    text = card_of(FIXTURES / "torch-2.13.0/fsdp2_sharded_w2/pytorch_model_fsdp_0")
    assert "fsdp-ckpt merge checkpoint model" in text
    assert "library_name" not in text


def test_versions_are_those_of_our_manifest(tmp_path: Path) -> None:
    import torch

    from tests.unit.ops.saved_by_us import save_small

    text = card_of(save_small(tmp_path / "step-7"))
    assert f"torch {torch.__version__}" in text.replace("\\", "")
    assert "| training step | 7 |" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    "name", ["a|b`c", "<script>x</script>", "[x](http://evil)", "a\nb", "a\x1b[31m", "# x", "x" * 500]
)
def test_names_mean_nothing_to_markdown(name: str) -> None:
    path = FIXTURES / "torch-2.13.0/fsdp2_sharded_w2/pytorch_model_fsdp_0"
    checkpoint = read_checkpoint(path)
    parts = [replace(part, name=name, writer=name) for part in checkpoint.parts]
    harmless = [replace(part, name="x", writer="x") for part in checkpoint.parts]
    plain = write_card(replace(checkpoint, title="x"), harmless, ADDRESS).splitlines()
    lines = write_card(replace(checkpoint, title=name), parts, ADDRESS).splitlines()
    assert len(lines) == len(plain)
    for ours, theirs in zip(lines, plain, strict=True):
        if ours != theirs:  # a row of the table: two cells, and nothing in them that is not escaped
            assert re.fullmatch(r"\| ([^\\|`<>\[\]#\x00-\x1f]|\\.)* \| ([^\\|`<>\[\]#\x00-\x1f]|\\.)* \|", ours), ours
            assert len(ours) < 400
