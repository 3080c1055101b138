"""Bring names of tensors into the form that a model expects: a prefix more, or a prefix less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.ops.conversion.hf_expected import ExpectedTensors

__all__ = ["Prefixes", "find_prefixes", "fits", "missing_from"]

_MOST_CANDIDATES = 2000
_SHORTEST = 2
"""Components that a name must have in common with an expected one to be taken for the same."""


@dataclass(frozen=True, slots=True, order=True)
class Prefixes:
    """A prefix that is taken off, and one that is put on."""

    old: str
    new: str

    def apply(self, name: str, expected: ExpectedTensors) -> str:
        """Return the new name; names that mean nothing to the model, or mean something already, stay as they are."""
        renamed = self.new + name.removeprefix(self.old)
        return renamed if name not in expected and name.startswith(self.old) and renamed in expected else name

    def __str__(self) -> str:
        if not self.old:
            return f"`{self.new}` was put before names"
        return f"`{self.old}` was taken off names" if not self.new else f"`{self.old}` became `{self.new}` in names"


def missing_from(names: Mapping[str, Shape], expected: ExpectedTensors) -> Iterator[str]:
    """Yield required tensors that are there under no name of theirs."""
    tied: dict[str, list[str]] = {}
    for other, kept in expected.tied.items():
        tied.setdefault(kept, []).append(other)
    for name in expected.required:
        if name not in names and not any(other in names for other in tied.get(name, ())):
            yield name


def fits(names: Mapping[str, Shape], expected: ExpectedTensors) -> bool:
    """Tell whether all required tensors are there, in their shapes."""
    if next(missing_from(names, expected), None) is not None:
        return False
    return all(expected.shape_of(name) in (None, shape) for name, shape in names.items())


def find_prefixes(names: Mapping[str, Shape], expected: ExpectedTensors) -> Prefixes | None:
    """Return the one change of prefixes with which all expected tensors are there.

    Args:
        names: Shapes of the tensors, by name.
        expected: What the model has.

    Returns:
        The change; None where none is needed, or none makes it so.

    Raises:
        Incompatible: Several changes would do: the checkpoint holds several such models.
    """
    if next(missing_from(names, expected), None) is None:
        return None
    found = []
    for candidate in _candidates(names, expected):
        renamed: dict[str, Shape] = {candidate.apply(name, expected): shape for name, shape in names.items()}
        if len(renamed) == len(names) and fits(renamed, expected):
            found.append(candidate)
    if len(found) > 1:
        first, second = sorted(found)[:2]
        raise Incompatible(
            f"several models of this kind are in it, under `{first.old}` and `{second.old}`",
            hint=f"choose one: --include '{first.old}*'",
        )
    return found[0] if found else None


def _candidates(names: Mapping[str, Shape], expected: ExpectedTensors) -> list[Prefixes]:
    """Return the changes that turn some name into the longest expected one, and lead to a few others as well."""
    if not expected.required:
        return []
    anchor = max(expected.required, key=lambda name: (name.count("."), name))
    wanted = anchor.split(".")
    samples = [name for number, name in enumerate(expected.required) if number % 7 == 0][:50]
    found: set[Prefixes] = set()
    for name in names:
        words = name.split(".")
        same = 0
        while same < min(len(words), len(wanted)) and words[-1 - same] == wanted[-1 - same]:
            same += 1
        if same < min(_SHORTEST, len(wanted)) or len(found) >= _MOST_CANDIDATES:
            continue
        old, new = (".".join([*some[: len(some) - same], ""]) if len(some) > same else "" for some in (words, wanted))
        found.add(Prefixes(old, new))
    return [one for one in found if one.old != one.new and all(_has(sample, one, names) for sample in samples)]


def _has(wanted: str, change: Prefixes, names: Mapping[str, Shape]) -> bool:
    return wanted in names or not wanted.startswith(change.new) or change.old + wanted.removeprefix(change.new) in names
