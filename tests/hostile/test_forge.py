"""The forged files, unspoilt, are what torch and safetensors write: their own readers take them."""

from __future__ import annotations

import io
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.cli.tool import tensors
from tests.hostile.forge_dcp import Forged, pattern
from tests.hostile.forge_zip import saved, tensor_value
from tests.hostile.sandbox import Sandbox


def test_torch_reads_a_forged_archive() -> None:
    data = saved({"w": tensor_value((2, 3))}, [pattern(24)])
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert found["w"].shape == (2, 3)
    assert found["w"].view(torch.int32).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_torch_reads_a_forged_checkpoint_and_so_do_we(tmp_path: Path, sandbox: Sandbox) -> None:
    forged = Forged()
    forged.tensor("a.weight", (5, 2), rows=(3, 2))
    forged.tensor("b", (4,), dtype="int64")
    folder = forged.write(tmp_path / "ckpt")
    state = {"a.weight": torch.zeros(5, 2), "b": torch.zeros(4, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert state["a.weight"].view(torch.int32).flatten().tolist() == list(range(10))

    done = sandbox.run("merge", folder, tmp_path / "out")
    assert done.code == 0, done.err
    assert tensors(tmp_path / "out") == {
        "a.weight": ("F32", (5, 2), state["a.weight"].numpy().tobytes()),
        "b": ("I64", (4,), state["b"].numpy().tobytes()),
    }
