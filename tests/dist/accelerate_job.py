"""A small training job on this rank, read by torch's own means, and Accelerate's own functions to save and load it."""

from __future__ import annotations

import functools
import os
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tests.cases.models import Mlp, Tied

__all__ = ["MODELS", "Accelerate", "Counter", "Job", "Rich", "Wrapped", "prepared", "wrap"]

_WRAPPER = "_fsdp_wrapped_module."
Wrapped = str
"""``FSDP1`` (use_orig_params), ``FSDP1-flat`` (without) or ``FSDP2``."""


class Rich(Tied):
    """Tied weights, and buffers that training changes: a float, an integer, and one that is not saved."""

    seen: Tensor
    mean: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scratch", torch.full((2,), 5.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        self.mean.mul_(0.5).add_(1.0)
        logits: Tensor = self.lm_head(self.mid(self.embed(tokens)))
        return logits


MODELS: Mapping[str, tuple[type[nn.Module], tuple[str, ...]]] = {"mlp": (Mlp, ("up", "down")), "rich": (Rich, ("mid",))}
"""Class, and the submodules that are wrapped on their own. The first one's parameters are a group of their own."""


class Counter:
    """An object of the caller's."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": torch.arange(self.count)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert torch.equal(state["seen"], torch.arange(state["count"]))
        self.count = state["count"]


def wrap(module: nn.Module, kind: Wrapped, units: tuple[str, ...], strategy: str = "FULL_SHARD") -> nn.Module:
    """Wrap a module, and some of its submodules on their own, by FSDP."""
    chosen = [module.get_submodule(name) for name in units]
    if kind == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*chosen, module):
            fully_shard(part, mesh=mesh, reshard_after_forward=strategy == "FULL_SHARD")
        return module
    return Fsdp1(
        module,
        auto_wrap_policy=CustomPolicy(lambda part: any(part is other for other in chosen)),
        use_orig_params=kind == "FSDP1",
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
    )


@dataclass
class Job:
    """A model in training: two groups, a scheduler, an object, and steps that draw random numbers."""

    kind: Wrapped
    name: str
    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    counter: Counter

    @classmethod
    def build(
        cls, kind: Wrapped, name: str = "mlp", *, seed: int = 7, strategy: str = "FULL_SHARD", **options: Any
    ) -> Job:
        """Make one whose weights, and whose random streams on each rank, follow from the seed."""
        make, units = MODELS[name]
        module = make()
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
        module.to(options.pop("dtype", torch.float32))
        model = wrap(module, kind, units, strategy)
        rows = list(model.named_parameters())
        first = [parameter for key, parameter in rows if units[0] in key]
        rest = [parameter for key, parameter in rows if units[0] not in key]
        groups: list[dict[str, Any]] = [{"params": first, "lr": 0.02, "weight_decay": 0.1}, {"params": rest}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        own = 10 * seed + dist.get_rank()
        torch.manual_seed(own)
        random.seed(own)
        np.random.seed(own)
        return cls(kind, name, model, optimizer, scheduler, Counter())

    @classmethod
    def trained(cls, kind: Wrapped, name: str = "mlp", *, steps: int = 2, **options: Any) -> Job:
        """Make one and train it."""
        job = cls.build(kind, name, **options)
        job.run(range(steps))
        return job

    def loss(self, number: int) -> Tensor:
        """Return the loss on the data of a step; what is dropped and added depends on all three random streams."""
        own = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        if self.name == "mlp":
            data = functional.dropout(torch.randn(4, 6, generator=own), 0.3) * (1 + random.random())
            result: Tensor = self.model(data.to(next(self.model.parameters()).dtype)).square().mean()
        else:
            tokens = torch.randint(0, 16, (8,), generator=own)
            logits = functional.dropout(self.model(tokens), 0.3) * (1 + random.random())
            result = functional.cross_entropy(logits, tokens.flip(0))
        return result * (1 + float(np.random.rand()))

    def run(self, numbers: range) -> list[float]:
        """Take steps; return this rank's losses."""
        losses = []
        for number in numbers:
            loss = self.loss(number)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.counter.count += 1
            losses.append(float(loss))
        return losses

    def tensors(self) -> dict[str, Tensor]:
        """Return whole parameters, buffers and moments, put together by torch."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._fsdp2_tensors() if self.kind == "FSDP2" else self._fsdp1_tensors()

    def _fsdp2_tensors(self) -> dict[str, Tensor]:
        found = {name: _full(value) for name, value in self.model.named_parameters()}
        found |= {name: value.clone() for name, value in self.model.named_buffers()}
        for name, parameter in self.model.named_parameters():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                found[f"state.{name}.{kind}"] = _full(value)
        return found

    def _fsdp1_tensors(self) -> dict[str, Tensor]:
        with Fsdp1.summon_full_params(self.model, writeback=False):
            found = {name.replace(_WRAPPER, ""): _full(value) for name, value in self.model.named_parameters()}
        found |= {name.replace(_WRAPPER, ""): value.clone() for name, value in self.model.named_buffers()}
        return found | (self._flat_moments() if self.kind == "FSDP1-flat" else self._orig_moments(found))

    def _flat_moments(self) -> dict[str, Tensor]:
        state = Fsdp1.full_optim_state_dict(self.model, self.optimizer, rank0_only=False)["state"]
        return {f"state.{name}.{kind}": value.clone() for name, kinds in state.items() for kind, value in kinds.items()}

    def _orig_moments(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Join the runs of all ranks: torch's full_optim_state_dict mixes up moments here, on the CPU."""
        own = {
            (name.replace(_WRAPPER, ""), kind): value
            for name, parameter in self.model.named_parameters()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
        }
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, own)
        found = {}
        for name, kind in {key: None for row in rows for key in row}:
            runs = [row[name, kind] for row in rows if (name, kind) in row]
            found[f"state.{name}.{kind}"] = runs[0] if kind == "step" else torch.cat(runs).view_as(params[name])
        return found

    def state(self) -> dict[str, Any]:
        """Return all that this job is, apart from what is in no checkpoint."""
        keep: dict[str, Any] = {"tensors": self.tensors(), "locals": self.locals(), "rest": self.rest()}
        for tensors in (keep["tensors"], keep["locals"]):
            for name in [name for name in tensors if name.endswith("scratch")]:
                del tensors[name]
        return keep

    def locals(self) -> dict[str, Tensor]:
        """Return what this rank itself has in memory, padding included."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = _local(parameter)
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                found[f"state.{name}.{kind}"] = _local(value)
        return found | {name: value.clone() for name, value in self.model.named_buffers()}

    def groups(self) -> list[dict[str, Any]]:
        """Return the options of each group, and how many parameters it has."""
        return [
            {**{option: value for option, value in group.items() if option != "params"}, "count": len(group["params"])}
            for group in self.optimizer.param_groups
        ]

    def rest(self) -> dict[str, Any]:
        """Return everything that is not sharded."""
        return {
            "groups": self.groups(),
            "scheduler": self.scheduler.state_dict(),
            "count": self.counter.count,
            "python": random.getstate(),
            "numpy": [np.asarray(item).tolist() for item in np.random.get_state()],
            "torch": torch.get_rng_state().tolist(),
        }


def _full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


@functools.cache
def _partial_state(rank: int, size: int) -> None:
    """Make Accelerate's singleton, which learns of the ranks from torchrun's variables."""
    from accelerate.state import PartialState

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="true")
    state = PartialState(cpu=True)
    assert (state.process_index, state.num_processes) == (rank, size)


class Accelerate:
    """The functions that ``Accelerator.save_state`` and ``load_state`` call, with a stand-in for the Accelerator."""

    def __init__(self, kind: Wrapped, style: str = "SHARDED_STATE_DICT", *, use_dcp: bool = True) -> None:
        from accelerate import FullyShardedDataParallelPlugin

        rank, size = dist.get_rank(), dist.get_world_size()
        _partial_state(rank, size)
        version = 2 if kind == "FSDP2" else 1
        self.rank = rank
        self.use_dcp = use_dcp
        self.plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=style)
        self.stub = SimpleNamespace(
            num_processes=size,
            process_index=rank,
            is_main_process=rank == 0,
            is_fsdp2=version == 2,
            wait_for_everyone=dist.barrier,
        )

    def save(self, folder: Path, job: Job) -> None:
        """Save everything, in the order of ``Accelerator.save_state``."""
        from accelerate.checkpointing import save_accelerator_state, save_custom_state

        self.save_sharded(folder, job)
        save_accelerator_state(str(folder), [], [], [job.scheduler], [], self.rank, 2)
        save_custom_state(job.counter, str(folder), 0)
        dist.barrier()

    def save_sharded(self, folder: Path, job: Job) -> None:
        """Save the model and the optimizer."""
        from accelerate.utils import fsdp_utils

        with _quiet():
            fsdp_utils.save_fsdp_model(self.plugin, self.stub, job.model, str(folder), use_dcp=self.use_dcp)
            fsdp_utils.save_fsdp_optimizer(
                self.plugin, self.stub, job.optimizer, job.model, str(folder), use_dcp=self.use_dcp
            )
        dist.barrier()

    def save_numbered(self, folder: Path, job: Job, number: int) -> None:
        """Save one of several models and its optimizer."""
        from accelerate.utils import fsdp_utils

        with _quiet():
            fsdp_utils.save_fsdp_model(self.plugin, self.stub, job.model, str(folder), number)
            fsdp_utils.save_fsdp_optimizer(self.plugin, self.stub, job.optimizer, job.model, str(folder), number)
        dist.barrier()

    def load_model(self, folder: Path, job: Job) -> None:
        """Load the model."""
        from accelerate.utils import fsdp_utils

        with _quiet():
            fsdp_utils.load_fsdp_model(self.plugin, self.stub, job.model, str(folder), use_dcp=self.use_dcp)

    def load_optimizer(self, folder: Path, job: Job) -> None:
        """Load the optimizer."""
        from accelerate.utils import fsdp_utils

        with _quiet():
            fsdp_utils.load_fsdp_optimizer(
                self.plugin, self.stub, job.optimizer, job.model, str(folder), use_dcp=self.use_dcp
            )

    def load_rest(self, folder: Path, job: Job) -> dict[str, Any]:
        """Load the scheduler, random states and the object; return what overrides the Accelerator's attributes."""
        from accelerate.checkpointing import load_accelerator_state, load_custom_state

        override: dict[str, Any] = load_accelerator_state(str(folder), [], [], [job.scheduler], [], self.rank)
        load_custom_state(job.counter, str(folder), 0)
        return override


def prepared(job: Job) -> tuple[Any, Any]:
    """Return the optimizer and the scheduler as ``Accelerator.prepare`` would. Call it late: it sets global state."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    _partial_state(dist.get_rank(), dist.get_world_size())
    Accelerator(cpu=True)
    optimizer = AcceleratedOptimizer(job.optimizer)
    return optimizer, AcceleratedScheduler(job.scheduler, optimizer)


def _quiet() -> warnings.catch_warnings[None]:
    return warnings.catch_warnings(action="ignore")
