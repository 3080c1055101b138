"""Folders for transformers. The judge is ``AutoModelForCausalLM.from_pretrained``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.catalog import DTYPES
from fsdp_ckpt.errors import Incompatible, UsageError
from fsdp_ckpt.ops.conversion import hf_expected
from fsdp_ckpt.ops.conversion.hf_export import prepare_export
from fsdp_ckpt.ops.side_files import SideFiles
from fsdp_ckpt.ops.ties import tie
from fsdp_ckpt.plan.merge import Selection
from fsdp_ckpt.run.sources import Sources
from tests.build import assert_same
from tests.unit.ops.conversion.hf_models import Saved, opened, saved


@pytest.fixture(params=["transformers", "rules"])
def judge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compare with what transformers says, and as where it is not installed."""
    if request.param == "rules":
        monkeypatch.setattr(hf_expected, "meta_shapes", lambda _: None)
    return str(request.param)


@pytest.mark.usefixtures("judge")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_model_as_it_is(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = saved(tmp_path / "run", kind)
    (source.folder / "tokenizer_config.json").write_text("{}")
    found = source.export()
    assert (list(found.notes), list(found.warnings)) == ([], [])
    assert found.files["config.json"] == (source.folder / "config.json").read_bytes()
    assert isinstance(found.files["tokenizer_config.json"], Path)  # a tokenizer may be large
    assert_same(opened(source.write(found, tmp_path / "out"), caplog).state_dict(), source.state)


CHANGES: dict[str, tuple[str, Callable[[str], str], str]] = {
    "a model within another one": ("llama", lambda name: f"actor.{name}", "`actor.` was taken off"),
    "wrapped twice": ("llama", lambda name: f"student.backbone.{name}", "`student.backbone.` was taken off"),
    "model. twice": ("llama", lambda name: f"model.{name}", "`model.` was taken off"),
    "the base model of a tied one": ("qwen2", lambda name: name.removeprefix("model."), "`model.` was put before"),
    "another base name": ("qwen2", lambda name: name.replace("model.", "net.core.", 1), "`net.core.` became `model.`"),
    "GPT-2 without head": ("gpt2", lambda name: name.removeprefix("transformer."), "`transformer.` was put before"),
    "a head of its own beside a bare base": ("llama", lambda name: name.removeprefix("model."), "`model.` was put"),
}


@pytest.mark.usefixtures("judge")
@pytest.mark.parametrize("what", CHANGES)
def test_prefixes(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, rename, told = CHANGES[what]
    source = saved(tmp_path / "run", kind)
    tied = kind != "llama"
    state = {rename(name): value for name, value in source.state.items() if not (tied and "lm_head" in name)}
    found = source.export(state)
    assert any(told in note for note in found.notes)
    assert_same(opened(source.write(found, tmp_path / "out"), caplog).state_dict(), source.state)


@pytest.mark.usefixtures("judge")
def test_what_stands_beside_the_model_stays_and_is_told_of(tmp_path: Path) -> None:
    source = saved(tmp_path / "run", "llama")
    state = {f"pretrained_model.{name}": value for name, value in source.state.items()}
    found = source.export({**state, "v_head.summary.weight": torch.ones(1, 16)})
    assert [tensor.name for tensor in found.tensors][-1] == "v_head.summary.weight"
    assert any("1 tensor that" in text and "`v_head.summary.weight`" in text for text in found.warnings)


@pytest.mark.usefixtures("judge")
def test_two_models_are_not_chosen_from(tmp_path: Path) -> None:
    source = saved(tmp_path / "run", "llama")
    state = {f"{one}.{name}": value for one in ("actor", "ref") for name, value in source.state.items()}
    with pytest.raises(Incompatible, match=r"`actor\.` and `ref\.`") as caught:
        source.export(state)
    assert caught.value.hint == "choose one: --include 'actor.*'"


def without(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    assert name in state
    return {key: value for key, value in state.items() if key != name}


NORM = "model.layers.1.input_layernorm.weight"
EMBED = "model.embed_tokens.weight"


@pytest.mark.usefixtures("judge")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: without(state, NORM), rf"`{NORM}` is missing, \(16,\) expected"),
        (lambda state: without(state, "lm_head.weight"), r"`lm_head\.weight` is missing, \(40, 16\) expected"),
        (
            lambda state: {**state, EMBED: torch.ones(44, 16)},
            rf"`{EMBED}` has the shape \(44, 16\), \(40, 16\) expected",
        ),
        (lambda state: {**state, NORM: torch.ones(8)}, rf"`{NORM}` has the shape \(8,\), \(16,\) expected"),
        # A prefix that would leave something out is not guessed at.
        (
            lambda state: without({f"actor.{name}": value for name, value in state.items()}, f"actor.{NORM}"),
            "21 tensors not as",
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused(change: Any, told: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "run", "llama", tie_word_embeddings=False)
    with pytest.raises(Incompatible, match=told) as caught:
        source.export(change(source.state))
    assert "--config-from" in (caught.value.hint or "")
    assert caught.value.exit_code == 8


def test_up_to_eight_faults_are_listed(tmp_path: Path) -> None:
    source = saved(tmp_path / "run", "llama")
    state = {name: value for name, value in source.state.items() if "layers" not in name}
    with pytest.raises(Incompatible) as caught:
        source.export(state)
    assert caught.value.message.startswith("18 tensors not as LlamaForCausalLM needs")
    assert len(re.findall("is missing", caught.value.message)) == 8
    assert caught.value.message.endswith("; and 10 more")


@pytest.mark.usefixtures("judge")
@pytest.mark.parametrize("said", [True, False])
def test_a_head_that_equals_the_embedding(said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = saved(tmp_path / "run", "llama", tie_word_embeddings=said)
    state = {**source.state, "lm_head.weight": source.state[EMBED].clone()}
    tensors = source.tensors(state)
    with Sources(source.folder / "sharded") as sources:
        selection, _ = tie(Selection(tensors=tensors), sources, asked=True)
    assert dict(selection.tied) == {"lm_head.weight": EMBED}
    found = prepare_export(selection.tensors, source.side(), tied=selection.tied)
    assert ("config.json: tie_word_embeddings is true" in found.notes) is not said
    assert len(found.tensors) == len(state) - 1
    assert_same(opened(source.write(found, tmp_path / "out"), caplog).state_dict(), state)


@pytest.mark.usefixtures("judge")
def test_a_tied_head_under_a_prefix(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = saved(tmp_path / "run", "llama", tie_word_embeddings=False)
    state = {**source.state, "lm_head.weight": source.state[EMBED].clone()}
    tensors = source.tensors({f"actor.{name}": value for name, value in state.items()})
    with Sources(source.folder / "sharded") as sources:
        selection, _ = tie(Selection(tensors=tensors), sources, asked=True)
    found = prepare_export(selection.tensors, source.side(), tied=selection.tied)
    assert_same(opened(source.write(found, tmp_path / "out"), caplog).state_dict(), state)


@pytest.mark.parametrize("keys", [["dtype"], ["torch_dtype"], ["dtype", "torch_dtype"], []])
def test_the_configuration_tells_the_new_dtype(
    keys: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved(tmp_path / "run", "llama")
    config = json.loads((source.folder / "config.json").read_text())
    plain = {key: value for key, value in config.items() if "dtype" not in key}
    (source.folder / "config.json").write_text(json.dumps(plain | dict.fromkeys(keys, "float32")))
    found = source.export(dtype=DTYPES["bfloat16"])
    assert not isinstance(found.files["config.json"], Path)
    written = json.loads(found.files["config.json"])
    assert {key: value for key, value in written.items() if "dtype" in key} == dict.fromkeys(
        keys or ["dtype"], "bfloat16"
    )
    assert {key: value for key, value in written.items() if "dtype" not in key} == plain
    model = opened(source.write(found, tmp_path / "out"), caplog, dtype="auto")
    assert_same(model.state_dict(), {name: value.to(torch.bfloat16) for name, value in source.state.items()})


@pytest.mark.parametrize(("version", "key"), [("4.40.1", "torch_dtype"), ("4.56.0", "dtype"), ("", "torch_dtype")])
def test_a_configuration_of_an_older_version(version: str, key: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "run", "llama")
    config = json.loads((source.folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if "dtype" not in name}
    (source.folder / "config.json").write_text(json.dumps(config | {"transformers_version": version}))
    found = source.export(dtype=DTYPES["float16"])
    assert not isinstance(found.files["config.json"], Path)
    assert json.loads(found.files["config.json"])[key] == "float16"
    assert f"config.json: {key} is float16" in found.notes


def test_tensors_of_another_dtype_than_the_configuration(tmp_path: Path) -> None:
    source = saved(tmp_path / "run", "llama", dtype="bfloat16")
    found = source.export({name: value.float() for name, value in source.state.items()})
    assert "the tensors are float32; by config.json they are loaded as bfloat16" in found.notes
    assert found.files["config.json"] == (source.folder / "config.json").read_bytes()


def test_experts_that_transformers_renames_while_it_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = saved(tmp_path / "run", "mixtral")
    source.model.save_pretrained(tmp_path / "saved")  # writes the names that all versions read
    from safetensors.torch import load_file

    state = load_file(tmp_path / "saved/model.safetensors")
    assert state.keys() != source.state.keys()
    for number, one in enumerate((state, source.state)):
        found = Saved(source.model, source.folder).export(one)
        assert not [text for text in found.warnings if "tokenizer" not in text]
        assert_same(opened(source.write(found, tmp_path / f"{number}/out"), caplog).state_dict(), source.state)
    state.pop(next(name for name in state if "gate" in name))
    with pytest.raises(Incompatible, match=r"gate\.weight` is missing"):
        source.export(state)


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "of-nobody", "architectures": ["Mine"]},
        {"model_type": ["x"], "architectures": {"a": 1}},
        {"num_hidden_layers": 10**9},
    ],
)
def test_what_is_not_compared_is_told_of(change: dict[str, Any], tmp_path: Path) -> None:
    source = saved(tmp_path / "run", "llama")
    config = json.loads((source.folder / "config.json").read_text())
    (source.folder / "config.json").write_text(json.dumps(config | change))
    found = source.export({"w": torch.ones(2)})
    assert "names and shapes were not compared with config.json" in found.notes[0]
    assert [tensor.name for tensor in found.tensors] == ["w"]


def test_without_configuration() -> None:
    with pytest.raises(UsageError, match=r"needs a config\.json"):
        prepare_export([], SideFiles())
