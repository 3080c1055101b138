from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_ckpt.catalog import Problem, Shape
from fsdp_ckpt.errors import AmbiguousPart, CheckpointNotFound, NoModelWeights, UsageError
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.validation.against import check_against, fit_sentence
from tests.build import rows, save_dcp
from tests.compat.samples import FIXTURES, SAMPLES, Sample, sample_id
from tests.unit.ops.validation.made import found, full

RIGHT = [s for s in SAMPLES if s.folder.is_relative_to(FIXTURES) and not s.is_flat and not s.is_wrong]
SHAPES: dict[str, Shape] = {
    "embed_tokens.weight": (8, 4), "layers.0.up.weight": (6, 4), "layers.0.up.bias": (6,), "norm.weight": (4,),
}  # fmt: skip


def dcp(folder: Path, shapes: Mapping[str, Shape], *, prefix: str = "", **more: Any) -> Path:
    state = {prefix + name: rows(torch.zeros(shape), 2) for name, shape in shapes.items()}
    return save_dcp(folder, {"model": state, **more})


def against(folder: Path, other: Path | str, **options: Any) -> list[Problem]:
    return list(check_against(read_checkpoint(folder), str(other), **options))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return dcp(tmp_path / "ck", SHAPES)


@pytest.mark.parametrize("sample", RIGHT, ids=sample_id)
def test_what_torch_wrote_fits_the_model_that_was_wrapped(sample: Sample, tmp_path: Path) -> None:
    # expected.safetensors is the unsharded model; layout.json lists what the writer could store of it.
    problems = against(sample.copy(tmp_path / "ck"), sample.folder / "expected.safetensors")
    left_out = load_file(sample.folder / "expected.safetensors").keys() - sample.layout.keys()
    assert sorted(found(problems)) == [("E", "missing-key", name) for name in sorted(left_out)]


def test_a_file_that_fits(saved: Path, tmp_path: Path) -> None:
    assert against(saved, full(tmp_path / "model.safetensors", SHAPES)) == []


def test_another_checkpoint_and_wrappers_on_either_side(saved: Path, tmp_path: Path) -> None:
    other = dcp(tmp_path / "other", SHAPES, prefix="module._orig_mod.")
    assert against(saved, other) == []
    assert against(other, saved) == []


def test_differences(saved: Path, tmp_path: Path) -> None:
    shapes = {**SHAPES, "embed_tokens.weight": (12, 4), "head.weight": (2, 4)}
    del shapes["norm.weight"]
    problems = against(saved, full(tmp_path / "target.safetensors", shapes))
    assert found(problems) == [
        ("E", "missing-key", "head.weight"),
        ("W", "unexpected-key", "model.norm.weight"),
        ("E", "shape-differs", "model.embed_tokens.weight"),
    ]
    assert problems[0].message == "is not there; in target.safetensors it has the shape (2, 4)"
    # Case P52: global shapes, not those of a rank.
    assert problems[2].message == "has the shape (8, 4); in target.safetensors it has (12, 4)"


def test_element_types_that_differ_are_one_warning(saved: Path, tmp_path: Path) -> None:
    (problem,) = against(saved, full(tmp_path / "model.safetensors", SHAPES, dtype=torch.bfloat16))
    assert (problem.code, problem.severity) == ("dtype-differs", "warning")
    assert problem.message.startswith("4 tensors are float32, in model.safetensors bfloat16: `model.")


def test_numbers_of_another_kind_are_an_error(saved: Path, tmp_path: Path) -> None:
    # As load_state refuses them.
    (problem,) = against(saved, full(tmp_path / "model.safetensors", SHAPES, dtype=torch.int32))
    assert (problem.code, problem.severity) == ("dtype-differs", "error")


@pytest.mark.parametrize(
    ("ours", "theirs", "rule"),
    [
        ("", "model.", "'s/^/model./'"),
        ("model.", "", "'model.='"),
        ("model.language_model.", "", "'model.language_model.='"),
        ("", "base_model.model.", "'s/^/base_model.model./'"),
    ],
)
def test_a_prefix_is_one_finding(ours: str, theirs: str, rule: str, tmp_path: Path) -> None:
    here = dcp(tmp_path / "ck", SHAPES, prefix=ours)
    other = full(tmp_path / "target.safetensors", {theirs + name: shape for name, shape in SHAPES.items()})
    (problem,) = against(here, other)
    assert (problem.code, problem.severity) == ("prefix-differs", "error")
    assert f"merge with --rename {rule}" in problem.message
    assert problem.message.startswith("4 of 4 names")


def test_behind_a_prefix_the_rest_is_compared(tmp_path: Path) -> None:
    here = dcp(tmp_path / "ck", SHAPES)
    shapes = {f"model.{name}": shape for name, shape in SHAPES.items()}
    shapes |= {"model.norm.weight": (5,), "model.extra.weight": (2,), "lm_head.weight": (8, 4)}
    assert found(against(here, full(tmp_path / "target.safetensors", shapes))) == [
        ("E", "prefix-differs", "model.embed_tokens.weight"),
        ("E", "missing-key", "lm_head.weight"),
        ("E", "missing-key", "model.extra.weight"),
        ("E", "shape-differs", "model.norm.weight"),
    ]


def test_the_rule_that_is_named_does_it(tmp_path: Path) -> None:
    import fsdp_ckpt

    here = dcp(tmp_path / "ck", SHAPES)
    other = full(tmp_path / "target.safetensors", {f"model.{name}": shape for name, shape in SHAPES.items()})
    fsdp_ckpt.merge(here, tmp_path / "out", rename=["s/^/model./"])
    assert against(tmp_path / "out", other) == []


def test_many_missing_tensors_are_cut_short(saved: Path, tmp_path: Path) -> None:
    shapes = SHAPES | {f"layers.{n}.gate": (2,) for n in range(60)}
    problems = against(saved, full(tmp_path / "target.safetensors", shapes))
    assert len(problems) == 51
    assert problems[-1].message == "… and 10 more of this kind"


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_head_that_is_the_embedding(tied: bool, tmp_path: Path) -> None:
    shapes = {**SHAPES, "lm_head.weight": (8, 4)}
    other = full(tmp_path / "target/model.safetensors", shapes)
    config = {"vocab_size": 8, "hidden_size": 4, "architectures": ["XForCausalLM"], "tie_word_embeddings": tied}
    (tmp_path / "target/config.json").write_text(json.dumps(config))
    here = dcp(tmp_path / "ck", SHAPES)
    assert found(against(here, other.parent)) == ([] if tied else [("E", "missing-key", "lm_head.weight")])


def test_one_tensor_under_two_names_is_there_under_either(saved: Path, tmp_path: Path) -> None:
    state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    torch.save({**state, "lm_head.weight": state["embed_tokens.weight"]}, tmp_path / "pytorch_model.bin")
    assert against(saved, tmp_path / "pytorch_model.bin") == []


def test_buffers_that_some_versions_compute(saved: Path, tmp_path: Path) -> None:
    # Case P56 and its kin.
    shapes = {**SHAPES, "layers.0.rotary_emb.inv_freq": (2,)}
    other = full(tmp_path / "target.safetensors", shapes)
    assert against(saved, other) == []
    assert against(other, full(tmp_path / "plain.safetensors", SHAPES)) == []


def test_an_optimizer_that_only_the_other_has(saved: Path, tmp_path: Path) -> None:
    other = dcp(tmp_path / "other", SHAPES, optim={"state": {"norm.weight": {"exp_avg": torch.zeros(4)}}})
    assert found(against(saved, other)) == [("E", "no-optimizer", "")]
    assert against(other, saved) == []


def test_flat_parameters_cannot_be_compared(saved: Path, tmp_path: Path) -> None:
    flat = save_dcp(tmp_path / "flat", {"model": {"_flat_param": rows(torch.ones(100), 2)}})
    assert found(against(flat, saved)) == found(against(saved, flat)) == [("N", "flat-parameters", "model")]


CONFIG = {"model_type": "llama", "vocab_size": 12, "hidden_size": 4}


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_configuration_of_the_model(is_folder: bool, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps(CONFIG))
    (problem,) = against(saved, tmp_path / ("target" if is_folder else "target/config.json"))
    assert problem.message == "has the shape (8, 4); by config.json it is (12, 4)"


@pytest.mark.parametrize("name", ["fsdp.yaml", "job.json"])
def test_a_configuration_of_the_job(name: str, saved: Path, tmp_path: Path) -> None:
    job = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}
    (tmp_path / name).write_text(json.dumps(job))
    assert [problem.code for problem in against(saved, tmp_path / name)] == ["no-optimizer", "missing-rng"]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("config.json", "{", UsageError),
        ("config.json", "[1, 2]", UsageError),
        ("config.json", "{}", UsageError),
        ("fsdp.yaml", "a: b", UsageError),
        ("model.safetensors", "", CheckpointNotFound),
    ],
)
def test_what_is_nothing_to_compare_with(
    name: str, text: str, error: type[Exception], saved: Path, tmp_path: Path
) -> None:
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(error):
        against(saved, tmp_path / name)


def test_a_path_that_is_not_there(saved: Path, tmp_path: Path) -> None:
    for name in ("none.yaml", "none/config.json", "none"):
        with pytest.raises(CheckpointNotFound, match="does not exist"):
            against(saved, tmp_path / name)


def test_one_of_several_models_is_named(saved: Path, tmp_path: Path) -> None:
    for number in (0, 1):
        shapes: dict[str, Shape] = {"a.weight": (4, 2)} if number == 0 else SHAPES
        dcp(tmp_path / f"run/pytorch_model_fsdp_{number}", shapes)
    with pytest.raises(AmbiguousPart):
        against(tmp_path / "run", saved)
    assert against(tmp_path / "run", saved, part="pytorch_model_fsdp_1") == []


def test_an_optimizer_is_no_model(saved: Path, tmp_path: Path) -> None:
    save_dcp(tmp_path / "optimizer_0", {"optimizer": {"state": {"a": {"exp_avg": torch.ones(2)}}}})
    with pytest.raises(NoModelWeights):
        against(saved, tmp_path / "optimizer_0")


LORA: dict[str, Shape] = {
    "base_model.model.layers.0.up.lora_A.weight": (2, 4), "base_model.model.layers.0.up.lora_B.weight": (6, 2),
    "base_model.model.embed_tokens.lora_embedding_A": (2, 8), "base_model.model.embed_tokens.lora_embedding_B": (4, 2),
    "base_model.model.norm.weight": (4,),
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "model."])
def test_an_adapter_is_compared_with_its_base_model(prefix: str, tmp_path: Path) -> None:
    base = full(tmp_path / "base.safetensors", {prefix + name: shape for name, shape in SHAPES.items()})
    (problem,) = against(full(tmp_path / "a/adapter_model.safetensors", LORA), base)
    assert (problem.code, problem.severity) == ("adapter", "note")
    assert problem.message == "5 of 5 tensors belong to a weight of base.safetensors"


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    shapes: dict[str, Shape] = {"layers.0.up.lora_A.weight": (2, 6), "layers.9.up.lora_A.weight": (2, 4)}
    more = {f"base_model.model.{name}": shape for name, shape in shapes.items()}
    problems = against(
        full(tmp_path / "a/adapter_model.safetensors", LORA | more), full(tmp_path / "base.safetensors", SHAPES)
    )
    assert found(problems) == [
        ("N", "adapter", "adapter_model"),
        ("W", "unexpected-key", "base_model.model.layers.9.up.lora_A.weight"),
        ("E", "shape-differs", "base_model.model.layers.0.up.lora_A.weight"),
    ]
    assert problems[2].message == "has the shape (2, 6); `layers.0.up.weight` in base.safetensors (6, 4)"


def test_the_matrices_of_gpt2_are_turned(tmp_path: Path) -> None:
    base = full(tmp_path / "base.safetensors", {"transformer.h.0.attn.c_attn.weight": (4, 12)})
    name = "base_model.model.transformer.h.0.attn.c_attn.lora_"
    lora = full(tmp_path / "a/adapter_model.safetensors", {f"{name}A.weight": (2, 4), f"{name}B.weight": (12, 2)})
    assert found(against(lora, base)) == [("N", "adapter", "adapter_model")]


def test_an_adapter_is_not_in_the_configuration_of_its_base_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    adapter = full(tmp_path / "a/adapter_model.safetensors", LORA)
    assert found(against(adapter, tmp_path / "config.json")) == [("N", "adapter", "adapter_model")]


def test_that_it_fits_in_a_line(saved: Path, tmp_path: Path) -> None:
    other = str(full(tmp_path / "target.safetensors", SHAPES))
    assert fit_sentence(read_checkpoint(saved), other, against(saved, other)) == "fits target.safetensors: 4 tensors"
    other = str(full(tmp_path / "target.safetensors", {"other": (2,)}))
    assert fit_sentence(read_checkpoint(saved), other, against(saved, other)) == ""


def test_unrelated_names_are_no_prefix(saved: Path, tmp_path: Path) -> None:
    save_file(
        {f"x.y{n}": torch.zeros(2) for n in range(3)} | {"z.norm.weight": torch.zeros(4)}, tmp_path / "o.safetensors"
    )
    problems = against(saved, tmp_path / "o.safetensors")
    assert "prefix-differs" not in [problem.code for problem in problems]
    assert len([problem for problem in problems if problem.code == "missing-key"]) == 4
