"""Take a saved optimizer apart: state by parameter, options by group or by parameter, blobs opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_ckpt.catalog import ObjectEntry, Part, TensorEntry
from fsdp_ckpt.codec.tensors import DTensorRef, ShardedTensorRef, TensorRef
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.optimizer_paths import (
    PARAM_GROUPS,
    STATE,
    OptimizerPlace,
    has_numbered_groups,
    optimizer_place,
)
from fsdp_ckpt.layouts.roles import KeyPath
from fsdp_ckpt.names import glob_filter

__all__ = ["Leaf", "OptimizerLeaves", "sort_leaves"]

_MAX_NUMBER = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One thing that an optimizer keeps.

    Attributes:
        source: The entry that holds it and nothing else; None for a piece of a blob.
        value: The piece.
    """

    source: TensorEntry | ObjectEntry | None = None
    value: Any = None

    def read(self, values: Callable[[ObjectEntry], Any]) -> Any:
        """Return the value of what is no tensor."""
        assert not isinstance(self.source, TensorEntry)
        return self.value if self.source is None else values(self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerLeaves:
    """A saved optimizer.

    Attributes:
        name: The part's name.
        state: What is kept of each parameter, by the parameter as it is written and by kind; a kind of several steps
            is nested.
        groups: Options of numbered groups, ``params`` among them.
        options: Options by parameter, of the flattened form.
    """

    name: str
    state: dict[str, dict[KeyPath, Leaf]] = field(default_factory=dict)
    groups: dict[int, dict[KeyPath, Leaf]] = field(default_factory=dict)
    options: dict[str, dict[KeyPath, Leaf]] = field(default_factory=dict)


def sort_leaves(
    part: Part, values: Callable[[ObjectEntry], Any], *, params: Collection[str], exclude: Sequence[str] = ()
) -> OptimizerLeaves:
    """Sort the entries of a part.

    Args:
        part: The saved optimizer.
        values: Reads an object; called for blobs only.
        params: Names of parameters, as far as they are known.
        exclude: Globs of keys to leave out among what belongs to neither state nor groups.

    Raises:
        Incompatible: There are several optimizers in it, or something that belongs to neither state nor groups.
        MalformedFile: Something is there twice, or is not what its place says.
    """
    leaves = OptimizerLeaves(name=part.name)
    entries: list[TensorEntry | ObjectEntry] = [*part.tensors.values(), *part.objects.values()]

    def place_of(path: KeyPath) -> OptimizerPlace:
        return optimizer_place(path, is_param=params.__contains__, is_numbered=is_numbered)

    is_numbered = has_numbered_groups(entry.name for entry in entries)
    prefixes: dict[KeyPath, str] = {}
    keep = glob_filter((), exclude)
    for entry in entries:
        place = place_of(entry.path or (entry.name,))
        if place.head is None and not keep.match(entry.key):
            continue
        prefixes.setdefault(place.prefix, entry.key)
        if place.head is not None and place.owner is not None and place.rest:
            _put(leaves, place, Leaf(source=entry))
            continue
        value: Any = None if isinstance(entry, TensorEntry) else values(entry)
        if isinstance(entry, TensorEntry) or (place.head is None and not _is_whole(value)):
            raise Incompatible(
                f"`{part.name}`: `{entry.key}` is neither state of a parameter nor an option of a group: it would be "
                "lost",
                hint=f"leave it out with --exclude '{entry.key}'",
            )
        what = f"`{part.name}`: `{entry.key}`"
        pieces = value.items() if place.head is None else ()
        for inner, item in [(place_of((key,)), item) for key, item in pieces] or [(place, value)]:
            for found, piece in _opened(inner, item, what):
                _put(leaves, found, Leaf(value=piece))
    if len(prefixes) > 1:
        shown = " and ".join(f"`{key}`" for key in list(prefixes.values())[:2])
        raise Incompatible(
            f"`{part.name}` holds {len(prefixes)} optimizers ({shown} are of different ones): which is meant cannot "
            "be told",
            hint="save each optimizer under a key of its own, or convert the model alone with --part model",
        )
    return leaves


def _is_whole(value: Any) -> bool:
    """Tell whether a value is all of an optimizer, nested or flattened."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(key, str) and key.partition(".")[0] in (STATE, PARAM_GROUPS) for key in value)
    )


def _opened(place: OptimizerPlace, value: Any, what: str) -> Iterator[tuple[OptimizerPlace, Any]]:
    """Yield the leaves of a blob: of all state or groups, of one parameter or one group, or a single one."""
    if isinstance(value, TensorRef | DTensorRef | ShardedTensorRef):
        raise Incompatible(f"{what} is one object with tensors in it, which cannot be taken apart")
    if place.owner is not None and place.rest:
        yield place, value
    elif isinstance(value, dict) or (isinstance(value, list) and place.owner is None and place.head == PARAM_GROUPS):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if not isinstance(key, str) and (type(key) is not int or not 0 <= key < _MAX_NUMBER):
                raise MalformedFile(f"{what} has keys that are neither names nor numbers")
            if place.owner is None:
                inner = replace(place, owner=key if place.head == PARAM_GROUPS else str(key))
            else:
                inner = replace(place, rest=(key,))
            yield from _opened(inner, item, what)
    else:
        raise MalformedFile(f"{what} is a {type(value).__name__}, where {place.head} is expected")


def _put(leaves: OptimizerLeaves, place: OptimizerPlace, leaf: Leaf) -> None:
    target: dict[KeyPath, Leaf]
    if place.head == STATE:
        target = leaves.state.setdefault(str(place.owner), {})
    elif isinstance(place.owner, int):
        target = leaves.groups.setdefault(place.owner, {})
    else:
        target = leaves.options.setdefault(str(place.owner), {})
    if place.rest in target:
        shown = ".".join(map(str, (place.head, place.owner, *place.rest)))
        raise MalformedFile(f"`{leaves.name}`: `{shown}` is there twice")
    target[place.rest] = leaf
