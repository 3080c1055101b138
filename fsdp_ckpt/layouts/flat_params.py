"""Give the parameters in FSDP1's flat parameters their names and shapes back.

A flat parameter ``layers.0._flat_param`` is what FSDP1 made of the module ``layers.0``: its parameters one after the
other, in the module's order, without those of modules in it that were wrapped themselves; a shared one once. With
``use_orig_params`` each begins at a multiple of 16 bytes, and the end is filled up to a multiple of the number of
ranks; there slices under the parameters' names stand beside it. See ``_init_flat_param_and_metadata`` in
``torch/distributed/fsdp/_flat_param.py``.

Shapes are not recorded, so they are given beside it, and have to agree in the number of elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_ckpt.catalog import Checkpoint, Chunk, Encoding, Part, Problem, Role, Severity, TensorEntry
from fsdp_ckpt.codec.torchzip import resolve_item
from fsdp_ckpt.errors import FlatParameters, IncompleteCheckpoint, NameCollision
from fsdp_ckpt.layouts.faults import coverage_problems
from fsdp_ckpt.layouts.flat_cut import cut_parameter
from fsdp_ckpt.layouts.flat_shapes import SHAPES_HINT, ModelShapes
from fsdp_ckpt.layouts.local_slices import LOCAL_SLICES, join_by_rank
from fsdp_ckpt.names import FLAT_PARAM, is_flat_param, strip_wrappers
from fsdp_ckpt.plan.extents import same_bytes
from fsdp_ckpt.store.local import LocalStore

__all__ = ["name_flat_parameters", "name_part"]

_SAVE_HINT = "load it into the wrapped model it was saved from, and save that as SHARDED_STATE_DICT"

_ALIGNMENT_BYTES = 16
"""Where parameters begin in a flat parameter with ``use_orig_params``."""

Resolve = Callable[[TensorEntry, Chunk], Chunk]
"""Finds the elements of a chunk that is a record of its own."""


def name_flat_parameters(checkpoint: Checkpoint, shapes: ModelShapes) -> Checkpoint:
    """Return a checkpoint whose models have named tensors in the place of flat parameters and of slices of them.

    Optimizers are left as they are.

    Args:
        checkpoint: As ``read_checkpoint`` returns it.
        shapes: Names and shapes of the model before it was wrapped.

    Raises:
        FlatParameters: The shapes do not fit, or leave open what lies where.
        IncompleteCheckpoint: Ranks are missing.
        NameCollision: Two tensors have one name.
        CorruptCheckpoint: A record that holds a shard is damaged.

    Example:
        >>> from fsdp_ckpt.layouts.flat_shapes import read_shapes
        >>> from fsdp_ckpt.layouts.registry import read_checkpoint
        >>> checkpoint = name_flat_parameters(read_checkpoint("local"), read_shapes("model.pt"))  # doctest: +SKIP
    """
    store = LocalStore(checkpoint.roots)

    def resolve(entry: TensorEntry, chunk: Chunk) -> Chunk:
        return resolve_item(chunk, entry.dtype, store.reader(chunk.file), where=f"{chunk.file} (`{entry.key}`)")

    parts = [
        name_part(part, shapes, resolve) if part.flat is not None and part.role is Role.MODEL else part
        for part in checkpoint.parts
    ]
    return replace(checkpoint, parts=parts)


def name_part(part: Part, shapes: ModelShapes, resolve: Resolve) -> Part:
    """Return a model with named tensors, see ``name_flat_parameters``."""
    found = {entry.key: entry for entry in _Namer(part, shapes, resolve).tensors()}
    problems = [problem for problem in part.problems if not _is_answered(problem, found)]
    return replace(part, tensors=found, flat=None, problems=[*problems, *coverage_problems(found.values())])


def _is_answered(problem: Problem, tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether it told of slices that were taken for copies."""
    entry = tensors.get(problem.where)
    return problem.code == "replicas-differ" and entry is not None and not entry.replicas


@dataclass(frozen=True, slots=True)
class _Unit:
    """A flat parameter, and the names below its module that no module further down has, in the order of the shapes."""

    entry: TensorEntry
    prefix: str
    names: list[str]


class _Namer:
    """Finds out what a model's flat parameters and slices are.

    Args:
        part: The model.
        shapes: What is known of it.
        resolve: Finds elements.
    """

    def __init__(self, part: Part, shapes: ModelShapes, resolve: Resolve) -> None:
        self._part = part
        self._shapes = shapes
        self._resolve = resolve
        self._plain: dict[str, TensorEntry] = {}
        self._units: dict[str, _Unit] = {}
        self._is_dcp = part.dialect == "dcp"
        for entry in part.tensors.values():
            name = strip_wrappers(entry.name)
            if is_flat_param(name):
                self._add_unit(entry, name)
            elif name in self._plain:
                raise NameCollision(f"{part.name}: two tensors would both be named `{name}`")
            else:
                self._plain[name] = entry
        self._plain = {name: self._joined(entry, name) for name, entry in self._plain.items()}
        self._by_bytes = {same_bytes(self._plain[name]): name for name in shapes.shapes if name in self._plain}

    def tensors(self) -> Iterator[TensorEntry]:
        """Yield the named tensors, those that the shapes name in their order."""
        for name in self._shapes.shapes:
            unit = self._unit_of(name)
            if unit is not None:
                unit.names.append(name)
            elif name not in self._plain:
                raise self._misfit(f"`{name}` of {self._shapes.source} is in no flat parameter, nor beside them")
        placed = {name: self._shaped(entry, name) for name, entry in self._plain.items()}
        for unit in self._units.values():
            placed.update(self._open(unit))
        for name, kept in self._shapes.aliases.items():
            if name not in placed and kept in placed:
                placed[name] = _named(placed[kept], name)
        order = {name: number for number, name in enumerate(self._shapes.shapes)}
        yield from (placed[name] for name in sorted(placed, key=lambda name: order.get(name, len(order))))

    def _add_unit(self, entry: TensorEntry, name: str) -> None:
        prefix = name.removesuffix(FLAT_PARAM)
        is_sharded = self._is_dcp or entry.placements is not None
        if prefix == name or prefix in self._units or len(entry.shape) != 1 or not is_sharded:
            raise FlatParameters(
                f"{self._part.name}: `{entry.name}` is not a flat parameter as FSDP1 of torch 2 saves them",
                hint=_SAVE_HINT,
            )
        self._units[prefix] = _Unit(entry, prefix, [])

    def _joined(self, entry: TensorEntry, name: str) -> TensorEntry:
        """Put slices of equal sizes together, which look like copies, where they were not recognised by their place."""
        shape, unit = self._shapes.shapes.get(name), self._unit_of(name)
        if shape is None or not entry.replicas or len(entry.shape) != 1 or self._is_dcp:
            return entry
        is_sum = entry.numel > 0 and math.prod(shape) == entry.numel * (1 + len(entry.replicas))
        is_like = unit is None or unit.entry.dtype == entry.dtype
        return join_by_rank(entry, (*entry.chunks, *entry.replicas)) if is_sum and is_like else entry

    def _unit_of(self, name: str) -> _Unit | None:
        prefix = name
        while prefix:
            prefix = prefix.rstrip(".").rpartition(".")[0]
            prefix = f"{prefix}." if prefix else ""
            if prefix in self._units:
                return self._units[prefix]
        return None

    def _open(self, unit: _Unit) -> Iterator[tuple[str, TensorEntry]]:
        """Yield what a unit's flat parameter holds, unless there are slices beside it that say it as well."""
        sliced = [name for name in unit.names if name in self._plain and self._plain[name].placements == LOCAL_SLICES]
        if sliced:
            self._check_slices(unit, sliced)
            return
        layout = self._layout(unit)
        shards = [self._elements(unit.entry, chunk) for chunk in unit.entry.chunks]
        copies = [self._elements(unit.entry, chunk) for chunk in unit.entry.replicas]
        for name, start in layout.items():
            entry = _named(replace(unit.entry, placements=None), name)
            yield name, self._cut(entry, name, start, shards, copies)

    def _check_slices(self, unit: _Unit, sliced: Sequence[str]) -> None:
        aliases = self._shapes.aliases
        for name in unit.names:
            if name not in self._plain and aliases.get(name, name) not in sliced:
                raise self._misfit(f"of `{sliced[0]}` there are slices, of `{name}` in the same module there are none")
        kept = {same_bytes(self._plain[name]): self._plain[name].numel for name in sliced if name not in aliases}
        rest = unit.entry.numel - sum(kept.values())  # below 0 where shared parameters were copied
        if rest >= _alignment(unit.entry) * len(kept) + _num_shards(unit.entry):
            self._demand_all_ranks()
            raise self._misfit(
                f"`{unit.entry.name}` has {unit.entry.numel} elements, the slices of its parameters "
                f"that {self._shapes.source} names have {sum(kept.values())}"
            )

    def _layout(self, unit: _Unit) -> dict[str, int]:
        """Return the first element of each parameter in a flat parameter without slices, hence without padding."""
        found: list[dict[str, int]] = []
        sums, most = set(), 0
        for names in self._candidates(unit):
            numels = [math.prod(self._shapes.shapes[name]) for name in names]
            starts = [0, *itertools.accumulate(numels)]
            sums.add(starts[-1])
            most = max(most, len(names))
            layout = dict(zip(names, starts, strict=False))
            if starts[-1] == unit.entry.numel and layout not in found:
                found.append(layout)
        if self._is_dcp and not most and unit.names:
            raise self._one_ranks_slices(unit)
        if self._shapes.doubt is not None and max(map(len, found), default=most) > 1:
            raise FlatParameters(
                f"{self._part.name}: `{unit.entry.name}` holds several parameters in the module's order, which "
                f"{self._shapes.source} does not tell: {self._shapes.doubt}",
                hint=SHAPES_HINT,
            )
        if len(found) == 1:
            return found[0]
        if found:
            raise self._misfit(f"the parameters that {self._shapes.source} names fit `{unit.entry.name}` in two ways")
        shown = " or ".join(map(str, sorted(sums)))
        raise self._misfit(
            f"`{unit.entry.name}` has {unit.entry.numel} elements, "
            f"the parameters in it by {self._shapes.source} have {shown}"
        )

    def _candidates(self, unit: _Unit) -> Iterator[list[str]]:
        """Yield the lists of names that a flat parameter may consist of.

        What stands beside it is not in it. A shared parameter is in it once; when modules share one across flat
        parameters, each may have it.
        """
        aliases = self._shapes.aliases
        names = [name for name in unit.names if name not in self._plain]
        yield [name for name in names if name not in aliases]
        first = {aliases.get(name, name): name for name in reversed(names)}
        yield [name for name in names if first[aliases.get(name, name)] == name]

    def _elements(self, entry: TensorEntry, chunk: Chunk) -> Chunk:
        if chunk.encoding is Encoding.TORCH_ZIP:
            chunk = self._resolve(entry, chunk)
        if chunk.encoding is not Encoding.RAW or chunk.strides is not None:
            raise FlatParameters(
                f"{self._part.name}: `{entry.name}` is compressed, or not in one run: what lies where is not looked up",
                hint=_SAVE_HINT,
            )
        return chunk

    def _shaped(self, entry: TensorEntry, name: str) -> TensorEntry:
        """Return a tensor from beside the flat parameters; slices get their shape."""
        shape = self._shapes.shapes.get(name)
        if entry.placements != LOCAL_SLICES:
            unit = self._unit_of(name)
            if self._is_dcp and unit is not None and len(entry.shape) == 1 and shape not in (None, entry.shape):
                raise self._one_ranks_slices(unit)
            if shape is not None and shape != entry.shape:
                raise self._misfit(
                    f"`{entry.name}` has the shape {entry.shape}; by {self._shapes.source} it is {shape}"
                )
            return entry
        if shape is None:  # a shared parameter's further name, which named_parameters() leaves out
            known = self._by_bytes.get(same_bytes(entry))
            if known is None:
                raise self._misfit(f"{self._shapes.source} does not tell the shape of `{entry.name}`")
            name, shape = known, self._shapes.shapes[known]
        if math.prod(shape) != entry.numel:
            self._demand_all_ranks()
            raise self._misfit(
                f"the slices of `{entry.name}` have {entry.numel} elements; "
                f"by {self._shapes.source} it has {math.prod(shape)}, {shape}"
            )
        return self._cut(replace(entry, placements=None), name, 0, entry.chunks, entry.replicas)

    def _cut(
        self, entry: TensorEntry, name: str, start: int, shards: Sequence[Chunk], copies: Sequence[Chunk]
    ) -> TensorEntry:
        shape, order = self._shapes.shapes[name], self._shapes.orders.get(name)
        itemsize = entry.dtype.itemsize
        return replace(
            entry,
            shape=shape,
            chunks=tuple(cut_parameter(shards, shape, order, start, itemsize)),
            replicas=tuple(cut_parameter(copies, shape, order, start, itemsize)),
        )

    def _one_ranks_slices(self, unit: _Unit) -> FlatParameters:
        return FlatParameters(
            f"{self._part.name}: of the tensors beside `{unit.entry.name}` one rank's slices were kept, as they are "
            "with use_orig_params: what lies where in it is not certain",
            hint=_SAVE_HINT,
        )

    def _demand_all_ranks(self) -> None:
        """Refuse what does not add up because something is missing, rather than because of the shapes."""
        for problem in self._part.problems:
            if problem.severity is Severity.ERROR:
                raise IncompleteCheckpoint(f"`{problem.where}`: {problem.message}")

    def _misfit(self, message: str) -> FlatParameters:
        return FlatParameters(f"{self._part.name}: {message}", hint=SHAPES_HINT)


def _named(entry: TensorEntry, name: str) -> TensorEntry:
    """Return a tensor under another name."""
    key = entry.key.removesuffix(entry.name) + name if entry.key.endswith(entry.name) else name
    return replace(entry, key=key, name=name, path=(name,) if entry.path else ())


def _alignment(entry: TensorEntry) -> int:
    """Return the elements to a multiple of which a parameter is put."""
    return max(1, _ALIGNMENT_BYTES // entry.dtype.itemsize)


def _num_shards(entry: TensorEntry) -> int:
    """Return the number of equal shards of a flat parameter, 1 where its elements are not spread evenly."""
    length = max((chunk.numel for chunk in entry.chunks), default=0)
    return entry.numel // length if length and entry.numel % length == 0 else 1
