"""Cases of themes 3 and 4: tied, shared and non-contiguous tensors, dtypes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases.check import assert_same, bits, load_file, merge_and_load, run
from tests.cases.models import Tied, mixed, reference


def test_p14_tied_weights_load_strictly_by_default(built: Path, tmp_path: Path) -> None:
    """EvolvingLMMs-Lab/lmms-engine#157: no name of a tied pair is lost."""
    report, found = merge_and_load(built / "p14", tmp_path / "out")
    assert_same(found, reference(Tied()))
    model = Tied()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.load_state_dict(found, strict=True)
    assert_same(model.state_dict(), reference(Tied()))
    assert not report.tied


def test_p14_with_the_option_one_copy_is_stored(built: Path, tmp_path: Path) -> None:
    """The embedding's name is kept, 256 bytes are saved, and the report says so."""
    both, _ = merge_and_load(built / "p14", tmp_path / "both", tie=False)
    report, found = merge_and_load(built / "p14", tmp_path / "one", tie=True)
    expected = reference(Tied())
    del expected["lm_head.weight"]
    assert_same(found, expected)
    assert both.tensor_bytes - report.tensor_bytes == 256
    assert report.tied == {"lm_head.weight": "embed.weight"}


def test_p14_config_json_may_ask_for_it(built: Path, tmp_path: Path) -> None:
    """`tie_word_embeddings` of the model's config is followed, and the command says what it did."""
    (tmp_path / "step-1").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True}))
    for path in (built / "p14").iterdir():
        (tmp_path / "step-1" / path.name).write_bytes(path.read_bytes())
    result = run("merge", tmp_path / "step-1", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "lm_head.weight is embed.weight" in result.stdout
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == ["embed.weight", "mid.bias", "mid.weight"]


def test_p14_heads_that_differ_are_both_kept(built: Path, tmp_path: Path) -> None:
    """Asked to tie what is not equal, a merge keeps both and warns."""
    state = reference(Tied()) | {"lm_head.weight": torch.ones(16, 4)}
    torch.save(state, tmp_path / "pytorch_model_fsdp.bin")
    report, found = merge_and_load(tmp_path / "pytorch_model_fsdp.bin", tmp_path / "out", tie=True)
    assert_same(found, state)
    assert any("lm_head.weight" in text and "differ" in text for text in report.warnings)


@pytest.fixture
def shared_storage(tmp_path: Path) -> Path:
    """P15's full file: one tensor under two names, a transposed one, two halves of one storage."""
    weight, big = torch.arange(64.0).reshape(16, 4), torch.arange(4000.0).reshape(4, 1000)
    state = {
        "embed.weight": weight,
        "lm_head.weight": weight,
        "mid.weight": torch.arange(16.0).reshape(4, 4).t(),
        "a": big[0:2],
        "b": big[2:4],
    }
    torch.save(state, tmp_path / "full.pt")
    return tmp_path / "full.pt"


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_p15_shared_and_transposed_tensors_of_a_full_file(kind: str, shared_storage: Path, tmp_path: Path) -> None:
    """safetensors#98, #304, #469, Megatron-Bridge#919: 'tensors share memory', 'non contiguous tensor'.

    The same input as convert will get; here merge has to write it right.
    """
    report, found = merge_and_load(shared_storage, tmp_path / "out", format=kind)
    assert_same(found, load_file(shared_storage))
    assert report.aliases == {"lm_head.weight": "embed.weight"}
    assert all(value.is_contiguous() for value in found.values())
    # embed, head, mid, and 8000 bytes each for a and b rather than the 16000 of their storage
    assert report.tensor_bytes == 256 + 256 + 64 + 8000 + 8000
    assert [found[name].untyped_storage().nbytes() for name in "ab"] == [8000, 8000]


def test_p15_the_command_reports_the_share(shared_storage: Path, tmp_path: Path) -> None:
    """A line names both."""
    result = run("merge", shared_storage, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "lm_head.weight and embed.weight are one tensor" in result.stdout


def test_p17_dtypes_are_kept_by_default(built: Path, tmp_path: Path) -> None:
    """meta-llama/llama-cookbook#289, huggingface/transformers#33780: nothing is converted unasked."""
    report, found = merge_and_load(built / "p17", tmp_path / "out")
    assert_same(found, mixed())
    assert not report.cast


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_p17_casts_round_as_torch_does(target: torch.dtype, built: Path, tmp_path: Path) -> None:
    """NaN, infinity, subnormals and the sign of zero included.

    convert: test_convert. The load of a bf16 checkpoint into an fp32 model: test_state_model.
    """
    report, found = merge_and_load(built / "p17", tmp_path / "out", dtype=str(target).removeprefix("torch."))
    expected = {name: value.to(target) for name, value in mixed().items()}
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys("xyz", target)
    for name, value in expected.items():
        _assert_equal_values(found[name], value)
    assert sum(report.cast.values()) == sum(value.dtype != target for value in mixed().values())


def test_p17_the_rounded_values_of_the_report(built: Path, tmp_path: Path) -> None:
    """1.00390625 -> 1.0 and 1.01171875 -> 1.015625 (ties to even); -0.0 keeps its sign; bf16 stays as it is."""
    _, found = merge_and_load(built / "p17", tmp_path / "out", dtype="bfloat16")
    assert found["x"][:3].tolist() == [1.0, 1.0, 1.015625]
    assert torch.signbit(found["x"][7])
    assert found["x"][7] == 0
    assert torch.equal(bits(found["y"]), bits(mixed()["y"]))


def _assert_equal_values(found: Tensor, expected: Tensor) -> None:
    """Compare bits, except for which of the NaNs a NaN became."""
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(bits(found[~is_nan]), bits(expected[~is_nan]))
