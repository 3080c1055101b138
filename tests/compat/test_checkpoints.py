"""Every checkpoint that real torch wrote merges to exactly its expected tensors, or is refused for a stated reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fsdp_ckpt
from fixtures.pattern import pattern
from fsdp_ckpt.errors import FlatParameters
from tests.cases.check import assert_same, bits, load, merge_and_load
from tests.compat.judges import read_with_torch
from tests.compat.samples import NAMED, RIGHT, SAMPLES, Sample, sample_id

WRONG = [sample for sample in NAMED if sample.is_wrong]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("sample", RIGHT, ids=sample_id)
def test_merge_gives_exactly_the_expected_tensors(sample: Sample, kind: str, tmp_path: Path) -> None:
    """dtype, shape and bits; no tensor more, none less."""
    report, found = merge_and_load(sample.copy(tmp_path / "src"), tmp_path / "out", format=kind, fsync=False)
    expected = sample.expected()
    assert_same(found, expected)
    assert report.num_tensors == len(expected)
    assert report.tensor_bytes == sum(value.nbytes for value in expected.values())
    # only safetensors items, and files that hold them, come without checksums
    assert bool(report.unverified) == ("safetensors" in sample.variant or sample.variant.startswith("hf_"))


@pytest.mark.skipif(not WRONG, reason="../shared/golden, which holds such files, is not here")
@pytest.mark.parametrize("sample", WRONG or [None], ids=sample_id)
def test_what_its_writer_stored_wrongly_is_given_as_it_is(sample: Sample, tmp_path: Path) -> None:
    """Names, dtypes and shapes are right, and torch reads the same (wrong) values."""
    _, found = merge_and_load(sample.copy(tmp_path / "src"), tmp_path / "out", fsync=False)
    expected = sample.expected()
    assert {k: (v.dtype, v.shape) for k, v in found.items()} == {k: (v.dtype, v.shape) for k, v in expected.items()}
    by_torch = read_with_torch(sample.folder / "pytorch_model_fsdp_0")
    assert_same(found, {key.removeprefix("model."): value for key, value in by_torch.items()})


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.is_flat], ids=sample_id)
def test_local_state_dicts_are_refused(sample: Sample, tmp_path: Path) -> None:
    """Flat parameters: exit 8, nothing written; inspect explains."""
    source = sample.copy(tmp_path / "src")
    with pytest.raises(FlatParameters, match="names and shapes of the tensors in it are not in the files") as caught:
        fsdp_ckpt.merge(source, tmp_path / "out")
    assert caught.value.exit_code == 8
    assert not (tmp_path / "out").exists()
    model = fsdp_ckpt.inspect(source).parts[0]
    assert model.flat is not None
    assert "_flat_param" in model.flat


@pytest.mark.parametrize(
    "sample",
    [s for s in RIGHT if s.dcp_folders() and "safetensors" not in s.variant],  # torch cannot read its own there
    ids=sample_id,
)
def test_torch_reads_the_same(sample: Sample, tmp_path: Path) -> None:
    """torch's own reader as the second judge, for every folder with .metadata that it can open."""
    found = merge_and_load(sample.copy(tmp_path / "src"), tmp_path / "out", fsync=False)[1]
    by_torch: dict[str, Tensor] = {}
    for folder in sample.dcp_folders():
        by_torch |= read_with_torch(folder)
    names = {key.removeprefix("model."): key for key in by_torch}
    assert_same(found, {name: by_torch[names[name]] for name in found})
    assert {key for key in by_torch if key.startswith("model.")} <= {f"model.{name}" for name in found}


@pytest.mark.parametrize("sample", [s for s in RIGHT if "w3" in s.variant or "w4" in s.variant], ids=sample_id)
def test_a_view_reads_the_same_slices(sample: Sample, tmp_path: Path) -> None:
    """`open_checkpoint` on uneven shards and grids: rows and columns that cross the shards."""
    expected = sample.expected()
    with fsdp_ckpt.open_checkpoint(sample.copy(tmp_path / "src"), framework="pt") as view:
        assert sorted(view.keys()) == sorted(expected)
        for name, value in expected.items():
            assert torch.equal(bits(view.get_tensor(name)), bits(value))
            if value.dim() == 2:
                piece = view.get_slice(name)[1:-1, 2:7:2]
                assert torch.equal(bits(piece), bits(value[1:-1, 2:7:2]))


@pytest.mark.parametrize("sample", SAMPLES, ids=sample_id)
def test_the_expected_values_follow_from_the_names(sample: Sample) -> None:
    """`pattern.py` and `expected.safetensors` agree, so that the judge is judged."""
    for name, value in load_file(sample.folder / "expected.safetensors").items():
        source = "embed.weight" if name == "lm_head.weight" else name
        assert torch.equal(bits(value), bits(pattern(source, value.shape, value.dtype)))


def test_several_small_files_hold_the_same(tmp_path: Path) -> None:
    """A limit that splits the model, in both formats."""
    sample = next(sample for sample in RIGHT if sample.variant == "tp_fully_shard_w4")
    source = sample.copy(tmp_path / "src")
    for kind in ("safetensors", "bin"):
        report = fsdp_ckpt.merge(source, tmp_path / kind, format=kind, max_shard_size=1000, fsync=False)
        assert len(report.files) > 3
        assert_same(load(tmp_path / kind), sample.expected())
