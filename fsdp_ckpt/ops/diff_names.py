"""Match the tensors of two parts by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_ckpt.catalog import Part, Role, TensorEntry
from fsdp_ckpt.errors import NameCollision
from fsdp_ckpt.names import Rename, clean_fqn

__all__ = ["Naming", "is_by_index", "suggest_rename", "wrapper_notes"]

_INDEX = re.compile(r"state\.\d+\.[^.]+")
_GROUP = re.compile(r"param_groups(\.\d+(\.[^.]+(\.\d+)*)?)?")
"""Options of a numbered group: no parameter's name in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How names of one side become names that can be compared.

    Attributes:
        keep: A pattern whose ``match`` keeps a name, see ``names.glob_filter``.
        renames: Applied in order, after the clean-up.
    """

    keep: re.Pattern[str]
    renames: Sequence[Rename] = ()

    def clean(self, name: str, role: Role) -> str:
        """Return a name without wrapper prefixes, renamed; of an optimizer, the parameter's name within it.

        Example:
            >>> naming = Naming(keep=re.compile(""))
            >>> naming.clean("state.module.layers.0._orig_mod.weight.exp_avg", Role.OPTIMIZER)
            'state.layers.0.weight.exp_avg'
        """
        head, name = _split(name, role)
        if head is None:
            return name
        name = clean_fqn(name)
        for rename in self.renames:
            name = rename(name)
        return head + name

    def keeps(self, name: str, role: Role) -> bool:
        """Tell whether a clean name passes the filter; globs see the parameter's name, without ``state.``."""
        head, rest = _split(name, role)
        return self.keep.match(rest if head else name) is not None

    def tensors(self, part: Part, role: Role, *, label: str) -> tuple[dict[str, TensorEntry], int]:
        """Return the tensors of a part by clean name, and how many the filter left out.

        Raises:
            NameCollision: Two would get one name.
        """
        found: dict[str, TensorEntry] = {}
        excluded = 0
        for entry in part.tensors.values():
            name = self.clean(entry.name, role)
            if not self.keeps(name, role):
                excluded += 1
                continue
            if name in found:
                raise NameCollision(
                    f"{label}: `{found[name].key}` and `{entry.key}` would both be named `{name}`",
                    hint="keep them apart with --rename, or leave both out with --exclude",
                )
            found[name] = entry
        return found, excluded


def _split(name: str, role: Role) -> tuple[str | None, str]:
    """Return what stands before a parameter's name, and that name; None when there is no such name in it."""
    if role is Role.OPTIMIZER:
        if _GROUP.fullmatch(name):
            return None, name
        for head in ("state.", "param_groups."):
            if name.startswith(head):
                return head, name.removeprefix(head)
    return "", name


def is_by_index(names: Iterable[str]) -> bool:
    """Tell whether an optimizer keeps its state by number rather than by the parameters' names."""
    state = [name for name in names if name.startswith("state.")]
    return bool(state) and all(_INDEX.fullmatch(name) for name in state)


def wrapper_notes(a: Mapping[str, TensorEntry], b: Mapping[str, TensorEntry], role: Role) -> list[str]:
    """Say for how many tensors of each side it took the clean-up to have the other side's name, and what went.

    Args:
        a: Tensors of A by clean name.
        b: Tensors of B by clean name.
        role: What the part is for.
    """
    notes: list[str] = []
    for label, mine, others in (("A", a, b), ("B", b, a)):
        gone: Counter[str] = Counter()
        many = 0
        for name, entry in mine.items():
            other = others.get(name)
            if other is None or other.name == entry.name:
                continue
            rest = _split(entry.name, role)[1]
            removed = Counter(rest.split(".")) - Counter(clean_fqn(rest).split("."))
            many += bool(removed)
            gone += removed
        if many:
            shown = ", ".join(f"`{wrapper}.`" for wrapper in sorted(gone))
            notes.append(f"{label}: {many} name{'' if many == 1 else 's'} compared without {shown}")
    return notes


def suggest_rename(a: Mapping[str, object], b: Mapping[str, object]) -> str | None:
    """Return a rule for ``--rename`` that would match names which differ by one prefix, None when there is none.

    Example:
        >>> suggest_rename({"model.x": 0, "model.y": 0}, {"x": 0, "y": 0})
        'model.='
        >>> suggest_rename({"x": 0, "y": 0}, {"model.x": 0, "model.y": 0})
        's/^/model./'
    """
    first = next(iter(a), "")
    for name in b if first else ():
        if first.endswith("." + name):
            prefix = first.removesuffix(name)
            if _is_most(other.startswith(prefix) and other.removeprefix(prefix) in b for other in a):
                return f"{prefix}="
        elif name.endswith("." + first):
            prefix = name.removesuffix(first)
            if _is_most(prefix + other in b for other in a):
                return f"s/^/{prefix}/"
    return None


def _is_most(answers: Iterable[bool]) -> bool:
    listed = list(answers)
    return 2 * sum(listed) > len(listed)
