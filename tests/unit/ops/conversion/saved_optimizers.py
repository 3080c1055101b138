"""Real optimizers, saved by torch in each of its forms, and what torch's own state_dict API says they hold."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint._version as dcp_version
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from fsdp_ckpt.catalog import Checkpoint, Part, Role
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.conversion.optimizer import CanonicalOptimizer, canonical_optimizer
from fsdp_ckpt.ops.conversion.values import load_value, read_small_tensor
from fsdp_ckpt.ops.view import SliceView
from fsdp_ckpt.plan.output import OutputPart
from fsdp_ckpt.run.sources import Sources
from tests.build import full_bits, rows, save_dcp

__all__ = [
    "FORMS", "OPTIMIZERS", "Alike", "Saved", "Unlike", "assert_equal", "by_name", "canonical", "content", "flat",
    "old_torch", "parts_of", "save", "sharded", "train",
]  # fmt: skip


class Unlike(nn.Module):
    """A model whose parameters all have different shapes, and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.down = nn.Linear(8, 5)
        self.unused = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.norm(self.up(x)))) * self.scale
        return found


class Alike(nn.Module):
    """A model whose layers are alike: shapes do not say which is which."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _split(model: nn.Module) -> tuple[list[Any], list[Any]]:
    params = list(model.parameters())
    return [param for param in params if param.dim() > 1], [param for param in params if param.dim() < 2]


def _three_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices, others = _split(model)
    groups = [
        {"params": matrices, "lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.95)},
        {"params": others, "lr": 2e-3, "weight_decay": 0.0},
        {"params": [], "lr": 5e-4, "eps": 1e-6},
    ]
    optimizer = torch.optim.AdamW(groups)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # adds initial_lr
    return optimizer


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices, others = _split(model)
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "AdamW, two groups": _two_groups,
    "AdamW, three groups, one of them empty": _three_groups,
    "Adam with amsgrad and a tensor as lr": lambda model: torch.optim.Adam(
        model.parameters(), lr=torch.tensor(0.01), amsgrad=True
    ),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "SGD without state": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Take some steps."""
    torch.manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(7, 6)).square().mean().backward()
        optimizer.step()


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer, *, flatten: bool = False) -> dict[str, Any]:
    """Return what torch's state_dict API makes of an optimizer."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(dict(get_optimizer_state_dict(model, optimizer, options=options)))


@contextlib.contextmanager
def old_torch() -> Iterator[None]:
    """Let torch flatten state dicts as 2.3 and older do."""
    dcp_version._derived_version = "2_3"
    try:
        yield
    finally:
        dcp_version._derived_version = None


def sharded(value: Any) -> Any:
    """Cut all tensors with dimensions among two ranks, but those in lists."""
    if isinstance(value, Mapping):
        return {key: sharded(item) for key, item in value.items()}
    return rows(value, 2) if isinstance(value, Tensor) and value.dim() and value.numel() > 1 else value


FORMS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "by index": lambda _, optimizer: optimizer.state_dict(),
    "by name": by_name,
    "flattened": lambda model, optimizer: by_name(model, optimizer, flatten=True),
}


def save(folder: Path, state: Mapping[str, Any], medium: str) -> Path:
    """Save a nested state dict: ``dcp`` (two ranks), ``old dcp`` (torch 2.3), ``accelerate`` (in folders), ``file``."""
    if medium == "file":
        folder.mkdir()
        torch.save(state, folder / "checkpoint.pt")
        return folder / "checkpoint.pt"
    if medium == "accelerate":
        with old_torch():
            save_dcp(folder / "pytorch_model_fsdp_0", sharded({"model": state["model"]}))
            save_dcp(folder / "optimizer_0", sharded({"optimizer": state["optimizer"]}))
        return folder
    with old_torch() if medium == "old dcp" else contextlib.nullcontext():
        return save_dcp(folder, sharded(state))


def parts_of(path: Path) -> tuple[Checkpoint, Part | None, Part]:
    """Return a checkpoint, its model and its optimizer."""
    checkpoint = read_checkpoint(path)
    models = [part for part in checkpoint.parts if part.role is Role.MODEL]
    (optimizer,) = (part for part in checkpoint.parts if part.role is Role.OPTIMIZER)
    return checkpoint, models[0] if models else None, optimizer


@dataclass(kw_only=True)
class Saved:
    """What was read, and where from."""

    checkpoint: Checkpoint
    found: CanonicalOptimizer


def canonical(
    path: Path, *, param_names: Sequence[str] | None = None, use_model: bool = True, exclude: Sequence[str] = ()
) -> Saved:
    """Bring the optimizer of a checkpoint into the form by name."""
    checkpoint, model, optimizer = parts_of(path)
    with Sources(checkpoint.roots) as sources:
        found = canonical_optimizer(
            optimizer,
            lambda entry: load_value(entry, sources.store),
            model=model if use_model else None,
            param_names=param_names,
            scalars=lambda entry: read_small_tensor(entry, sources),
            exclude=exclude,
        )
    return Saved(checkpoint=checkpoint, found=found)


def flat(part: OutputPart, checkpoint: Checkpoint) -> dict[tuple[str | int, ...], Any]:
    """Return everything that a part would write, by place, with the bytes read from where the part says."""
    with Sources(checkpoint.roots) as sources:
        found: dict[tuple[str | int, ...], Any] = {}
        for tensor in part.tensors:
            assert tensor.name == ".".join(map(str, tensor.path))
            found[tensor.path] = SliceView(tensor, sources, "pt", verify=True).read(
                (0,) * len(tensor.shape), tensor.shape
            )
        for entry in part.objects:
            found[entry.path] = entry.value if entry.source is None else load_value(entry.source, sources.store)
    assert len(found) == len(part.tensors) + len(part.objects)
    return found


def content(part: OutputPart, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the same as a state dict of nested dictionaries, groups as a list."""
    state: dict[Any, dict[Any, Any]] = {}
    groups: dict[Any, dict[Any, Any]] = {}
    for path, value in flat(part, checkpoint).items():
        head, owner, kind = path
        (state if head == "state" else groups).setdefault(owner, {})[kind] = value
    return {"state": state, "param_groups": [groups[number] for number in range(len(groups))]}


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested values, tensors bit for bit."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), where
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert full_bits(found) == full_bits(expected), where
    elif isinstance(expected, Mapping):
        assert set(found) == set(expected), where
        for key, item in expected.items():
            assert_equal(found[key], item, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert (type(found), len(found)) == (type(expected), len(expected)), where
        for number, (first, second) in enumerate(itertools.zip_longest(found, expected)):
            assert_equal(first, second, f"{where}.{number}")
    else:
        assert (type(found), found) == (type(expected), expected), where
