"""Tell whether two decoded values are equal, however deep they are nested and whatever was made to stop that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.catalog import TensorEntry
from fsdp_ckpt.codec.pickles import Constructor, Record
from fsdp_ckpt.codec.tensors import DTensorRef, ShardedTensorRef, TensorRef
from fsdp_ckpt.codec.torchzip import Archive, locate
from fsdp_ckpt.ops.objects import to_plain
from fsdp_ckpt.run.sides import TensorPair

__all__ = ["Blob", "Leaf", "ValueComparison"]

_MAX_DEPTH = 48
_MAX_NODES = 2_000_000
_ATOMS = (str, bytes, int, float, type(None))
_NUMBERS = (int, float, complex)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A value of a part.

    Attributes:
        value: The value; a ``Blob`` where the file holds nothing that torch wrote.
        file: The file that tensors in it lie in; empty when that was expanded in memory.
        archive: The archive that tensors in it refer to; None where there are none.
    """

    value: Any
    file: str = ""
    archive: Archive | None = None


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that nobody here can decode: how many, and their CRC-32."""

    num_bytes: int
    crc32: int


class _TooLargeError(Exception):
    """A value that nobody will read to its end; it may contain itself."""


class ValueComparison:
    """Compares two values, whatever they are made of.

    Args:
        equal_tensors: Compares tensors that stand in them.
    """

    def __init__(self, equal_tensors: Callable[[TensorPair], bool]) -> None:
        self._equal_tensors = equal_tensors
        self._left = 0
        self._leaves: tuple[Leaf, Leaf] = (Leaf(value=None), Leaf(value=None))

    def same(self, a: Leaf, b: Leaf) -> bool:
        """Tell whether two values are equal: NaN equals itself, 1 is 1.0 but not true, and a tuple is a list."""
        self._left, self._leaves = _MAX_NODES, (a, b)
        try:
            return self._same(a.value, b.value, 0)
        except _TooLargeError:
            return bool(to_plain(a.value) == to_plain(b.value))

    def _same(self, x: Any, y: Any, depth: int) -> bool:
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            raise _TooLargeError
        match x, y:
            case (list() | tuple(), list() | tuple()):
                return self._all(x, y, depth)
            case Mapping(), Mapping():
                return len(x) == len(y) and all(key in y and self._same(x[key], y[key], depth + 1) for key in x)
            case (set() | frozenset(), set() | frozenset()):
                if all(isinstance(item, _ATOMS) for item in x):
                    return bool(x == y)
                return self._all(list(x), list(y), depth)  # comparing what is nested would recurse in C
            case slice(), slice():
                return self._all((x.start, x.stop, x.step), (y.start, y.stop, y.step), depth)
            case Record(), Record():
                names = [item.cls.replace("numpy._core.", "numpy.core.") for item in (x, y)]
                return names[0] == names[1] and self._all((x.args, x.state), (y.args, y.state), depth)
            case (TensorRef() | DTensorRef() | ShardedTensorRef(), _):
                return type(x) is type(y) and self._same_tensor(x, y)
            case _:
                return _same_atom(x, y)

    def _all(self, x: Sequence[Any], y: Sequence[Any], depth: int) -> bool:
        return len(x) == len(y) and all(self._same(a, b, depth + 1) for a, b in zip(x, y, strict=True))

    def _same_tensor(self, x: Any, y: Any) -> bool:
        if isinstance(x, DTensorRef):
            return (x.shape, x.placements) == (y.shape, y.placements) and self._same_tensor(x.local, y.local)
        if isinstance(x, ShardedTensorRef):
            boxes = [[(shard.offsets, shard.lengths) for shard in item.shards] for item in (x, y)]
            pairs = zip(x.shards, y.shards, strict=False)
            return (
                x.shape == y.shape
                and boxes[0] == boxes[1]
                and all(self._same_tensor(a.tensor, b.tensor) for a, b in pairs)
            )
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return False
        entries = []
        for leaf, tensor in zip(self._leaves, (x, y), strict=True):
            if leaf.archive is None:
                return False
            chunk = locate(leaf.archive, tensor, leaf.file, (0,) * len(tensor.shape), tensor.shape)
            entries.append(
                TensorEntry(key=leaf.file, name=leaf.file, dtype=tensor.dtype, shape=tensor.shape, chunks=(chunk,))
            )
        if all(leaf.file for leaf in self._leaves):
            return self._equal_tensors(TensorPair(name="", a=entries[0], b=entries[1]))
        contents = [
            (chunk.strides, leaf.archive.read_at(chunk.start, chunk.stop - chunk.start))
            for leaf, entry in zip(self._leaves, entries, strict=True)
            for chunk in entry.chunks
            if leaf.archive is not None
        ]
        return contents[0] == contents[1]


def _same_atom(x: Any, y: Any) -> bool:
    if isinstance(x, Constructor) and isinstance(y, Constructor):
        return bool(x.name == y.name)
    if isinstance(x, bool) or isinstance(y, bool) or not isinstance(x, _NUMBERS) or not isinstance(y, _NUMBERS):
        return type(x) is type(y) and bool(x == y)
    return bool(x == y or (x != x and y != y))  # noqa: PLR0124  # NaN
