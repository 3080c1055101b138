from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.catalog import Checkpoint, Shape
from fsdp_ckpt.config.accelerate_yaml import read_config
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.validation.against_config import check_launch, check_model_config
from tests.build import rows, save_dcp
from tests.unit.ops.validation.made import found, model

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 4,
    "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}  # fmt: skip


def llama(layers: int = 2) -> dict[str, Shape]:
    """Names and shapes of the model of ``LLAMA``, written down by hand."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (16, 4), "model.norm.weight": (4,), "lm_head.weight": (16, 4),
    }  # fmt: skip
    for number in range(layers):
        inner: dict[str, Shape] = {
            "self_attn.q_proj": (4, 4), "self_attn.k_proj": (2, 4), "self_attn.v_proj": (2, 4),
            "self_attn.o_proj": (4, 4), "mlp.gate_proj": (6, 4), "mlp.up_proj": (6, 4), "mlp.down_proj": (4, 6),
            "input_layernorm": (4,), "post_attention_layernorm": (4,),
        }  # fmt: skip
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in inner.items()}
    return shapes


def check(shapes: Mapping[str, Shape], **config: Any) -> list[tuple[str, str, str]]:
    return found(check_model_config(model(shapes), LLAMA | config, "config.json"))


def test_a_model_that_fits() -> None:
    assert check(llama()) == []


def test_wrappers_in_its_names_do_not_matter() -> None:
    assert check({f"module._orig_mod.{name}": shape for name, shape in llama().items()}) == []


def test_the_base_model_without_its_prefix() -> None:
    shapes = {name.removeprefix("model."): shape for name, shape in llama().items()}
    assert check(shapes) == []
    del shapes["norm.weight"]
    assert check(shapes) == [("E", "missing-key", "norm.weight")]


@pytest.mark.parametrize("prefix", ["foo.", "model.wrapped."])
def test_another_prefix_is_one_finding(prefix: str) -> None:
    shapes = {prefix + name: shape for name, shape in llama().items()}
    (problem,) = check_model_config(model(shapes), LLAMA, "config.json")
    assert (problem.code, problem.severity) == ("prefix-differs", "error")
    assert problem.message.startswith(f"21 of 21 names have the prefix `{prefix}`")
    assert problem.message.endswith(f"merge with --rename '{prefix}='")


@pytest.mark.parametrize(("tied", "codes"), [(False, ["prefix-differs"]), (True, [])])
def test_a_head_that_other_models_may_have_elsewhere(tied: bool, codes: list[str]) -> None:
    shapes: dict[str, Shape] = {
        "foo.wte.weight": (16, 4),
        "foo.blocks.0.up.weight": (4, 4),
        "foo.lm_head.weight": (16, 4),
    }
    config = {"model_type": "other", "num_hidden_layers": 1, "tie_word_embeddings": tied}
    assert [code for letter, code, _ in check(shapes, **config) if letter != "N"] == codes


def test_behind_a_prefix_the_rest_is_compared() -> None:
    shapes = {f"foo.{name}": shape for name, shape in llama().items()}
    del shapes["foo.model.norm.weight"]
    assert [code for _, code, _ in check(shapes, vocab_size=12)] == [
        "prefix-differs", "missing-key", "shape-differs", "shape-differs",
    ]  # fmt: skip


def test_a_base_model_within_another_one() -> None:
    shapes = {
        f"foo.{name.removeprefix('model.')}": shape for name, shape in llama().items() if name != "lm_head.weight"
    }
    codes = [code for _, code, _ in check(shapes, architectures=["LlamaModel"])]
    assert codes == ["prefix-differs"]


def test_experts_that_are_missing() -> None:
    mixtral = {"model_type": "mixtral", "num_local_experts": 8}
    assert check(llama(), **mixtral) == [
        ("E", "missing-key", "model.embed_tokens.weight"),
        ("N", "compared-in-part", ""),
    ]
    experts: dict[str, Shape] = {"model.layers.0.block_sparse_moe.experts.0.w1.weight": (6, 4)}
    assert check(llama() | experts, **mixtral) == [("N", "compared-in-part", "")]


def test_a_layer_that_is_missing_is_one_finding() -> None:
    assert check(llama(2), num_hidden_layers=3) == [("E", "missing-key", "model.layers.2")]


def test_layers_that_are_too_many() -> None:
    (problem,) = check_model_config(model(llama(4)), LLAMA, "config.json")
    assert (problem.code, problem.severity, problem.where) == ("unexpected-key", "warning", "model.layers.2")
    assert problem.message == "2 layers more than the 2 of config.json: `model.layers.2`, `model.layers.3`"


def test_a_tensor_that_is_missing_is_told_with_its_shape() -> None:
    shapes = llama()
    del shapes["model.layers.1.mlp.down_proj.weight"]
    (problem,) = check_model_config(model(shapes), LLAMA, "config.json")
    assert problem.where == "model.layers.1.mlp.down_proj.weight"
    assert problem.message == "is not there, of the shape (4, 6), by config.json"


@pytest.mark.parametrize(
    ("config", "is_missed"),
    [
        ({}, True),
        ({"tie_word_embeddings": True}, False),
        ({"tie_word_embeddings": None}, False),
        ({"architectures": ["LlamaForSequenceClassification"]}, False),
    ],
)
def test_an_output_head_is_missed_only_where_there_has_to_be_one(config: dict[str, Any], is_missed: bool) -> None:
    shapes = llama()
    del shapes["lm_head.weight"]
    assert check(shapes, **config) == ([("E", "missing-key", "lm_head.weight")] if is_missed else [])


def test_shapes_that_differ() -> None:
    problems = list(check_model_config(model(llama()), LLAMA | {"vocab_size": 12}, "c.json"))
    assert [problem.where for problem in problems] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert {problem.message for problem in problems} == {"has the shape (16, 4); by c.json it is (12, 4)"}


def test_nothing_to_compare_with() -> None:
    with pytest.raises(UsageError, match="neither names nor shapes"):
        list(check_model_config(model(llama()), {"model_type": "resnet"}, "config.json"))


def test_a_whole_stack_that_is_missing() -> None:
    assert check({"model.embed_tokens.weight": (16, 4), "lm_head.weight": (16, 4)})[-2:] == [
        ("E", "missing-key", "layers.0"),
        ("E", "missing-key", "layers.1"),
    ]


def launch(folder: Path, kind: str, *, version: int = 1, processes: int = 2) -> Any:
    text = f"distributed_type: FSDP\nnum_processes: {processes}\nfsdp_config:\n  fsdp_version: {version}\n"
    (folder / "fsdp.yaml").write_text(f"{text}  fsdp_state_dict_type: {kind}\n")
    return read_config(folder / "fsdp.yaml")


def saved(folder: Path, style: str) -> Checkpoint:
    """Lay a model and an optimizer out as Accelerate does."""
    state = {"lin.weight": torch.ones(4, 2)}
    folder.mkdir()
    torch.save({"state": {"lin.weight": {"exp_avg": torch.ones(4, 2)}}, "param_groups": []}, folder / "optimizer.bin")
    match style:
        case "SHARDED_STATE_DICT":
            save_dcp(folder / "pytorch_model_fsdp_0", {"model": {"lin.weight": rows(torch.ones(4, 2), 2)}})
        case "FULL_STATE_DICT":
            torch.save(state, folder / "pytorch_model_fsdp.bin")
        case _:
            for rank in (0, 1):
                own = {"_flat_param": torch.ones(5)} if style == "LOCAL_STATE_DICT" else state
                torch.save(own, folder / f"pytorch_model_fsdp_0_rank{rank}.bin")
    return read_checkpoint(folder)


STYLES = ["SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"]


@pytest.mark.parametrize("style", [*STYLES, "use_dcp=False"])
@pytest.mark.parametrize("wanted", STYLES)
def test_the_kind_of_state_dict(wanted: str, style: str, tmp_path: Path) -> None:
    problems = list(check_launch(saved(tmp_path / "ck", style), launch(tmp_path, wanted), "fsdp.yaml"))
    kinds = [problem.code for problem in problems if problem.code == "other-state-dict-type"]
    assert kinds == ([] if style == wanted else ["other-state-dict-type"])
    if kinds:
        assert f"fsdp_state_dict_type: {wanted}" in problems[0].message


def test_flat_parameters_are_nothing_for_fsdp2(tmp_path: Path) -> None:
    config = launch(tmp_path, "SHARDED_STATE_DICT", version=2)
    problem, *_ = check_launch(saved(tmp_path / "ck", "LOCAL_STATE_DICT"), config, "fsdp.yaml")
    assert (problem.code, problem.severity) == ("other-state-dict-type", "error")
    assert "asks for FSDP2, which has none" in problem.message


def test_what_accelerate_did_not_lay_out_is_not_judged(tmp_path: Path) -> None:
    save_dcp(tmp_path / "ck", {"model": {"a": torch.ones(2)}, "optim": {"state": {"a": {"exp_avg": torch.ones(2)}}}})
    config = launch(tmp_path, "FULL_STATE_DICT")
    assert [p.severity for p in check_launch(read_checkpoint(tmp_path / "ck"), config, "fsdp.yaml")] == ["note"]


def test_processes_are_ranks(tmp_path: Path) -> None:
    here = saved(tmp_path / "ck", "SHARDED_STATE_DICT")
    for rank in (0, 1):
        torch.save({"step": 1}, here.root / f"random_states_{rank}.pkl")
    config = launch(tmp_path, "SHARDED_STATE_DICT", processes=4)
    (problem,) = check_launch(read_checkpoint(here.root), config, "fsdp.yaml")
    assert (problem.code, problem.message) == ("rng-world-size", "random states of ranks 2-3 begin anew")
