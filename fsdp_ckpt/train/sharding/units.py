"""Which modules of a model become units, the same ones for FSDP1 and FSDP2. Nothing here changes the model."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import Incompatible, UsageError

__all__ = ["Unit", "check_units", "choose_units", "ignored_modules", "recomputed", "unit_of_modules"]

_log = logging.getLogger("fsdp_ckpt")

# torch.distributed.fsdp.wrap.size_based_auto_wrap_policy: no unit by themselves, and not looked into.
_NO_UNITS = (nn.ModuleList, nn.ModuleDict)
_LEAVES = (nn.MultiheadAttention,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module whose parameters are gathered together, without those of units within it.

    Attributes:
        name: Its name in the model; ``""`` is the model itself.
        module: The module.
        full_precision: Whether it computes in float32 whatever the others do.
    """

    name: str
    module: nn.Module
    full_precision: bool = False

    def __str__(self) -> str:
        return f"`{self.name}`" if self.name else "the model itself"


def ignored_modules(model: nn.Module, pattern: str | None) -> list[nn.Module]:
    """Return the modules whose full names match a regular expression, and all modules within them.

    Raises:
        UsageError: None does, or the model itself does.
    """
    if pattern is None:
        return []
    matches = re.compile(pattern).fullmatch
    found = {name: module for name, module in model.named_modules() if matches(name)}
    if not found or "" in found:
        what = "the model itself, so that nothing would be sharded" if found else "no module of the model"
        names = ", ".join(name for name, _ in model.named_children())
        raise UsageError(
            f"ignored_modules: {pattern!r} matches {what}",
            hint=f"it has to match full names; the outermost modules are {names or '(none)'}",
        )
    return list(dict.fromkeys(part for module in found.values() for part in module.modules()))


def choose_units(model: nn.Module, config: FSDPConfig, ignored: Sequence[nn.Module] = ()) -> list[Unit]:
    """Return the units within a model, inner ones before those around them; the model itself is not among them.

    Raises:
        UsageError: A class that the model does not have, or no class where one is needed.
    """
    leave_out = set(ignored)
    match config.auto_wrap_policy:
        case "NO_WRAP":
            return []
        case "TRANSFORMER_BASED_WRAP":
            return _by_class(model, _layer_classes(model, config, leave_out), leave_out)
        case "SIZE_BASED_WRAP":
            found = _by_size(model, config.min_num_params, leave_out)
            if not found:
                _log.warning(
                    "min_num_params: %d makes no module a unit, so that the whole model is gathered at once "
                    "(it has %d parameters)",
                    config.min_num_params,
                    sum(param.numel() for param in model.parameters()),
                )
            return found


def _by_class(model: nn.Module, classes: Sequence[str], ignored: set[nn.Module]) -> list[Unit]:
    """As torch's ``ModuleWrapPolicy``: instances of the classes, and of what is derived from them."""
    return [
        Unit(name=name, module=module)
        for name, module in _bottom_up(model)
        if name and module not in ignored and any(cls.__name__ in classes for cls in type(module).__mro__)
    ]


def _bottom_up(
    module: nn.Module, name: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for child_name, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name, seen)
    yield name, module


def _layer_classes(model: nn.Module, config: FSDPConfig, ignored: set[nn.Module]) -> list[str]:
    present = {type(module).__name__ for name, module in model.named_modules() if name and module not in ignored}
    bases = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    given = config.transformer_layer_cls_to_wrap
    if given:
        missing = [name for name in given if name not in bases]
        if missing:
            raise UsageError(
                f"transformer_layer_cls_to_wrap: {', '.join(missing)} is no class of the model's modules; "
                f"they are {_listed(present)}"
            )
        return list(given)
    own = _own_layer_classes(model)
    # A family of models lists the layers of all its members there.
    found = [name for name in own if name in bases]
    if not found:
        why = f"none of its _no_split_modules ({', '.join(own)}) is in it" if own else "it has no _no_split_modules"
        raise UsageError(
            f"auto_wrap_policy: TRANSFORMER_BASED_WRAP does not know the model's layers: {why}; "
            f"the classes of its modules are {_listed(present)}",
            hint="name the class of the layers in transformer_layer_cls_to_wrap, or use another auto_wrap_policy",
        )
    return found


def _own_layer_classes(model: nn.Module) -> list[str]:
    return sorted(getattr(model, "_no_split_modules", None) or ())


def _listed(names: set[str], shown: int = 12) -> str:
    rest = len(names) - shown
    return ", ".join(sorted(names)[:shown]) + (f" and {rest} more" if rest > 0 else "")


def _by_size(model: nn.Module, min_num_params: int, ignored: set[nn.Module]) -> list[Unit]:
    """As torch's ``size_based_auto_wrap_policy``: what is left of a module without its inner units decides."""
    whole = {param for module in ignored for param in module.parameters()}
    found: dict[nn.Module, Unit] = {}
    counted: dict[nn.Module, int] = {}

    def visit(module: nn.Module, name: str) -> int:
        """Return how many parameters are in units now."""
        if module in counted:
            return counted[module]
        total = sum(param.numel() for param in module.parameters() if param not in whole)
        in_units = 0
        if total >= min_num_params and not isinstance(module, _LEAVES):
            for child_name, child in module.named_children():
                if child not in ignored:
                    in_units += visit(child, f"{name}.{child_name}" if name else child_name)
            if name and total - in_units >= min_num_params and not isinstance(module, _NO_UNITS):
                found[module] = Unit(name=name, module=module)
                in_units = total
        counted[module] = in_units
        return in_units

    visit(model, "")
    return list(found.values())


def unit_of_modules(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, Unit]:
    """Return the innermost unit around every module; the model's own for what is in no other.

    A module that is used at several places is listed with the first one.
    """
    by_module = {unit.module: unit for unit in units}
    found: dict[nn.Module, Unit] = {}

    def visit(module: nn.Module, unit: Unit) -> None:
        if module not in found:
            found[module] = by_module.get(module, unit)
            for child in module.children():
                visit(child, found[module])

    visit(model, Unit(name="", module=model))
    return found


def check_units(model: nn.Module, units: Sequence[Unit], config: FSDPConfig, ignored: Sequence[nn.Module] = ()) -> None:
    """Make sure that every unit is one that torch can shard.

    Raises:
        UsageError: A parameter would be in two units, or a unit holds what its FSDP version cannot hold together.
    """
    leave_out = set(ignored)
    first: dict[nn.Parameter, tuple[str, Unit]] = {}
    kinds: dict[Unit, tuple[str, nn.Parameter]] = {}
    for module_name, module, unit in _places(model, units):
        if module in leave_out:
            continue
        for name, param in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            if config.fsdp_version == 1 and isinstance(param, DTensor):
                raise Incompatible(
                    f"`{full}` is a DTensor (tensor parallelism), which FSDP1 cannot shard",
                    hint="use fsdp_version 2",
                )
            other, other_unit = first.setdefault(param, (full, unit))
            if other_unit != unit:
                raise UsageError(
                    f"`{other}` and `{full}` are one parameter, but it would be in two units, {other_unit} and {unit}: "
                    "modules that share weights must be in one",
                    hint="choose units that hold both or neither: TRANSFORMER_BASED_WRAP with the layers' class, a "
                    "larger min_num_params, or NO_WRAP",
                )
            _check_alike(kinds, unit, full, param, config)


def _places(model: nn.Module, units: Sequence[Unit]) -> Iterator[tuple[str, nn.Module, Unit]]:
    """Yield every module at every place where it is used, with the innermost unit around that place."""
    by_module = {unit.module: unit for unit in units}

    def visit(module: nn.Module, name: str, unit: Unit) -> Iterator[tuple[str, nn.Module, Unit]]:
        unit = by_module.get(module, unit)
        yield name, module, unit
        for child_name, child in module._modules.items():
            if child is not None:
                yield from visit(child, f"{name}.{child_name}" if name else child_name, unit)

    return visit(model, "", Unit(name="", module=model))


def _check_alike(
    kinds: dict[Unit, tuple[str, nn.Parameter]], unit: Unit, name: str, param: nn.Parameter, config: FSDPConfig
) -> None:
    if config.fsdp_version == 2 and not param.requires_grad:
        return
    other_name, other = kinds.setdefault(unit, (name, param))
    if other.dtype != param.dtype:
        raise Incompatible(
            f"`{other_name}` ({other.dtype}) and `{name}` ({param.dtype}) would be in one unit, {unit}, which FSDP "
            f"{config.fsdp_version} cannot hold together",
            hint="give all parameters of a unit one dtype",
        )
    if other.requires_grad != param.requires_grad and not config.use_orig_params:
        raise UsageError(
            f"`{other_name}` and `{name}` would be in one unit, {unit}, but only one of them is trained",
            hint="set use_orig_params: true",
        )


def recomputed(model: nn.Module, units: Sequence[Unit], ignored: Sequence[nn.Module] = ()) -> list[Unit]:
    """Return the modules whose activations are computed again: units without others in them, else the layers.

    Raises:
        UsageError: There are neither units nor ``_no_split_modules``.
    """
    chosen = list(units) or _by_class(model, _own_layer_classes(model), set(ignored))
    if not chosen:
        raise UsageError(
            "activation_checkpointing: there are no units, and the model has no _no_split_modules, so that it is not "
            "known which layers to compute again",
            hint="use TRANSFORMER_BASED_WRAP with transformer_layer_cls_to_wrap",
        )
    modules = {unit.module for unit in chosen}
    return [
        unit for unit in chosen if not any(part in modules for part in unit.module.modules() if part is not unit.module)
    ]
