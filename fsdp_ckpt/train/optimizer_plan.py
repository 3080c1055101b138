"""Decide how saved optimizer state goes into a live optimizer: fresh or not, on any number of ranks.

A fresh optimizer has nothing that could be filled, which is why loaders that take the live state as their template
restore nothing into it (Accelerate 1.15 with FSDP1) or depend on gradients (torch's ``_init_optim_state``). Here the
checkpoint says what there is, the parameter says how it is laid out, and neither a step is taken nor a gradient
looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_ckpt.catalog import DTYPES, ObjectEntry, TensorEntry
from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.plan.boxes import Box
from fsdp_ckpt.train.live import ParamSlot, Piece, Span, dtype_of
from fsdp_ckpt.train.model_plan import Fit, Resize
from fsdp_ckpt.train.optimizer_state import Entry, SavedOptimizer
from fsdp_ckpt.train.optimizers import Slots, find_slots
from fsdp_ckpt.train.reader import Reader

__all__ = ["OptimizerPlan", "check_class", "plan_optimizer"]

_LOCAL_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable")
"""Options that say how this process computes, not what: they stay as they are."""


@dataclass(kw_only=True)
class _Moment:
    """A saved tensor that is laid out like its parameter, and what this rank needs of it."""

    entry: TensorEntry
    span: Span


@dataclass(kw_only=True)
class _SlotPlan:
    """State for one object in ``param_groups``.

    Attributes:
        slot: The parameter.
        moments: By kind; several where FSDP1 flattened several parameters into one.
        dtypes: Element type of each moment when it is loaded.
        scalars: Step counts and the like, by kind: one for each named parameter.
    """

    slot: ParamSlot
    moments: dict[str, list[_Moment]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    scalars: dict[str, list[Entry]] = field(default_factory=dict)


@dataclass(kw_only=True)
class OptimizerPlan:
    """What will be loaded into an optimizer.

    Attributes:
        optimizer: The optimizer.
        options: New options of each group.
        slots: State by parameter.
        fit: How the two compare.
        fresh: Parameters that are trained, and for which an optimizer with state had none: they start without.
        unused: Parameters whose saved state is for nobody here.
        cleared: Live parameters that the saved optimizer had without state: theirs is dropped.
        kept_options: Options that were saved with another value and stay as they are.
    """

    optimizer: torch.optim.Optimizer
    options: list[dict[str, Any]] = field(default_factory=list)
    slots: list[_SlotPlan] = field(default_factory=list)
    fit: Fit = field(default_factory=Fit)
    fresh: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    cleared: list[Tensor] = field(default_factory=list)
    kept_options: list[str] = field(default_factory=list)

    def wanted(self) -> list[tuple[TensorEntry, Sequence[Box]]]:
        """Return everything that this rank will read: tensors, and boxes of each."""
        found: list[tuple[TensorEntry, Sequence[Box]]] = []
        for plan in self.slots:
            template = plan.slot.template()
            for moments in plan.moments.values():
                found += [
                    (moment.entry, [piece.box for piece in moment.span.cut(template) or ()]) for moment in moments
                ]
            for entries in plan.scalars.values():
                tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
                found += [(entry, [((0,) * len(entry.shape), entry.shape)]) for entry in tensors]
        return found

    def apply(self, reader: Reader) -> None:
        """Load: fill moments in place where they are there, make them where they are not, and set options."""
        groups = {id(param): group for group in self.optimizer.param_groups for param in group["params"]}
        fills: list[tuple[TensorEntry, Sequence[Piece]]] = []
        for plan in self.slots:
            param = plan.slot.param
            state = self.optimizer.state.get(param, {})
            group = groups[id(param)]
            for kind, moments in plan.moments.items():
                fills += _moments(plan, kind, moments, state)
            for kind, entries in plan.scalars.items():
                state[kind] = self._scalar(kind, entries, plan.slot, group, reader)
            if state:
                self.optimizer.state[param] = state
        reader.fill(fills)
        for param in self.cleared:
            self.optimizer.state.pop(param, None)
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            for option, value in options.items():
                group[option] = _option(group.get(option), value)
        # Optimizers add what options and state of older versions lack (Optimizer.load_state_dict ends in this, too).
        self.optimizer.__setstate__({"state": self.optimizer.state, "param_groups": self.optimizer.param_groups})

    def _scalar(
        self, kind: str, entries: Sequence[Entry], slot: ParamSlot, group: Mapping[str, Any], reader: Reader
    ) -> Any:
        values = [reader.value(entry) if isinstance(entry, ObjectEntry) else reader.read(entry) for entry in entries]
        # FSDP1's flattened parameters have one step count, saved with each name; one that joined later has less.
        first = max(values, key=float) if len(values) > 1 else values[0]
        # torch.optim.Optimizer keeps step counts on the CPU, except for kernels that count on the device.
        on_device = kind != "step" or bool(group.get("capturable")) or bool(group.get("fused"))
        local = slot.template()
        device = local.to_local().device if isinstance(local, DTensor) else local.device
        return _moved(first, device) if on_device else first


def _moments(
    plan: _SlotPlan, kind: str, moments: Sequence[_Moment], state: dict[str, Any]
) -> list[tuple[TensorEntry, Sequence[Piece]]]:
    """Return what goes where of one kind of moment; made here when it is not there, or is laid out otherwise."""
    wanted = plan.dtypes[kind]
    live = state.get(kind)
    fits = isinstance(live, Tensor) and live.dtype == wanted and moments[0].span.cut(live) is not None
    if not fits:
        # Zeros, as padding and what a tensor has grown by are not in the checkpoint.
        live = state[kind] = torch.zeros_like(plan.slot.template(), dtype=wanted, requires_grad=False)
    assert isinstance(live, Tensor)
    return [(moment.entry, moment.span.cut(live) or ()) for moment in moments]


def check_class(optimizer: torch.optim.Optimizer, saved: str) -> None:
    """Make sure that saved state is of use to an optimizer of torch: each of them needs what it keeps itself.

    Args:
        optimizer: The live one.
        saved: Name of the class that was saved; ``""`` where that is not known.

    Raises:
        Incompatible: Both are classes of torch, and different ones.
    """
    live = type(optimizer).__name__
    known = {name for name in dir(torch.optim) if name[0].isupper()}
    if saved != live and {saved, live} <= known and not {saved, live} <= {"Adam", "AdamW"}:
        raise Incompatible(
            f"the saved optimizer is a {saved}, this one a {live}, which keeps other state",
            hint=f"build a torch.optim.{saved}, or leave out optimizer= to load the model alone",
        )


def _option(live: Any, value: Any) -> Any:
    """Return an option to set: a tensor is kept and filled, as captured graphs refer to it; a number stays one."""
    single = isinstance(value, float | int) or (isinstance(value, Tensor) and value.numel() == 1)
    if isinstance(live, Tensor) and single:
        return live.fill_(value if not isinstance(value, Tensor) else value.item())
    if isinstance(live, Tensor) and isinstance(value, Tensor):
        return live.copy_(value) if live.shape == value.shape else value.to(live.device)
    return value.item() if isinstance(value, Tensor) and isinstance(live, float | int) and single else value


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value with all tensors in it on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return type(value)(_moved(item, device) for item in value) if isinstance(value, list | tuple) else value


def plan_optimizer(
    optimizer: torch.optim.Optimizer,
    slots: Slots,
    saved: SavedOptimizer,
    *,
    dtypes: Mapping[str, str],
    strict: bool,
    resize: Resize = None,
    elsewhere: Collection[str] = (),
) -> OptimizerPlan:
    """Match an optimizer with saved state.

    Args:
        optimizer: The optimizer.
        slots: What the models hold.
        saved: The saved state.
        dtypes: Saved dtype of each parameter of the model, where the model is loaded as well: a moment that had its
            parameter's dtype gets that of the live parameter, one that had its own keeps it.
        strict: Refuse parameters that were not in the saved optimizer.
        resize: As for models; moments follow their parameters.
        elsewhere: Parameters that only other ranks have.

    Raises:
        Incompatible: Groups that do not correspond.
    """
    plan = OptimizerPlan(optimizer=optimizer)
    rows = find_slots(optimizer, slots)
    grouped = [[name for slot in row for name in slot.names] for row in rows]
    known = _saved_names(saved)
    for names in grouped:
        plan.fit.missing += [name for name in names if known is not None and name not in known]
    _plan_options(plan, grouped, saved, strict=strict)
    live = {name for names in grouped for name in names}
    for row in rows:
        for slot in row:
            planned = _plan_slot(plan, slot, saved, dtypes, resize)
            is_held_elsewhere = not slot.spans and any(saved.state.get(name) for name in slot.names)
            if not planned and not is_held_elsewhere and (known is None or known >= set(slot.names)):
                plan.cleared.append(slot.param)
    plan.unused = [name for name in saved.state if name not in live and name not in elsewhere]
    return plan


def _saved_names(saved: SavedOptimizer) -> set[str] | None:
    if saved.groups is not None:
        return {name for group in saved.groups for name in group.get("params", ())}
    return set(saved.options) or None


def _plan_options(plan: OptimizerPlan, grouped: list[list[str]], saved: SavedOptimizer, *, strict: bool) -> None:
    for number, names in enumerate(grouped):
        options = _options_for(number, names, grouped, saved, strict=strict)
        live = plan.optimizer.param_groups[number]
        for option in _LOCAL_OPTIONS[1:]:
            if option in options and options[option] != live.get(option):
                plan.kept_options.append(
                    f"{option} of group {number} stays {live.get(option)} ({options[option]} saved)"
                )
        plan.options.append({option: value for option, value in options.items() if option not in _LOCAL_OPTIONS})


def _options_for(
    number: int, names: list[str], grouped: list[list[str]], saved: SavedOptimizer, *, strict: bool
) -> dict[str, Any]:
    """Return the saved options of a live group: of the one with the same parameters, else the one that has them all."""
    if saved.groups is None:
        return _flattened_options(number, names, saved)
    groups = saved.groups
    if len(groups) == len(grouped) and set(groups[number].get("params", ())) == set(names):
        return groups[number]
    known = [name for name in names if any(name in group.get("params", ()) for group in groups)]
    holders = [group for group in groups if known and set(known) <= set(group.get("params", ()))]
    if len(holders) == 1:
        return holders[0]
    if not known and not strict:
        return {}
    if not names and len(groups) == len(grouped) and not groups[number].get("params"):
        return groups[number]
    homes = sorted({index for name in known for index, group in enumerate(groups) if name in group.get("params", ())})
    raise Incompatible(
        f"group {number} of the optimizer ({len(names)} parameters) is none of the {len(groups)} saved groups: its "
        f"parameters are in saved groups {homes or 'none'}",
        hint="build the optimizer with the groups that it had when it was saved",
    )


def _flattened_options(number: int, names: list[str], saved: SavedOptimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        for option, value in saved.options.get(name, {}).items():
            if option in found and not _same(found[option], value):
                raise Incompatible(
                    f"parameters of group {number} of the optimizer were saved with different `{option}`",
                    hint="build the optimizer with the groups that it had when it was saved",
                )
            found[option] = value
    return found


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return bool(torch.equal(torch.as_tensor(first), torch.as_tensor(second)))
    return bool(first == second)


def _plan_slot(
    plan: OptimizerPlan, slot: ParamSlot, saved: SavedOptimizer, dtypes: Mapping[str, str], resize: Resize
) -> bool:
    """Plan the state of one parameter; tell whether there is any for this rank."""
    have = [name for name in slot.names if saved.state.get(name)]
    if saved.state and slot.param.requires_grad:
        plan.fresh += [name for name in slot.names if name not in have]
    if not have:
        return False
    one = _SlotPlan(slot=slot)
    for span in slot.spans:
        for kind, entry in saved.state.get(span.name, {}).items():
            if isinstance(entry, ObjectEntry):
                one.scalars.setdefault(kind, []).append(entry)
            elif kind != "step" and _is_moment(entry, slot, span, resize):
                _plan_moment(plan, one, kind, entry, span, dtypes=dtypes, resize=resize)
            elif entry.numel == 1 or slot.is_whole(span):
                one.scalars.setdefault(kind, []).append(entry)
            else:
                raise Incompatible(
                    f"`{entry.key}` has shape {entry.shape}, its parameter {span.shape}: how this rank's share of it "
                    "is laid out cannot be told",
                    hint="use an optimizer whose state has the shape of its parameter",
                )
    if not one.moments and not one.scalars:
        return False
    plan.slots.append(one)
    return True


def _is_moment(entry: TensorEntry, slot: ParamSlot, span: Span, resize: Resize) -> bool:
    """Tell whether a saved tensor is laid out like its parameter, rather than state of a shape of its own."""
    if entry.shape == span.shape:
        return True
    return len(entry.shape) == len(span.shape) and (resize is not None or not slot.is_whole(span))


def _plan_moment(
    plan: OptimizerPlan,
    one: _SlotPlan,
    kind: str,
    entry: TensorEntry,
    span: Span,
    *,
    dtypes: Mapping[str, str],
    resize: Resize,
) -> None:
    name = f"state.{span.name}.{kind}"
    param_dtype = dtype_of(one.slot.param.dtype, span.name)
    follows = dtypes.get(span.name) == entry.dtype.name and entry.dtype.kind == "float"
    target = param_dtype if follows else entry.dtype
    live = plan.optimizer.state.get(one.slot.param, {}).get(kind)
    if isinstance(live, Tensor):
        target = dtype_of(live.dtype, name)
    if plan.fit.compare(entry, name, span.shape, target.name, resize):
        one.moments.setdefault(kind, []).append(_Moment(entry=entry, span=span))
        one.dtypes[kind] = getattr(torch, DTYPES[target.name].name)
