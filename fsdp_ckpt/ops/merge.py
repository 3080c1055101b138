"""Merge a sharded checkpoint into model files that anything can load."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_ckpt.layouts.registry import PathLike
from fsdp_ckpt.ops.destination import destination_of, local_bytes, refuse_for_urls, shown_destination, upload_bytes
from fsdp_ckpt.ops.merge_files import PATTERNS, index_json, lay_out_bin, lay_out_safetensors
from fsdp_ckpt.ops.merge_plan import MergeOptions, MergePlan, plan_merge
from fsdp_ckpt.ops.next_step import names_next_step
from fsdp_ckpt.ops.preflight import check_destination, check_space
from fsdp_ckpt.ops.remove_source import check_removable, remove_source, verify_output
from fsdp_ckpt.ops.write_out import WriteJob, WriteOptions, Written, identify, num_workers, write_out
from fsdp_ckpt.plan.merge import split_files
from fsdp_ckpt.run.progress import Listener
from fsdp_ckpt.store.publish import resolve_destination
from fsdp_ckpt.store.remote.places import speaks_urls
from fsdp_ckpt.store.remote.urls import is_url

__all__ = ["MergeOptions", "MergeReport", "merge", "merge_fsdp_weights"]


_IDENTITY = (
    "max_shard_size", "format", "dtype", "include", "exclude", "rename", "verify", "fsync", "remove_source", "into",
)  # fmt: skip
"""Options that say what is written, and how: a run resumes only what was made in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a merge did, or would do.

    Attributes:
        source: The checkpoint, as given; the first folder where there are several.
        destination: The folder written.
        part: The part that was merged.
        format: ``safetensors`` or ``bin``.
        files: Bytes of each weight file, by name.
        num_tensors: Tensors written.
        num_parameters: Elements written.
        tensor_bytes: Bytes of tensors written.
        dtypes: Tensors by dtype in the result.
        cast: Tensors that were converted, by ``source -> result``.
        renamed: New name by key, where more than the part's prefix changed.
        excluded: Number of tensors left out by filters.
        objects_left: Values of the part that are no tensors, and stay behind.
        tied: Name kept by name not written.
        aliases: Name kept by name written again although both are the same bytes in the source.
        verified_bytes: Source bytes whose recorded CRC-32 was compared.
        unverified: Shards without a recorded CRC-32.
        shared_bytes: Bytes that share blocks with the source instead of being copied.
        recovered: Damaged shards that were read from a replica.
        resumed: Weight files that an earlier run had finished.
        side_files: Files copied beside the weights.
        missing_side_files: Important ones that were not found.
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
    destination: str
    part: str
    format: str
    files: Mapping[str, int]
    num_tensors: int
    num_parameters: int
    tensor_bytes: int
    dtypes: Mapping[str, int]
    cast: Mapping[str, int] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    excluded: int = 0
    objects_left: int = 0
    tied: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    verified_bytes: int = 0
    unverified: int = 0
    shared_bytes: int = 0
    recovered: Sequence[str] = ()
    resumed: int = 0
    side_files: Sequence[str] = ()
    missing_side_files: Sequence[str] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    elapsed_s: float = 0.0
    dry_run: bool = False
    pending: Sequence[int] | None = None
    source_removed: bool = False
    free_bytes: int | None = None
    peak_memory_bytes: int = 0
    other_sources: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A plan, the files that it becomes, and how those are written."""

    plan: MergePlan
    writing: WriteJob


@speaks_urls
@names_next_step
def merge(
    src: PathLike | Sequence[PathLike],
    out: str | os.PathLike[str],
    *,
    options: MergeOptions | None = None,
    listener: Listener | None = None,
    **changes: Any,
) -> MergeReport:
    """Merge the model of a checkpoint into one or several files in a folder.

    The folder appears complete or not at all; in an object store, what makes it complete comes last. Memory does not
    depend on the model's size. Tensors keep their dtype and bits unless ``dtype`` is given.

    Args:
        src: A checkpoint in any layout that ``inspect`` knows, or a folder above it. Where nodes saved to disks of
            their own: the folders of all nodes.
        out: The folder to make; parents are made as well. Or a URL, such as ``s3://bucket/model`` or ``hf://owner/repo``.
        options: All options at once; or give them as keywords:
        listener: Called with ``Progress`` while bytes are moved.
        **changes: Fields of ``MergeOptions``: ``max_shard_size`` (largest file, ``"5GB"``), ``format``
            (``"safetensors"`` or ``"bin"``), ``dtype`` (convert float tensors), ``include`` / ``exclude`` (globs),
            ``rename`` (``"old=new"`` prefixes or ``"s/regex/replacement/"``), ``tie`` (drop an output head that
            equals the embedding; None follows config.json), ``part`` (name, when there are several models),
            ``dry_run``, ``overwrite``, ``resume``, ``remove_source`` (after reading the result back), ``verify``
            (compare recorded checksums), ``fsync``, ``jobs`` (threads), ``share`` (this process's share of the work),
            ``into`` (write into a folder that has files of its own: weight files of the same name are replaced, nothing
            else is).

    Returns:
        What was done.

    Raises:
        CheckpointNotFound: No checkpoint, or none with model weights.
        CorruptCheckpoint: Damaged or incomplete; nothing is left at ``out``.
        DestinationExists: ``out`` has content and ``overwrite`` is off.
        NotEnoughSpace: The disk is too small; found before writing where possible.
        Unreachable: A store failed for good; what was uploaded is removed.
        Incompatible: Flat parameters, colliding names, dtypes that the format lacks; folders of different saves.
        UsageError: Options that contradict each other.

    Example:
        >>> report = merge("run/checkpoint-2000", "out", dtype="bfloat16")  # doctest: +SKIP
        >>> report.files  # doctest: +SKIP
        {'model.safetensors': 14483464192}
    """
    begun = time.monotonic()
    target = shown_destination(os.fspath(out))
    plan = plan_merge(src, options, out=target, **changes)
    chosen = plan.options
    refuse_for_urls(
        target,
        remove_source=chosen.remove_source,
        resume=chosen.resume,
        into=chosen.into,
        shared=chosen.share is not None and chosen.share.count > 1,
    )
    destination = destination_of(os.fspath(out))
    check_destination(
        destination,
        plan.checkpoint,
        sources=plan.sources,
        out=target,
        overwrite=plan.options.overwrite,
        into=plan.options.into,
        resume=plan.options.resume,
    )
    if plan.options.remove_source:
        check_removable(plan, destination)
    job = _lay_out(plan, destination)
    mine = job.writing.mine
    needed_bytes = local_bytes(job.writing, workers=num_workers(job.writing.options))
    free = check_space(destination, needed_bytes, len(mine) + len(plan.side.files))
    if plan.options.dry_run:
        return _report(job, Written(results={}), begun, free=free, dry_run=True)
    written = write_out(job.writing, listener)
    removed = plan.options.remove_source and written.published
    if removed:
        verify_output(destination, job.writing.specs, written.crcs)
        remove_source(plan.checkpoint, [plan.part], destination=destination)
    return _report(job, written, begun, free=free, source_removed=removed)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge sharded FSDP weights; same name and arguments as in ``accelerate.utils``.

    Args:
        checkpoint_dir: ``pytorch_model_fsdp_0``, or a folder above it.
        output_path: Folder for the result. As in Accelerate it may exist and hold other files; a weight file of the
            same name is replaced in one step.
        safe_serialization: Write ``model.safetensors`` rather than ``pytorch_model.bin``.
        remove_checkpoint_dir: Delete the source; here only after the result was read back and compared.

    Raises:
        As ``merge``.
    """
    options = MergeOptions(
        format="safetensors" if safe_serialization else "bin",
        max_shard_size="1000TB",
        remove_source=remove_checkpoint_dir,
        into=not is_url(os.fspath(output_path)) and resolve_destination(Path(output_path)).is_dir(),
    )
    merge(checkpoint_dir, output_path, options=options)


def _lay_out(plan: MergePlan, destination: Path) -> _Job:
    options, style = plan.options, plan.options.format
    files = split_files(plan.selection.tensors, max_shard_bytes=plan.max_shard_bytes, pattern=PATTERNS[style])
    specs = [lay_out_bin(file, plan.selection.tied) if style == "bin" else lay_out_safetensors(file) for file in files]
    small: dict[str, bytes | Path] = {
        name: path
        for name, path in plan.side.files.items()
        if not (options.into and (destination / name).exists())  # a folder that was there keeps its own
    }
    if len(specs) > 1:
        index = PATTERNS[style].format(suffix="") + ".index.json"
        small[index] = index_json(files, plan.selection.tied, keep_tied=style == "bin")
    facts = [{name: getattr(options, name) for name in _IDENTITY}, dict(plan.selection.tied)]
    writing = WriteJob(
        destination=destination,
        roots=plan.roots,
        specs=specs,
        files=small,
        identity=identify(plan.checkpoint, [plan.part], facts),
        options=WriteOptions(
            overwrite=options.overwrite,
            resume=options.resume,
            verify=options.verify,
            fsync=options.fsync,
            jobs=options.jobs,
            share=options.share,
            into=options.into,
            keep_crcs=options.remove_source,
        ),
    )
    return _Job(plan=plan, writing=writing)


def _report(
    job: _Job, written: Written, begun: float, *, free: int | None, dry_run: bool = False, source_removed: bool = False
) -> MergeReport:
    results = list(written.results.values())
    plan, workers = job.plan, num_workers(job.writing.options)
    tensors = plan.selection.tensors
    dtypes: dict[str, int] = {}
    cast: dict[str, int] = {}
    for tensor in tensors:
        dtypes[tensor.dtype.name] = dtypes.get(tensor.dtype.name, 0) + 1
        if tensor.is_cast:
            step = f"{tensor.source.dtype} -> {tensor.dtype}"
            cast[step] = cast.get(step, 0) + 1
    warnings = list(plan.warnings)
    if "config.json" in plan.side.missing:
        warnings.append("no config.json was found beside the checkpoint: from_pretrained needs it in the output folder")
    return MergeReport(
        source=plan.sources[0],
        other_sources=plan.sources[1:],
        destination=str(job.writing.destination),
        part=plan.part.name,
        format=plan.options.format,
        files={spec.name: spec.size for spec in job.writing.specs},
        num_tensors=len(tensors),
        num_parameters=sum(tensor.source.numel for tensor in tensors),
        tensor_bytes=sum(tensor.num_bytes for tensor in tensors),
        dtypes=dtypes,
        cast=cast,
        renamed=plan.selection.renamed,
        excluded=len(plan.selection.excluded),
        objects_left=len(plan.part.objects),
        tied=plan.selection.tied,
        aliases=plan.aliases,
        verified_bytes=sum(result.verified_bytes for result in results),
        unverified=sum(result.unverified for result in results),
        shared_bytes=sum(result.shared_bytes for result in results),
        recovered=[sentence for result in results for sentence in result.recovered],
        resumed=written.resumed,
        side_files=sorted(plan.side.files),
        missing_side_files=plan.side.missing,
        notes=plan.notes,
        warnings=warnings,
        elapsed_s=time.monotonic() - begun,
        dry_run=dry_run,
        pending=written.pending,
        source_removed=source_removed,
        free_bytes=free,
        peak_memory_bytes=((45 + 4 * workers) << 20) + upload_bytes(job.writing.destination, workers=workers),
    )
