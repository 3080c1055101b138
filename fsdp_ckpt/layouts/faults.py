"""Problems that every layout can have: parts that cannot be read, tensors with holes, misplaced shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from fsdp_ckpt.catalog import Part, Problem, Role, Severity, Shape, TensorEntry
from fsdp_ckpt.errors import (
    ChecksumMismatch,
    CorruptCheckpoint,
    FsdpCkptError,
    IncompleteCheckpoint,
    ItemMismatch,
    NotPermitted,
    PathOutside,
    UnknownLayout,
    UnsafePickle,
)
from fsdp_ckpt.names import is_flat_param
from fsdp_ckpt.plan.boxes import Box, Coverage, check_coverage
from fsdp_ckpt.store.local import Folder

__all__ = [
    "DAMAGE", "UNREADABLE", "coverage_problems", "describe_box", "describe_coverage", "fault_of", "flat_reason",
    "tolerate", "unreadable_part",
]  # fmt: skip

UNREADABLE = "unreadable"
"""Code of what breaks the rules of its format, and dialect of a part that does."""

_FAULTS: dict[type[CorruptCheckpoint], str] = {
    UnsafePickle: "unsafe-pickle",
    ChecksumMismatch: "wrong-checksum",
    NotPermitted: "no-permission",
    IncompleteCheckpoint: "missing-file",
    PathOutside: "path-outside",
    ItemMismatch: "header-mismatch",
}
"""Codes of problems by the exceptions that tell of them."""

DAMAGE = frozenset({UNREADABLE, *_FAULTS.values()} - {"missing-file", "no-permission"})
"""Codes of what is there, but not as it was written."""


def coverage_problems(tensors: Iterable[TensorEntry], *, prefix: str = "") -> Iterator[Problem]:
    """Yield one problem for each tensor that its chunks do not tile exactly."""
    for tensor in tensors:
        coverage = check_coverage(tensor.shape, [(chunk.offsets, chunk.lengths) for chunk in tensor.chunks])
        if not coverage.is_exact:
            code, message = describe_coverage(tensor, coverage)
            yield Problem(severity=Severity.ERROR, code=code, where=prefix + tensor.key, message=message)


def fault_of(error: FsdpCkptError, where: str) -> Problem:
    """Return an exception that a file raised as a problem."""
    for kind, code in _FAULTS.items():
        if isinstance(error, kind):
            return Problem(severity=Severity.ERROR, code=code, where=where, message=error.message)
    return Problem(severity=Severity.ERROR, code=UNREADABLE, where=where, message=error.message)


def tolerate(
    read: Callable[[], list[Part]], folder: Folder, name: str, role: Role, files: Mapping[str, int]
) -> Iterator[Part]:
    """Read a part; when it is damaged, say so and go on, as others do not need it."""
    try:
        yield from read()
    except (CorruptCheckpoint, UnknownLayout) as error:
        yield unreadable_part(error, folder, name, role, files)


def unreadable_part(error: FsdpCkptError, folder: Folder, name: str, role: Role, files: Mapping[str, int]) -> Part:
    """Return a part that is nothing but the reason why it cannot be read."""
    where = next((file for file in files if file.endswith(".metadata")), next(iter(files), folder.prefix))
    return Part(
        name=name,
        role=role,
        dialect=UNREADABLE,
        folder=folder.prefix.rstrip("/"),
        files=files,
        problems=[fault_of(error, next((file for file in files if file in error.message), where))],
    )


def flat_reason(tensors: Iterable[TensorEntry]) -> str | None:
    """Return why tensors cannot be named, None when they can: FSDP1 flat parameters keep no names."""
    flat = next((tensor.name for tensor in tensors if is_flat_param(tensor.name)), None)
    if flat is None:
        return None
    return f"`{flat}` is an FSDP1 flat parameter: names and shapes of the tensors in it are not in the files"


def describe_coverage(tensor: TensorEntry, coverage: Coverage) -> tuple[str, str]:
    """Return code and sentence for a coverage that is not exact."""
    if coverage.outside is not None:
        chunk = tensor.chunks[coverage.outside]
        box = describe_box((chunk.offsets, chunk.lengths))
        if not len(chunk.offsets) == len(chunk.lengths) == len(tensor.shape):
            return "shard-outside", f"a shard has another number of dimensions than the shape {_shape(tensor.shape)}"
        return "shard-outside", f"a shard at {box} lies outside of the shape {_shape(tensor.shape)}"
    if coverage.overlap is not None:
        first, second = (tensor.chunks[index] for index in coverage.overlap)
        boxes = " and ".join(describe_box((chunk.offsets, chunk.lengths)) for chunk in (first, second))
        return "shard-overlap", f"shards at {boxes} overlap"
    assert coverage.missing is not None
    share = f"{coverage.missing_elements} of {tensor.numel} elements"
    return "missing-shard", f"{share} are in no shard, first {describe_box(coverage.missing)} of {_shape(tensor.shape)}"


def describe_box(box: Box) -> str:
    """Return a box in slice notation, ``[0:6, 0:8]``; ``[]`` for a 0-d tensor."""
    return "[" + ", ".join(f"{start}:{start + length}" for start, length in zip(*box, strict=False)) + "]"


def _shape(shape: Shape) -> str:
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
