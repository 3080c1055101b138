"""The two sides of a comparison, and errors that say on which of them something is wrong."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from fsdp_ckpt.catalog import DType, Shape, TensorEntry
from fsdp_ckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsafePickle
from fsdp_ckpt.run.sources import Located, Sources

__all__ = ["Side", "TensorPair", "blame"]


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
        hint = error.hint or f"fsdp-ckpt validate {shlex.quote(path)}"
        raise type(error)(f"{label} (`{path}`): {error.message}", hint=hint) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two checkpoints that are compared.

    Attributes:
        label: ``A`` or ``B``.
        path: As the user typed it.
        sources: Finds its bytes.
        inodes: Device and inode of its files, as far as they were looked at.
    """

    label: str
    path: str
    sources: Sources
    inodes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def resolve(self, tensor: TensorEntry) -> list[Located]:
        """Return where the elements of a tensor lie; chunks without elements are left out."""
        return [self.sources.resolve(tensor, chunk) for chunk in tensor.chunks if chunk.numel]

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
