"""Compare two models by the names, shapes and element types of their tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdp_ckpt.catalog import Part, Problem, Severity, TensorEntry
from fsdp_ckpt.names import clean_fqn
from fsdp_ckpt.ops.validation.expected import HEAD
from fsdp_ckpt.ops.validation.wording import capped, counted, few, finding, shape_text
from fsdp_ckpt.plan.extents import same_bytes

__all__ = ["compare_models", "prefix_problem"]

_COMPUTED = (".rotary_emb.inv_freq", ".attn.masked_bias", "_extra_state")
"""Buffers that some versions of a model save and others compute."""

_ALIGNED_SHARE = 0.5


def compare_models(model: Part, other: Part, name: str, *, is_tied: bool) -> Iterator[Problem]:
    """Yield what of a model does not fit another one. Wrappers in names are left out of account.

    Args:
        model: The saved model.
        other: What it is to be loaded into.
        name: What to call the other one.
        is_tied: Whether a configuration says that there need be no output head.
    """
    yield from _Comparison.of(model, other, name, is_tied=is_tied).problems()


def prefix_problem(prefix: str, where: str, moved: int, of: int, other: str) -> Problem:
    """Return that names have, or lack, a prefix, with the rule that mends it.

    Args:
        prefix: ``-foo.`` to be taken from names, ``+foo.`` to be put before them.
        where: The first of these names.
        moved: How many there are.
        of: How many names there are in all.
        other: What they are compared with.
    """
    sign, prefix = prefix[0], prefix[1:]
    rule = f"'s/^/{prefix}/'" if sign == "+" else f"'{prefix}='"
    does = "lack" if sign == "+" else "have"
    message = f"{moved} of {counted(of, 'name')} {does} the prefix `{prefix}`, unlike those of {other}: "
    return finding("prefix-differs", where, message + f"merge with --rename {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """Two models.

    Attributes:
        ours: Tensors of the checkpoint, by clean name as the other one would call it.
        theirs: Tensors of the other one, by clean name.
        other: What the other one is called.
        prefix: What was put before our names (``+``), or taken from them (``-``); empty for neither.
        moved: How many of our names that changed.
        is_tied: Whether a configuration says that there need be no output head.
    """

    ours: Mapping[str, TensorEntry]
    theirs: Mapping[str, TensorEntry]
    other: str
    prefix: str
    moved: int
    is_tied: bool

    @classmethod
    def of(cls, model: Part, other_model: Part, other: str, *, is_tied: bool) -> _Comparison:
        ours = {clean_fqn(entry.name): entry for entry in model.tensors.values()}
        theirs = {clean_fqn(entry.name): entry for entry in other_model.tensors.values()}
        prefix = _find_prefix(ours, theirs)
        renamed = {_renamed(name, prefix, ours, theirs): entry for name, entry in ours.items()}
        moved = len(renamed.keys() - ours.keys())
        return cls(ours=renamed, theirs=theirs, other=other, prefix=prefix, moved=moved, is_tied=is_tied)

    def problems(self) -> Iterator[Problem]:
        if self.prefix:
            yield self._other_prefix()
        yield from capped(self._missing())
        unexpected = [entry.key for name, entry in self.ours.items() if name not in self.theirs and _counts(name)]
        for key in unexpected[:1]:
            message = f"{counted(len(unexpected), 'tensor')} that {self.other} does not have: {few(unexpected)}"
            yield finding("unexpected-key", key, message)
        yield from capped(self._shapes())
        yield from self._dtypes()

    def _other_prefix(self) -> Problem:
        where = next(name for name in self.ours if name in self.theirs)
        return prefix_problem(self.prefix, self.ours[where].key, self.moved, len(self.ours), self.other)

    def _missing(self) -> Iterator[Problem]:
        missing = [name for name in self.theirs if name not in self.ours and _counts(name)]
        # What the other one has under two names, we may have under one of them.
        shared = {same_bytes(entry) for name, entry in self.theirs.items() if name in self.ours} if missing else set()
        for name in missing:
            entry = self.theirs[name]
            if not (entry.chunks and same_bytes(entry) in shared) and not (name == HEAD and self.is_tied):
                message = f"is not there; in {self.other} it has the shape {shape_text(entry.shape)}"
                yield finding("missing-key", name, message)

    def _shapes(self) -> Iterator[Problem]:
        for name, entry in self.ours.items():
            other = self.theirs.get(name)
            if other is not None and other.shape != entry.shape:
                message = f"has the shape {shape_text(entry.shape)}; in {self.other} it has {shape_text(other.shape)}"
                yield finding("shape-differs", entry.key, message)

    def _dtypes(self) -> Iterator[Problem]:
        pairs: dict[tuple[str, str], list[TensorEntry]] = {}
        kinds: dict[tuple[str, str], bool] = {}
        for name, entry in self.ours.items():
            other = self.theirs.get(name)
            if other is not None and other.dtype != entry.dtype:
                pair = entry.dtype.name, other.dtype.name
                pairs.setdefault(pair, []).append(entry)
                kinds[pair] = {entry.dtype.kind, other.dtype.kind} <= {"float", "float8"}
        for pair, entries in pairs.items():
            mine, theirs = pair
            keys = [entry.key for entry in entries]
            verb = "is" if len(keys) == 1 else "are"
            message = f"{counted(len(keys), 'tensor')} {verb} {mine}, in {self.other} {theirs}: {few(keys)}"
            # load_state converts between kinds of floats, and refuses the rest.
            severity = None if kinds[pair] else Severity.ERROR
            yield finding("dtype-differs", keys[0], message, severity=severity)


def _counts(name: str) -> bool:
    return not name.endswith(_COMPUTED)


def _find_prefix(ours: Mapping[str, TensorEntry], theirs: Mapping[str, TensorEntry]) -> str:
    """Return ``+model.`` or ``-model.`` where that makes names fit of which most do not; otherwise nothing."""
    only_ours = [name for name in ours if name not in theirs]
    only_theirs = [name for name in theirs if name not in ours]
    found: Counter[str] = Counter()
    for sign, short, long in (("+", ours, only_theirs), ("-", theirs, only_ours)):
        for name in long:
            head, dot, rest = name.partition(".")
            prefix = ""
            while dot and len(prefix) < 200:
                prefix += head + dot
                if rest in short:
                    found[sign + prefix] += 1
                    break
                head, dot, rest = rest.partition(".")
    best = found.most_common(1)
    needed = _ALIGNED_SHARE * max(1, min(len(only_ours), len(only_theirs)))
    return best[0][0] if best and best[0][1] >= needed else ""


def _renamed(name: str, prefix: str, ours: Mapping[str, TensorEntry], theirs: Mapping[str, TensorEntry]) -> str:
    if not prefix or name in theirs:
        return name
    other = prefix[1:] + name if prefix[0] == "+" else name.removeprefix(prefix[1:])
    return other if other in theirs and other not in ours else name
