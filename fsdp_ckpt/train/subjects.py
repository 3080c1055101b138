"""What a call of save_state or load_state is about, under names: models, optimizers, and all the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.modules import LiveModel, is_sharded
from fsdp_ckpt.train.optimizers import Slots, unwrap_optimizer

__all__ = ["Subjects", "all_slots", "models_of", "name_all", "refuse_state_dict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjects:
    """Everything by name; things given as a list are named by their number.

    Attributes:
        models: Modules.
        optimizers: Optimizers, without wrappers.
        schedulers: Learning rate schedulers.
        dataloaders: Data loaders or samplers, a state for each rank.
        objects: Anything else with ``state_dict`` and ``load_state_dict``; the same on all ranks.
        scaler: The gradient scaler.
    """

    models: Mapping[str, Any] = field(default_factory=dict)
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    dataloaders: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    scaler: Any = None

    def names(self) -> dict[str, list[str]]:
        """Return the names of everything, for comparing ranks."""
        kinds = ("models", "optimizers", "schedulers", "dataloaders", "objects")
        return {kind: list(getattr(self, kind)) for kind in kinds} | {"scaler": ["scaler"] if self.scaler else []}

    @classmethod
    def of(cls, *, model: Any, optimizer: Any, scheduler: Any, dataloader: Any, objects: Any, scaler: Any) -> Subjects:
        """Sort the arguments of a call.

        Raises:
            UsageError: One of them cannot do what it would have to.
        """
        refuse_state_dict(model)
        if isinstance(optimizer, Mapping) and {"state", "param_groups"} <= optimizer.keys():
            raise UsageError("optimizer= is a state dict", hint="pass the optimizer itself")
        if isinstance(optimizer, torch.nn.Module):
            raise UsageError("optimizer= is a module", hint="the order is: path, model, optimizer, scheduler")
        found = cls(
            models=name_all(model),
            optimizers={name: unwrap_optimizer(item) for name, item in name_all(optimizer).items()},
            schedulers=name_all(scheduler),
            dataloaders=name_all(dataloader),
            objects=name_all(objects),
            scaler=scaler,
        )
        for name, item in found.models.items():
            if not isinstance(item, torch.nn.Module):
                raise UsageError(f"model `{name}` is a {type(item).__name__}, no torch.nn.Module")
        if found.optimizers and not found.models:
            raise UsageError(
                "an optimizer was given without its model, which alone knows the names of its parameters",
                hint="pass the model as well",
            )
        for name, item in found.objects.items():
            if isinstance(item, torch.nn.Module) and is_sharded(item):
                raise UsageError(
                    f"object `{name}` ({type(item).__name__}) is a sharded module, and of objects the first rank's "
                    "state is stored",
                    hint="pass it as a model: model={...: module}",
                )
        for what, items in (
            ("scheduler", found.schedulers), ("dataloader", found.dataloaders), ("object", found.objects),
            ("scaler", {} if scaler is None else {"scaler": scaler}),
        ):  # fmt: skip
            for name, item in items.items():
                if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                    raise UsageError(
                        f"{what} `{name}` ({type(item).__name__}) has no state_dict and load_state_dict",
                        hint="torchdata's StatefulDataLoader has both; a sampler of your own may be given as well"
                        if what == "dataloader"
                        else "pass the object itself, not its state",
                    )
        return found


def refuse_state_dict(model: Any) -> None:
    """Make sure that a model is not given as its state dict.

    Raises:
        UsageError: It is.
    """
    if isinstance(model, Mapping) and any(isinstance(value, torch.Tensor) for value in model.values()):
        raise UsageError("model= is a state dict", hint="pass the module itself")
    if isinstance(model, torch.optim.Optimizer):
        raise UsageError("model= is an optimizer", hint="the order is: path, model, optimizer, scheduler")


def name_all(value: Any) -> dict[str, Any]:
    """Return one thing, a list of things, or a dictionary of things, by name."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    if isinstance(value, list | tuple):
        return {str(number): item for number, item in enumerate(value)}
    return {"0": value}


def all_slots(models: Mapping[str, LiveModel]) -> dict[int, Any]:
    """Return what optimizers may hold, of all models.

    A parameter that two models share belongs to the first of them.
    """
    found: dict[int, Any] = {}
    for live in models.values():
        for key, slot in live.slots.items():
            found.setdefault(key, slot)
    return found


def models_of(optimizer: torch.optim.Optimizer, models: Mapping[str, LiveModel]) -> Sequence[str]:
    """Return the names of the models whose parameters an optimizer holds: how the two are paired, whatever the order.

    Raises:
        UsageError: It holds parameters of two models that have a name in common, so that names do not tell them apart.
    """
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    names = [name for name, live in models.items() if held & live.slots.keys()]
    seen: dict[str, str] = {}
    for name in names:
        for fqn in _names_held(held, models[name].slots):
            other = seen.setdefault(fqn, name)
            if other != name:
                raise UsageError(
                    f"one optimizer holds `{fqn}` of model `{other}` and of model `{name}`",
                    hint="give each model an optimizer of its own, or put both models into one torch.nn.ModuleDict",
                )
    return names


def _names_held(held: set[int], slots: Slots) -> Iterator[str]:
    for key, slot in slots.items():
        if key in held:
            yield from slot.names
