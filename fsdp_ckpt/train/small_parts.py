"""Load what is not sharded: schedulers, the scaler, data loaders, random states, and the caller's own objects.

Everything is read and checked first; what is returned are functions that set it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fsdp_ckpt.catalog import Part, Role
from fsdp_ckpt.errors import CheckpointNotFound, Incompatible, MalformedFile
from fsdp_ckpt.train.full import nest
from fsdp_ckpt.train.locate import Source, by_rank
from fsdp_ckpt.train.random_state import restore_random_state
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.reader import Reader

__all__ = ["SmallPlan", "plan_dataloaders", "plan_objects", "plan_random_state", "plan_schedulers"]

Action = Callable[[], None]
Positions = Literal["exact", "fresh"]
"""What to do about data loaders when the world size has changed: refuse, or leave them as they are."""


@dataclass(kw_only=True)
class SmallPlan:
    """What will be set once everything is known to fit.

    Attributes:
        actions: Set things; by the part's name.
        warnings: What the caller should know.
        rng: What happens to random states, in a sentence.
        data: What happens to data loaders, in a sentence.
    """

    actions: list[tuple[str, Action]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rng: str | None = None
    data: str | None = None


def part_value(part: Part, reader: Reader) -> Any:
    """Return the nested value of a part: of one file, or of many objects in a distributed checkpoint."""
    entries = list(part.objects.values())
    if len(entries) == 1 and part.dialect == "torch-file" and not entries[0].decoded:
        return reader.value(entries[0])
    flat: dict[tuple[str | int, ...], Any] = {entry.path or (entry.name,): reader.value(entry) for entry in entries}
    for tensor in part.tensors.values():
        flat[tensor.path or (tensor.name,)] = reader.read(tensor)
    value = nest(flat)
    return value[part.name] if isinstance(value, dict) and set(value) == {part.name} else value


def plan_schedulers(
    plan: SmallPlan,
    source: Source,
    schedulers: Mapping[str, Any],
    ranks: Ranks,
    reader: Reader,
    *,
    loaded_optimizers: set[int],
) -> None:
    """Plan schedulers.

    A scheduler whose optimizer is not loaded in the same call sets that optimizer's learning rates, too: building a
    scheduler changes them, and only those of its next step would be right again.

    Raises:
        CheckpointNotFound: None was saved.
    """
    members = source.manifest.schedulers if source.manifest else None
    parts = source.match(Role.SCHEDULER, members, schedulers, "scheduler")
    for name, scheduler in schedulers.items():
        state = part_value(parts[name], reader)
        if not isinstance(state, Mapping):
            raise MalformedFile(f"`{parts[name].name}` holds no scheduler state")
        kinds = {member.part: member.kind for member in members or ()}
        saved, live = kinds.get(parts[name].name), type(scheduler).__name__
        if saved is not None and saved != live:
            plan.warnings.append(
                f"the saved scheduler is a {saved}, this one a {live}: its rates are its own from here on"
            )
        optimizer = _optimizer_of(scheduler)
        sync = optimizer is not None and id(optimizer) not in loaded_optimizers
        plan.actions.append((parts[name].name, _scheduler_action(scheduler, state, optimizer if sync else None)))
        per_process = getattr(scheduler, "step_with_optimizer", False) and not getattr(scheduler, "split_batches", True)
        if per_process and source.world_size != ranks.size:
            plan.warnings.append(
                f"scheduler `{name}` takes as many steps at a time as there are processes, as Accelerate's do; it was "
                f"saved on {source.world_size or 'an unknown number of'} ranks, now there are {ranks.size}: from here "
                "on its learning rate changes at another pace"
            )


def _optimizer_of(scheduler: Any) -> Any:
    inner = getattr(scheduler, "scheduler", scheduler)
    return getattr(inner, "optimizer", None)


def _scheduler_action(scheduler: Any, state: Mapping[str, Any], optimizer: Any) -> Action:
    def run() -> None:
        scheduler.load_state_dict(dict(state))
        rates = getattr(getattr(scheduler, "scheduler", scheduler), "_last_lr", None)
        if optimizer is not None and rates is not None:
            for group, rate in zip(optimizer.param_groups, rates, strict=False):
                if hasattr(group["lr"], "fill_"):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    return run


def plan_objects(plan: SmallPlan, source: Source, objects: Mapping[str, Any], scaler: Any, reader: Reader) -> None:
    """Plan the scaler and the caller's objects.

    Raises:
        CheckpointNotFound: One of them was not saved.
    """
    custom = {part.name: part for part in source.checkpoint.parts if part.role is not Role.MODEL}
    for number, (name, item) in enumerate(objects.items()):
        part = _object_part(source, custom, number, name)
        if part is None:
            have = ", ".join(f"`{known}`" for known in custom) or "nothing"
            raise CheckpointNotFound(f"the checkpoint has no object `{name}`; besides models it holds: {have}")
        plan.actions.append((part.name, _setter(item, part_value(part, reader))))
    if scaler is not None:
        part = custom.get("scaler")
        if part is None:
            raise CheckpointNotFound("the checkpoint has no scaler", hint="leave out scaler= to start with a new one")
        plan.actions.append(("scaler", _setter(scaler, part_value(part, reader))))


def _object_part(source: Source, custom: Mapping[str, Part], number: int, name: str) -> Part | None:
    if source.manifest is not None:
        members = source.manifest.objects
        member = next((member for member in members if member.name == name), None)
        if member is None and name.isdecimal() and int(name) < len(members):
            member = members[int(name)]
        return custom.get(member.part) if member else None
    return custom.get(name) or custom.get(f"custom_checkpoint_{number}") or _single_object(custom, name)


def _single_object(custom: Mapping[str, Part], name: str) -> Part | None:
    """Return a top-level value that was stored as one object, as torch 2.3 and older store all containers."""
    for part in custom.values():
        for key, entry in part.objects.items():
            if entry.path == (name,):
                return replace(part, name=name, objects={key: entry}, tensors={})
    return None


def _setter(item: Any, state: Any) -> Action:
    return lambda: item.load_state_dict(state)


def plan_random_state(plan: SmallPlan, source: Source, ranks: Ranks, reader: Reader) -> None:
    """Plan random states: each rank gets its own. A rank that did not exist when they were saved keeps what it has.

    Raises:
        UnsafePickle: The file asks for code.
        MalformedFile: It holds no random states.
    """
    states = {number: part for part in source.parts(Role.RNG) if (number := _rank_of(part)) is not None}
    known = source.ranks_with("random_states") or set(states)
    if not known:
        plan.rng = "none were saved; all streams are left as they are"
        return
    count = len(known)
    without = [str(rank) for rank in range(ranks.size) if rank not in known]
    if count != ranks.size or without:
        what = (
            f"those without any ({', '.join(without)}) keep the streams that they have"
            if without
            else f"each rank gets its own; those of ranks {ranks.size} to {count - 1} are not used"
        )
        plan.warnings.append(f"random states of {count} ranks were saved, now there are {ranks.size}: {what}")
    part = states.get(ranks.rank)
    if part is None:
        plan.rng = f"this rank had none among the {count} saved; its streams are left as they are"
        return
    (entry,) = part.objects.values()
    saved = reader.value(entry)
    if not isinstance(saved, Mapping):
        raise MalformedFile(f"{entry.file}: no random states")
    action, notes = restore_random_state(saved, entry.file)
    plan.warnings += notes
    plan.actions.append(("random_states", action))
    plan.rng = "restored" if count == ranks.size else f"this rank's own, of {count} saved"


def _rank_of(part: Part) -> int | None:
    match = re.fullmatch(r"(?:random_states|rng_state)_(\d+)", part.name)
    if match:
        return int(match[1])
    return 0 if part.name == "rng_state" else None


def plan_dataloaders(
    plan: SmallPlan, source: Source, loaders: Mapping[str, Any], ranks: Ranks, reader: Reader, *, positions: Positions
) -> None:
    """Plan data loaders: each rank's own position, on the same number of ranks only.

    Raises:
        CheckpointNotFound: None were saved.
        Incompatible: They were saved by another number of ranks, and ``positions`` is ``"exact"``.
    """
    own = {int(part.name.rpartition("_")[2]): part for part in source.parts(Role.DATALOADER) if _is_own(part)}
    if own:
        saved_for = len(source.ranks_with("dl_states") or own)
    else:
        spread = {part.name: by_rank(part) for part in source.parts(Role.DATALOADER)}
        saved_for = max((len(found) for found in spread.values()), default=0)
    if not saved_for:
        _plan_single(plan, source, loaders, ranks, reader)
        return
    if saved_for != ranks.size:
        text = f"data loader positions were saved for {saved_for} ranks, now there are {ranks.size}"
        if positions == "exact":
            raise Incompatible(
                text, hint='pass positions="fresh" to load all the rest and leave the data loaders at their beginning'
            )
        plan.data = f"{text}: the loaders are left as they are"
        plan.warnings.append(plan.data)
        return
    plan.data = "restored"
    if own:
        (entry,) = own[ranks.rank].objects.values()
        states = reader.value(entry)
        for name, loader in loaders.items():
            key = name if name in states else (list(states)[int(name)] if _is_index(name, states) else None)
            if key is None:
                raise CheckpointNotFound(f"no data loader `{name}` was saved; there are: {', '.join(states)}")
            plan.actions.append(("dl_states", _setter(loader, states[key])))
        return
    for (name, loader), part in zip(loaders.items(), source.parts(Role.DATALOADER), strict=False):
        entries = by_rank(part)[ranks.rank]
        flat = {}
        for entry in entries:
            path = entry.path or (entry.name,)
            at = next(index for index, step in enumerate(path) if re.fullmatch(r"(?:dp_)?rank_\d+", str(step)))
            flat[path[at + 1 :]] = reader.value(entry)
        state = flat[()] if set(flat) == {()} else nest(flat)
        plan.actions.append((part.name or name, _setter(loader, state)))


def _is_own(part: Part) -> bool:
    return re.fullmatch(r"dl_states_\d+", part.name) is not None


def _is_index(name: str, states: Mapping[str, Any]) -> bool:
    return name.isdecimal() and int(name) < len(states)


def _plan_single(plan: SmallPlan, source: Source, loaders: Mapping[str, Any], ranks: Ranks, reader: Reader) -> None:
    """Accelerate keeps one state for all ranks: that of the rank which wrote last."""
    members = None
    parts = source.match(Role.DATALOADER, members, loaders, "dataloader")
    for name, loader in loaders.items():
        plan.actions.append((parts[name].name, _setter(loader, part_value(parts[name], reader))))
    plan.data = "restored, the same state on all ranks"
    if ranks.size > 1:
        plan.warnings.append(
            f"`{next(iter(parts.values())).name}` is one state for all ranks (of the rank that wrote last)"
        )
