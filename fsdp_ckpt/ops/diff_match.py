"""Match what two parts hold, as far as names, shapes and dtypes go."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from fsdp_ckpt.catalog import Part, Role, TensorEntry
from fsdp_ckpt.ops.diff_names import Naming, is_by_index, suggest_rename, wrapper_notes
from fsdp_ckpt.ops.diff_objects import compare_leaves, read_leaves, spread_groups
from fsdp_ckpt.ops.diff_report import Change, ObjectDiff, PartDiff, TensorDiff
from fsdp_ckpt.ops.diff_values import Leaf
from fsdp_ckpt.ops.ties import find_aliases, tie
from fsdp_ckpt.plan.merge import Selection, find_tie_candidates
from fsdp_ckpt.plan.output import OutputTensor
from fsdp_ckpt.run.sides import Side, TensorPair

__all__ = ["PartMatch", "match_objects", "match_tensors"]

_BY_INDEX = (
    "{} keeps its state by index, {} by the names of parameters: which is which cannot be told without the model"
)


@dataclass(slots=True, kw_only=True)
class PartMatch:
    """Two parts that correspond, while they are compared.

    Attributes:
        a: The part of A.
        b: The part of B.
        role: What both are for.
        order: Names of all tensors, in the order of A, then of B.
        pairs: Tensors of equal shape by name, to be compared.
        tensors: What is known of tensors that are not the same, by name.
        num_equal: Tensors found to be equal.
        num_settled: Those of them that nothing was read for.
        num_same_file: Those of these that are the same bytes of the same file.
        num_objects: Values on both sides that are no tensors.
        objects: Those that differ.
        excluded: Names that the filter left out.
        tied: Name kept by name that one side leaves out because it is the same tensor.
        incomparable: Why nothing is compared; None when it is.
        notes: What else there is to know.
    """

    a: Part
    b: Part
    role: Role
    order: list[str] = field(default_factory=list)
    pairs: dict[str, TensorPair] = field(default_factory=dict)
    tensors: dict[str, TensorDiff] = field(default_factory=dict)
    num_equal: int = 0
    num_settled: int = 0
    num_same_file: int = 0
    num_objects: int = 0
    objects: list[ObjectDiff] = field(default_factory=list)
    excluded: int = 0
    tied: dict[str, str] = field(default_factory=dict)
    incomparable: str | None = None
    notes: list[str] = field(default_factory=list)

    def report(self) -> PartDiff:
        """Return what was found."""
        tensors = [self.tensors[name] for name in self.order if name in self.tensors]
        close = sum(tensor.change is Change.CLOSE for tensor in tensors)
        one_sided = sum(tensor.change in (Change.REMOVED, Change.ADDED) for tensor in tensors)
        return PartDiff(
            part_a=self.a.name,
            part_b=self.b.name,
            role=self.role.value,
            num_tensors=self.num_equal + len(tensors) - one_sided,
            num_equal=self.num_equal,
            num_close=close,
            num_settled=self.num_settled,
            num_same_file=self.num_same_file,
            tensors=tensors,
            num_objects=self.num_objects,
            objects=self.objects,
            excluded=self.excluded,
            tied=self.tied,
            incomparable=self.incomparable,
            notes=self.notes,
            is_equal=len(tensors) == close and not self.objects and self.incomparable is None,
        )


def match_tensors(parts: tuple[Part, Part], sides: tuple[Side, Side], namings: tuple[Naming, Naming]) -> PartMatch:
    """Pair the tensors of two parts.

    Raises:
        NameCollision: Two tensors of one side would get one name.
    """
    role = Role.OPTIMIZER if Role.OPTIMIZER in (parts[0].role, parts[1].role) else parts[0].role
    match = PartMatch(a=parts[0], b=parts[1], role=role)
    (a, left_a), (b, left_b) = (
        naming.tensors(part, role, label=f"{side.label} (`{side.path}`)")
        for part, side, naming in zip(parts, sides, namings, strict=True)
    )
    match.excluded = left_a + left_b
    match.order = [*a, *(name for name in b if name not in a)]
    if role is Role.OPTIMIZER and a and b and is_by_index(a) != is_by_index(b):
        match.incomparable = _BY_INDEX.format(*(("A", "B") if is_by_index(a) else ("B", "A")))
        return match
    if role is Role.MODEL:
        match.tied = _tied(a, b, sides[0]) | _tied(b, a, sides[1])
    for name in match.order:
        first, second = a.get(name), b.get(name)
        if first is not None and second is not None and first.shape == second.shape:
            match.pairs[name] = TensorPair(name=name, a=first, b=second)
        elif name not in match.tied:
            change = Change.RESHAPED
            if first is None or second is None:
                change = Change.ADDED if first is None else Change.REMOVED
            match.tensors[name] = _difference(name, change, first, second)
    match.notes += wrapper_notes(a, b, role)
    if a and b and not a.keys() & b.keys():
        rule = suggest_rename(a, b)
        hint = f"; try --rename '{rule}'" if rule else ""
        match.notes.append(f"no name is on both sides: A has `{next(iter(a))}`, B has `{next(iter(b))}`{hint}")
    return match


def match_objects(
    match: PartMatch,
    sides: tuple[Side, Side],
    namings: tuple[Naming, Naming],
    equal_tensors: Callable[[TensorPair], bool],
) -> None:
    """Compare the values of two parts that are no tensors.

    Raises:
        CorruptCheckpoint: One is damaged; the message names the side.
    """
    if match.incomparable is not None:
        return
    for part, other, label in ((match.a, match.b, "A"), (match.b, match.a, "B")):
        if part.objects and other.dialect == "safetensors":
            first = next(iter(part.objects.values())).name
            match.notes.append(
                f"{len(part.objects)} values of {label} that are no tensors, such as `{first}`, were not compared: "
                "safetensors files hold none"
            )
            return
    a, b = (
        read_leaves(part, match.role, side, naming)
        for part, side, naming in zip((match.a, match.b), sides, namings, strict=True)
    )
    params = {name.removeprefix("state.").rpartition(".")[0] for name in match.order if name.startswith("state.")}
    flat = _is_flattened(a, params), _is_flattened(b, params)
    if match.role is Role.OPTIMIZER and flat[0] != flat[1]:
        a, b = (leaves if done else spread_groups(leaves) for leaves, done in zip((a, b), flat, strict=True))
    match.objects, match.num_objects = compare_leaves(a, b, match.role, equal_tensors)


def _is_flattened(leaves: Mapping[str, Leaf], params: Container[str]) -> bool:
    """Tell whether options stand under names of parameters, as with ``flatten_optimizer_state_dict=True``."""
    options = [name.removeprefix("param_groups.") for name in leaves if name.startswith("param_groups.")]
    return any(name.rpartition(".")[0] in params or not name.split(".")[0].isdecimal() for name in options)


def _tied(mine: Mapping[str, TensorEntry], others: Mapping[str, TensorEntry], side: Side) -> dict[str, str]:
    """Return tensors that the other side lacks because they are another tensor, which it has."""
    alone = [name for name in mine if name not in others]
    if not alone or len(alone) == len(mine):
        return {}
    tensors = [OutputTensor(name=name, dtype=entry.dtype, source=entry) for name, entry in mine.items()]
    pairs = find_aliases(tensors)
    likely = find_tie_candidates(tensors)
    if likely is not None and any(tensor.name in alone for tensor in likely):
        with side.blame():
            pairs |= tie(Selection(tensors=likely), side.sources, asked=True)[0].tied
    partners = {kept: name for name, kept in pairs.items()} | dict(pairs)
    return {name: partners[name] for name in alone if partners.get(name) in others}


def _difference(name: str, change: Change, a: TensorEntry | None, b: TensorEntry | None) -> TensorDiff:
    known = a or b
    assert known is not None
    return TensorDiff(
        name=name,
        change=change,
        dtype_a=a.dtype.name if a is not None else None,
        dtype_b=b.dtype.name if b is not None else None,
        shape_a=a.shape if a is not None else None,
        shape_b=b.shape if b is not None else None,
        num_elements=known.numel,
    )
