"""Decide everything about a merge from metadata, before a byte of data is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fsdp_ckpt.catalog import DTYPES, Checkpoint, DType, Part, Severity
from fsdp_ckpt.errors import CorruptCheckpoint, NoModelWeights, UsageError
from fsdp_ckpt.layouts.registry import PathLike, given_paths
from fsdp_ckpt.names import parse_rename
from fsdp_ckpt.ops.choose import choose_model_part, read_source, refuse_incomplete, refuse_mixed, show_paths
from fsdp_ckpt.ops.share import Share
from fsdp_ckpt.ops.side_files import SideFiles, find_side_files
from fsdp_ckpt.ops.ties import find_aliases, tie
from fsdp_ckpt.plan.extents import find_shared_bytes
from fsdp_ckpt.plan.merge import Selection, select_tensors
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.units import parse_size

__all__ = ["DEFAULT_SHARD_SIZE", "MergeOptions", "MergePlan", "cast_target", "plan_merge"]

DEFAULT_SHARD_SIZE = "50GB"
"""Largest file by default, as ``save_pretrained`` of transformers 5."""

_CAST_TARGETS = ("float32", "float16", "bfloat16", "float64")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


_FORMATS = ("safetensors", "bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """How to merge; see ``merge`` for the fields."""

    max_shard_size: str | int = DEFAULT_SHARD_SIZE
    format: Literal["safetensors", "bin"] = "safetensors"
    dtype: str | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Sequence[str] = ()
    tie: bool | None = None
    part: str | None = None
    dry_run: bool = False
    overwrite: bool = False
    resume: bool = False
    remove_source: bool = False
    verify: bool = True
    fsync: bool = True
    jobs: int | None = None
    share: Share | None = None
    into: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """What a merge will do.

    Attributes:
        sources: The checkpoint, as given: its path, or the folders of all nodes.
        checkpoint: Its catalog.
        part: The part to merge.
        options: As given.
        selection: Tensors, names, dtypes, ties.
        max_shard_bytes: Limit for one file.
        side: Files to copy beside the weights.
        aliases: Name kept by name of tensors that are the same bytes of the source, but are both written.
        notes: What was chosen on the user's behalf.
        warnings: What the user should know.
    """

    sources: Sequence[str]
    checkpoint: Checkpoint
    part: Part
    options: MergeOptions
    selection: Selection
    max_shard_bytes: int
    side: SideFiles
    aliases: Mapping[str, str]
    notes: Sequence[str]
    warnings: Sequence[str]

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders that all files of the checkpoint are relative to."""
        return self.checkpoint.roots


def plan_merge(
    src: PathLike | Sequence[PathLike], options: MergeOptions | None = None, *, out: str = "OUT", **changes: Any
) -> MergePlan:
    """Read the metadata of a checkpoint and decide what to write; arguments and errors as ``merge``."""
    texts = given_paths(src)
    try:
        chosen = replace(options or MergeOptions(), **changes)
    except TypeError as error:
        raise UsageError(f"unknown option: {error}") from None
    if chosen.format not in _FORMATS:
        raise UsageError(f"--format {chosen.format} is not possible", hint=f"choose one of: {', '.join(_FORMATS)}")
    if chosen.remove_source and not chosen.verify:
        raise UsageError("--remove-source compares the result first: it cannot go with --no-verify")
    if chosen.jobs is not None and chosen.jobs < 1:
        raise UsageError("--jobs must be at least 1")
    max_shard_bytes = parse_size(chosen.max_shard_size)
    dtype, renames = cast_target(chosen.dtype), parse_rename(chosen.rename)
    checkpoint = read_source(texts, out=out)
    part, notes = choose_model_part(checkpoint, chosen.part, paths=texts, out=out)
    refuse_incomplete(part, paths=texts, out=out)
    refuse_mixed(checkpoint, part, paths=texts)
    if not part.tensors:
        raise NoModelWeights(
            f"{show_paths(texts)} holds no tensors, only {len(part.objects)} pickled objects",
            hint="it was saved with flatten_state_dict=False or outside of a state dict; load it with torch",
        )
    shared = find_shared_bytes(part.tensors.values())
    if shared is not None:
        raise CorruptCheckpoint(f"`{shared[0]}` and `{shared[1]}` claim the same bytes; nothing was written")
    selection = select_tensors(
        list(part.tensors.values()), dtype=dtype, include=chosen.include, exclude=chosen.exclude, renames=renames
    )
    side = find_side_files(*(root / part.folder for root in checkpoint.roots))
    warnings = [f"{p.where}: {p.message}" for p in part.problems if p.severity is Severity.WARNING]
    if part.objects:
        first = next(iter(part.objects.values())).name
        notes.append(f"{len(part.objects)} values of {part.name} that are no tensors stay behind, such as `{first}`")
    aliases = find_aliases(selection.tensors)
    if chosen.tie or (chosen.tie is None and side.config.get("tie_word_embeddings") is True):
        with Sources(checkpoint.roots) as sources:
            selection, more = tie(selection, sources, asked=chosen.tie is True)
        warnings += more
        aliases = {name: kept for name, kept in aliases.items() if name not in selection.tied}
    return MergePlan(
        sources=texts,
        checkpoint=checkpoint,
        part=part,
        options=chosen,
        selection=selection,
        max_shard_bytes=max_shard_bytes,
        side=side,
        aliases=aliases,
        notes=notes,
        warnings=warnings,
    )


def cast_target(name: str | None) -> DType | None:
    """Return the element type that ``--dtype`` names, None for none.

    Raises:
        UsageError: It is none that float tensors are converted to.
    """
    if name is None:
        return None
    full = _SHORT.get(name.lower(), name.lower().removeprefix("torch."))
    if full not in _CAST_TARGETS:
        raise UsageError(f"--dtype {name} is not possible", hint=f"choose one of: {', '.join(_CAST_TARGETS)}")
    return DTYPES[full]
