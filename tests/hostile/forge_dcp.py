"""Write torch.distributed.checkpoint folders by hand, wrong ones on purpose.

The classes are those of ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``. ``test_forge.py`` has
torch itself read an unspoilt one, so that a refusal of a spoilt one is about what was spoilt.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hostile.forge_pickle import Call, Glob, New, dump
from tests.hostile.forge_zip import ITEM_SIZES, saved, tensor_value

MODULE = "torch.distributed.checkpoint.metadata"
FILE = "__0_0.distcp"


def size(values: Any) -> Any:
    """``torch.Size``; anything but a sequence of integers as it is."""
    if isinstance(values, tuple | list) and all(isinstance(value, int) for value in values):
        return Call(Glob("torch", "Size"), (tuple(values),))
    return values


def chunk(offsets: Any, sizes: Any) -> New:
    """``ChunkStorageMetadata``."""
    return New(Glob(MODULE, "ChunkStorageMetadata"), {"offsets": size(offsets), "sizes": size(sizes)})


def tensor_metadata(shape: Any, chunks: Any, *, dtype: str = "float32") -> New:
    """``TensorStorageMetadata``; ``chunks`` are pairs of offsets and sizes, or anything else as it is."""
    layout = Call(Glob("torch.serialization", "_get_layout"), ("torch.strided",))
    memory = Call(Glob(MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    properties = New(Glob(MODULE, "TensorProperties"), (Glob("torch", dtype), layout, False, memory, False))
    if isinstance(chunks, list):
        chunks = [chunk(*item) if isinstance(item, tuple) else item for item in chunks]
    return New(Glob(MODULE, "TensorStorageMetadata"), {"properties": properties, "size": size(shape), "chunks": chunks})


def index(key: Any, offset: Any = None) -> New:
    """``MetadataIndex``; ``offset`` is None for an object."""
    return New(
        Glob(MODULE, "MetadataIndex"),
        {"fqn": key, "offset": None if offset is None else size(offset), "index": None if offset is None else 0},
    )


def place(path: Any, offset: Any, length: Any, **more: Any) -> New:
    """``_StorageInfo``."""
    state = {"relative_path": path, "offset": offset, "length": length, **more}
    return New(Glob("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state)


BYTES = New(Glob(MODULE, "BytesStorageMetadata"))
"""Metadata of something that is no tensor."""


class Rows:
    """A mapping that keeps unhashable keys, and keys that stand twice."""

    def __init__(self, *pairs: tuple[Any, Any]) -> None:
        self.pairs = pairs

    def items(self) -> Sequence[tuple[Any, Any]]:
        return self.pairs


Mapping.register(Rows)


def metadata(items: Any, storage: Any, **more: Any) -> bytes:
    """A ``.metadata`` file."""
    state = {"state_dict_metadata": items, "storage_data": storage, "planner_data": {}, **more}
    return dump(New(Glob(MODULE, "Metadata"), state))


@dataclass
class Forged:
    """A folder in the making: items are appended, ``write`` puts it on disk.

    Attributes:
        items: Metadata by key.
        storage: Pairs of index and place.
        data: Contents by file name.
    """

    items: dict[str, Any] = field(default_factory=dict)
    storage: list[tuple[Any, Any]] = field(default_factory=list)
    data: dict[str, bytearray] = field(default_factory=dict)

    def append(self, content: bytes, file: str = FILE) -> tuple[str, int, int]:
        """Append bytes to a file; return the place."""
        have = self.data.setdefault(file, bytearray())
        start = len(have)
        have += content
        return file, start, len(content)

    def tensor(self, key: str, shape: Sequence[int], *, rows: Sequence[int] = (), dtype: str = "float32") -> None:
        """Add a sound tensor, cut into pieces of so many rows, whose bytes count up from zero."""
        chunks, start = [], 0
        inner = 1
        for length in shape[1:]:
            inner *= length
        for number in rows or (shape[0] if shape else 1,):
            extent = (number, *shape[1:]) if shape else ()
            offsets = (start, *([0] * (len(shape) - 1))) if shape else ()
            chunks.append((offsets, extent))
            item = saved(
                tensor_value(extent, dtype=dtype), [pattern(number * inner * ITEM_SIZES[dtype], start * inner)]
            )
            self.storage.append((index(key, offsets), place(*self.append(item, f"__{len(chunks) - 1}_0.distcp"))))
            start += number
        self.items[key] = tensor_metadata(tuple(shape), chunks, dtype=dtype)

    def item(self, key: str, content: bytes) -> None:
        """Add an item that is no tensor."""
        self.items[key] = BYTES
        self.storage.append((index(key), place(*self.append(content))))

    def metadata(self, **more: Any) -> bytes:
        """The ``.metadata`` file."""
        return metadata(self.items, Rows(*self.storage), **more)

    def write(self, folder: Path, **more: Any) -> Path:
        """Make the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.data.items():
            (folder / name).write_bytes(content)
        (folder / ".metadata").write_bytes(self.metadata(**more))
        return folder


def pattern(num_bytes: int, start: int = 0) -> bytes:
    """Bytes that a test can compute again: 32-bit integers that count up."""
    count = -(-num_bytes // 4)
    return struct.pack(f"<{count}I", *range(start, start + count))[:num_bytes]
