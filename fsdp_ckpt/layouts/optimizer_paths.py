"""Where the entries of a saved optimizer belong: to a parameter's state or to a group, whatever the form.

===================  =====================================================  ======================================
form                 keys                                                   written by
===================  =====================================================  ======================================
by name              ``state.<fqn>.exp_avg``, ``param_groups.0.lr``         Accelerate, torch's state_dict API
groups in one blob   ``state.<fqn>.exp_avg``, ``param_groups`` (a list)     the same with torch 2.3 and older
by index             ``state.0.exp_avg``, ``param_groups.0.lr``             ``optimizer.state_dict()`` as it is
flattened            ``state.<fqn>.exp_avg``, ``param_groups.<fqn>.lr``     ``flatten_optimizer_state_dict=True``
===================  =====================================================  ======================================

Frameworks put a level or two before: the optimizer's class (Composer), its number in a list (Lightning).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fsdp_ckpt.layouts.roles import KeyPath

__all__ = ["PARAM_GROUPS", "STATE", "OptimizerPlace", "has_numbered_groups", "optimizer_place"]

STATE = "state"
PARAM_GROUPS = "param_groups"
_HEADS = (STATE, PARAM_GROUPS)
_MAX_LEVELS = 2
_MAX_DIGITS = 10
_MAX_NESTED = 16
_NUMBERED = re.compile(r"(?:^|\.)param_groups(?:\.\d{1,9}(?:\.params)?)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlace:
    """The place of an entry.

    Attributes:
        prefix: What stands before ``state`` or ``param_groups``.
        head: ``state`` or ``param_groups``; None for an entry that belongs to neither, as far as its path says.
        owner: The parameter, by name or number as it is written; the group's number as an integer; None for an entry
            that holds several owners in one blob.
        rest: The kind of state (``exp_avg``) or the option (``lr``), and what is nested in it.
    """

    prefix: KeyPath = ()
    head: str | None = None
    owner: str | int | None = None
    rest: KeyPath = ()


def has_numbered_groups(names: Iterable[str]) -> bool:
    """Tell whether groups are known by number: then one of them has a list of its parameters, or is one object.

    Example:
        >>> has_numbered_groups(["state.w.step", "param_groups.0.lr", "param_groups.0.params"])
        True
        >>> has_numbered_groups(["state.0.weight.step", "param_groups.0.weight.lr"])
        False
    """
    return any(_NUMBERED.search(name) for name in names)


def optimizer_place(path: KeyPath, *, is_param: Callable[[str], bool], is_numbered: bool) -> OptimizerPlace:
    """Return where an entry belongs.

    Args:
        path: Where a tensor or object of an optimizer stood, not empty; one text where nobody took it apart.
        is_param: Tells whether a text is the name of a parameter; where names and what follows are joined with dots,
            it says where the name ends. Without it, what follows the last dot is the kind.
        is_numbered: Whether groups are known by number, see ``has_numbered_groups``.
    """
    for level, step in enumerate(path[: _MAX_LEVELS + 1]):
        head, dot, text = str(step).partition(".")
        if head in _HEADS:
            joined, rest = (text if dot else None), path[level + 1 :]
            break
    else:
        pieces = str(path[0]).split(".") if len(path) == 1 else []  # joined with dots as a whole
        found = [number for number, piece in enumerate(pieces[: _MAX_LEVELS + 1]) if piece in _HEADS]
        if not found:
            return OptimizerPlace(prefix=path)
        level, head, rest = found[0], pieces[found[0]], ()
        path, joined = tuple(pieces[:level]), ".".join(pieces[level + 1 :]) or None
    is_group = head == PARAM_GROUPS and is_numbered
    owner: str | int | None = None
    inner: KeyPath = ()
    if joined is not None:
        owner, inner = _split(joined, is_param, is_group=is_group) if not rest else (joined, rest)
    elif rest:
        owner, inner = (rest[0] if head == PARAM_GROUPS else str(rest[0])), rest[1:]
    if is_group and isinstance(owner, str) and owner.isdecimal() and len(owner) < _MAX_DIGITS:
        owner = int(owner)
    return OptimizerPlace(prefix=path[:level], head=head, owner=owner, rest=inner)


def _split(text: str, is_param: Callable[[str], bool], *, is_group: bool) -> tuple[str, KeyPath]:
    pieces = text.split(".")
    if is_group:
        return pieces[0], tuple(pieces[1:])
    for cut in range(len(pieces) - 1, max(len(pieces) - 1 - _MAX_NESTED, 0), -1):
        name = ".".join(pieces[:cut])
        if is_param(name):
            return name, tuple(pieces[cut:])
    return ".".join(pieces[:-1]) or text, tuple(pieces[-1:]) if len(pieces) > 1 else ()
