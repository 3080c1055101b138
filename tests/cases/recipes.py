"""The recipes of ../shared/cases.md that need several ranks; each function runs on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._version as dcp_version
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.cases import models


def save_rank_file(folder: Path, state: Mapping[str, Any]) -> None:
    """Save as verl does: one torch.save file per rank."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state), folder / f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")


def sharded(tensor: Tensor) -> Any:
    """Return a ShardedTensor as FSDP1 makes it: rows by torch.chunk, ranks without rows hold no shard."""
    rank, offset, shards = dist.get_rank(), 0, []
    for owner, piece in enumerate(tensor.chunk(dist.get_world_size())):
        offsets = [offset] + [0] * (tensor.dim() - 1)
        if owner == rank:
            shards.append(LocalShard.from_tensor_and_offsets(piece.clone(), offsets, rank))
        offset += piece.shape[0]
    return init_from_local_shards(shards, *tensor.shape)


def spread(tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, DTensor]:
    """Return tensors sharded by rows."""
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in tensors.items()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train one step, with the same data on every rank."""
    model(torch.arange(12.0).reshape(2, 6) / 12).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# Four ranks -----------------------------------------------------------------------------------------------------------


def p03(out: Path, _: DeviceMesh) -> None:
    """FSDP over tensor parallelism, rows strided."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = models.Mlp()
    parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    state = model.state_dict()
    dcp.save({"model": state}, checkpoint_id=out / "dcp")
    save_rank_file(out / "verl", state)


def p05(out: Path, mesh: DeviceMesh) -> None:
    """Fewer rows than ranks: FSDP2 with empty shards, FSDP1 without them."""
    model = models.Odd()
    whole = models.reference(model)
    fully_shard(model, mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=out / "fsdp2")
    dcp.save({"model": {name: sharded(value) for name, value in whole.items()}}, checkpoint_id=out / "fsdp1")


def p08(out: Path, _: DeviceMesh) -> None:
    """HSDP: two replicas of two shards."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "sh"))
    model = models.Mlp()
    fully_shard(model, mesh=grid)
    dcp.save({"model": model.state_dict()}, checkpoint_id=out / "dcp")
    save_rank_file(out / "verl", model.state_dict())


def p28_first(out: Path, mesh: DeviceMesh) -> None:
    """The first save into a folder that two ranks save into again."""
    model = models.Mlp()
    fully_shard(model, mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=out)


def p40(out: Path, mesh: DeviceMesh) -> None:
    """Each rank's position in its data."""
    model = models.Mlp()
    fully_shard(model, mesh=mesh)
    rank = dist.get_rank()
    loader = {f"dp_rank_{rank}": {"pos": 10 * (rank + 1)}}
    dcp.save({"model": model.state_dict(), "dataloader": loader}, checkpoint_id=out)


def p48(out: Path, _: DeviceMesh) -> None:
    """Composer's files per rank, with ShardedTensor."""
    out.mkdir(exist_ok=True)
    state = {"w": sharded(torch.arange(12.0).reshape(6, 2)), "buf": torch.tensor(3)}
    torch.save({"state": {"model": state}}, out / f"ep10-ba50000-rank{dist.get_rank()}.pt")


# Two ranks ------------------------------------------------------------------------------------------------------------


def p01(out: Path, mesh: DeviceMesh) -> None:
    """Buffers beside sharded parameters; and the world of one, where nothing is sharded."""
    plain = models.Buffers()
    if dist.get_rank() == 0:
        (out / "one").mkdir(parents=True)
        torch.save(plain.state_dict(), out / "one" / "model_world_size_1_rank_0.pt")
    model = models.Buffers()
    fully_shard(model, mesh=mesh)
    save_rank_file(out / "verl", model.state_dict())
    dcp.save({"model": model.state_dict()}, checkpoint_id=out / "dcp")


def p09(out: Path, mesh: DeviceMesh) -> None:
    """A compiled block within activation checkpointing leaks `_orig_mod`."""
    model = models.Layered()
    model.layers[0] = checkpoint_wrapper(torch.compile(model.layers[0]))  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=out)


def p14(out: Path, mesh: DeviceMesh) -> None:
    """Tied weights are saved under both names."""
    model = models.Tied()
    fully_shard(model, mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=out)


def p22(out: Path, mesh: DeviceMesh) -> None:
    """Model and optimizer as Accelerate lays them out; the model is left as it was before the step."""
    model = models.Mlp()
    fully_shard(model, mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=out / "pytorch_model_fsdp_0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=out / "optimizer_0")


def p28_second(out: Path, mesh: DeviceMesh) -> None:
    """The second save, by two ranks, of other values."""
    model = models.Mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    fully_shard(model, mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=out)


def p34(out: Path, mesh: DeviceMesh) -> None:
    """Three param groups, the last without parameters."""
    model = models.Mlp()
    fully_shard(model, mesh=mesh)
    named = dict(model.named_parameters())
    weights = [named.pop("up.weight"), named.pop("down.weight")]
    groups: list[dict[str, Any]] = [
        {"params": weights, "lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.95)},
        {"params": list(named.values()), "lr": 2e-3, "weight_decay": 0.0},
        {"params": [], "lr": 5e-4, "eps": 1e-6},
    ]
    optimizer = torch.optim.AdamW(groups)
    step(model, optimizer)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=out)


def p37(out: Path, mesh: DeviceMesh) -> None:
    """One optimizer in three layouts: by index, by name, flattened."""
    model = models.Mlp()
    fully_shard(model, mesh=mesh)
    named = dict(model.named_parameters())
    weights = [named.pop("up.weight"), named.pop("down.weight")]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 1e-3}, {"params": list(named.values()), "lr": 2e-3}])
    step(model, optimizer)
    step(model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    by_index = optimizer.state_dict()
    by_name = get_optimizer_state_dict(model, optimizer)
    flattened = get_optimizer_state_dict(model, optimizer, options=flat)
    for name, state in (("index", by_index), ("name", by_name), ("flat", flattened)):
        dcp.save({"optimizer": state}, checkpoint_id=out / name)


def p44(out: Path, mesh: DeviceMesh) -> None:
    """Nested containers as one blob (torch <= 2.3) and flattened (now)."""
    model = models.Mlp()
    fully_shard(model, mesh=mesh)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer)
    state = {
        "model": saved,
        "optim": get_optimizer_state_dict(model, optimizer),
        "extra": {"l": [1, {"x": 2}]},
    }
    dcp.save(state, checkpoint_id=out / "new")
    dcp_version._derived_version = "2_3"
    dcp.save(state, checkpoint_id=out / "old")
    dcp_version._derived_version = None


def p49(out: Path, mesh: DeviceMesh) -> None:
    """A full file that holds rank 0's slice only (accelerate#4206)."""
    model = models.Lora()
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    for value in state.values():
        value.to_local().fill_(0.01 * (dist.get_rank() + 1))
    if dist.get_rank() == 0:
        out.mkdir()
        torch.save(state, out / "pytorch_model_fsdp.bin")


def p52(out: Path, mesh: DeviceMesh) -> None:
    """A vocabulary of 12."""
    model = models.Embed()
    fully_shard(model, mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=out)


def p17(out: Path, mesh: DeviceMesh) -> None:
    """Three dtypes."""
    dcp.save({"model": spread(models.mixed(), mesh)}, checkpoint_id=out)


def p51(out: Path, mesh: DeviceMesh) -> None:
    """The keys of PEFT."""
    dcp.save({"model": spread(models.adapted(), mesh)}, checkpoint_id=out)


def p54(out: Path, mesh: DeviceMesh) -> None:
    """An odd tensor name."""
    state = spread(models.oddly_named(), mesh)
    dcp.save({"model": state}, checkpoint_id=out / "dcp")
    save_rank_file(out / "verl", state)


def p23(out: Path, mesh: DeviceMesh, sizes: Mapping[int, tuple[int, int]]) -> None:
    """Many equal tensors; only the shards are ever in memory."""
    for count, (rows, columns) in sizes.items():
        state = {
            name: DTensor.from_local(torch.full((rows // 2, columns), float(i)), mesh, [Shard(0)])
            for i, name in enumerate(models.layers(count, (rows, columns)))
        }
        dcp.save({"model": state}, checkpoint_id=out / str(count))
