"""Models that are loaded: of another precision or shape, with tensors too few or too many, or with empty shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim import AdamW

import fsdp_ckpt
from fsdp_ckpt import LoadReport
from fsdp_ckpt.train.model_plan import Resize
from tests.cases import models
from tests.cases import recipes as r
from tests.cases.state_training import blank, caught, full, mesh, moments_of, seeded, shard, state_of
from tests.dist.stage import scenario


@scenario(ranks=2)
def p17(place: Path) -> tuple[LoadReport, dict[str, Tensor]]:
    """A bf16 checkpoint into an fp32 model."""
    saved = shard(seeded(1).bfloat16())
    fsdp_ckpt.save_state(place / "ck", saved, rng=False)
    model = shard(blank(models.Mlp()))
    report = fsdp_ckpt.load_state(place / "ck", model)
    return report, state_of(model)


class Words(nn.Module):
    """P52: an embedding with another number of rows, filled with -1."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        nn.init.constant_(self.embed.weight, -1)


@scenario(ranks=2)
def p52(place: Path) -> dict[str, Any]:
    """A vocabulary of 12 into 10 and 16 rows, with optimizer state."""
    r.p52(place / "stock", mesh())
    model = shard(models.Embed())
    optimizer = AdamW(model.parameters())
    model.embed.weight.grad = model.embed.weight.detach() / 100 - 0.1
    optimizer.step()
    fsdp_ckpt.save_state(place / "ck", model, optimizer)
    found: dict[str, Any] = {"saved": (state_of(model), moments_of(model, optimizer))}
    resizes: tuple[Resize, ...] = (None, "grow", "truncate")
    for rows in (10, 16):
        for resize in resizes:
            words = shard(Words(rows))
            fresh = AdamW(words.parameters(), lr=9.0)
            error = caught(lambda: fsdp_ckpt.load_state(place / "ck", words, fresh, resize=resize))  # noqa: B023
            report = None if error else fsdp_ckpt.load_state(place / "stock", shard(Words(rows)), resize=resize)
            found[f"{rows} {resize}"] = error, state_of(words), moments_of(words, fresh), report
    return found


def layers(count: int) -> nn.Sequential:
    """Return P55's layers, sharded and filled with -1."""
    return shard(blank(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))))


@scenario(ranks=2)
def p55(place: Path) -> dict[str, Any]:
    """A checkpoint of two layers into three and into one."""
    saved = {f"{number}.weight": torch.arange(16.0).reshape(4, 4) + 100 * number for number in range(2)}
    dcp.save({"model": r.spread(saved, mesh())}, checkpoint_id=place / "ck")
    found: dict[str, Any] = {}
    for count in (3, 1):
        model = layers(count)
        refused = caught(lambda: fsdp_ckpt.load_state(place / "ck", model))  # noqa: B023
        found[f"{count} strict"] = refused, state_of(model)
        report = fsdp_ckpt.load_state(place / "ck", model, strict=False)
        found[str(count)] = report, state_of(model)
    return found


@scenario(ranks=2)
def p56(place: Path) -> dict[str, Any]:
    """A buffer that is in no checkpoint: garbage after to_empty, or as the module made it."""
    fsdp_ckpt.save_state(place / "ck", shard(models.Buffers()), rng=False)
    with torch.device("meta"):
        empty = models.Buffers()
    shard(empty)
    on_meta = caught(lambda: fsdp_ckpt.load_state(place / "ck", empty))
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for value in (*empty.parameters(), *empty.buffers()):
            value.fill_(float("nan") if value.is_floating_point() else -1)
    first = fsdp_ckpt.load_state(place / "ck", empty)
    normal = shard(blank(models.Buffers()))
    second = fsdp_ckpt.load_state(place / "ck", normal)
    return {
        "on meta": on_meta,
        "empty": (first, state_of(empty)),
        "normal": (second, state_of(normal), full(dict(normal.named_buffers())["np_buf"])),
    }


@scenario(ranks=4)
def p05(place: Path) -> dict[str, dict[str, Tensor]]:
    """Fewer rows than ranks, from both forms."""
    r.p05(place, mesh())
    found = {}
    for form in ("fsdp2", "fsdp1"):
        model = shard(blank(models.Odd()))
        fsdp_ckpt.load_state(place / form, model)
        found[form] = state_of(model)
    fsdp_ckpt.save_state(place / "ours", shard(models.Odd()))
    model = shard(blank(models.Odd()))
    fsdp_ckpt.load_state(place / "ours", model)
    return {**found, "ours": state_of(model)}


@scenario(ranks=4)
def p06(place: Path) -> dict[str, Any]:
    """One row for four ranks, from a full file."""
    value = torch.arange(17.0).view(1, 17)
    if dist.get_rank() == 0:
        torch.save({"weight": value}, place / "model.pt")
        save_file({"weight": value}, place / "model.safetensors")
    dist.barrier()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = {}
    for file in ("model.pt", "model.safetensors"):
        for target in ("1-D", "2-D"):
            model = nn.Module()
            model.weight = nn.Parameter(torch.full((1, 17), -1.0))
            if target == "2-D":
                model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), grid["tp"], [Replicate()]))
                fully_shard(model, mesh=grid["dp"])
            else:
                shard(model)
            fsdp_ckpt.load_state(place / file, model)
            weight: Any = model.weight
            found[f"{file} {target}"] = (
                str(weight.placements), tuple(weight.to_local().shape), full(weight)
            )  # fmt: skip
    return found


@scenario(ranks=4)
def p08(place: Path) -> dict[str, Any]:
    """Two replicas of two shards are saved as one copy."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "sh"))
    model = models.Mlp()
    fully_shard(model, mesh=grid)
    weight: Any = model.up.weight
    fsdp_ckpt.save_state(place / "ck", model, rng=False)
    again = models.Mlp()
    fully_shard(blank(again), mesh=grid)
    fsdp_ckpt.load_state(place / "ck", again)
    return {"local": tuple(weight.to_local().shape), "loaded": state_of(again)}
