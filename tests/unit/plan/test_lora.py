"""Names of models that PEFT wrapped. The names are those that PEFT gives: see also ops/conversion/test_adapters.py."""

from __future__ import annotations

import pytest

from fsdp_ckpt.catalog import DTYPES, TensorEntry
from fsdp_ckpt.errors import Incompatible, NameCollision
from fsdp_ckpt.plan.lora import PeftKind, has_adapter, parse_name, sort_tensors
from fsdp_ckpt.plan.output import OutputTensor

P = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"


def tensor(name: str, *shape: int) -> OutputTensor:
    entry = TensorEntry(key=name, name=name, dtype=DTYPES["float32"], shape=shape, chunks=())
    return OutputTensor(name=name, dtype=entry.dtype, source=entry)


@pytest.mark.parametrize(
    ("name", "kind", "base", "adapter", "inner"),
    [
        (f"{P}{Q}.base_layer.weight", PeftKind.BASE, f"{Q}.weight", "", f"{Q}.base_layer.weight"),
        (f"{P}{Q}.base_layer.bias", PeftKind.BASE, f"{Q}.bias", "", f"{Q}.base_layer.bias"),
        (f"{P}model.norm.weight", PeftKind.BASE, "model.norm.weight", "", "model.norm.weight"),
        (f"{Q}.base_layer.weight", PeftKind.BASE, f"{Q}.weight", "", f"{Q}.base_layer.weight"),
        (
            f"{P}model.embed_tokens.token_adapter.base_layer.weight",
            PeftKind.BASE,
            "model.embed_tokens.weight",
            "",
            "model.embed_tokens.token_adapter.base_layer.weight",
        ),
        (f"{P}lm_head.original_module.weight", PeftKind.ORIGINAL, "lm_head.weight", "", "lm_head.weight"),
        (f"{P}lm_head.modules_to_save.default.weight", PeftKind.TRAINED, "lm_head.weight", "default", "lm_head.weight"),
        (f"{P}score.modules_to_save.mine.dense.bias", PeftKind.TRAINED, "score.dense.bias", "mine", "score.dense.bias"),
        # A module that happens to have the name of a copy of PEFT's.
        (
            "modules_to_save.default.weight",
            PeftKind.BASE,
            "modules_to_save.default.weight",
            "",
            "modules_to_save.default.weight",
        ),
        ("weight", PeftKind.BASE, "weight", "", "weight"),
    ],
)  # fmt: skip
def test_tensors_of_the_model(name: str, kind: PeftKind, base: str, adapter: str, inner: str) -> None:
    found = parse_name(name)
    assert (found.kind, found.base, found.adapter, found.inner) == (kind, base, adapter, inner)


@pytest.mark.parametrize(
    ("name", "module", "part", "adapter", "inner"),
    [
        (f"{P}{Q}.lora_A.default.weight", Q, "lora_A", "default", f"{Q}.lora_A.weight"),
        (f"{P}{Q}.lora_B.default.weight", Q, "lora_B", "default", f"{Q}.lora_B.weight"),
        (f"{P}{Q}.lora_B.default.bias", Q, "lora_B", "default", f"{Q}.lora_B.bias"),
        (f"{P}{Q}.lora_A.other_1.weight", Q, "lora_A", "other_1", f"{Q}.lora_A.weight"),
        (f"{P}{Q}.lora_A.weight", Q, "lora_A", "default", f"{Q}.lora_A.weight"),
        (f"_orig_mod.{P}{Q}.lora_A.weight", Q, "lora_A", "default", f"{Q}.lora_A.weight"),
        (f"{P}model._fsdp_wrapped_module.e.lora_A.a.weight", "model.e", "lora_A", "a", "model.e.lora_A.weight"),
        (f"model.{P}{Q}.lora_A.default.weight", Q, "lora_A", "default", f"{Q}.lora_A.weight"),
        (f"{Q}.lora_A.default.weight", Q, "lora_A", "default", f"{Q}.lora_A.weight"),
        (f"{P}e.lora_embedding_A.default", "e", "lora_embedding_A", "default", "e.lora_embedding_A"),
        (f"{P}e.lora_embedding_B", "e", "lora_embedding_B", "default", "e.lora_embedding_B"),
        (f"{P}q.lora_magnitude_vector.a.weight", "q", "lora_magnitude_vector", "a", "q.lora_magnitude_vector"),
        (f"{P}q.lora_magnitude_vector", "q", "lora_magnitude_vector", "default", "q.lora_magnitude_vector"),
        (f"{P}k.ia3_l.default", "k", "ia3_l", "default", "k.ia3_l"),
        (f"{P}k.hada_w1_a.default", "k", "hada_w1_a", "default", "k.hada_w1_a"),
        (
            f"{P}e.token_adapter.trainable_tokens_delta.default",
            "e",
            "trainable_tokens_delta",
            "default",
            "e.token_adapter.trainable_tokens_delta",
        ),
        # Two parameters of one module: PEFT puts one layer around the other.
        (f"{P}mlp.e.base_layer.lora_A.a.weight", "mlp.e", "lora_A", "a", "mlp.e.base_layer.lora_A.weight"),
    ],
)  # fmt: skip
def test_tensors_of_adapters(name: str, module: str, part: str, adapter: str, inner: str) -> None:
    found = parse_name(name)
    assert found.kind is PeftKind.TUNED
    assert (found.module, found.part, found.adapter, found.inner) == (module, part, adapter, inner)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.attn.w_lora.lora.0.weight",  # RWKV's own
        "model.lora_A.layers.0.q_proj.weight",  # a module of that name
        "lora_A.weight",  # the tensors of P49: there is no module that they would belong to
        "transformer.h.0.lora_down.weight",
    ],
)
def test_what_only_looks_like_an_adapter(name: str) -> None:
    assert parse_name(name).kind is PeftKind.BASE
    assert not has_adapter([name])


def test_pairs_and_what_is_in_none() -> None:
    names = {
        f"{P}a.base_layer.weight": (4, 3), f"{P}a.lora_A.default.weight": (2, 3), f"{P}a.lora_B.default.weight": (4, 2),
        f"{P}e.base_layer.weight": (9, 3), f"{P}e.lora_embedding_A.default": (2, 9),
        f"{P}e.lora_embedding_B.default": (3, 2), f"{P}alone.lora_A.default.weight": (2, 3),
        f"{P}a.lora_magnitude_vector.default.weight": (4,), f"{P}a.lora_B.default.bias": (4,),
        f"{P}a.lora_A.other.weight": (1, 3), f"{P}s.modules_to_save.other.weight": (2, 2),
        f"{P}s.original_module.weight": (2, 2),
    }  # fmt: skip
    model = sort_tensors([tensor(name, *shape) for name, shape in names.items()])
    assert list(model.base) == ["a.weight", "e.weight"]
    assert list(model.originals) == ["s.weight"]
    assert list(model.adapters) == ["default", "other"]
    default, other = model.adapters.values()
    assert {module: (pair.rank, pair.is_embedding) for module, pair in default.pairs.items()} == {
        "a": (2, False),
        "e": (2, True),
    }
    assert (default.pairs["e"].up.shape, default.pairs["e"].down.shape) == ((3, 2), (2, 9))
    assert list(default.unpaired) == ["alone.lora_A.weight", "a.lora_magnitude_vector", "a.lora_B.bias"]
    assert (list(other.trained), list(other.unpaired), other.pairs) == (["s.weight"], ["a.lora_A.weight"], {})
    assert model.has_base
    held = [*model.base, *model.originals]
    held += [name for one in model.adapters.values() for name in (*one.tuned, *one.trained)]
    assert len(held) == len(names)


def test_an_adapter_alone_is_no_model() -> None:
    alone = [tensor(f"{P}a.lora_A.weight", 2, 3), tensor(f"{P}a.lora_B.weight", 4, 2), tensor(f"{P}s.weight", 2, 2)]
    assert not sort_tensors(alone).has_base
    assert sort_tensors([*alone, tensor(f"{P}a.base_layer.weight", 4, 3)]).has_base
    assert not sort_tensors(alone[:2]).has_base
    other = [tensor(f"{P}k.ia3_l", 4), alone[2]]
    assert not sort_tensors(other).has_base
    assert sort_tensors([*other, tensor(f"{P}k.base_layer.weight", 4, 4)]).has_base


@pytest.mark.parametrize(
    "names",
    [
        (f"{P}a.base_layer.weight", f"{P}a.weight"),
        (f"{P}a.lora_A.default.weight", f"{P}a.lora_A.weight"),
        (f"{P}s.modules_to_save.x.weight", f"model.{P}s.modules_to_save.x.weight"),
    ],
)
def test_two_tensors_of_one_name(names: tuple[str, str]) -> None:
    with pytest.raises(NameCollision) as caught:
        sort_tensors([tensor(name, 2, 2) for name in names])
    assert all(f"`{name}`" in caught.value.message for name in names)


def test_prompt_tuning_is_refused() -> None:
    # There `base_model.model.` is PEFT's `base_model.` and Llama's own `model.`.
    names = ["prompt_encoder.default.embedding.weight", "base_model.model.layers.0.q_proj.weight"]
    with pytest.raises(Incompatible, match="prompt tuning"):
        sort_tensors([tensor(name, 2, 2) for name in names])
