"""Write whole state dicts (FULL_STATE_DICT) from shards: the first rank streams them into a file, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp_ckpt.codec.nested_archive import check_plain, lay_out_nested
from fsdp_ckpt.codec.torchzip_writer import ArchiveTensor, ZipLayout, seal_archive
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.flatten import flatten
from fsdp_ckpt.layouts.roles import KeyPath
from fsdp_ckpt.run.checksum import checksum_range, crc32
from fsdp_ckpt.store.local import LocalFile
from fsdp_ckpt.store.syscalls import write_all
from fsdp_ckpt.train.files import open_new
from fsdp_ckpt.train.gather import Described, describe, gather_tensors
from fsdp_ckpt.train.live import LiveTensor, dtype_of
from fsdp_ckpt.train.memory import byte_blocks
from fsdp_ckpt.train.ranks import Ranks

__all__ = ["nest", "write_full", "write_tensor"]


def write_tensor(fd: int, position: int, tensor: Tensor, name: str) -> int:
    """Write a tensor's elements in row-major order; return their CRC-32."""
    crc = 0
    for block in byte_blocks(tensor, dtype_of(tensor.dtype, name)):
        crc = crc32(block, crc)
        write_all(fd, block, position)
        position += len(block)
    return crc


def write_full(
    path: Path,
    tensors: Mapping[KeyPath, LiveTensor],
    values: Mapping[KeyPath, Any],
    ranks: Ranks,
    *,
    durable: bool,
    doing: str,
) -> tuple[int, int] | None:
    """Write a nested state dict into one torch.save file. A collective.

    Args:
        path: The file.
        tensors: What this rank holds, by place in the nested state dict.
        values: Everything else, on the ranks that know it.
        ranks: The ranks.
        durable: Wait until the disk has it all.
        doing: For messages.

    Returns:
        Size and CRC-32 of the file on the first rank, None on others.

    Raises:
        FsdpCkptError: On all ranks, when it fails on one.
    """
    with ranks.together(doing):
        for place, value in values.items():
            check_plain(value)
            _refuse_changed(place, value)
    by_name = {_dotted(place): tensor for place, tensor in tensors.items()}
    places: dict[str, KeyPath] = {}
    known: dict[KeyPath, Any] = {}
    for their_places, their_values in ranks.gather_all(([*tensors], dict(values)), doing):
        places |= {_dotted(place): place for place in their_places}
        known = {**their_values, **known}
    renamed = {name: _renamed(tensor, name) for name, tensor in by_name.items()}
    described = describe(renamed, ranks, doing, show=lambda name: ".".join(map(str, places[name])))
    writer: list[_Writer] = []
    with ranks.together(doing):
        if ranks.is_first:
            writer.append(_Writer(path, described, places, known))

    def consume(entry: Described, tensor: Tensor) -> None:
        writer[0].add(entry.name, tensor)

    try:
        failed = gather_tensors(described, renamed, ranks, consume)
        ranks.agree(failed, doing)
        with ranks.together(doing):
            return writer[0].finish(durable=durable) if writer else None
    finally:
        for one in writer:
            with suppress(OSError):  # of a file that is finished, or given up
                one.close()


def _refuse_changed(place: KeyPath, value: Any) -> None:
    """Make sure that a value comes back as it is: readers take dictionaries apart, and lists of them.

    Raises:
        Incompatible: It would come back as something else.
    """
    what = f"`{'.'.join(map(str, place))}`"
    outer = nest({place: value})
    try:
        leaves = flatten(outer, where=what)
    except MalformedFile as error:
        raise Incompatible(f"a full state dict cannot hold {error.message}", hint="use SHARDED_STATE_DICT") from None
    is_state = place[:1] == ("state",)  # a dictionary there cannot be told from state
    keys = {".".join(map(str, path)) for path, _ in leaves}
    if len(keys) < len(leaves) or not _alike(nest(dict(leaves)), outer) or (is_state and leaves[0][0] != place):
        raise Incompatible(
            f"{what} is a {type(value).__name__} that a full state dict does not give back as it was",
            hint="use SHARDED_STATE_DICT, or let its dictionaries have texts without dots as keys",
        )


def _alike(first: Any, second: Any) -> bool:
    """Tell whether two values are nested in the same way and hold the very same leaves."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = list(zip(first, second, strict=False))
        return len(first) == len(second) and all(
            type(a) is type(b) and a == b and _alike(first[a], second[b]) for a, b in keys
        )
    if type(first) is list and type(second) is list:
        return len(first) == len(second) and all(map(_alike, first, second))
    return first is second


def _dotted(place: KeyPath) -> str:
    return "\0".join(f"{type(step).__name__[0]}{step}" for step in place)


def _renamed(tensor: LiveTensor, name: str) -> LiveTensor:
    return replace(tensor, name=name)


class _Writer:
    """The file on the first rank."""

    def __init__(
        self, path: Path, described: list[Described], places: Mapping[str, KeyPath], values: Mapping[KeyPath, Any]
    ) -> None:
        rows: dict[KeyPath, Any] = {}
        self._numbers: dict[str, int] = {}
        for number, entry in enumerate(described):
            self._numbers[entry.name] = number
            place = places[entry.name]
            tensor = ArchiveTensor(name="", dtype=dtype_of(entry.dtype, entry.name), shape=entry.shape, storage=number)
            rows[place] = tensor
            for alias in entry.aliases:
                rows[(*place[:-1], alias)] = tensor
        self._layout: ZipLayout = lay_out_nested(nest({**rows, **values}), prefix=path.stem)
        self._crcs: dict[int, int] = {}
        self._fd = open_new(path)

    def add(self, name: str, tensor: Tensor) -> None:
        number = self._numbers[name]
        self._crcs[number] = write_tensor(self._fd, self._layout.storages[number][0], tensor, name)

    def finish(self, *, durable: bool) -> tuple[int, int]:
        for position, data in seal_archive(self._layout, self._crcs):
            write_all(self._fd, data, position)
        if durable:
            os.fsync(self._fd)
        found = self._layout.size, checksum_range(LocalFile(self._fd), 0, self._layout.size)
        self.close()  # here its errors reach all ranks
        return found

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def nest(flat: Mapping[KeyPath, Any]) -> Any:
    """Return nested dictionaries and lists from places; integers are list indices. Values stay what they are.

    Example:
        >>> nest({("state", "w", "step"): 1.0, ("groups", 0, "lr"): 0.1, ("groups", 1, "lr"): 0.2})
        {'state': {'w': {'step': 1.0}}, 'groups': [{'lr': 0.1}, {'lr': 0.2}]}
    """
    root = _Node()
    for place, value in flat.items():
        node = root
        for step in place[:-1]:
            node = node.setdefault(step, _Node())
        node[place[-1]] = value
    return _plain(root)


class _Node(dict[Any, Any]):
    """A dictionary that ``nest`` made, unlike those among the values."""


def _plain(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    built = {key: _plain(item) for key, item in node.items()}
    if built and all(type(key) is int for key in built) and sorted(built) == list(range(len(built))):
        return [built[index] for index in range(len(built))]
    return built
