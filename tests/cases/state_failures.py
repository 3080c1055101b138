"""Saves that fail: on a full disk, with ranks that die; what is left, and which checkpoint is loaded then.

`MORTAL` names the scenarios in which ranks die.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim import AdamW

import fsdp_ckpt
from fsdp_ckpt import LoadReport
from fsdp_ckpt.train.shards import ShardWriter
from tests.cases import models
from tests.cases.state_training import blank, caught, of, shard, state_of
from tests.dist.stage import Raised, scenario


@scenario(ranks=2)
def p25(place: Path) -> tuple[LoadReport, dict[str, Tensor], Raised | None]:
    """A run whose newest checkpoints are not whole."""
    for step in (100, 200, 400):
        model = models.Mlp()
        with torch.no_grad():
            model.up.weight.add_(step)
        dcp.save({"model": shard(model).state_dict()}, checkpoint_id=place / f"step-{step}")
    if dist.get_rank() == 0:
        (place / "step-200/.metadata").rename(place / "step-200/.metadata.tmp")
        (place / "step-300").mkdir()
        for file in (place / "step-400").glob("*.distcp"):
            file.unlink()
    dist.barrier()
    model = shard(blank(models.Mlp()))
    asked = caught(lambda: fsdp_ckpt.load_state(place / "step-200", model))
    assert all(bool((value == -1).all()) for value in state_of(model).values()), "changed by a load that was refused"
    report = fsdp_ckpt.load_state(place, model)
    return report, state_of(model), asked


@scenario(ranks=2)
def p32_full_disk(place: Path) -> dict[str, Any]:
    """The disk is full for rank 1, once over a good checkpoint and once at a new place."""
    model = shard(models.Mlp())
    fsdp_ckpt.save_state(place / "ck", model, AdamW(model.parameters()), step=1)
    with torch.no_grad():
        model.up.weight.add_(1)
    found: dict[str, Any] = {}
    for name in ("ck", "new"):
        begun = time.monotonic()
        with _full_disk() if dist.get_rank() == 1 else mock.MagicMock():
            found[name] = caught(lambda name=name: fsdp_ckpt.save_state(place / name, model, step=2))  # type: ignore[misc]
        found[f"{name} took"] = time.monotonic() - begun
    dist.barrier()
    found["there"] = sorted(path.name for path in place.iterdir())
    again = shard(blank(models.Mlp()))
    found["step"] = fsdp_ckpt.load_state(place / "ck", again).step
    found["state"] = state_of(again)
    fsdp_ckpt.save_state(place / "new", model, step=2)  # all ranks are still in step with each other
    return found


@contextmanager
def _full_disk() -> Iterator[None]:
    """Let this process write nothing."""

    def refuse(*_: Any) -> int:
        raise OSError(28, os.strerror(28))

    with mock.patch("os.pwrite", refuse), mock.patch("os.write", refuse):
        yield


@scenario(ranks=4)
def p28_first(place: Path) -> None:
    """The first save, by four ranks."""
    fsdp_ckpt.save_state(place / "D", shard(models.Mlp()), step=1)


def p28_crash(place: Path, dying: Sequence[int]) -> Any:
    """The second save, of other values: some ranks exit after their data files are written."""
    model = models.Mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    shard(model)
    close = ShardWriter.close

    def die(writer: ShardWriter) -> Any:
        share = close(writer)
        if share.file is not None and dist.get_rank() in dying:
            assert share.size == writer._file.path.stat().st_size > 0
            (place / str(dist.get_rank())).touch()
            while len(os.listdir(place)) < len(dying):  # nobody may notice that another one is gone
                time.sleep(0.01)
            os._exit(9)
        return share

    with mock.patch.object(ShardWriter, "close", die):
        return caught(lambda: fsdp_ckpt.save_state(of(place, "p28_first") / "D", model, step=2))


def p28_crash_one(place: Path) -> Any:
    """Rank 1 dies."""
    return p28_crash(place, [1])


def p28_crash_all(place: Path) -> Any:
    """All ranks die."""
    return p28_crash(place, [0, 1])


def p32_absent(place: Path) -> Any:
    """Rank 1 raises before it saves, and its process ends."""
    model = shard(models.Mlp())
    if dist.get_rank() == 1:
        raise ValueError("out of data")
    begun = time.monotonic()
    error = caught(lambda: fsdp_ckpt.save_state(place / "ck", model))
    return error, time.monotonic() - begun, sorted(path.name for path in place.iterdir())


@scenario(ranks=2)
def p28_after(place: Path) -> dict[str, Any]:
    """What the crashes left; then a good save, by fewer ranks than the first one."""
    folder = of(place, "p28_first") / "D"
    model = shard(blank(models.Mlp()))
    report = fsdp_ckpt.load_state(folder, model)
    found: dict[str, Any] = {"loaded": state_of(model), "step": report.step}
    found["left"] = sorted(path.name for path in folder.parent.iterdir())
    dist.barrier()
    model = models.Mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    fsdp_ckpt.save_state(folder, shard(model), step=2)
    again = shard(blank(models.Mlp()))
    found["step again"] = fsdp_ckpt.load_state(folder, again).step
    return {**found, "again": state_of(again)}


MORTAL = (p28_crash_one, p28_crash_all, p32_absent)
