"""Corners of the format: ../../fixtures/edge. torch's own reader is the judge where it can read them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

import fsdp_ckpt
from fsdp_ckpt.errors import AmbiguousPart, Incompatible, NoModelWeights
from tests.cases.check import assert_same, merge_and_load, run
from tests.compat.judges import read_item_by_item, read_objects, read_with_torch
from tests.compat.samples import EDGE

KINDS = pytest.mark.parametrize("kind", ["safetensors", "bin"])
COMPLEX_HALF = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

BY_TORCH = [
    "align4k",
    "layouts",
    "model_optim",
    "model_optim_dsd",
    "model_optim_dsd_flat",
    "no_collectives",
    "nocrc",
    "py3112",
    "stale",
    "tied",
    "torch213_hand2",
    "torch213_hand4",
    "zstd",
]
"""What torch 2.13 reads."""
BY_ITEM = ["nontensor", "py313_style", "torch215_hand2", "torch215_hand4"]
"""What it does not: another Python's paths, another torch's fields, a class of somebody's script."""


def model_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the model by their names in it."""
    model = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    return model or tensors


def blob_of(folder: Path) -> bytes:
    """Return the safetensors data in __0_0.distcp: from where .metadata says that all tensors begin, to the end."""
    storage = FileSystemReader(folder).read_metadata().storage_data
    (start,) = {info.offset for index, info in storage.items() if index.offset is not None}
    return (folder / "__0_0.distcp").read_bytes()[start:]


def test_every_corner_has_a_test() -> None:
    """A folder that is added to fixtures/edge has to be looked at."""
    special = {"dtypes", "noflatten", "safetensors_fmt", "hf_dist_consol_scalar", "hf_dist_consol_int", "torch215_pt4"}
    assert {path.name for path in EDGE.iterdir() if path.is_dir()} == {*BY_TORCH, *BY_ITEM, *special}


@KINDS
@pytest.mark.parametrize("name", BY_TORCH)
def test_merge_gives_what_torch_reads(name: str, kind: str, tmp_path: Path) -> None:
    """0-d, empty, transposed, sliced, expanded, conj and neg tensors, zstd, gaps, enums by getattr, left-over files."""
    _, found = merge_and_load(EDGE / name, tmp_path / "out", format=kind, fsync=False)
    assert_same(found, model_of(read_with_torch(EDGE / name)))


@KINDS
@pytest.mark.parametrize("name", BY_ITEM)
def test_merge_gives_what_each_item_holds(name: str, kind: str, tmp_path: Path) -> None:
    """Where torch 2.13 cannot read .metadata, it can still load the items one by one."""
    _, found = merge_and_load(EDGE / name, tmp_path / "out", format=kind, fsync=False)
    assert_same(found, model_of(read_item_by_item(EDGE / name)))


def test_the_judge_agrees_with_torch() -> None:
    """Reading item by item gives the same where both can read."""
    for name in ("torch213_hand2", "torch213_hand4", "model_optim", "tied"):
        assert_same(read_item_by_item(EDGE / name), read_with_torch(EDGE / name))


def test_dtypes_that_safetensors_lacks_are_refused(tmp_path: Path) -> None:
    """complex32 and complex128: exit 8, and the way out is named."""
    result = run("merge", EDGE / "dtypes", tmp_path / "out")
    assert result.returncode == 8
    assert "complex" in result.stderr
    assert "--format bin" in result.stderr
    assert not (tmp_path / "out").exists()
    for name in ("complex32", "complex128"):
        with pytest.raises(Incompatible, match=name):
            fsdp_ckpt.merge(EDGE / "dtypes", tmp_path / "out", include=[f"dt.{name}"])


@COMPLEX_HALF
def test_all_other_dtypes_fit_into_safetensors(tmp_path: Path) -> None:
    """Unsigned integers, float8 and packed float4 too."""
    options = {"exclude": ["dt.complex32", "dt.complex128"]}
    report, found = merge_and_load(EDGE / "dtypes", tmp_path / "out", **options)
    expected = read_with_torch(EDGE / "dtypes")
    assert len(expected) == 22
    del expected["dt.complex32"], expected["dt.complex128"]
    assert_same(found, expected)
    assert report.excluded == 2


@COMPLEX_HALF
def test_bin_holds_all_dtypes(tmp_path: Path) -> None:
    """All 22."""
    _, found = merge_and_load(EDGE / "dtypes", tmp_path / "out", format="bin")
    assert_same(found, read_with_torch(EDGE / "dtypes"))


@COMPLEX_HALF
def test_a_cast_touches_floats_only(tmp_path: Path) -> None:
    """float64, float32 and float16 become bfloat16; integers, bool, complex, float8 and float4 are left as they are."""
    _, found = merge_and_load(EDGE / "dtypes", tmp_path / "out", format="bin", dtype="bfloat16")
    expected = read_with_torch(EDGE / "dtypes")
    for name in ("float64", "float32", "float16"):
        expected[f"dt.{name}"] = expected[f"dt.{name}"].to(torch.bfloat16)
    assert_same(found, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_torch_2_15_holds_what_torch_2_13_held(size: int, tmp_path: Path) -> None:
    """Six fields instead of five in TensorProperties change nothing. `dt.tiny` was saved with 2.13 only."""
    _, old = merge_and_load(EDGE / f"torch213_hand{size}", tmp_path / "old")
    _, new = merge_and_load(EDGE / f"torch215_hand{size}", tmp_path / "new")
    del old["dt.tiny"]
    assert_same(new, old)
    assert fsdp_ckpt.inspect(EDGE / f"torch215_hand{size}").parts[0].writer == "torch >= 2.15"


def test_rank_files_of_torch_2_15(tmp_path: Path) -> None:
    """DTensor, HSDP and ShardedTensor files of four ranks; two models, so that one has to be named."""
    with pytest.raises(AmbiguousPart, match=r"model .*; st "):
        fsdp_ckpt.merge(EDGE / "torch215_pt4", tmp_path / "out")
    _, found = merge_and_load(EDGE / "torch215_pt4", tmp_path / "out", part="model")
    whole = torch.arange(66.0).reshape(11, 6)
    assert_same(found, {"w": whole, "w2": whole, "buf": torch.arange(3.0)})
    _, found = merge_and_load(EDGE / "torch215_pt4", tmp_path / "st", part="st")
    assert_same(found, {"s": whole})


def test_python_3_13_paths_change_nothing(tmp_path: Path) -> None:
    """`pathlib._local.PosixPath` in .metadata: the same tensor as a plain save."""
    _, found = merge_and_load(EDGE / "py313_style", tmp_path / "out")
    assert_same(found, {"a": read_item_by_item(EDGE / "py313_style")["a"]})
    assert fsdp_ckpt.inspect(EDGE / "py313_style").complete


@KINDS
def test_the_blob_of_safetensors_items(kind: str, tmp_path: Path) -> None:
    """torch cannot read back what SerializationFormat.SAFETENSORS wrote; safetensors reads the blob."""
    report, found = merge_and_load(EDGE / "safetensors_fmt", tmp_path / "out", format=kind)
    blob = load_bytes(blob_of(EDGE / "safetensors_fmt"))
    assert_same(found, model_of(blob))
    assert report.unverified == len(blob)


def test_items_without_checksums_are_reported(tmp_path: Path) -> None:
    """`compute_crc32=False` leaves zeros: the tensors are copied unchecked, and the report counts them."""
    report, _ = merge_and_load(EDGE / "nocrc", tmp_path / "out")
    assert (report.unverified, report.verified_bytes) == (4, 0)
    result = run("merge", EDGE / "nocrc", tmp_path / "again")
    assert "4 shards without a recorded checksum, copied unchecked" in result.stdout
    other, _ = merge_and_load(EDGE / "align4k", tmp_path / "other")
    assert (other.unverified, other.verified_bytes) == (0, other.tensor_bytes)


def test_a_whole_dict_as_one_item_is_refused(tmp_path: Path) -> None:
    """Without flattening there are no tensors to copy, only an object."""
    with pytest.raises(NoModelWeights, match="no tensors, only 1 pickled object") as caught:
        fsdp_ckpt.merge(EDGE / "noflatten", tmp_path / "out")
    assert caught.value.exit_code == 3
    assert "flatten_state_dict=False" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_left_over_files_are_named(tmp_path: Path) -> None:
    """Two shards of an earlier save."""
    report, _ = merge_and_load(EDGE / "stale", tmp_path / "out")
    named = [text.partition(":")[0] for text in report.warnings if "not referenced" in text]
    assert named == ["__0_1.distcp", "__0_2.distcp"]


@pytest.mark.parametrize("name", ["hf_dist_consol_scalar", "hf_dist_consol_int"])
def test_the_sharded_files_win_over_their_consolidation(name: str, tmp_path: Path) -> None:
    """torch's consolidation sets 0-d tensors to zero, or never finishes with integers."""
    (sharded,) = (EDGE / name / "sharded").glob("shard-*.safetensors")
    expected = load_file(sharded)
    _, found = merge_and_load(EDGE / name, tmp_path / "out")
    assert_same(found, expected)
    scalars = [value for value in found.values() if value.dim() == 0]
    assert scalars
    assert all(value != 0 for value in scalars)


def test_the_consolidated_file_is_the_trap() -> None:
    """It does hold a zero where the sharded file holds something else."""
    (sharded,) = (EDGE / "hf_dist_consol_scalar/sharded").glob("*.safetensors")
    right, wrong = load_file(sharded), load_file(EDGE / "hf_dist_consol_scalar/model-00001-of-00001.safetensors")
    differ = [name for name in right if not torch.equal(right[name], wrong[name])]
    assert differ
    assert all(wrong[name].dim() == 0 and wrong[name] == 0 for name in differ)


@pytest.mark.parametrize("name", ["nontensor", "model_optim", "model_optim_dsd", "model_optim_dsd_flat"])
def test_objects_are_those_that_torch_loads(name: str) -> None:
    """Learning rates and the like, by value; what torch's allow-list refuses is shown as what it would need."""
    shown: dict[str, Any] = {}
    for part in fsdp_ckpt.inspect(EDGE / name, objects=True).parts:
        head = "" if part.name in ("model", "other") else f"{part.name}."
        shown |= {head + key: value for key, value in part.objects.items()}
    loaded = {key.removeprefix("model."): value for key, value in read_objects(EDGE / name).items()}
    simple = {key: value for key, value in loaded.items() if isinstance(value, int | float | str | None)}
    assert len(simple) >= 3
    assert {key: shown[key] for key in simple} == simple
    assert {key: value for key, value in loaded.items() if key.endswith("betas")} == {
        key: tuple(value) for key, value in shown.items() if key.endswith("betas")
    }
    if name == "nontensor":
        assert shown["foo"] == "<opaque: needs __main__.Foo>"


def test_the_folder_may_be_read_only_and_anywhere(tmp_path: Path) -> None:
    """.metadata holds the path that it was saved to, which no longer exists."""
    source = tmp_path / "elsewhere"
    shutil.copytree(EDGE / "torch213_hand2", source)
    source.chmod(0o500)
    _, found = merge_and_load(source, tmp_path / "out")
    assert_same(found, model_of(read_with_torch(EDGE / "torch213_hand2")))
    source.chmod(0o700)
