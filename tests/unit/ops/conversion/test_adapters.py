"""Models that PEFT wrapped: the model, the adapter, the one folded into the other. The judge is PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.catalog import DTYPES
from fsdp_ckpt.errors import AmbiguousPart, Incompatible, NameCollision, UsageError
from fsdp_ckpt.ops.conversion.adapter_config import AdapterConfig, read_adapter_config
from fsdp_ckpt.ops.conversion.adapters import base_of, export_adapter, holds_wrapped_model
from fsdp_ckpt.ops.conversion.hf_export import prepare_export
from fsdp_ckpt.plan.output import OutputTensor
from tests.build import assert_same
from tests.unit.plan.test_lora import tensor

pytest.importorskip("peft", reason="the judge; part of the test extra")

from tests.unit.ops.conversion import hf_models
from tests.unit.ops.conversion.peft_models import (
    gpt2,
    llama,
    loaded_by_peft,
    merged,
    save,
    shake,
    tensors_of,
    untied_gpt2,
    wrap,
    written,
)

# What PEFT calls of transformers, and not what it says of adapters: a warning of missing keys is still an error.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

P = "base_model.model."
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIG = AdapterConfig(source="--lora-alpha", values={"lora_alpha": 8})


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (llama, {"target_modules": ALL}),
        (llama, {"target_modules": ["q_proj"], "use_rslora": True}),
        (llama, {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["lm_head"]}),
        (
            llama,
            {
                "target_modules": ALL,
                "rank_pattern": {"q_proj": 5, r"layers\.1\.mlp\..*": 2},
                "alpha_pattern": {"model.layers.0.self_attn.k_proj": 3},
            },
        ),
        (llama, {"target_parameters": ["self_attn.q_proj.weight"], "target_modules": []}),
        (untied_gpt2, {"target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}),
        (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["ln_f"]}),
    ],
)
def test_folded_as_peft_folds(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    wrapped = wrap(make(), **options)
    folder = save(wrapped, tmp_path / "run")
    found = base_of(tensors_of(folder), fold=True, config=read_adapter_config(tmp_path / "run"))
    values = written(found.tensors, folder, tmp_path / "scratch")
    expected = merged(wrapped)
    assert sorted(values) == sorted(expected)
    before = wrapped.state_dict()
    changed = 0
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6)
        changed += f"{P}{name}" not in before
    assert changed == sum(".base_layer." in name or ".original_module." in name for name in before)


def test_a_tied_head_does_not_change_with_the_embedding(tmp_path: Path) -> None:
    # PEFT adds to the embedding in place, and so to the head, for which the adapter was not trained.
    wrapped = wrap(gpt2(), target_modules=["wte"])
    folder = save(wrapped, tmp_path / "run")
    found = base_of(tensors_of(folder), fold=True, config=read_adapter_config(tmp_path / "run"))
    assert "`transformer.wte.weight` and not `lm_head.weight`" in found.warnings[0]
    untied = gpt2(tie_word_embeddings=False)
    untied.load_state_dict(written(found.tensors, folder, tmp_path / "scratch"))
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(untied.eval()(tokens).logits, wrapped.eval()(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "target"), [("gpt2", "wte"), ("gpt2", "c_attn"), ("qwen2", "q_proj"), ("qwen2", "embed_tokens")]
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning")
def test_a_folded_model_for_transformers(
    kind: str, target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = hf_models.saved(tmp_path / "run", kind)
    wrapped = wrap(source.model, target_modules=[target], fan_in_fan_out=target == "c_attn")
    found = base_of(source.tensors(wrapped.state_dict()), fold=True, config=CONFIG)
    export = prepare_export(found.tensors, source.side())
    is_untied = "config.json: tie_word_embeddings is false" in export.notes
    assert is_untied is (target in ("wte", "embed_tokens"))
    model = hf_models.opened(source.write(export, tmp_path / "out"), caplog)
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, wrapped.eval()(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_folded_into_half_precision_is_nearer_than_peft(dtype: str, tmp_path: Path) -> None:
    # PEFT rounds the product as well as the sum; ours is rounded once.
    wrapped = wrap(llama().to(getattr(torch, dtype)), target_modules=ALL)
    folder = save(wrapped, tmp_path / "run")
    found = base_of(tensors_of(folder), fold=True, config=read_adapter_config(tmp_path / "run"))
    values = written(found.tensors, folder, tmp_path / "scratch")
    exact = merged(wrapped.double())
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    for name, value in values.items():
        assert value.dtype is getattr(torch, dtype)
        torch.testing.assert_close(value.double(), exact[name], rtol=epsilon / 2, atol=1e-6)


def test_folded_while_the_base_is_converted(tmp_path: Path) -> None:
    wrapped = wrap(llama(), target_modules=["q_proj"])
    folder = save(wrapped, tmp_path / "run")
    tensors = tensors_of(folder, dtype=DTYPES["bfloat16"])
    found = base_of(tensors, fold=True, config=read_adapter_config(tmp_path / "run"))
    values = written(found.tensors, folder, tmp_path / "scratch")
    expected = {name: value.to(torch.bfloat16) for name, value in merged(wrapped).items()}
    worst = max((values[name].float() - value.float()).abs().max().item() for name, value in expected.items())
    assert all(value.dtype is torch.bfloat16 for value in values.values())
    assert worst < 2**-8  # one step at 0.5 to 1, where a sum lay in the middle


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (llama, {"target_modules": ALL}),
        (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
        (llama, {"target_modules": ["q_proj"], "use_dora": True}),
        (llama, {"target_modules": ["q_proj", "embed_tokens"]}),
        (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"}),
        (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    ],
)
def test_exported_as_peft_saves_it(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    wrapped = wrap(make(), **options)
    folder = save(wrapped, tmp_path / "run")
    config = read_adapter_config(tmp_path / "run")
    found = export_adapter(tensors_of(folder), config=config)
    assert found.config == (tmp_path / "run/adapter_config.json").read_bytes()
    assert not found.warnings
    values = written(found.tensors, folder, tmp_path / "scratch")
    wrapped.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
    from safetensors.torch import load_file

    assert_same(values, load_file(tmp_path / "saved/adapter_model.safetensors"))
    again = loaded_by_peft(make(), values, found.config, tmp_path / "adapter")
    assert_same(again.state_dict(), wrapped.state_dict())


@pytest.mark.parametrize(
    "options", [{"target_modules": ALL}, {"target_modules": ["q_proj"], "layers_to_transform": [1]}]
)
def test_a_configuration_that_is_made_from_alpha(options: dict[str, Any], tmp_path: Path) -> None:
    wrapped = wrap(llama(), **options, rank_pattern={"model.layers.1.self_attn.q_proj": 5}, modules_to_save=["lm_head"])
    folder = save(wrapped, tmp_path / "run")
    found = export_adapter(tensors_of(folder), config=CONFIG)
    assert found.config is not None
    assert any("made from the shapes and --lora-alpha" in note for note in found.notes)
    values = written(found.tensors, folder, tmp_path / "scratch")
    again = loaded_by_peft(llama(), values, found.config, tmp_path / "adapter")
    assert_same(again.state_dict(), wrapped.state_dict())
    for name, value in merged(again).items():
        torch.testing.assert_close(value, merged(wrapped)[name], rtol=0, atol=0)


def test_nothing_is_invented_without_alpha(tmp_path: Path) -> None:
    folder = save(wrap(llama(), target_modules=["q_proj"]), tmp_path / "run")
    tensors = tensors_of(folder)
    found = export_adapter(tensors, config=None)
    assert found.config is None
    assert "no adapter_config.json" in found.warnings[0]
    assert "--adapter-config" in found.warnings[0]
    with pytest.raises(UsageError, match=r"adapter_config\.json") as caught:
        base_of(tensors, fold=True)
    assert "--adapter-config" in (caught.value.hint or "")


@pytest.mark.parametrize("fold", [False, True])
def test_the_base_model_under_its_own_names(fold: bool, tmp_path: Path) -> None:
    model = llama()
    names = list(model.state_dict())
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = wrap(model, target_modules=["q_proj"], modules_to_save=["lm_head"])
    folder = save(wrapped, tmp_path / "run")
    found = base_of(tensors_of(folder), fold=fold, config=read_adapter_config(tmp_path / "run"))
    assert sorted(tensor.name for tensor in found.tensors) == sorted(names)
    values = written(found.tensors, folder, tmp_path / "scratch")
    plain["lm_head.weight"] = wrapped.state_dict()[f"{P}lm_head.modules_to_save.default.weight"]
    same = {name for name, value in values.items() if torch.equal(value, plain[name])}
    assert len(names) - len(same) == (2 if fold else 0)
    told = " | ".join(found.notes)
    assert "as trained, from modules_to_save: `lm_head.weight`" in told
    assert "left out, as they were before training: `lm_head.weight`" in told
    assert ("folded adapter `default` into 2 weights, times 2.66667" in told) is fold
    assert (found.left_out or "").startswith("4 tensors of the adapter left out") is not fold


def test_one_of_several_adapters(tmp_path: Path) -> None:
    from peft import LoraConfig

    wrapped = wrap(llama(), target_modules=["q_proj"])
    wrapped.add_adapter("other", LoraConfig(r=2, lora_alpha=2, target_modules=["v_proj"], modules_to_save=["lm_head"]))
    shake(wrapped)
    folder = save(wrapped, tmp_path / "run")
    tensors = tensors_of(folder)
    with pytest.raises(AmbiguousPart, match="2 adapters: `default`, `other`") as caught:
        export_adapter(tensors, config=None)
    assert caught.value.hint == "choose one: --adapter default"
    with pytest.raises(UsageError, match="no adapter `mine`"):
        export_adapter(tensors, config=None, adapter="mine")
    config = AdapterConfig(source="--lora-alpha", values={"lora_alpha": 2})
    found = export_adapter(tensors, config=config, adapter="other")
    assert any("4 tensors of adapter `default` left out" in note for note in found.notes)
    values = written(found.tensors, folder, tmp_path / "scratch")
    wrapped.save_pretrained(tmp_path / "saved", selected_adapters=["other"])
    from safetensors.torch import load_file

    assert_same(values, load_file(tmp_path / "saved/other/adapter_model.safetensors"))
    folded = base_of(tensors, fold=True, config=config, adapter="other")
    wrapped.set_adapter("other")
    expected = merged(wrapped)
    for name, value in written(folded.tensors, folder, tmp_path / "scratch").items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6)


def test_an_adapter_folder_keeps_its_names_and_loses_wrappers(tmp_path: Path) -> None:
    # Case P11: saved under torch.compile.
    names = [f"_orig_mod.{P}layers.{i}.q_proj.lora_{side}.weight" for i in (0, 1) for side in "AB"]
    found = export_adapter([tensor(name, 2, 2) for name in names], config=CONFIG)
    assert [one.name for one in found.tensors] == [name.removeprefix("_orig_mod.") for name in names]
    whole = [tensor(name, 2, 2) for name in [*names, f"_orig_mod.{P}score.weight"]]
    found = export_adapter(whole, config=CONFIG)
    assert [one.name for one in found.tensors][-1] == f"{P}score.weight"
    with pytest.raises(Incompatible, match="without the model that it is for"):
        base_of(whole, fold=False)


def test_which_tensors_are_a_model_in_wrapping() -> None:
    alone = [f"{P}m.lora_A.weight", f"{P}m.lora_B.weight"]
    for names, expected in (
        ([*alone, f"{P}m.base_layer.weight"], True),
        ([f"{P}m.base_layer.weight"], True),
        (alone, False),
        (["m.weight"], False),
        (["prompt_encoder.default.embedding.weight", "base_model.model.norm.weight"], False),
    ):
        assert holds_wrapped_model([tensor(name, 2, 2) for name in names]) is expected, names


A, B, W = f"{P}m.lora_A.default.weight", f"{P}m.lora_B.default.weight", f"{P}m.base_layer.weight"


@pytest.mark.parametrize(
    ("extra", "said", "reason"),
    [
        ({f"{P}m.lora_magnitude_vector.default.weight": (6,)}, {}, "more to it than pairs"),
        ({f"{P}m.lora_B.default.bias": (6,)}, {}, "more to it than pairs"),
        ({f"{P}n.lora_A.default.weight": (2, 4)}, {}, "more to it than pairs"),
        ({f"{P}n.ia3_l.default": (4,)}, {}, "more to it than pairs"),
        ({}, {"use_dora": True}, "DoRA"),
        ({}, {"peft_type": "LOHA"}, "LOHA"),
        ({}, {"trainable_token_indices": [1]}, "rows of the embedding"),
        ({}, {"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({}, {"r": 3}, "rank 2; by --lora-alpha it is 3"),
        ({}, {"lora_alpha": None}, "tells no lora_alpha"),
        ({}, {"lora_alpha": "8"}, "tells no lora_alpha"),
        ({}, {"lora_alpha": float("nan")}, "tells no lora_alpha"),
        ({}, {"lora_alpha": True}, "tells no lora_alpha"),
        ({W: (5, 4)}, {}, r"\(5, 4\), \(6, 2\), \(2, 4\)"),
        ({W: (6, 4, 1)}, {}, "do not fit together"),
        ({B: (6, 3)}, {}, "do not fit together"),
        (
            {f"{P}n.lora_A.default.weight": (1, 3), f"{P}n.lora_B.default.weight": (3, 1)},
            {},
            r"`n\.weight`, which is not in the checkpoint",
        ),
    ],
)
def test_what_cannot_be_folded(extra: dict[str, tuple[int, ...]], said: dict[str, Any], reason: str) -> None:
    shapes = {W: (6, 4), A: (2, 4), B: (6, 2)} | extra
    config = AdapterConfig(source="--lora-alpha", values={"lora_alpha": 8, **said})
    with pytest.raises(Incompatible, match=reason):
        base_of([tensor(name, *shape) for name, shape in shapes.items()], fold=True, config=config)


@pytest.mark.parametrize("names", [["m.weight"], ["x", "y"]])
def test_without_adapter(names: list[str]) -> None:
    tensors = [tensor(name, 2, 2) for name in names]
    with pytest.raises(Incompatible, match="no adapter to fold"):
        base_of(tensors, fold=True, config=CONFIG)
    with pytest.raises(Incompatible, match="no adapter"):
        export_adapter(tensors, config=CONFIG)
    assert base_of(tensors, fold=False).tensors is tensors


def test_a_wrapped_model_whose_adapter_was_left_out() -> None:
    tensors = [tensor(name, 2, 2) for name in (W, f"{P}s.original_module.weight", f"{P}norm.weight")]
    found = base_of(tensors, fold=False)
    assert [one.name for one in found.tensors] == ["m.weight", "s.weight", "norm.weight"]
    assert found.notes == ["as they were before training, for the trained copies are not there: `s.weight`"]
    with pytest.raises(Incompatible, match="no adapter to fold"):
        base_of(tensors, fold=True, config=CONFIG)


def quantized(name: str, *shape: int) -> OutputTensor:
    from dataclasses import replace

    found = tensor(name, *shape)
    return replace(found, dtype=DTYPES["uint8"], source=replace(found.source, dtype=DTYPES["uint8"]))


def test_a_quantized_base_is_not_folded_into() -> None:
    with pytest.raises(Incompatible, match="uint8"):
        base_of([quantized(W, 6, 4), tensor(A, 2, 4), tensor(B, 6, 2)], fold=True, config=CONFIG)


def square(said: bool | None, *others: tuple[int, int]) -> list[bool]:
    """Return which weights are taken for (in, out): a square one first, then others of the shapes given."""
    shapes = {W: (4, 4), A: (2, 4), B: (4, 2)}
    for number, (rows, columns) in enumerate(others):
        shapes |= {f"{P}o{number}.base_layer.weight": (rows, columns), f"{P}o{number}.lora_A.default.weight": (2, 4)}
        shapes[f"{P}o{number}.lora_B.default.weight"] = (6, 2)
    values = {"lora_alpha": 8} | ({} if said is None else {"fan_in_fan_out": said})
    config = AdapterConfig(source="`adapter_config.json`", values=values)
    found = base_of([tensor(name, *shape) for name, shape in shapes.items()], fold=True, config=config)
    return [one.addition.transposed for one in found.tensors if one.addition is not None]


def test_which_way_round_a_square_weight_is() -> None:
    assert square(False) == [False]
    assert square(True) == [True]
    assert square(None) == [False]  # PEFT's default
    assert square(None, (4, 6)) == [True, True]
    assert square(False, (6, 4)) == [False, False]
    assert square(True, (4, 6)) == [True, True]


@pytest.mark.parametrize(("said", "others"), [(False, [(4, 6)]), (True, [(6, 4)]), (None, [(6, 4), (4, 6)])])
def test_a_square_weight_that_may_be_either_way_round(said: bool | None, others: list[tuple[int, int]]) -> None:
    with pytest.raises(Incompatible, match=r"`m` .* cannot be told"):
        square(said, *others)


def test_a_square_weight_of_which_nothing_is_known() -> None:
    names = [f"{P}attn.c_proj.{name.removeprefix(f'{P}m.')}" for name in (W, A, B)]
    tensors = [tensor(name, *shape) for name, shape in zip(names, [(4, 4), (2, 4), (4, 2)], strict=True)]
    with pytest.raises(Incompatible, match=r"`attn\.c_proj` .* cannot be told from --lora-alpha"):
        base_of(tensors, fold=True, config=CONFIG)
    for said in (False, True):
        config = AdapterConfig(source="x", values={"lora_alpha": 8, "fan_in_fan_out": said})
        (weight,) = base_of(tensors, fold=True, config=config).tensors
        assert weight.addition is not None
        assert weight.addition.transposed is said


def test_weights_that_are_no_longer_tied() -> None:
    shapes = {
        f"{P}embed_tokens.base_layer.weight": (9, 4), f"{P}embed_tokens.lora_embedding_A.default": (2, 9),
        f"{P}embed_tokens.lora_embedding_B.default": (4, 2), f"{P}lm_head.weight": (9, 4),
    }  # fmt: skip
    found = base_of([tensor(name, *shape) for name, shape in shapes.items()], fold=True, config=CONFIG)
    (warning,) = found.warnings
    assert "changes `embed_tokens.weight` and not `lm_head.weight`" in warning


def test_an_adapter_whose_base_was_changed_with_it() -> None:
    config = AdapterConfig(
        source="`adapter_config.json`", values={"lora_alpha": 8, "init_lora_weights": "pissa_niter_4"}, data=b"{}"
    )
    found = export_adapter([tensor(name, 2, 2) for name in (W, A, B)], config=config)
    assert "pissa" in found.warnings[0]
    assert "this checkpoint only" in found.warnings[0]


def test_every_tensor_is_written_or_told_of() -> None:
    names = [W, A, B, f"{P}s.original_module.weight", f"{P}s.modules_to_save.default.weight", f"{P}norm.weight"]
    tensors = [tensor(name, 2, 2) for name in names]
    found = export_adapter(tensors, config=CONFIG)
    assert [one.name for one in found.tensors] == [f"{P}m.lora_A.weight", f"{P}m.lora_B.weight", f"{P}s.weight"]
    assert found.notes[:2] == [
        "2 tensors of the base model left out, such as `m.weight`",
        "left out, as they were before training: `s.weight`",
    ]
    half = export_adapter([tensors[0], tensors[1]], config=CONFIG)
    assert "one of a pair of matrices is missing" in half.warnings[0]


def test_two_tensors_of_an_adapter_of_one_name() -> None:
    names = [A, B, f"{P}s.weight", f"{P}s.modules_to_save.default.weight"]
    with pytest.raises(NameCollision, match=rf"both be named `{P}s\.weight`"):
        export_adapter([tensor(name, 2, 2) for name in names], config=CONFIG)


def test_a_trained_copy_beside_a_tensor_of_its_name() -> None:
    tensors = [tensor(name, 2, 2) for name in (W, f"{P}s.weight", f"{P}s.modules_to_save.default.weight")]
    with pytest.raises(NameCollision, match=r"both be named `s\.weight`"):
        base_of(tensors, fold=False)
