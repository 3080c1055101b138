from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fsdp_ckpt
from fsdp_ckpt.catalog import Role
from fsdp_ckpt.findings import KINDS
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.validation.names import check_names
from tests.build import rows, save_dcp
from tests.compat.samples import EDGES, FIXTURES, SAMPLES, Sample, sample_id
from tests.unit.ops.validation.made import checkpoint, codes, found, full, model

HERE = [sample for sample in SAMPLES if sample.folder.is_relative_to(FIXTURES)]
FLAT = {"local_state_dict_w2": ["flat-parameters"], "local_state_dict_flat_w2": ["flat-parameters"]}


def names_in(folder: Path, **shapes: Any) -> list[tuple[str, str, str]]:
    return found(check_names(checkpoint(folder, model(shapes))))


@pytest.mark.parametrize("sample", HERE, ids=sample_id)
def test_only_flat_parameters_are_found_in_what_torch_wrote(sample: Sample, tmp_path: Path) -> None:
    assert codes(check_names(read_checkpoint(sample.copy(tmp_path / "ck")))) == FLAT.get(sample.variant, [])


@pytest.mark.parametrize("folder", EDGES, ids=sample_id)
def test_nothing_is_found_in_the_corners_of_the_format(folder: Path) -> None:
    problems = list(check_names(read_checkpoint(folder)))
    assert codes(problems) == []
    # A tensor `empty0` of size 0 was saved on purpose, beside `empty2d`.
    assert [problem.code for problem in problems] == (["empty-tensor"] if folder.name == "layouts" else [])


def test_an_optimizer_of_slices_is_less_than_an_error(tmp_path: Path) -> None:
    # What verl saves of FSDP1: whole weights, but each rank's slices of the moments.
    for rank in (0, 1):
        torch.save({"lin.weight": torch.ones(4, 2)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        state = {"state": {0: {"exp_avg": torch.ones(5 - 2 * rank)}}, "param_groups": [{"params": [0]}]}
        torch.save(state, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    assert found(check_names(read_checkpoint(tmp_path))) == [("N", "flat-parameters", "optim")]


def test_wrappers_are_counted_and_named(tmp_path: Path) -> None:
    # Case P09, its second half.
    shapes = {
        "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.attn.weight": (4, 4),
        "module.layers.0.mlp.weight": (4, 4),
        "layers.0.attn.bias": (4,),
        "layers.0._orig_mod.mlp.bias": (4,),
    }
    (problem,) = check_names(checkpoint(tmp_path, model(shapes)))
    assert (problem.code, problem.severity, problem.where) == ("wrapper-prefix", "warning", next(iter(shapes)))
    assert problem.message.startswith("3 of 4 names have the prefix of a wrapper")
    assert "`_orig_mod.` 2" in problem.message
    assert "`module.` 1" in problem.message


def test_a_module_of_that_name_further_down_is_no_wrapper(tmp_path: Path) -> None:
    assert names_in(tmp_path, **{"layers.module.weight": (4, 4), "my_orig_mod.weight": (4,)}) == []


def test_adapters_that_peft_would_not_match(tmp_path: Path) -> None:
    # Case P11.
    names = [f"layers.{layer}.q_proj.lora_{kind}.weight" for layer in (0, 1) for kind in "AB"]
    shapes = {f"_orig_mod.base_model.model.{name}": (2, 6) for name in names}
    file = full(tmp_path / "adapter_model.safetensors", shapes)
    (problem,) = check_names(read_checkpoint(file))
    assert (problem.code, problem.severity) == ("adapter-prefix", "warning")
    assert "4 of 4 names do not begin with `base_model.model.` but with `_orig_mod.`" in problem.message


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("base_model.model._orig_mod.model.q_proj.lora_A.weight", "have a wrapper in them (`_orig_mod.`)"),
        ("base_model.model.layers.0._fsdp_wrapped_module.q_proj.lora_B.weight", "(`_fsdp_wrapped_module.`)"),
        ("base_model.model.layers.0.q_proj.lora_A.default.weight", "the adapter's name in them (`.default`)"),
        ("base_model.model.wte.lora_embedding_A.mine", "the adapter's name in them (`.mine`)"),
        ("layers.0.q_proj.lora_A.weight", "do not begin with `base_model.model.`"),
    ],
)
def test_other_ways_to_miss_what_peft_looks_for(name: str, why: str, tmp_path: Path) -> None:
    src = tmp_path / "src"
    src.mkdir()
    (problem,) = check_names(read_checkpoint(full(src / "adapter_model.safetensors", {name: (2, 6)})))
    assert (problem.code, problem.severity, problem.where) == ("adapter-prefix", "warning", name)
    assert why in problem.message
    # The command that is named mends it.
    assert shlex.split(KINDS["adapter-prefix"].command) == shlex.split("fsdp-ckpt convert {path} OUT --to adapter")
    fsdp_ckpt.convert(src, tmp_path / "OUT", to="adapter")
    assert list(check_names(read_checkpoint(tmp_path / "OUT"))) == []


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.layers.0.q_proj.lora_A.weight",
        "base_model.model.wte.lora_embedding_A",
        "base_model.model.layers.0.q_proj.lora_B.bias",
        "prompt_embeddings",
    ],
)
def test_adapters_as_peft_writes_them(name: str, tmp_path: Path) -> None:
    assert list(check_names(read_checkpoint(full(tmp_path / "adapter_model.safetensors", {name: (2, 6)})))) == []


def test_tensors_without_elements(tmp_path: Path) -> None:
    # Case P13, without config.json: the two of size 0, and the embedding by its name.
    shapes = {"model.embed_tokens.weight": (32,), "model.norm.weight": (0,), "lm_head.weight": (0,), "other": (32,)}
    assert names_in(tmp_path, **shapes) == [
        ("E", "empty-tensor", "model.norm.weight"),
        ("E", "empty-tensor", "lm_head.weight"),
        ("E", "flattened-tensor", "model.embed_tokens.weight"),
    ]


def test_a_buffer_without_elements_is_a_note(tmp_path: Path) -> None:
    shapes = {"cache": (0, 8), "past": (0,), "attn._extra_state": (0,)}
    assert names_in(tmp_path, **shapes) == [("N", "empty-tensor", "cache")]


def test_ranks_without_rows_are_no_fault(tmp_path: Path) -> None:
    save_dcp(
        tmp_path / "ck", {"model": {"norm.weight": rows(torch.ones(1), 3), "bias": rows(torch.ones(2), 3)}}, ranks=3
    )
    assert list(check_names(read_checkpoint(tmp_path / "ck"))) == []


def test_packed_integers_are_not_flattened_weights(tmp_path: Path) -> None:
    packed = model({"layers.0.self_attn.q_proj.weight": (512,)}, dtype="uint8")
    assert list(check_names(checkpoint(tmp_path, packed))) == []


def test_many_empty_tensors_are_cut_short(tmp_path: Path) -> None:
    problems = list(check_names(checkpoint(tmp_path, model({f"layers.{n}.weight": (0,) for n in range(120)}))))
    assert len(problems) == 51
    assert problems[-1].message == "… and 70 more of this kind"


def config(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("kind", [{}, {"model_type": "llama"}])
def test_shapes_that_config_json_expects(kind: dict[str, str], tmp_path: Path) -> None:
    # Case P13: exactly these three, with found and expected shapes.
    config(tmp_path, vocab_size=16, hidden_size=4, num_hidden_layers=1, **kind)
    shapes = {
        "model.embed_tokens.weight": (32,),
        "model.norm.weight": (0,),
        "lm_head.weight": (0,),
        "model.layers.0.self_attn.q_proj.weight": (4, 4),
    }
    problems = list(check_names(read_checkpoint(full(tmp_path / "model.safetensors", shapes).parent)))
    messages = {problem.where: problem.message for problem in problems}
    assert set(messages) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert {problem.severity for problem in problems} == {"error"}
    assert messages["model.embed_tokens.weight"] == "has the shape (32,); by config.json it is (16, 4)"
    assert messages["lm_head.weight"] == "has the shape (0,); by config.json it is (16, 4)"
    assert messages["model.norm.weight"].startswith("has the shape (0,)")


def test_a_vocabulary_that_config_json_does_not_know(tmp_path: Path) -> None:
    config(tmp_path, vocab_size=16, hidden_size=4, num_hidden_layers=1)
    assert names_in(tmp_path, **{"model.embed_tokens.weight": (20, 4)}) == [
        ("W", "shape-differs", "model.embed_tokens.weight")
    ]


@pytest.mark.parametrize(("missing", "letter"), [("", "E"), ("num_key_value_heads", "W")])
def test_a_configuration_that_tells_all_sizes_is_believed(missing: str, letter: str, tmp_path: Path) -> None:
    sizes = {"intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes.pop(missing, None)
    config(tmp_path, model_type="llama", vocab_size=16, hidden_size=4, num_hidden_layers=1, **sizes)
    weights = full(tmp_path / "model.safetensors", {"model.norm.weight": (8,)})
    assert found(check_names(read_checkpoint(weights.parent))) == [(letter, "shape-differs", "model.norm.weight")]
    # load_state goes by the model, whatever lies beside the weights.
    other = model({"model.norm.weight": (8,)}, dialect="dcp")
    assert found(check_names(checkpoint(tmp_path, other))) == [("W", "shape-differs", "model.norm.weight")]


@pytest.mark.parametrize(
    "other", [{"quantization_config": {"bits": 4}}, {"word_embed_proj_dim": 2}, {"pad_vocab_size_multiple": 8}]
)
def test_configurations_that_leave_the_shape_open(other: dict[str, Any], tmp_path: Path) -> None:
    config(tmp_path, vocab_size=16, hidden_size=4, num_hidden_layers=1, **other)
    assert names_in(tmp_path, **{"model.embed_tokens.weight": (20, 4)}) == []


@pytest.mark.parametrize("text", ["{", "[1]", "{}"])
def test_a_broken_configuration_tells_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert names_in(tmp_path, **{"model.embed_tokens.weight": (20, 4)}) == []


def local(folder: Path, **others: torch.Tensor) -> Path:
    flat = {"_flat_param": rows(torch.arange(100.0), 2)}
    named = {name.replace("__", "."): value for name, value in others.items()}
    return save_dcp(folder, {"model": {**flat, **named}})


def test_local_slices_saved_through_dcp(tmp_path: Path) -> None:
    # As FSDP1 with use_orig_params=True leaves Sequential(Linear(6, 8), LayerNorm(8), Linear(8, 3)) on two ranks.
    slices = {"0__weight": torch.ones(48), "1__weight": torch.ones(0), "0__bias": torch.ones(6)}
    problems = list(check_names(read_checkpoint(local(tmp_path / "ck", **slices))))
    assert codes(problems) == ["flat-parameters", "local-slices"]
    assert problems[1].severity == "error"
    assert problems[1].message.startswith("3 tensors beside the flat parameters are one rank's slices")


def test_slices_are_known_by_a_bias_of_another_length(tmp_path: Path) -> None:
    slices = {"0__weight": torch.ones(48), "0__bias": torch.ones(6)}
    assert "local-slices" in codes(check_names(read_checkpoint(local(tmp_path / "ck", **slices))))


def test_what_fsdp1_does_not_manage_is_whole(tmp_path: Path) -> None:
    # use_orig_params=False: buffers, and a norm that was left out of the wrapping.
    others = {"mask": torch.ones(5), "norm__weight": torch.ones(8), "norm__bias": torch.ones(8)}
    assert codes(check_names(read_checkpoint(local(tmp_path / "ck", **others)))) == ["flat-parameters"]


def test_optimizers_are_not_judged_by_the_names_of_models(tmp_path: Path) -> None:
    moments = model({"module.lm_head.weight": (0,)}, role=Role.OPTIMIZER)
    assert list(check_names(checkpoint(tmp_path, moments))) == []


def test_only_config_json_within_the_checkpoint_is_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text(json.dumps({"vocab_size": 16, "hidden_size": 4}))
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/config.json").symlink_to(outside)
    save_file({"embed_tokens.weight": torch.zeros(20, 4)}, tmp_path / "ck/model.safetensors")
    assert list(check_names(read_checkpoint(tmp_path / "ck"))) == []
