"""Names and shapes of a model's tensors, from a file beside the checkpoint: FSDP1's flat parameters keep neither.

A flat parameter holds its parameters one after the other, in the order in which the module has them. So it matters
where the shapes come from: JSON and files of ``torch.save`` can have that order, safetensors never have it. A wrong one
would not show: the number of elements is the same. So what no module can have is not taken for a module's order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fsdp_ckpt.catalog import MAX_DIMS, Part, Role, Shape
from fsdp_ckpt.errors import CheckpointNotFound, NoModelWeights, UsageError
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.names import strip_wrappers
from fsdp_ckpt.plan.extents import same_bytes
from fsdp_ckpt.store.remote.mirrors import materialise

__all__ = ["SHAPES_HINT", "ModelShapes", "order_doubt", "read_shapes", "shapes_of_part"]

S = TypeVar("S")

SHAPES_HINT = (
    "give the model's config.json, or shapes in the module's order as JSON; in the training code, before the model is "
    "wrapped: json.dump([[name, p.shape, p.stride()] for name, p in model.named_parameters()], file)"
)

_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """What a module's tensors are called, and their shapes.

    Attributes:
        source: Where they are from, for messages.
        shapes: Shape by name, without wrappers. There may be buffers among them, and further names of shared
            parameters.
        doubt: Why ``shapes`` may not be in the module's order; None where they are.
        aliases: Further names of shared parameters, with the name that comes first.
        orders: Where a tensor was not row-major in memory: its dimensions, the slowest first.
    """

    source: str
    shapes: Mapping[str, Shape]
    doubt: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def read_shapes(path: str | os.PathLike[str]) -> ModelShapes:
    """Read the names and shapes of a model.

    Args:
        path: JSON, either ``{"layers.0.weight": [8, 4], …}`` or ``[["layers.0.weight", [8, 4]], …]``, in the order of
            ``named_parameters()``, where strides may follow a shape, as FSDP1 takes elements in the order of memory;
            or weights: a file of ``torch.save``, safetensors, any checkpoint with names.

    Raises:
        CheckpointNotFound: Nothing is there, or nothing that holds a model.
        UsageError: The file says something else.
        CorruptCheckpoint: The weights are damaged.

    Example:
        >>> read_shapes("shapes.json").shapes  # doctest: +SKIP
        {'embed.weight': (37, 8), 'layers.0.norm.weight': (8,)}
    """
    place = Path(path)
    if place.suffix == ".json" and not place.name.endswith(".index.json"):
        return _from_json(place)
    models = [part for part in read_checkpoint(place).parts if part.role is Role.MODEL and part.tensors]
    if not models:
        raise NoModelWeights(f"`{place}` holds no model whose shapes could be taken")
    if len(models) > 1:
        names = ", ".join(part.name for part in models)
        raise UsageError(f"`{place}` holds {len(models)} models: {names}", hint="give the file of one of them")
    return shapes_of_part(models[0], source=place.name)


def shapes_of_part(part: Part, *, source: str) -> ModelShapes:
    """Return the names and shapes of a model that has both.

    Args:
        part: The model.
        source: What to call it in messages.

    Raises:
        UsageError: It has flat parameters itself, or two tensors of one name.
    """
    if part.flat is not None:
        raise UsageError(f"{source}: {part.flat}", hint="give weights that were saved whole, or shapes as JSON")
    entries = [(strip_wrappers(entry.name), entry) for entry in part.tensors.values()]
    shapes = _unique(((name, entry.shape) for name, entry in entries), source)
    first: dict[Any, str] = {}
    aliases = {}
    for name, entry in entries:
        kept = first.setdefault(same_bytes(entry), name) if entry.num_bytes else name
        if kept != name and shapes[kept] == shapes[name]:
            aliases[name] = kept
    whole = {name: entry.chunks[0].strides for name, entry in entries if len(entry.chunks) == 1}
    orders = {name: order for name in whole if (order := _memory_order(shapes[name], whole[name])) is not None}
    return ModelShapes(source=source, shapes=shapes, doubt=_doubt(part, shapes), aliases=aliases, orders=orders)


def _doubt(part: Part, names: Collection[str]) -> str | None:
    if part.dialect not in ("rank-files", "torch-file") or (part.dialect == "torch-file" and len(part.files) > 1):
        return f"{part.dialect} files do not keep the order"
    return order_doubt(names)


def order_doubt(names: Collection[str]) -> str | None:
    """Return why names cannot be taken to be in the order in which a module has its tensors, None where they can.

    A module's own tensors come before those of its children, the children one after the other, numbered ones (of
    ``ModuleList``, ``Sequential``) by their number. Names in alphabetical order were sorted by somebody.

    Example:
        >>> order_doubt(["layers.0.weight", "layers.10.weight", "layers.2.weight"])
        'the names are sorted'
        >>> order_doubt(["layers.0.weight", "layers.2.weight", "layers.10.weight"])
        >>> order_doubt(["norm.weight", "layers.1.weight", "layers.0.weight"])
        '`layers.0` comes after `layers.1`'
    """
    listed = list(names)
    if len(listed) > 1 and listed == sorted(listed):
        return "the names are sorted"
    seen: set[str] = set()
    before: list[str] = []
    for name in listed:
        modules = name.split(".")[:-1]
        paths = [".".join(modules[: depth + 1]) for depth in range(len(modules))]
        if paths == before:
            continue
        depth = sum(old == new for old, new in zip(before, paths, strict=False))
        if depth == len(paths):
            return f"`{name}` comes after what is in `{before[depth]}`"
        if not seen.isdisjoint(paths[depth:]):
            return f"what is in `{paths[depth]}` does not stand together"
        sibling = before[depth].rpartition(".")[2] if depth < len(before) else ""
        if sibling.isdecimal() and modules[depth].isdecimal() and int(sibling) > int(modules[depth]):
            return f"`{paths[depth]}` comes after `{before[depth]}`"
        seen.update(paths)
        before = paths
    return None


def _memory_order(shape: Shape, strides: Shape | None) -> tuple[int, ...] | None:
    """Return the dimensions of a tensor by falling stride, None where that is their own order."""
    if strides is None:
        return None
    dims = [dim for dim, size in enumerate(shape) if size > 1]  # the others have any stride
    falling = sorted(dims, key=lambda dim: -strides[dim])
    if falling == dims:
        return None
    return (*(dim for dim in range(len(shape)) if dim not in dims), *falling)


def _from_json(place: Path) -> ModelShapes:
    try:
        with materialise(place).open("rb") as file:
            data = file.read(_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointNotFound(f"`{place}` does not exist") from None
    except OSError as error:
        raise UsageError(f"`{place}` cannot be read: {error.strerror}") from None
    if len(data) > _LIMIT_BYTES:
        raise UsageError(f"`{place}` is no list of shapes: it is larger than {_LIMIT_BYTES} bytes")
    try:
        # As pairs, as a name that stands there twice must not be lost; a list, unlike a tuple, was meant to have order.
        value = json.loads(data, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`{place}` is no JSON: {error}") from None
    rows = [_row_of(item) for item in value] if isinstance(value, list | tuple) else []
    known = [row for row in rows if row is not None]
    if not rows or len(known) < len(rows):
        raise UsageError(f"`{place}` is no list of shapes", hint=SHAPES_HINT)
    orders = {name: order for name, shape, strides in known if (order := _memory_order(shape, strides)) is not None}
    shapes = _unique(((name, shape) for name, shape, _ in known), place.name)
    doubt = order_doubt(shapes) if isinstance(value, tuple) else None
    return ModelShapes(source=place.name, shapes=shapes, doubt=doubt, orders=orders)


def _row_of(item: Any) -> tuple[str, Shape, Shape | None] | None:
    if not isinstance(item, list | tuple) or len(item) not in (2, 3) or not isinstance(item[0], str):
        return None
    sizes = [_sizes_of(value) for value in item[1:]]
    shape, strides = sizes[0], sizes[-1]
    if shape is None or strides is None or len(shape) != len(strides) or math.prod(shape) >= 2**63:
        return None
    return strip_wrappers(item[0]), shape, strides if len(item) == 3 else None


def _sizes_of(value: Any) -> Shape | None:
    is_shape = isinstance(value, list) and len(value) <= MAX_DIMS and all(type(n) is int and n >= 0 for n in value)
    return tuple(value) if is_shape else None


def _unique(pairs: Iterable[tuple[str, S]], source: str) -> dict[str, S]:
    found: dict[str, S] = {}
    for name, shape in pairs:
        if name in found:
            raise UsageError(f"{source} has two tensors named `{name}`")
        found[name] = shape
    return found
