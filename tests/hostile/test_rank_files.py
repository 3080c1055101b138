"""Per-rank files whose sharded tensors contradict themselves or each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import assert_refused, tensors
from tests.hostile.forge_dcp import pattern, size
from tests.hostile.forge_pickle import Call, Glob, New, bomb, nested
from tests.hostile.forge_zip import saved, tensor_value
from tests.hostile.places import assert_harmless
from tests.hostile.sandbox import Case, Sandbox

PLACEMENTS = "torch.distributed.tensor.placement_types"


def shard(dim: Any = 0) -> New:
    return New(Glob(PLACEMENTS, "Shard"), {"dim": dim})


def dtensor(
    local: Any,
    shape: Any = (4, 2),
    *,
    mesh: Any = (2,),
    coordinate: Any = (0,),
    placements: Any = None,
) -> Call:
    """What ``torch.save`` writes for a DTensor, as far as the whole is to be found from it."""
    state = {"mesh": tensor_value(mesh, dtype="int64", key="1"), "_coordinate_on_dim": coordinate}
    meta = New(Glob("torch.distributed.tensor._dtensor_spec", "TensorMeta"), {"shape": size(shape)})
    spec = New(
        Glob("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
        {
            "mesh": New(Glob("torch.distributed.device_mesh", "DeviceMesh"), state),
            "placements": (shard(),) if placements is None else placements,
            "tensor_meta": meta,
        },
    )
    kind = Glob("torch.distributed.tensor", "DTensor")
    wrapper = Glob("torch._utils", "_rebuild_wrapper_subclass")
    arguments = (kind, Glob("torch", "float32"), size(shape))
    return Call(
        Glob("torch._tensor", "_rebuild_from_type_v2"),
        (wrapper, kind, arguments, {"_local_tensor": local, "_spec": spec}),
    )


def sharded(shards: Any, boxes: Any, shape: Any = (4, 2)) -> Call:
    """What ``torch.save`` writes for a ShardedTensor; shards are (tensor, offsets, sizes)."""

    def box(offsets: Any, sizes: Any) -> New:
        state = {"shard_offsets": offsets, "shard_sizes": sizes, "placement": None}
        return New(Glob("torch.distributed._shard.metadata", "ShardMetadata"), state)

    module = "torch.distributed._shard.sharded_tensor"
    found = [
        New(Glob(f"{module}.shard", "Shard"), {"tensor": tensor, "metadata": box(offsets, sizes)})
        for tensor, offsets, sizes in shards
    ]
    properties = New(Glob(f"{module}.metadata", "TensorProperties"), (Glob("torch", "float32"), 0, False, 0, False))
    metadata = New(
        Glob(f"{module}.metadata", "ShardedTensorMetadata"),
        {"shards_metadata": [box(*item) for item in boxes], "size": size(shape), "tensor_properties": properties},
    )
    kind = Glob(f"{module}.api", "ShardedTensor")
    state = (found, metadata, None, None, False)
    return Call(
        Glob("torch._tensor", "_rebuild_from_type_v2"), (Glob("torch._utils", "_rebuild_tensor_v2"), kind, (), state)
    )


def _write(folder: Path, *values: Any) -> Path:
    folder.mkdir()
    for rank, value in enumerate(values):
        half = pattern(16, 4 * rank)
        content = saved({"w": value}, [half, (0).to_bytes(8, "little") + (1).to_bytes(8, "little")])
        (folder / f"model_world_size_{len(values)}_rank_{rank}.pt").write_bytes(content)
    return folder


HALF = tensor_value((2, 2))
LAST = dtensor(HALF, coordinate=(1,))


def test_a_sound_dtensor_merges(tmp_path: Path, sandbox: Sandbox) -> None:
    path = _write(tmp_path / "ckpt", dtensor(HALF), LAST)
    done = sandbox.run("merge", path, tmp_path / "out")
    assert done.code == 0, done.err
    assert tensors(tmp_path / "out") == {"w": ("F32", (4, 2), pattern(32))}


STRIDED = New(Glob(PLACEMENTS, "_StridedShard"), {"dim": 0, "split_factor": 1 << 24})
FIRST: dict[str, Any] = {
    "coordinate-beyond": dtensor(HALF, coordinate=(7,)),
    "coordinate-2-62": dtensor(HALF, coordinate=(1 << 62,)),
    "coordinate-negative": dtensor(HALF, coordinate=(-1,)),
    "coordinate-none": dtensor(HALF, coordinate=None),
    "coordinate-rank": dtensor(HALF, coordinate=(0, 0)),
    "coordinate-text": dtensor(HALF, coordinate=("0",)),
    "coordinate-bomb": dtensor(HALF, coordinate=(bomb(),)),
    "coordinate-twice": dtensor(HALF, coordinate=(1,)),
    "mesh-zero": dtensor(HALF, mesh=(0,)),
    "mesh-2-24": dtensor(HALF, mesh=(1 << 24,)),
    "mesh-2-62": dtensor(HALF, mesh=(1 << 62,)),
    "mesh-rank": dtensor(HALF, mesh=(2, 1)),
    "mesh-of-rank-1000": dtensor(HALF, mesh=(1,) * 1_000, coordinate=(0,) * 1_000, placements=(shard(),) * 1_000),
    "placements-none": dtensor(HALF, placements=()),
    "placements-too-many": dtensor(HALF, placements=(shard(), shard())),
    "placements-number": dtensor(HALF, placements=7),
    "placement-bomb": dtensor(HALF, placements=(bomb(),)),
    "placement-nested": dtensor(HALF, placements=(nested(100_000),)),
    "placement-dim-beyond": dtensor(HALF, placements=(shard(2),)),
    "placement-dim-2-62": dtensor(HALF, placements=(shard(1 << 62),)),
    "placement-dim-text": dtensor(HALF, placements=(shard("0"),)),
    "placement-split-2-24": dtensor(HALF, placements=(STRIDED,)),
    "placement-partial": dtensor(HALF, placements=(New(Glob(PLACEMENTS, "Partial"), {"reduce_op": "sum"}),)),
    "shape-2-62": dtensor(HALF, (1 << 62, 2)),
    "shape-huge": dtensor(HALF, (1 << 20_000, 2)),
    "shape-bomb": dtensor(HALF, bomb()),
    "shape-rank": dtensor(HALF, (4,)),
    "shape-other": dtensor(HALF, (6, 2)),
    "local-other": dtensor(tensor_value((1, 4))),
    "local-none": dtensor(None),
    "whole": tensor_value((2, 2)),
    "sharded": sharded([(HALF, [0, 0], [2, 2])], [([0, 0], [2, 2]), ([2, 0], [2, 2])]),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_dtensor_that_cannot_be_is_refused(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    _assert_refused(_write(tmp_path / "ckpt", FIRST[name], LAST), tmp_path, sandbox)


TWO = [([0, 0], [2, 2]), ([2, 0], [2, 2])]
SHARDED: dict[str, list[Any]] = {
    "hole": [sharded([(HALF, [0, 0], [2, 2])], TWO), sharded([], TWO)],
    "overlap": [sharded([(HALF, [0, 0], [2, 2])], TWO), sharded([(HALF, [1, 0], [2, 2])], TWO)],
    "beyond": [sharded([(HALF, [0, 0], [2, 2])], TWO), sharded([(HALF, [3, 0], [2, 2])], TWO)],
    "negative": [sharded([(HALF, [-2, 0], [2, 2])], TWO), sharded([(HALF, [2, 0], [2, 2])], TWO)],
    "rank": [sharded([(HALF, [0], [2])], TWO), sharded([(HALF, [2, 0], [2, 2])], TWO)],
    "size-of-another": [sharded([(HALF, [0, 0], [3, 2])], TWO), sharded([(HALF, [2, 0], [2, 2])], TWO)],
    "other-shape": [sharded([(HALF, [0, 0], [2, 2])], TWO), sharded([(HALF, [2, 0], [2, 2])], TWO, (5, 2))],
    "no-tensor": [sharded([(None, [0, 0], [2, 2])], TWO), sharded([(HALF, [2, 0], [2, 2])], TWO)],
    "offsets-none": [sharded([(HALF, None, [2, 2])], TWO), sharded([(HALF, [2, 0], [2, 2])], TWO)],
    "offsets-bomb": [sharded([(HALF, bomb(), [2, 2])], TWO), sharded([(HALF, [2, 0], [2, 2])], TWO)],
    "shape-bomb": [sharded([(HALF, [0, 0], [2, 2])], TWO, bomb()), sharded([(HALF, [2, 0], [2, 2])], TWO, bomb())],
    "boxes-number": [sharded([(HALF, [0, 0], [2, 2])], [(7, 7)]), sharded([(HALF, [2, 0], [2, 2])], TWO)],
}  # fmt: skip


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_tensor_that_cannot_be_is_refused(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    _assert_refused(_write(tmp_path / "ckpt", *SHARDED[name]), tmp_path, sandbox)


def _assert_refused(path: Path, tmp_path: Path, sandbox: Sandbox) -> None:
    out = tmp_path / "out"
    cases = [
        Case(argv=["inspect", str(path)], direct=True),
        Case(argv=["merge", str(path), str(out), "--no-fsync"], out=str(out), direct=True),
    ]
    seen, merged = sandbox.many(cases, timeout_s=20)
    for outcome in (seen, merged):
        assert_harmless(outcome, tmp_path)
    assert seen.code in (0, 4, 8), seen.err
    assert_refused(merged, 4, 8)
    assert merged.digest is None


@pytest.mark.parametrize(
    "name",
    [
        "model_world_size_2_rank_5.pt",
        "model_world_size_99999999999999999999_rank_0.pt",
        "model_world_size_2_rank_99999999999999999999.pt",
        "model_world_size_0_rank_0.pt",
        "model_world_size_\u0662_rank_\u0660.pt",
        "pytorch_model-00001-of-99999.bin",
        "pytorch_model-99999-of-00001.bin",
        "model-00001-of-99999.safetensors",
    ],
)
def test_file_names_with_absurd_numbers_do_no_harm(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    path = _write(tmp_path / "ckpt", tensor_value((2, 2)))
    (path / "model_world_size_1_rank_0.pt").rename(path / name)
    for argv in (["inspect", path], ["inspect", path, "--json"], ["merge", path, tmp_path / "out"]):
        outcome = sandbox.run(*argv, timeout_s=20)
        assert_harmless(outcome, tmp_path)
        assert outcome.code in (0, 3, 4), outcome.err
