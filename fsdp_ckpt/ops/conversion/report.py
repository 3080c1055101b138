"""What a conversion did, or would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["ConvertReport", "WrittenPart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """A part of the result.

    Attributes:
        name: As the source names it.
        role: ``model``, ``optimizer``, …
        written_as: Folder or file in the result.
        num_tensors: Tensors written.
        num_objects: Values that are no tensors.
        num_parameters: Elements of the tensors.
        tensor_bytes: Their bytes.
    """

    name: str
    role: str
    written_as: str
    num_tensors: int
    num_objects: int
    num_parameters: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What was converted, or would be.

    Attributes:
        source: The checkpoint, as given; the first folder where there are several.
        root: The folder that was read: ``source``, or a checkpoint below it.
        destination: The folder written.
        layout: What the source is.
        to: What was made: a target of ``convert``, or ``reshard``.
        parts: What was written.
        files: Bytes of each large file, by name.
        small_files: Names of the small ones.
        world_size: Ranks that the result is sharded for; None where it is not.
        mesh: Ranks per mesh dimension, likewise.
        dtypes: Tensors by dtype in the result.
        cast: Tensors that were converted, by ``source -> result``.
        renamed: New name by key, where more than the part's prefix changed.
        excluded: Tensors of models left out by filters.
        left: What of the source is not in the result, one sentence each.
        tied: Name kept by name not written.
        verified_bytes: Source bytes whose recorded CRC-32 was compared.
        unverified: Shards without a recorded CRC-32.
        shared_bytes: Bytes that share blocks with the source instead of being copied.
        recovered: Damaged shards that were read from a replica.
        resumed: Large files that an earlier run had finished.
        notes: What was chosen on the user's behalf.
        warnings: What the user should know.
        elapsed_s: Wall time in seconds.
        dry_run: Nothing was written.
        pending: Shares that are still to be written by other processes; None unless the work is shared.
        source_removed: The source was deleted after the result was read back.
        free_bytes: Free space at the destination before the run.
        peak_memory_bytes: Estimate of the memory needed.
        other_sources: Further folders, of other nodes.
    """

    source: str
    root: str
    destination: str
    layout: str
    to: str
    parts: Sequence[WrittenPart]
    files: Mapping[str, int]
    small_files: Sequence[str] = ()
    world_size: int | None = None
    mesh: Sequence[int] | None = None
    dtypes: Mapping[str, int] = field(default_factory=dict)
    cast: Mapping[str, int] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    excluded: int = 0
    left: Sequence[str] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    verified_bytes: int = 0
    unverified: int = 0
    shared_bytes: int = 0
    recovered: Sequence[str] = ()
    resumed: int = 0
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    elapsed_s: float = 0.0
    dry_run: bool = False
    pending: Sequence[int] | None = None
    source_removed: bool = False
    free_bytes: int | None = None
    peak_memory_bytes: int = 0
    other_sources: Sequence[str] = ()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors written."""
        return sum(part.tensor_bytes for part in self.parts)
