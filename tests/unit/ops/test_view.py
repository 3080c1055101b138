"""Tensors and slices, against indexing the whole tensor with torch and against safetensors' own slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import save_file

from fsdp_ckpt.errors import ChecksumMismatch, Incompatible, UsageError
from fsdp_ckpt.ops.view import CheckpointView, open_checkpoint
from tests.build import assert_same, full_bits, grid, rows, save_dcp

STATE: dict[str, torch.Tensor] = {
    "matrix": torch.arange(63.0).reshape(9, 7),
    "cube": torch.arange(60, dtype=torch.int64).reshape(3, 4, 5) * 10**12,
    "vector": torch.linspace(-3, 3, 11).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "mask": torch.arange(10) % 3 == 0,
    "small": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sharded: dict[str, Any] = {key: rows(tensor, 3) if tensor.dim() else tensor for key, tensor in STATE.items()}
    sharded["cube"] = grid(STATE["cube"], [[1], [2, 3], [2]], ranks=3)
    return save_dcp(tmp_path_factory.mktemp("view") / "ckpt", {"model": sharded}, ranks=3)


@pytest.fixture
def view(folder: Path) -> Any:
    with open_checkpoint(folder, framework="pt") as opened:
        yield opened


def test_whole_tensors(view: CheckpointView) -> None:
    assert_same({key: view.get_tensor(key) for key in view}, STATE)


def test_numpy(folder: Path) -> None:
    with open_checkpoint(folder) as view:
        for key, tensor in STATE.items():
            found = view.get_tensor(key)
            assert isinstance(found, np.ndarray)
            assert found.dtype.name == str(tensor.dtype).removeprefix("torch.")
            assert found.shape == tuple(tensor.shape)
            assert found.tobytes() == full_bits(tensor)


def test_the_manners_of_safe_open(view: CheckpointView, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as judge:
        assert sorted(view.keys()) == sorted(judge.keys())
        assert len(view) == len(STATE)
        assert view.metadata() == judge.metadata()
        for key in STATE:
            ours, theirs = view.get_slice(key), judge.get_slice(key)
            assert (ours.get_shape(), ours.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
    assert "matrix" in view
    assert "nothing" not in view
    for use in (view.get_tensor, view.get_slice):
        with pytest.raises(KeyError, match="nothing"):
            use("nothing")


INDICES: dict[str, list[Any]] = {
    "matrix": [
        3, -1, slice(None), slice(2, 5), slice(None, None, 2), slice(1, None, 3), slice(-4, -1), slice(5, 2),
        slice(100, 200), slice(-100, 3), (3, 4), (-1, -7), (slice(None), 2), (slice(2, 7), slice(1, 6)),
        (slice(1, 8, 3), slice(0, 7, 2)),
        (4, slice(None, None, 3)), ..., (..., 3), (3, ...), (..., slice(1, 3)), (slice(2, 4), ...), (2, ..., 3),
        (slice(0, 0), slice(None)), (), (slice(0, 0), 3), (slice(None), slice(-2, None)), (..., -1), (slice(8, 9),),
        slice(2, 5, 100), np.int64(3), (np.int32(-2), slice(1, 2)),
    ],
    "cube": [
        1, -3, (0, 1, 2), (..., 2), (1, ..., 2), (slice(None), 1), (slice(1, 3), slice(1, 4, 2), slice(None, None, 2)),
        (slice(None), slice(None), 4), (-1, slice(2, 2), 0),
    ],
    "vector": [0, 10, -11, slice(3, 9, 4), ..., slice(None, None, 11)],
    "scalar": [..., ()],
    "empty": [slice(None), (slice(None), 2), (..., slice(1, 3)), slice(0, 5)],
    "mask": [0, slice(1, 7, 3)],
    "small": [7, slice(2, 5)],
}  # fmt: skip
CASES = [(key, index) for key, indices in INDICES.items() for index in indices]


@pytest.mark.parametrize(("key", "index"), CASES, ids=str)
def test_slices_are_those_of_torch(key: str, index: Any, view: CheckpointView) -> None:
    want = STATE[key].view(torch.int8)[index].view(STATE[key].dtype) if key == "small" else STATE[key][index]
    assert_same({"w": view.get_slice(key)[index]}, {"w": want})


@pytest.mark.parametrize(("key", "index"), CASES, ids=str)
def test_slices_of_numpy(key: str, index: Any, folder: Path) -> None:
    with open_checkpoint(folder) as view:
        whole, found = view.get_tensor(key), np.asarray(view.get_slice(key)[index])
    want = np.asarray(whole[index])
    assert (found.shape, found.dtype, found.tobytes()) == (want.shape, want.dtype, want.tobytes())


@pytest.mark.parametrize(
    ("key", "index"),
    [("matrix", 9), ("matrix", -10), ("matrix", (0, 7)), ("matrix", (0, 0, 0)), ("matrix", slice(None, None, -1)),
     ("scalar", 0), ("scalar", slice(None)), ("empty", 0), ("vector", (..., 3, 3)), ("matrix", (0, ..., 0, 0))],
    ids=str,
)  # fmt: skip
def test_indices_out_of_range(key: str, index: Any, view: CheckpointView) -> None:
    with pytest.raises((IndexError, ValueError)):
        _ = STATE[key][index]
    with pytest.raises(IndexError):
        _ = view.get_slice(key)[index]


@pytest.mark.parametrize("index", [None, "a", 1.5, [0, 1], slice("a", None), slice(None, None, 0)])
def test_indices_that_are_none(index: Any, view: CheckpointView) -> None:
    with pytest.raises((IndexError, TypeError, ValueError)):
        _ = view.get_slice("matrix")[index]


def test_as_it_would_be_merged(folder: Path) -> None:
    options = {"dtype": "bf16", "include": ["matrix", "cube"], "rename": ["matrix=a.b"]}
    with open_checkpoint(folder, framework="pt", **options) as view:
        assert_same(
            {key: view.get_tensor(key) for key in view},
            {"a.b": STATE["matrix"].to(torch.bfloat16), "cube": STATE["cube"]},
        )
        assert view.get_slice("a.b").get_dtype() == "BF16"
        assert_same({"w": view.get_slice("a.b")[2:4, ::3]}, {"w": STATE["matrix"][2:4, ::3].to(torch.bfloat16)})


def test_tied_names_are_there(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    torch.save({"embed.weight": weight, "lm_head.weight": weight}, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path, framework="pt", tie=True) as view:
        assert sorted(view.keys()) == ["embed.weight", "lm_head.weight"]
        assert torch.equal(view.get_tensor("lm_head.weight"), weight)


def test_damage_is_noticed_in_whole_tensors(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    save_dcp(tmp_path / "ckpt", {"model": {"w": tensor}}, ranks=1)
    data = bytearray((tmp_path / "ckpt" / "__0_0.distcp").read_bytes())
    at = data.index(full_bits(tensor)) + 2000
    data[at] ^= 1
    (tmp_path / "ckpt" / "__0_0.distcp").write_bytes(data)
    with open_checkpoint(tmp_path / "ckpt", framework="pt") as view, pytest.raises(ChecksumMismatch):
        view.get_tensor("w")
    with open_checkpoint(tmp_path / "ckpt", framework="pt", verify=False) as view:
        assert int((view.get_tensor("w") != tensor).sum()) == 1
        assert torch.equal(view.get_slice("w")[:499], tensor[:499])


def test_dtypes_that_numpy_lacks(tmp_path: Path) -> None:
    tensor = torch.arange(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({"w": tensor}, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as view, pytest.raises(Incompatible, match="float4"):
        view.get_tensor("w")
    with open_checkpoint(tmp_path, framework="pt") as view:
        assert_same({"w": view.get_tensor("w")}, {"w": tensor})


@pytest.mark.parametrize("name", ["conj", "neg", "one"])
def test_lazy_bits(name: str, tmp_path: Path) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    tensor = {"conj": base.conj(), "neg": base.conj().imag, "one": base.conj()[0]}[name]
    torch.save({"w": tensor}, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path, framework="pt") as view:
        assert_same({"w": view.get_tensor("w")}, {"w": tensor})


def test_other_frameworks(folder: Path) -> None:
    wrong: Any = "tf"
    with pytest.raises(UsageError, match="tf"):
        open_checkpoint(folder, framework=wrong)


def test_nothing_stays_open(folder: Path) -> None:
    import os

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with open_checkpoint(folder) as view:
            view.get_tensor("cube")
    assert len(os.listdir("/proc/self/fd")) == before
