"""Every error that fsdp-ckpt raises on purpose.

::

    FsdpCkptError                70  something we did not foresee
    ├── UsageError                2  the request contradicts itself            (ValueError)
    │   └── AmbiguousPart         2  several parts fit, one must be named
    ├── CheckpointNotFound        3  nothing there, or nothing that we know    (FileNotFoundError)
    │   ├── UnknownLayout         3  files are there, but no layout fits
    │   └── NoModelWeights        3  a checkpoint, but not of model weights
    ├── CorruptCheckpoint         4  bytes contradict each other               (ValueError)
    │   ├── IncompleteCheckpoint  4  parts of it are missing
    │   │   └── NotPermitted      4  a file of it may not be read, or not be removed
    │   ├── ChecksumMismatch      4  a recorded CRC-32 does not match
    │   ├── MalformedFile         4  a file breaks the rules of its format
    │   │   ├── ItemMismatch      4  an item is not what the metadata say
    │   │   └── PathOutside       4  a file name leads out of the checkpoint
    │   └── UnsafePickle          4  a pickle asks for code that is not allowed
    ├── DestinationExists         5  the target is in the way                  (FileExistsError)
    ├── NotEnoughSpace            6  disk or memory would not suffice          (OSError)
    ├── Unreachable               7  the network or the hub did not answer     (ConnectionError)
    ├── Incompatible              8  the request cannot be met for this input  (ValueError)
    │   ├── FlatParameters        8  FSDP flat parameters without names
    │   ├── NameCollision         8  two tensors would get one name
    │   └── StateMismatch         8  a checkpoint and a live model differ in names or shapes
    ├── RankFailed               70  a rank of the training job failed or fell silent (RuntimeError)
    └── Vetoed                   70  a hook refused to save or to load             (RuntimeError)

Each class carries the exit code of the command line in ``exit_code``; an instance may carry ``hint``, the next
thing to do, usually a command that can be typed as it stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AmbiguousPart",
    "CheckpointNotFound",
    "ChecksumMismatch",
    "CorruptCheckpoint",
    "DestinationExists",
    "FlatParameters",
    "FsdpCkptError",
    "Incompatible",
    "IncompleteCheckpoint",
    "ItemMismatch",
    "MalformedFile",
    "NameCollision",
    "NoModelWeights",
    "NotEnoughSpace",
    "NotPermitted",
    "PathOutside",
    "RankFailed",
    "StateMismatch",
    "UnknownLayout",
    "Unreachable",
    "UnsafePickle",
    "UsageError",
    "Vetoed",
]


class FsdpCkptError(Exception):
    """Base of all errors of this package.

    Args:
        message: What happened and where, in one sentence.
        hint: What to do next; None when there is nothing sensible to suggest.
    """

    exit_code = 70

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # Python prints notes below an uncaught error

    def __str__(self) -> str:
        return self.message


class UsageError(FsdpCkptError, ValueError):
    """Options or arguments that contradict each other or make no sense."""

    exit_code = 2


class AmbiguousPart(UsageError):
    """More than one part of the checkpoint fits the request."""


class CheckpointNotFound(FsdpCkptError, FileNotFoundError):
    """The path does not exist or holds no checkpoint."""

    exit_code = 3


class UnknownLayout(CheckpointNotFound):
    """The path holds files, but none of the known layouts recognises them."""


class NoModelWeights(CheckpointNotFound):
    """The checkpoint is readable but holds no model weights (an optimizer, say)."""


class CorruptCheckpoint(FsdpCkptError, ValueError):
    """The bytes of a checkpoint contradict each other."""

    exit_code = 4


class IncompleteCheckpoint(CorruptCheckpoint):
    """Files or parts of tensors are missing, as after an interrupted save."""


class NotPermitted(IncompleteCheckpoint):
    """A file is there, but this user may not read it, or not remove it."""


class ChecksumMismatch(CorruptCheckpoint):
    """The CRC-32 stored beside a tensor's bytes is not the CRC-32 of these bytes."""


class MalformedFile(CorruptCheckpoint):
    """A file or record breaks the rules of its own format."""


class ItemMismatch(MalformedFile):
    """An item of a data file has another dtype or shape than the metadata say."""


class PathOutside(MalformedFile):
    """A file name leads out of the checkpoint; nothing was read from there."""


class UnsafePickle(CorruptCheckpoint):
    """A pickle refers to a global that is not on the list of known, harmless names.

    Nothing is ever imported or called to find this out.

    Args:
        name: The global, as ``module.qualname``.
        where: The file, and the tensor or object in it where known.
    """

    def __init__(self, name: str, *, where: str, hint: str | None = None) -> None:
        super().__init__(
            f"{where}: the pickle refers to `{name}`, which is not allowed; nothing was run",
            hint=hint or "torch would run it: do not load this file with torch before you know why it is there",
        )
        self.name = name
        self.where = where

    def __reduce__(self) -> tuple[object, ...]:
        """Pass between processes: rebuild from the parts."""
        return _unsafe_pickle, (self.name, self.where, self.hint)


def _unsafe_pickle(name: str, where: str, hint: str | None) -> UnsafePickle:
    return UnsafePickle(name, where=where, hint=hint)


class DestinationExists(FsdpCkptError, FileExistsError):
    """The destination exists, or somebody else is writing to it."""

    exit_code = 5


class NotEnoughSpace(FsdpCkptError, OSError):
    """The destination's disk, inodes or this machine's memory would not suffice."""

    exit_code = 6


class Unreachable(FsdpCkptError, ConnectionError):
    """The network or the hub did not answer, or does not have what was asked for."""

    exit_code = 7


class Incompatible(FsdpCkptError, ValueError):
    """The request cannot be carried out for this checkpoint without losing something."""

    exit_code = 8


class FlatParameters(Incompatible):
    """FSDP1 flat parameters: names and shapes of the tensors are not in the files."""


class NameCollision(Incompatible):
    """Two tensors of the checkpoint would be written under one name."""


class StateMismatch(Incompatible):
    """The tensors of a checkpoint are not those of the model or optimizer that it is loaded into.

    Args:
        message: All differences, with global shapes.
        missing: Names that the checkpoint lacks.
        unexpected: Names that only the checkpoint has.
        mismatched: Names whose shapes differ.
        hint: What to do next.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.mismatched = list(mismatched)


class RankFailed(FsdpCkptError, RuntimeError):
    """A rank raised, died or fell silent; every rank that is left raises this.

    Attributes:
        has_lost_touch: Whether this rank no longer hears the others, so that it is not known how far they came.
    """

    has_lost_touch = False


class Vetoed(FsdpCkptError, RuntimeError):
    """A hook refused; nothing was saved or loaded."""
