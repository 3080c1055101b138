"""Look at the head of every item: whether it is an archive, and of what the metadata say. No pickle is run.

Only directories and small records are read; ``records`` reads the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.catalog import Checkpoint, Chunk, Encoding, ObjectEntry, Part, Problem, Severity, TensorEntry
from fsdp_ckpt.codec.known import records
from fsdp_ckpt.codec.pickles import Record
from fsdp_ckpt.codec.tensors import TORCH, TensorRef
from fsdp_ckpt.codec.torchzip import Archive, locate, open_archive
from fsdp_ckpt.errors import (
    ChecksumMismatch,
    CorruptCheckpoint,
    ItemMismatch,
    MalformedFile,
    UnknownLayout,
    UnsafePickle,
)
from fsdp_ckpt.layouts.torch_file import open_torch_value
from fsdp_ckpt.ops.validation.twins import Twins
from fsdp_ckpt.ops.validation.wording import finding
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.store.remote.mirrors import mirror_of

__all__ = [
    "HeaderCount", "check_headers", "count_items", "is_there", "item_problem", "load_whole", "unsafe_problem",
]  # fmt: skip

_SEVERAL = 3
_AT_A_TIME = 64
_HEAD_BYTES = 1 << 10
_TAIL_BYTES = 4 << 10
_DANGEROUS = frozenset(
    {
        "__builtin__", "_pickle", "builtins", "code", "commands", "ctypes", "ftplib", "http", "importlib",
        "multiprocessing", "nt", "os", "pdb", "pickle", "pip", "posix", "pty", "runpy", "shutil", "signal", "smtplib",
        "socket", "subprocess", "sys", "timeit", "trace", "urllib", "webbrowser",
    }
)  # fmt: skip
"""Modules that no saved value needs, and by which a pickle does things."""
_KNOWN = {**TORCH, **records("_io", "BytesIO")}
"""What objects may refer to: torchtitan keeps a ``torch.save`` within a BytesIO in its train state."""


@dataclass(slots=True)
class HeaderCount:
    """How many items were looked at."""

    items: int = 0


def count_items(checkpoint: Checkpoint) -> int:
    """Return how many heads there are to read."""
    items = 0
    for part in checkpoint.parts:
        for tensor in part.tensors.values():
            items += sum(chunk.encoding is not Encoding.RAW for chunk in (*tensor.chunks, *tensor.replicas))
        items += sum(not entry.decoded for entry in part.objects.values())
    return items


def check_headers(checkpoint: Checkpoint, sources: Sources, count: HeaderCount) -> Iterator[Problem]:
    """Look at every item that is where the metadata say; what is not there was reported when the files were read.

    Compressed items are left to ``records``, as all of one has to be read to see its head.
    """
    twins, wrong = Twins(), _WrongFiles()
    is_far = any(mirror_of(root) is not None for root in checkpoint.roots)
    for part in checkpoint.parts:
        tensors, objects = list(part.tensors.values()), list(part.objects.values())
        for start in range(0, len(tensors), _AT_A_TIME):
            some = tensors[start : start + _AT_A_TIME]
            if is_far:
                _fetch_heads(sources.store, [chunk for tensor in some for chunk in (*tensor.chunks, *tensor.replicas)])
            for tensor in some:
                yield from _check_tensor(tensor, sources, count, twins, wrong)
        for start in range(0, len(objects), _AT_A_TIME):
            several = [entry for entry in objects[start : start + _AT_A_TIME] if not entry.decoded]
            if is_far:
                _fetch_heads(sources.store, several)
            for entry in several:
                count.items += 1
                yield from _check_object(part, entry, sources.store)
    yield from wrong.find()
    yield from twins.find(sources.store)


def _fetch_heads(store: LocalStore, items: Sequence[Chunk | ObjectEntry]) -> None:
    """Ask for the beginnings and ends of items of a remote checkpoint together: each alone would wait for an answer."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for item in items:
        if item.encoding is Encoding.TORCH_ZIP and is_there(store, item):
            ends = [
                (item.start, min(item.start + _HEAD_BYTES, item.stop)),
                (max(item.stop - _TAIL_BYTES, 0), item.stop),
            ]
            ranges.setdefault(item.file, []).extend(ends)
    for file, wanted in ranges.items():
        with store.opened(file) as source:
            source.prefetch(wanted)


class _WrongFiles:
    """Items that are not what the metadata say, by file: where none of a file's is, the file is another one."""

    def __init__(self) -> None:
        self._items: dict[str, int] = {}
        self._problems: dict[str, list[Problem]] = {}

    def count(self, file: str) -> None:
        self._items[file] = self._items.get(file, 0) + 1

    def add(self, file: str, problem: Problem) -> None:
        self._problems.setdefault(file, []).append(problem)

    def find(self) -> Iterator[Problem]:
        for file, problems in self._problems.items():
            if len(problems) < _SEVERAL or len(problems) < self._items[file]:
                yield from problems
                continue
            message = f"none of its {len(problems)} tensors is where the metadata say: it is another file, or damaged"
            yield finding("header-mismatch", file, message)


def _check_tensor(
    tensor: TensorEntry, sources: Sources, count: HeaderCount, twins: Twins, wrong: _WrongFiles
) -> Iterator[Problem]:
    located: dict[tuple[object, object], Chunk] = {}
    for chunk in (*tensor.chunks, *tensor.replicas):
        found = chunk
        if chunk.encoding is Encoding.ZSTD_TORCH_ZIP or not is_there(sources.store, chunk):
            continue
        if chunk.encoding is Encoding.TORCH_ZIP:
            count.items += 1
            wrong.count(chunk.file)
            try:
                _, found = sources.resolve(tensor, chunk)
            except CorruptCheckpoint as error:
                wrong.add(chunk.file, item_problem(error, tensor.key))
                continue
            twins.add(tensor, found)
        elif tensor.placements is None:  # copies of a buffer were compared when the files were read
            continue
        first = located.setdefault((chunk.offsets, chunk.lengths), found)
        if first is not found and _differ(first, found):
            yield finding(
                "replicas-differ",
                tensor.key,
                f"the shard at {chunk.offsets} is not the same in {first.file} and in {found.file}",
            )


def is_there(store: LocalStore, item: Chunk | ObjectEntry) -> bool:
    """Tell whether an item's file is there, long enough, and may be read."""
    try:
        size = store.size(item.file)
    except MalformedFile:
        return False
    return size is not None and item.stop <= size and os.access(store.path(item.file), os.R_OK)


def item_problem(error: CorruptCheckpoint, where: str) -> Problem:
    """Return what reading an item raised as a problem."""
    match error:
        case UnsafePickle():
            return finding("unsafe-pickle", where, error.message)
        case ChecksumMismatch():
            return finding("wrong-checksum", where, error.message)
        case ItemMismatch():
            return finding("header-mismatch", where, error.message)
        case _:
            return finding("damaged-item", where, error.message)


def load_whole(archive: Archive) -> None:
    """Read an object, and look whether the tensors in it are there.

    Raises:
        UnsafePickle: It asks for code.
        CorruptCheckpoint: It is damaged.
    """
    for tensor in _tensors_in(archive.load(_KNOWN)):
        locate(archive, tensor, archive.where, (0,) * len(tensor.shape), tensor.shape)


def _tensors_in(value: Any) -> Iterator[TensorRef]:
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, TensorRef):
            yield item
        elif id(item) in seen:
            continue
        elif isinstance(item, dict | list | tuple | Record):
            seen.add(id(item))
            if isinstance(item, Record):
                stack += [item.state, item.args]
            else:
                stack += item.values() if isinstance(item, dict) else item


def unsafe_problem(error: UnsafePickle, key: str, where: str) -> Problem:
    """Return what an object's pickle asks for as a problem: a class of somebody's own, or something worse."""
    is_dangerous = error.name.partition(".")[0] in _DANGEROUS
    message = f"{where} refers to `{error.name}`, which torch would import and may run"
    return finding("unsafe-pickle", key, message, severity=None if is_dangerous else Severity.WARNING)


def _differ(first: Chunk, other: Chunk) -> bool:
    """Compare recorded checksums, where both cover the same elements in the same order."""
    if None in (first.crc32, other.crc32) or first.strides != other.strides:
        return False
    if first.crc_range is not None or other.crc_range is not None:
        return False
    return first.crc32 != other.crc32


def _check_object(part: Part, entry: ObjectEntry, store: LocalStore) -> Iterator[Problem]:
    if entry.encoding is Encoding.ZSTD_TORCH_ZIP or not is_there(store, entry):
        return
    where = f"{entry.file} (`{entry.key}`)" if entry.key != entry.file else entry.file
    try:
        read = store.reader(entry.file)
        is_item = entry.encoding is Encoding.TORCH_ZIP and (entry.start or entry.stop != store.size(entry.file))
        if is_item or read(0, min(entry.stop, 2)) == b"PK":
            load_whole(open_archive(read, entry.start, entry.stop, where=where))
        else:
            open_torch_value(store, entry.file, allow_unknown=False)
    except UnsafePickle as error:
        yield unsafe_problem(error, entry.key, where)
    except UnknownLayout as error:
        yield finding("unreadable", entry.file, error.message)
    except CorruptCheckpoint as error:
        found = item_problem(error, entry.key)
        yield found if part.dialect == "dcp" else finding("unreadable", entry.file, found.message)
