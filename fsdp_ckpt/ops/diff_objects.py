"""Compare what is no tensor: param groups, schedulers, counters, random states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fsdp_ckpt.catalog import Encoding, ObjectEntry, Part, Role
from fsdp_ckpt.codec.tensors import TORCH, DTensorRef, ShardedTensorRef, TensorRef
from fsdp_ckpt.codec.torchzip import Archive, open_archive
from fsdp_ckpt.errors import UnknownLayout
from fsdp_ckpt.layouts.flatten import flatten
from fsdp_ckpt.layouts.torch_file import open_torch_file
from fsdp_ckpt.ops.conversion.values import expand
from fsdp_ckpt.ops.diff_names import Naming
from fsdp_ckpt.ops.diff_report import Change, ObjectDiff
from fsdp_ckpt.ops.diff_values import Blob, Leaf, ValueComparison
from fsdp_ckpt.ops.objects import to_plain
from fsdp_ckpt.run.checksum import checksum_range
from fsdp_ckpt.run.sides import Side, TensorPair

__all__ = ["compare_leaves", "read_leaves", "spread_groups"]

_SHALLOW = 4


def read_leaves(part: Part, role: Role, side: Side, naming: Naming) -> dict[str, Leaf]:
    """Return all values of a part by name: dictionaries, and lists that hold some, are taken apart.

    So it makes no difference whether param groups were saved one by one or as one list.

    Raises:
        CorruptCheckpoint: A value is damaged; the message names the side.
    """
    found: dict[str, Leaf] = {}
    with side.blame():
        for entry in part.objects.values():
            # The file's name says nothing where the file is the part.
            name = "" if entry.name == entry.file.rpartition("/")[2] else naming.clean(entry.name, role)
            for inner, leaf in _read(entry, side):
                found[".".join(filter(None, (name, inner)))] = leaf
    return {name: _clean_params(name, leaf, role, naming) for name, leaf in found.items() if naming.keeps(name, role)}


def compare_leaves(
    a: Mapping[str, Leaf],
    b: Mapping[str, Leaf],
    role: Role,
    equal_tensors: Callable[[TensorPair], bool],
) -> tuple[list[ObjectDiff], int]:
    """Compare values by name.

    Args:
        a: Values of the first side.
        b: Values of the second side.
        role: What the part is for.
        equal_tensors: Compares tensors that stand among the values.

    Returns:
        What differs, and how many values are on both sides.
    """
    comparison = ValueComparison(equal_tensors)
    found: list[ObjectDiff] = []
    for name in [*a, *(name for name in b if name not in a)]:
        first, second = a.get(name), b.get(name)
        if first is not None and second is not None:
            if comparison.same(first, second):
                continue
            change = Change.CHANGED
        else:
            change = Change.ADDED if first is None else Change.REMOVED
        is_random = role is Role.RNG and change is Change.CHANGED
        found.append(
            ObjectDiff(
                name=name,
                change=change,
                a=None if first is None or is_random else _show(first.value),
                b=None if second is None or is_random else _show(second.value),
                is_random=is_random,
            )
        )
    return found, sum(name in b for name in a)


def spread_groups(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Return options of numbered param groups under the names of the parameters, as flattened optimizers have them."""
    groups: dict[str, dict[str, Leaf]] = {}
    found: dict[str, Leaf] = {}
    for name, leaf in leaves.items():
        head, _, rest = name.partition("param_groups.")
        number, _, option = rest.partition(".")
        if not head and number.isdecimal() and option:
            groups.setdefault(number, {})[option] = leaf
        else:
            found[name] = leaf
    for options in groups.values():
        params = options.pop("params", Leaf(value=())).value
        for param in params if isinstance(params, list | tuple) else ():
            for option, leaf in options.items():
                found[f"param_groups.{param}.{option}"] = leaf
    return found


def _read(entry: ObjectEntry, side: Side) -> Iterator[tuple[str, Leaf]]:
    where = f"{entry.file} (`{entry.key}`)"
    store = side.sources.store
    if entry.decoded:
        wanted = _holds_tensor(entry.value, 0)
        archive = open_torch_file(store, entry.file, allow_unknown=True).archive if wanted else None
        yield from _spread(entry.value, entry.file, archive, where)
        return
    reader = store.reader(entry.file)
    try:
        if entry.encoding is Encoding.ZSTD_TORCH_ZIP:
            data = expand(reader(entry.start, entry.stop - entry.start), where)
            archive = open_archive(lambda start, num: data[start : start + num], 0, len(data), where=where)
            yield from _spread(archive.load(TORCH, allow_unknown=True), "", archive, where)
        elif entry.start or entry.stop != store.size(entry.file):
            archive = open_archive(reader, entry.start, entry.stop, where=where)
            yield from _spread(archive.load(TORCH, allow_unknown=True), entry.file, archive, where)
        else:
            opened = open_torch_file(store, entry.file, allow_unknown=True)
            for path, value in opened.leaves:
                yield ".".join(map(str, path)), Leaf(value=value, file=entry.file, archive=opened.archive)
    except UnknownLayout:  # a single value, or nothing that torch wrote
        if reader(0, min(2, entry.stop)) == b"PK":
            archive = open_archive(reader, 0, entry.stop, where=where)
            yield "", Leaf(value=archive.load(TORCH, allow_unknown=True), file=entry.file, archive=archive)
            return
        with store.opened(entry.file) as source:
            yield "", Leaf(value=Blob(entry.stop, checksum_range(source, 0, entry.stop)))


def _clean_params(name: str, leaf: Leaf, role: Role, naming: Naming) -> Leaf:
    """Clean the names of parameters that a param group lists."""
    names = leaf.value
    if role is not Role.OPTIMIZER or not name.endswith(".params") or not isinstance(names, list | tuple):
        return leaf
    if not all(isinstance(param, str) for param in names):
        return leaf
    return replace(leaf, value=[naming.clean("state." + param, role).removeprefix("state.") for param in names])


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, dict | list | tuple) and depth < _SHALLOW:
        return any(_holds_tensor(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, TensorRef | DTensorRef | ShardedTensorRef)


def _spread(value: Any, file: str, archive: Archive | None, where: str) -> Iterator[tuple[str, Leaf]]:
    for path, leaf in flatten(value, where=where):
        yield ".".join(map(str, path)), Leaf(value=leaf, file=file, archive=archive)


def _show(value: Any) -> Any:
    if isinstance(value, Blob):
        return f"<{value.num_bytes} bytes, CRC-32 {value.crc32:08x}>"
    return to_plain(value)
