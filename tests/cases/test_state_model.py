"""The save_state and load_state halves of themes 1, 2, 4, 9 and 10: models, their names and shapes, and paths.

What several ranks did is in `played`, see `state_ranks`; the rest is loaded here, without a process group.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.optim import AdamW

import fsdp_ckpt
from fsdp_ckpt.errors import StateMismatch, UnsafePickle, UsageError
from tests.cases.check import assert_same, merge_and_load
from tests.cases.judge import payload_bytes, stock
from tests.cases.models import Buffers, Embed, Layered, Mlp, Odd, oddly_named, reference
from tests.cases.state_training import Position, blank, moments_of, seeded
from tests.cases.test_paths import ODD
from tests.cases.test_pickles import Touch, in_full_file, in_metadata, in_rank_file
from tests.dist.stage import outcomes

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("form", ["fsdp2", "fsdp1", "ours"])
def test_p05_fewer_rows_than_ranks(form: str, played: Path) -> None:
    """pytorch/pytorch#108869, #102821: with empty chunks (FSDP2), without them (FSDP1), and as save_state stores it."""
    for found in outcomes(played, "p05"):
        assert_same(found[form], reference(Odd()))


@pytest.mark.parametrize("file", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize(
    ("target", "placements", "rows"),
    [("1-D", "(Shard(dim=0),)", [1, 0, 0, 0]), ("2-D", "(Shard(dim=0), Replicate())", [1, 1, 0, 0])],
)
def test_p06_one_row_from_a_full_file(file: str, target: str, placements: str, rows: list[int], played: Path) -> None:
    """pytorch/pytorch#136228: ranks have (1, 17) or (0, 17), and not (2, 17)."""
    for count, found in zip(rows, outcomes(played, "p06"), strict=True):
        shown, local, whole = found[f"{file} {target}"]
        assert (shown, local) == (placements, (count, 17))
        assert torch.equal(whole, torch.arange(17.0).view(1, 17))


def test_p08_replicas_are_saved_once(played: Path, tmp_path: Path) -> None:
    """pytorch/torchtitan#799, #709, pytorch/pytorch#145978: 488 bytes and not 976, told by torch's own reader."""
    for found in outcomes(played, "p08"):
        assert found["local"] == (4, 6)
        assert_same(found["loaded"], reference(Mlp()))
    folder = played / "p08/place/ck/pytorch_model_fsdp_0"
    assert payload_bytes(folder) == 488
    _, merged = merge_and_load(folder.parent, tmp_path / "out")
    assert_same(merged, reference(Mlp()))
    assert_same(stock(folder)["model"], reference(Mlp()))


def test_p09_names_with_wrappers_fit_the_plain_model(built: Path) -> None:
    """pytorch/torchtitan#2622, pytorch/pytorch#117399, mosaicml/composer#2745: saved names have _orig_mod in them."""
    model = blank(Layered())
    report = fsdp_ckpt.load_state(built / "p09", model)
    assert_same(reference(model), reference(Layered()))
    assert report.renamed == {
        f"layers.0._orig_mod.{name}": f"layers.0.{name}"
        for name in ("attn.weight", "attn.bias", "mlp.weight", "mlp.bias")
    }


def test_p09_every_wrapper_prefix(tmp_path: Path) -> None:
    """The hand-made one: FSDP1's, the checkpoint wrapper's, torch.compile's and DDP's."""
    wrapped = {
        "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.attn.weight": torch.full((4, 4), 1.0),
        "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.attn.bias": torch.full((4,), 2.0),
        "module.layers.0.mlp.weight": torch.full((4, 4), 3.0),
        "module.layers.0.mlp.bias": torch.full((4,), 4.0),
    }
    dcp.save({"model": wrapped}, checkpoint_id=tmp_path / "ck")
    model = Layered()
    fsdp_ckpt.load_state(tmp_path / "ck", model)
    names = ("layers.0.attn.weight", "layers.0.attn.bias", "layers.0.mlp.weight", "layers.0.mlp.bias")
    assert_same(reference(model), dict(zip(names, wrapped.values(), strict=True)))


def test_p17_a_bf16_checkpoint_into_an_fp32_model(played: Path) -> None:
    """llama-cookbook#289, transformers#33780, instructlab/training#477: widened exactly, and said so."""
    expected = {name: value.bfloat16().float() for name, value in reference(seeded(1)).items()}
    for report, found in outcomes(played, "p17"):
        assert_same(found, expected)
        assert report.cast == dict.fromkeys(expected, "bfloat16 -> float32")


@pytest.mark.parametrize(("rows", "resize"), [(10, None), (10, "grow"), (16, None)])
def test_p52_another_vocabulary_is_refused_with_global_shapes(rows: int, resize: str | None, played: Path) -> None:
    """wall-x#114, torchtune#2542, transformers#40382: (12, 4) and not what one rank has; nothing is touched."""
    for error, state, moments, _ in (found[f"{rows} {resize}"] for found in outcomes(played, "p52")):
        assert error.kind == "StateMismatch"
        for text in ("embed.weight", "(12, 4)", f"({rows}, 4)"):
            assert text in error.message
        assert_same(state, {"embed.weight": torch.full((rows, 4), -1.0)})
        assert moments == {}


@pytest.mark.parametrize(("rows", "resize"), [(16, "grow"), (16, "truncate"), (10, "truncate")])
def test_p52_rows_are_added_or_dropped_on_request(rows: int, resize: str, played: Path) -> None:
    """New rows keep what they hold, their moments are zero; and moments follow the same rule."""
    kept = min(rows, 12)
    for found in outcomes(played, "p52"):
        saved, saved_moments = found["saved"]
        error, state, moments, report = found[f"{rows} {resize}"]
        assert error is None
        weight = state["embed.weight"]
        assert weight.shape == (rows, 4)
        assert torch.equal(weight[:kept], saved["embed.weight"][:kept])
        assert torch.equal(weight[kept:], torch.full((rows - kept, 4), -1.0))
        for kind in ("exp_avg", "exp_avg_sq"):
            moment, old = moments["embed.weight"][kind], saved_moments["embed.weight"][kind]
            assert old[:kept].count_nonzero() > 30
            assert moment.shape == (rows, 4)
            assert torch.equal(moment[:kept], old[:kept])
            assert not moment[kept:].any()
        assert moments["embed.weight"]["step"] == 1
        assert report.resized == {"embed.weight": ((12, 4), (rows, 4))}


def test_p52_the_saved_values_are_those_that_were_trained(played: Path) -> None:
    """The step changed the embedding, so the test above compares something."""
    (saved, _), *_ = (found["saved"] for found in outcomes(played, "p52"))
    assert not torch.equal(saved["embed.weight"], reference(Embed())["embed.weight"])


@pytest.mark.parametrize("url", ["gs://bucket/step-1", "az://bucket/a//b", "ftp://ck"])
def test_p53_schemes_that_cannot_be_had_are_refused_unchanged(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gcs-connector-for-pytorch#144, pytorch-lightning#19802: no folder called `gs:`, the URL as it was given."""
    monkeypatch.chdir(tmp_path)
    model = Mlp()
    with pytest.raises(UsageError, match=f"`{url}`"):
        fsdp_ckpt.save_state(url, model)
    with pytest.raises(UsageError, match=f"`{url}`"):
        fsdp_ckpt.load_state(url, model)
    with pytest.raises(UsageError, match=f"`{url}`"):
        fsdp_ckpt.Checkpointer(url, model)
    with pytest.raises(fsdp_ckpt.FsdpCkptError, match=f"`{url}`"):
        fsdp_ckpt.save_model(model, url)
    assert list(tmp_path.iterdir()) == []


def test_p53_a_file_url_is_the_plain_path(tmp_path: Path) -> None:
    """For saving and for loading, alone and by way of the Checkpointer."""
    report = fsdp_ckpt.save_state(f"file://{tmp_path}/ck", Mlp())
    assert report.path == str(tmp_path / "ck")
    for path in (f"file://{tmp_path}/ck", tmp_path / "ck"):
        model = blank(Mlp())
        assert fsdp_ckpt.load_state(path, model).path == str(tmp_path / "ck")
        assert_same(reference(model), reference(Mlp()))
    fsdp_ckpt.Checkpointer(f"file://{tmp_path}/run", Mlp()).save(3)
    resumed = fsdp_ckpt.Checkpointer(f"file://{tmp_path}/run", Mlp()).resume()
    assert resumed is not None
    assert resumed.step == 3
    fsdp_ckpt.save_model(Mlp(), f"file://{tmp_path}/hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "hf", "run"]


class OddlyNamed(nn.Module):
    """A module whose state dict is P54's."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in oddly_named().items():
            *modules, last = name.split(".")
            module: nn.Module = self
            for step in modules:
                if step not in dict(module.named_children()):
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(last, nn.Parameter(value))


@pytest.mark.parametrize("style", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_p54_odd_paths_and_names_are_saved_and_loaded(style: Any, tmp_path: Path) -> None:
    """ray-project/ray#15367, tensorflow/tensorflow#34290: brackets, spaces, `=` and stars are no patterns."""
    model = OddlyNamed()
    assert_same(reference(model), oddly_named())
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved, moments = reference(model), moments_of(model, optimizer)
    fsdp_ckpt.save_state(tmp_path / ODD, model, optimizer, state_dict_type=style)
    model = blank(OddlyNamed())
    optimizer = AdamW(model.parameters(), lr=9.0)
    report = fsdp_ckpt.load_state(tmp_path / ODD, model, optimizer)
    assert_same(reference(model), saved)
    assert report.step == 10
    assert list(moments_of(model, optimizer)) == list(oddly_named())
    for name, state in moments_of(model, optimizer).items():
        assert_same(state, moments[name])
    if style == "SHARDED_STATE_DICT":
        assert_same(stock(tmp_path / ODD / "pytorch_model_fsdp_0")["model"], saved)


@pytest.mark.parametrize("kind", ["dcp", "verl", "safetensors"])
def test_p54_odd_paths_of_others_are_loaded(kind: str, built: Path, tmp_path: Path) -> None:
    """The three layouts of the recipe."""
    source = tmp_path / ODD
    if kind == "safetensors":
        source.mkdir(parents=True)
        save_file(oddly_named(), source / "model.safetensors")
    else:
        shutil.copytree(built / "p54" / kind, source)
    model = blank(OddlyNamed())
    fsdp_ckpt.load_state(source, model)
    assert_same(reference(model), oddly_named())


SAVED = {f"{number}.weight": torch.arange(16.0).reshape(4, 4) + 100 * number for number in range(2)}
UNTOUCHED = torch.full((4, 4), -1.0)


@pytest.mark.parametrize(("count", "name"), [(3, "2.weight"), (1, "1.weight")])
def test_p55_other_names_are_refused_by_default(count: int, name: str, played: Path) -> None:
    """pytorch/pytorch#190389, #148252, #123869: missing ones as well as those that only the checkpoint has."""
    for found in outcomes(played, "p55"):
        error, state = found[f"{count} strict"]
        assert error.kind == "StateMismatch"
        assert name in error.message
        assert "0.weight" not in error.message
        assert_same(state, {f"{number}.weight": UNTOUCHED for number in range(count)})


@pytest.mark.parametrize(("count", "missing", "unexpected"), [(3, ["2.weight"], []), (1, [], ["1.weight"])])
def test_p55_what_fits_is_loaded_on_request(
    count: int, missing: list[str], unexpected: list[str], played: Path
) -> None:
    """Weights that the checkpoint lacks keep their values, and the report names both kinds."""
    for found in outcomes(played, "p55"):
        report, state = found[str(count)]
        assert (report.missing, report.unexpected) == (missing, unexpected)
        expected = {**SAVED, "2.weight": UNTOUCHED}
        assert_same(state, {f"{number}.weight": expected[f"{number}.weight"] for number in range(count)})


def test_p56_buffers_that_are_not_saved_are_named(played: Path) -> None:
    """LlamaFactory#10820, lmms-engine#185, transformers#45902: after to_empty np_buf is garbage, and that is said."""
    for found in outcomes(played, "p56"):
        assert found["on meta"].kind == "UsageError"
        assert "meta device" in found["on meta"].message
        report, state = found["empty"]
        assert_same(state, reference(Buffers()))
        assert report.unsaved_buffers == ["np_buf"]
        (warning,) = report.warnings
        assert "np_buf" in warning
        assert not [name for name in state if name in warning]


def test_p56_buffers_that_the_module_made_stay(played: Path) -> None:
    """A normal start: nothing to warn of."""
    for found in outcomes(played, "p56"):
        report, state, buffer = found["normal"]
        assert_same(state, reference(Buffers()))
        assert buffer.tolist() == [1.0, 1.0, 1.0]
        assert report.warnings == []


@pytest.mark.parametrize("place", [in_metadata, in_rank_file, in_full_file])
def test_p47_pickles_that_run_code_are_refused(place: Any, built: Path, tmp_path: Path) -> None:
    """pytorch/pytorch#189308, #191326: .metadata, a file per rank, a full file; named, not run, nothing loaded."""
    folder, mark = tmp_path / "ck", tmp_path / "MARK"
    place(folder, built, Touch(mark))
    model = blank(Buffers() if place is in_rank_file else Mlp())
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        fsdp_ckpt.load_state(folder, model)
    assert not mark.exists()
    assert all((value == -1).all() for value in model.state_dict().values())


def test_p47_an_object_that_runs_code_is_refused(tmp_path: Path) -> None:
    """The same in an item of a data file, when it is asked for."""
    folder, mark = tmp_path / "ck", tmp_path / "MARK"
    dcp.save({"model": Mlp().state_dict(), "extra": Touch(mark)}, checkpoint_id=folder)
    metadata = FileSystemReader(folder).read_metadata()
    assert isinstance(metadata.state_dict_metadata["extra"], BytesStorageMetadata)
    model = blank(Mlp())
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        fsdp_ckpt.load_state(folder, model, objects={"extra": Position()})
    assert not mark.exists()
    assert all((value == -1).all() for value in model.state_dict().values())
    fsdp_ckpt.load_state(folder, model)  # what was not asked for is not even looked at
    assert_same(reference(model), reference(Mlp()))
    assert not mark.exists()


def test_p47_what_loading_would_refuse_is_not_saved(tmp_path: Path) -> None:
    """A checkpoint of ours never needs code."""
    with pytest.raises(fsdp_ckpt.FsdpCkptError, match="system"):
        fsdp_ckpt.save_state(tmp_path / "ck", Mlp(), objects={"extra": Position({"x": Touch(tmp_path / "MARK")})})
    assert list(tmp_path.iterdir()) == []


def test_p47_the_trap_works(built: Path, tmp_path: Path) -> None:
    """Plain pickle runs it."""
    in_metadata(tmp_path / "ck", built, Touch(tmp_path / "MARK"))
    pickle.loads((tmp_path / "ck/.metadata").read_bytes())
    assert (tmp_path / "MARK").exists()


def test_p52_p55_the_errors_list_names(tmp_path: Path) -> None:
    """Lists are in the exception for a program to read."""
    fsdp_ckpt.save_state(tmp_path / "ck", Mlp())
    larger = nn.ModuleDict({"up": nn.Linear(6, 9), "down": nn.Linear(8, 6), "new": nn.Linear(2, 2)})
    with pytest.raises(StateMismatch) as caught:
        fsdp_ckpt.load_state(tmp_path / "ck", larger)
    assert sorted(caught.value.missing) == ["new.bias", "new.weight"]
    assert sorted(caught.value.unexpected) == ["norm.bias", "norm.weight"]
    assert sorted(caught.value.mismatched) == ["up.bias", "up.weight"]
