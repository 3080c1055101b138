"""A job of sharded training whose every number says which save it is of, and what torch's own loaders make of it.

Element i of tensor k at version v is 1000 v + 50 k + i mod 50, so that whoever reads a checkpoint knows what is right,
and an element of another version gives itself away.
"""

from __future__ import annotations

import json
import random
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["Job", "expected", "judge", "read_parts", "versions_in"]

_SCALE = 1000
_TENSORS = ("0.weight", "0.bias", "1.weight")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MANIFEST = "fsdp_ckpt.json"


def _shapes(rows: int) -> dict[str, tuple[int, ...]]:
    return {"0.weight": (rows, 6), "0.bias": (rows,), "1.weight": (3, rows)}


def _value(version: int, number: int, shape: tuple[int, ...]) -> Tensor:
    numel = torch.Size(shape).numel()
    return (torch.arange(numel) % 50 + (_SCALE * version + 50 * number)).to(torch.float32).reshape(shape)


def expected(version: int, rows: int) -> dict[str, Tensor]:
    """Return every tensor of a version, by its place in the checkpoint."""
    found: dict[str, Tensor] = {}
    for name, shape in _shapes(rows).items():
        found[f"model.{name}"] = _value(version, len(found), shape)
        for moment in _MOMENTS:
            found[f"optimizer.state.{name}.{moment}"] = _value(version, len(found), shape)
        found[f"optimizer.state.{name}.step"] = torch.tensor(float(_SCALE * version))
    return found


class _Feed:
    """A data loader: where it is."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Job:
    """A sharded model, an optimizer with moments, a scheduler and a data loader, all of some version."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.rank = dist.get_rank()
        self.model = nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 3, bias=False))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        for param in self.model.parameters():
            moments = {moment: torch.zeros_like(param, requires_grad=False) for moment in _MOMENTS}
            self.optimizer.state[param] = {"step": torch.tensor(0.0), **moments}
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _constant)
        self.feed = _Feed()

    def state(self) -> dict[str, Any]:
        """Return what ``save_state`` takes."""
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "dataloader": self.feed,
        }  # fmt: skip

    def nested(self) -> dict[str, Any]:
        """Return what ``dcp.save`` takes: the same tensors."""
        return {place.replace("optimizer.state", "state"): tensor for place, tensor in self._live().items()}

    def become(self, version: int) -> None:
        """Take on the values of a version."""
        right = expected(version, self.rows)
        with torch.no_grad():
            for place, tensor in self._live().items():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local.copy_(self._mine(right[place], tensor))
        self.scheduler.last_epoch = version
        self.feed.position = 10 * version + self.rank
        torch.manual_seed(_seed(version, self.rank))
        random.seed(_seed(version, self.rank))

    def lacks(self, version: int) -> str:
        """Return what in the live job is not of a version; ``""`` when all is."""
        right = expected(version, self.rows)
        for place, tensor in self._live().items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if not torch.equal(local, self._mine(right[place], tensor)):
                return f"{place} on rank {self.rank} is of {sorted(versions_in([local]))}, not {version}"
        if (self.scheduler.last_epoch, self.feed.position) != (version, 10 * version + self.rank):
            return f"the scheduler is at {self.scheduler.last_epoch}, the data at {self.feed.position}"
        return "" if torch.initial_seed() == _seed(version, self.rank) else f"the random state on rank {self.rank}"

    def _live(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            found[f"model.{name}"] = param
            for kind, tensor in self.optimizer.state[param].items():
                found[f"optimizer.state.{name}.{kind}"] = tensor
        return found

    def _mine(self, whole: Tensor, live: Tensor) -> Tensor:
        """Return this rank's rows of a tensor; they are dealt out as torch.chunk does."""
        if not isinstance(live, DTensor):
            return whole
        pieces = torch.chunk(whole, dist.get_world_size())
        return pieces[self.rank] if self.rank < len(pieces) else whole[:0]


def _constant(epoch: int) -> float:
    return 1.0


def _seed(version: int, rank: int) -> int:
    return 10 * version + rank + 1


def versions_in(tensors: list[Tensor]) -> set[int]:
    """Return the versions whose elements are in some tensors."""
    return {int(value) for tensor in tensors for value in (tensor.reshape(-1) // _SCALE).unique().tolist()}


def read_parts(folder: Path) -> dict[str, Tensor]:
    """Read a folder of torch.distributed.checkpoint with torch's own reader; return its tensors by place."""
    nested: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader, planner = FileSystemReader(folder), _EmptyStateDictLoadPlanner()
        _load_state_dict(nested, storage_reader=reader, planner=planner, no_dist=True)
    return dict(_flat(nested, ""))


def _read_full(folder: Path) -> dict[str, Tensor]:
    """Read what FULL_STATE_DICT leaves, with torch.load; empty where there is no such file."""
    if not (folder / "pytorch_model_fsdp.bin").exists():
        return {}
    model = torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True)
    optimizer = torch.load(folder / "optimizer.bin", weights_only=True)
    return dict(_flat({"model": model, "optimizer": optimizer}, ""))


def _flat(value: Any, place: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(place, value)]
    found = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [pair for key, inner in found for pair in _flat(inner, f"{place}.{key}" if place else str(key))]


def judge(folder: Path, rows: int, ranks: int) -> dict[str, Any]:
    """Say of which one version a checkpoint is in all that it holds, or what is wrong with it.

    Nothing of fsdp_ckpt is used: torch's own readers, zlib and json.
    """
    if not folder.exists():
        return {"state": "absent", "why": ""}
    try:
        version, why = _check(folder, rows, ranks)
    except BaseException as error:  # noqa: BLE001 - torch raises a BaseException; whatever it is, it does not load
        return {"state": "unreadable", "why": f"{type(error).__name__}: {error}"[:2000]}
    return {"state": "wrong" if why else "whole", "version": version, "why": why}


def _check(folder: Path, rows: int, ranks: int) -> tuple[int, str]:
    manifest = json.loads((folder / _MANIFEST).read_bytes())
    version = manifest["values"]["version"]
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    locks = {name for name in files if name.startswith(".fsdp-ckpt-") and not (folder / name).stat().st_size}
    if files - locks != {*manifest["files"], _MANIFEST}:
        return version, f"files: {sorted(files - locks)}"
    for name, facts in manifest["files"].items():
        data = (folder / name).read_bytes()
        if (len(data), f"{zlib.crc32(data):08x}") != (facts["bytes"], facts["crc32"]):
            return version, f"{name} is not what the manifest says"
    found = _read_full(folder) or read_parts(folder / "pytorch_model_fsdp_0") | read_parts(folder / "optimizer_0")
    right = expected(version, rows)
    wrong = [place for place in right if place not in found or not torch.equal(found[place], right[place])]
    if wrong or found.keys() - right.keys():
        return version, f"{wrong or found.keys() - right.keys()}, of {sorted(versions_in(list(found.values())))}"
    return version, _check_small(folder, version, ranks)


def _check_small(folder: Path, version: int, ranks: int) -> str:
    epoch = torch.load(folder / "scheduler.bin", weights_only=False)["last_epoch"]
    if epoch != version:
        return f"the scheduler is at {epoch}"
    for rank in range(ranks):
        states = torch.load(folder / f"random_states_{rank}.pkl", weights_only=False)
        random.seed(_seed(version, rank))
        right = torch.Generator().manual_seed(_seed(version, rank)).get_state()
        if not torch.equal(states["torch_manual_seed"], right) or states["random_state"] != random.getstate():
            return f"the random states of rank {rank}"
        (name,) = [path for path in folder.rglob("*") if path.name in (f"dl_states_{rank}.pkl", f"dl_state_{rank}.bin")]
        position = torch.load(name, weights_only=False)
        if f"{10 * version + rank}" not in str(position):
            return f"the data of rank {rank} is at {position}"
    return ""
