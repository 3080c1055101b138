"""Which keys of a state dict are the model, which the optimizer, and what a tensor is called within its part.

Frameworks nest what they save: ``{"model": …, "optimizer": …}`` (Accelerate, torchtune, VeOmni), ``{"app": {…}}``
(the torch tutorial), ``{"state": {"model": …}}`` (Composer), or the model's keys at the top with the rest beside
them (torchtitan).
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
_ROLES = {
    Role.MODEL: r"model|models|module|network|net|state_dict|model_state|model_state_dict|model_(part_)?\d+"
    r"|pytorch_model(_fsdp)?(_\d+)?",
    Role.OPTIMIZER: r"(model_)?optim(izer)?s?(_states?)?(_dict)?(_\d+)?|optimizer_states?(_dict)?",
    Role.SCHEDULER: r"(lr_?)?schedulers?(_\d+)?(_state(_dict)?)?",
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
    found = list(paths)
    depth = 0
    while found and all(len(path) > depth + 1 and path[depth] in _WRAPPERS for _, path in found):
        depth += 1
    heads: dict[str, Role | None] = {}
    for _, path in found:
        if len(path) > depth + 1:
            heads.setdefault(str(path[depth]), role_of(str(path[depth])))
    has_model = Role.MODEL in heads.values()
    parts: dict[str, Split] = {}
    for key, path in found:
        head, rest = str(path[depth]), path[depth + 1 :]
        role = heads.get(head) if rest else _flat_role(head)
        if role is None or not rest:
            # Not a head that we know: part of a bare state dict, or an unknown thing beside a model.
            is_loose = role is None and has_model
            role = role or (Role.OTHER if is_loose else default)
            name = head if rest and is_loose else role.value
            inner = rest if rest and is_loose else path[depth:]
        else:
            name, inner = head, rest
        part = parts.setdefault(name, Split(name=name, role=role, names={}, paths={}))
        part.names[key], part.paths[key] = _join(inner), inner
    order = list(Role)
    return sorted(parts.values(), key=lambda part: order.index(part.role))


def _flat_role(key: str) -> Role | None:
    """Return the role of a key without nesting; only names that no module would have count, or weights were lost."""
    if _OPTIMIZER_KEY.search(key):
        return Role.OPTIMIZER
    head, dot, _ = key.partition(".")
    return _FLAT_HEADS.get(head) if dot else None


def _join(path: KeyPath) -> str:
    return ".".join(map(str, path))
