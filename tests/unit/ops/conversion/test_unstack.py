"""Stacked layers are taken apart: names, windows and shapes, and what is no stack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fsdp_ckpt.catalog import DTYPES, Chunk, Role, Shape, TensorEntry
from fsdp_ckpt.errors import Incompatible, NameCollision, UsageError
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.conversion.unstack import unstack_layers
from fsdp_ckpt.plan.boxes import check_coverage
from fsdp_ckpt.plan.output import LowRank, OutputTensor, Window
from tests.compat.samples import REALS, sample_id

HERE = pytest.mark.skipif(not REALS, reason="../shared/real, which may not be committed, is not here")


def entry(name: str, shape: Shape) -> TensorEntry:
    chunk = Chunk((0,) * len(shape), shape, "file", 0, 0)
    return TensorEntry(key=name, name=name, dtype=DTYPES["float32"], shape=shape, chunks=(chunk,), path=(name,))


def outputs(tensors: dict[str, Shape]) -> list[OutputTensor]:
    return [
        OutputTensor(name=name, dtype=DTYPES["bfloat16"], source=entry(name, shape), path=("model", name))
        for name, shape in tensors.items()
    ]


def windows(tensors: Sequence[OutputTensor]) -> list[tuple[str, Window | None]]:
    return [(tensor.name, tensor.window) for tensor in tensors]


def test_by_hand() -> None:
    given = outputs(
        {
            "embedding.weight": (7, 4),
            "decoder.layers.mlp.fc.weight": (2, 3, 4),
            "decoder.layers.norm.bias": (2, 4),
            "decoder.final_norm.weight": (4,),
        }
    )
    found = unstack_layers(given)
    assert windows(found) == [
        ("embedding.weight", None),
        ("decoder.layers.0.mlp.fc.weight", Window(offsets=(0, 0, 0), lengths=(1, 3, 4), shape=(3, 4))),
        ("decoder.layers.0.norm.bias", Window(offsets=(0, 0), lengths=(1, 4), shape=(4,))),
        ("decoder.layers.1.mlp.fc.weight", Window(offsets=(1, 0, 0), lengths=(1, 3, 4), shape=(3, 4))),
        ("decoder.layers.1.norm.bias", Window(offsets=(1, 0), lengths=(1, 4), shape=(4,))),
        ("decoder.final_norm.weight", None),
    ]
    assert [tensor.num_bytes for tensor in found] == [56, 24, 8, 24, 8, 8]
    assert found[1].path == ("model", "decoder.layers.0.mlp.fc.weight")
    assert found[1].source is found[3].source is given[1].source
    assert found[0] is given[0]


def test_a_scalar_of_each_layer() -> None:
    found = unstack_layers(outputs({"layers.gate": (2,)}))
    assert windows(found) == [
        ("layers.0.gate", Window(offsets=(0,), lengths=(1,), shape=())),
        ("layers.1.gate", Window(offsets=(1,), lengths=(1,), shape=())),
    ]


def test_stacks_may_differ_from_each_other_and_numbered_layers_stay() -> None:
    given = {"encoder.layers.w": (1, 2), "decoder.layers.w": (2, 2), "mtp.layers.0.w": (5, 2), "layers.10": (3,)}
    assert [(tensor.name, tensor.shape) for tensor in unstack_layers(outputs(given))] == [
        ("encoder.layers.0.w", (2,)),
        ("decoder.layers.0.w", (2,)),
        ("decoder.layers.1.w", (2,)),
        ("mtp.layers.0.w", (5, 2)),
        ("layers.10", (3,)),
    ]


def test_a_number_further_down_is_no_layer() -> None:
    (found,) = unstack_layers(outputs({"decoder.layers.mlp.local_experts.0.w": (1, 2)}))
    assert found.name == "decoder.layers.0.mlp.local_experts.0.w"


@pytest.mark.parametrize("names", [{}, {"layers.0.w": (2, 3)}, {"my_layers.w": (2,)}, {"layers": (2,)}])
def test_nothing_is_stacked(names: dict[str, Shape]) -> None:
    with pytest.raises(UsageError, match="no layers are stacked"):
        unstack_layers(outputs(names))


@pytest.mark.parametrize("other", [(3, 4), ()])
def test_other_numbers_of_layers_are_refused(other: Shape) -> None:
    with pytest.raises(Incompatible, match=r"`decoder\.layers\.a` has 2 .*`decoder\.layers\.b` has [30]"):
        unstack_layers(outputs({"decoder.layers.a": (2, 4), "decoder.layers.b": other}))


@pytest.mark.parametrize("shape", [(), (0, 4), (1 << 15, 1)])
def test_what_is_no_number_of_layers_is_refused(shape: Shape) -> None:
    with pytest.raises(Incompatible, match="is no stack of layers"):
        unstack_layers(outputs({"decoder.layers.a": shape}))


def test_a_name_that_is_there_already_is_refused() -> None:
    with pytest.raises(NameCollision, match=r"decoder\.layers\.1\.w"):
        unstack_layers(outputs({"decoder.layers.w": (2, 4), "decoder.layers.1.w": (4,)}))


def test_what_is_no_whole_saved_tensor_is_refused() -> None:
    source = entry("layers.w", (2, 4))
    window = Window(offsets=(0, 0), lengths=(1, 4), shape=(1, 4))
    added = LowRank(up=entry("up", (2, 1)), down=entry("down", (1, 4)), scale=1.0)
    dtype = DTYPES["float32"]
    for tensor in (
        OutputTensor(name="layers.w", dtype=dtype, source=source, window=window),
        OutputTensor(name="layers.w", dtype=dtype, source=source, addition=added),
    ):
        with pytest.raises(Incompatible, match="not written as it is saved"):
            unstack_layers([tensor])


@HERE
@pytest.mark.parametrize("folder", REALS or [None], ids=sample_id)
def test_megatrons_own(folder: Path) -> None:
    """Two layers: each stacked tensor becomes two, which tile it."""
    part = next(part for part in read_checkpoint(folder).parts if part.role is Role.MODEL)
    given = [OutputTensor(name=e.name, dtype=e.dtype, source=e, path=e.path) for e in part.tensors.values()]
    found = unstack_layers(given)
    stacked = [tensor for tensor in given if tensor.name.startswith("decoder.layers.")]
    assert (len(given), len(stacked), len(found)) == (17, 12, 17 + 12)
    shapes = {tensor.name: tensor.shape for tensor in found}
    assert shapes["decoder.layers.1.self_attention.linear_qkv.weight"] == (36, 12)
    assert shapes["decoder.layers.0.mlp.linear_fc1.layer_norm_bias"] == (12,)
    for tensor in stacked:
        pieces = [piece.window for piece in found if piece.source is tensor.source]
        boxes = [(window.offsets, window.lengths) for window in pieces if window is not None]
        assert len(boxes) == 2
        assert check_coverage(tensor.shape, boxes).is_exact
