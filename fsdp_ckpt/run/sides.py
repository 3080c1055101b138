"""The two sides of a comparison, and errors that say on which of them something is wrong."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from fsdp_ckpt.catalog import DType, Shape, TensorEntry
from fsdp_ckpt.errors import ChecksumMismatch, CorruptCheckpoint, IncompleteCheckpoint, UnsafePickle
from fsdp_ckpt.run.sources import Located, Sources

__all__ = ["Side", "TensorPair", "batches", "blame"]

_BATCH_BYTES = 1 << 20
_MAX_BATCH = 256


@contextmanager
def blame(label: str, path: str) -> Iterator[None]:
    """Let errors about damaged files say which side they are about, and what to type next.

    Args:
        label: ``A`` or ``B``.
        path: As the user typed it.

    Raises:
        CorruptCheckpoint: Of the same class as the one that was caught.
    """
    try:
        yield
    except UnsafePickle as error:
        raise UnsafePickle(error.name, where=f"{label} (`{path}`): {error.where}", hint=error.hint) from None
    except CorruptCheckpoint as error:
        deep = " --deep" if isinstance(error, ChecksumMismatch) else ""  # nothing less reads the bytes
        hint = error.hint or f"fsdp-ckpt validate {shlex.quote(path)}{deep}"
        raise type(error)(f"{label} (`{path}`): {error.message}", hint=hint) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two checkpoints that are compared.

    Attributes:
        label: ``A`` or ``B``.
        path: As the user typed it.
        sources: Finds its bytes.
        inodes: Device and inode of its files, as far as they were looked at.
        places: Where elements lie, by tensor (its ``id``), as far as it was looked at.
        sound: Records whose checksum was compared apart from reading their elements.
    """

    label: str
    path: str
    sources: Sources
    inodes: dict[str, tuple[int, int]] = field(default_factory=dict)
    places: dict[int, list[Located]] = field(default_factory=dict)
    sound: set[tuple[object, ...]] = field(default_factory=set)

    def resolve(self, tensor: TensorEntry) -> list[Located]:
        """Return where the elements of a tensor lie; chunks without elements are left out."""
        known = self.places.get(id(tensor))
        if known is None:
            known = [self.sources.resolve(tensor, chunk) for chunk in tensor.chunks if chunk.numel]
            self.places[id(tensor)] = known
        return known

    def inode(self, file: str) -> tuple[int, int]:
        """Return what tells a file from all others, whatever its name.

        Raises:
            IncompleteCheckpoint: It is not there.
        """
        known = self.inodes.get(file)
        if known is None:
            try:
                status = os.stat(self.sources.store.path(file))
            except (FileNotFoundError, NotADirectoryError):
                raise IncompleteCheckpoint(f"{file} is missing") from None
            known = self.inodes[file] = (status.st_dev, status.st_ino)
        return known

    def blame(self) -> AbstractContextManager[None]:
        """Return ``blame`` for this side."""
        return blame(self.label, self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """A tensor on both sides, of equal shape.

    Attributes:
        name: What it is called in the report.
        a: On the first side.
        b: On the second side.
    """

    name: str
    a: TensorEntry
    b: TensorEntry

    @property
    def shape(self) -> Shape:
        """Shape of both."""
        return self.a.shape

    @property
    def dtypes(self) -> tuple[DType, DType]:
        """Element types of both."""
        return self.a.dtype, self.b.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.a.num_bytes + self.b.num_bytes


def batches(pairs: Sequence[TensorPair]) -> Iterator[list[TensorPair]]:
    """Put small tensors together, so that handing them to threads does not take longer than comparing them."""
    batch: list[TensorPair] = []
    num_bytes = 0
    for pair in pairs:
        batch.append(pair)
        num_bytes += pair.num_bytes
        if num_bytes >= _BATCH_BYTES or len(batch) == _MAX_BATCH:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
