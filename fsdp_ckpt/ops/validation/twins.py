"""Find data files that were copied over others: the same items with the same checksums, but for other places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdp_ckpt.catalog import Chunk, Problem, TensorEntry
from fsdp_ckpt.ops.validation.wording import finding
from fsdp_ckpt.store.local import LocalStore

__all__ = ["Twins"]

_SAMPLES = 8
_SAMPLE_BYTES = 1 << 16
_LEAST_BYTES = 64


@dataclass(slots=True)
class _File:
    """What a file holds, in the order of the metadata, which is the same for all ranks."""

    content: int = 0
    places: int = 0
    samples: list[tuple[Chunk, int]] = field(default_factory=list)
    """Some of its chunks, with the size of their elements."""


class Twins:
    """Items of data files as they are looked at, a few numbers for each file."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._unknown: set[str] = set()

    def add(self, tensor: TensorEntry, chunk: Chunk) -> None:
        """Take the resolved chunk of an item into account."""
        if chunk.crc32 is None:
            self._unknown.add(chunk.file)
            return
        file = self._files.get(chunk.file) or self._files.setdefault(chunk.file, _File())
        file.content = hash((file.content, tensor.key, chunk.lengths, chunk.crc32))
        file.places = hash((file.places, chunk.offsets))
        if len(file.samples) < _SAMPLES and chunk.stop - chunk.start >= _LEAST_BYTES:
            file.samples.append((chunk, tensor.dtype.itemsize))

    def find(self, store: LocalStore) -> Iterator[Problem]:
        """Yield the files that are equal to another one and stand for other shards.

        Shards may be equal by right where all of their elements are, such as the moments of a fresh optimizer.
        """
        first: dict[int, tuple[str, int]] = {}
        for name, file in self._files.items():
            if not file.samples or name in self._unknown:
                continue
            other, places = first.setdefault(file.content, (name, file.places))
            if other != name and places != file.places and any(_varies(store, *sample) for sample in file.samples):
                message = f"it holds the same bytes as {other}, for other shards: one was copied over the other"
                yield finding("duplicate-file", name, message)


def _varies(store: LocalStore, chunk: Chunk, itemsize: int) -> bool:
    data = store.reader(chunk.file)(chunk.start, min(chunk.stop - chunk.start, _SAMPLE_BYTES))
    return data != data[:itemsize] * (len(data) // itemsize)
