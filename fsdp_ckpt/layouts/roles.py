"""Which keys of a state dict are the model, which the optimizer, and what a tensor is called within its part.

Frameworks nest what they save: ``{"model": …, "optimizer": …}`` (Accelerate, torchtune, VeOmni), ``{"app": {…}}``
(the torch tutorial), ``{"state": {"model": …, "optimizers": {CLASS: …}}, "rng": …}`` (Composer), or the model's keys
at the top with the rest beside them (torchtitan, Megatron-core).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_ckpt.catalog import Role

__all__ = ["KeyPath", "Split", "role_of", "split_roles"]

KeyPath = tuple[str | int, ...]
"""Where a value stood in the nested state dict."""

_WRAPPERS = frozenset({"app", "state", "checkpoint", "ckpt"})
_OPTIMIZER_HEADS = ("state", "param_groups")
_ROLES = {
    Role.MODEL: r"model|models|module|network|net|state_dict|model_state|model_state_dict|model_(part_)?\d+"
    r"|pytorch_model(_fsdp)?(_\d+)?",
    Role.OPTIMIZER: r"(model_)?optim(izer)?s?(_states?)?(_dict)?(_\d+)?|optimizer_states?(_dict)?",
    Role.SCHEDULER: r"(lr_?)?sched(uler)?s?(_\d+)?(_state(_dict)?)?",
    Role.DATALOADER: r"(train_)?data_?loaders?(_\d+)?|loader_state.*|dataset.*|samplers?(_\d+)?",
    Role.RNG: r"rng.*|random_states?.*",
    Role.OTHER: r"train_state|timestamp|callbacks|algorithms|extra(_state)?|step|epoch|iteration|args|config|cfg"
    r"|hyper_parameters|loops|pytorch-lightning_version|global_step|meta",
}
_PATTERNS = {role: re.compile(pattern) for role, pattern in _ROLES.items()}
_FLAT_HEADS = {
    "optimizer": Role.OPTIMIZER,
    "optimizers": Role.OPTIMIZER,
    "optim": Role.OPTIMIZER,
    "lr_scheduler": Role.SCHEDULER,
    "lr_schedulers": Role.SCHEDULER,
    "dataloader": Role.DATALOADER,
    "train_state": Role.OTHER,
    "rng_state": Role.RNG,
}
_OPTIMIZER_KEY = re.compile(
    r"^(?:optim\w*\.)?(?:state\..+\.(?:exp_avg|exp_avg_sq|momentum_buffer|step)$|param_groups\.)"
)
_CHAINED = re.compile(r"chained_\d+\.optimizer\.")
_KIND_FIRST = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|master_param|momentum_buffer)\.(.+)"
)
"""Megatron-core: one key for what all layers have of a kind; several optimizers are chained by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Keys of one part.

    Attributes:
        name: The head that they stood under (``model``); ``model`` for keys at the top level.
        role: What the part is for.
        names: Name within the part, by key.
        paths: The same before it was joined with dots.
    """

    name: str
    role: Role
    names: dict[str, str]
    paths: dict[str, KeyPath]


def role_of(head: str) -> Role | None:
    """Return what a dictionary key or file stem usually holds, None when it says nothing."""
    for role, pattern in _PATTERNS.items():
        if pattern.fullmatch(head):
            return role
    return None


def split_roles(paths: Iterable[tuple[str, KeyPath]], *, default: Role = Role.MODEL) -> list[Split]:
    """Sort the keys of one state dict into parts.

    Args:
        paths: Key and path of everything in it. A path of one element is a key at the top level.
        default: The role of keys whose head says nothing.

    Returns:
        The parts, models first, each with its keys in the given order.
    """
    found = _unwrapped(list(paths))
    heads: dict[str, Role | None] = {}
    for _, path in found:
        if len(path) > 1:
            heads.setdefault(str(path[0]), role_of(str(path[0])))
    if "param_groups" in heads and heads.keys() <= set(_OPTIMIZER_HEADS):  # optimizer.state_dict(), nothing around it
        default = Role.OPTIMIZER
    has_model = Role.MODEL in heads.values()
    optimizers = _optimizers(path for _, path in found if heads.get(str(path[0])) is Role.OPTIMIZER)
    parts: dict[str, Split] = {}
    for key, path in found:
        head, rest = str(path[0]), path[1:]
        kind_first = None if rest else _KIND_FIRST.fullmatch(head)
        role = heads.get(head) if rest else Role.OPTIMIZER if kind_first else _flat_role(head)
        if role is None or not rest:
            # Not a head that we know: part of a bare state dict, or an unknown thing beside a model.
            is_loose = role is None and has_model
            role = role or (Role.OTHER if is_loose else default)
            name = head if rest and is_loose else role.value
            inner = rest if rest and is_loose else path
            if kind_first:
                inner = ("state", kind_first[2], kind_first[1])
        elif head in optimizers:
            name = head if len(optimizers[head]) == 1 else f"{head}.{rest[0]}"
            inner = rest[1:]
        else:
            name, inner = head, rest
        part = parts.setdefault(name, Split(name=name, role=role, names={}, paths={}))
        part.names[key], part.paths[key] = _join(inner), inner
    order = list(Role)
    return sorted(parts.values(), key=lambda part: order.index(part.role))


def _unwrapped(found: list[tuple[str, KeyPath]]) -> list[tuple[str, KeyPath]]:
    """Leave out what models and optimizers are wrapped in: everything, or Composer's ``state`` beside ``rng``."""
    while found and all(len(path) > 1 and path[0] in _WRAPPERS for _, path in found):
        found = [(key, path[1:]) for key, path in found]
    if any(path[0] == "param_groups" for _, path in found):  # then this is an optimizer, and `state` a part of it
        return found
    opened = {
        path[0]
        for _, path in found
        if path[0] in _WRAPPERS and len(path) > 2 and role_of(str(path[1])) in (Role.MODEL, Role.OPTIMIZER)
    }
    return [(key, path[1:] if path[0] in opened and len(path) > 1 else path) for key, path in found]


def _optimizers(paths: Iterable[KeyPath]) -> dict[str, set[str]]:
    """Return heads under which optimizers lie one deeper, by class (Composer) or number, and what they lie under."""
    found: dict[str, set[str]] = {}
    others: set[str] = set()
    for path in paths:
        if len(path) > 2 and path[1] not in _OPTIMIZER_HEADS and path[2] in _OPTIMIZER_HEADS:
            found.setdefault(str(path[0]), set()).add(str(path[1]))
        else:
            others.add(str(path[0]))
    return {head: names for head, names in found.items() if head not in others}


def _flat_role(key: str) -> Role | None:
    """Return the role of a key without nesting; only names that no module would have count, or weights were lost."""
    if _OPTIMIZER_KEY.search(key) or _CHAINED.match(key):
        return Role.OPTIMIZER
    head, dot, _ = key.partition(".")
    return _FLAT_HEADS.get(head) if dot else None


def _join(path: KeyPath) -> str:
    return ".".join(map(str, path))
