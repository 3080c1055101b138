"""Carry out a planned conversion, and say what it did."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.nodes import demand_equal_copies
from fsdp_ckpt.ops.conversion.options import ConvertOptions
from fsdp_ckpt.ops.conversion.plan import ConvertPlan
from fsdp_ckpt.ops.conversion.report import ConvertReport
from fsdp_ckpt.ops.preflight import check_destination, check_space
from fsdp_ckpt.ops.remove_source import remove_source, verify_output
from fsdp_ckpt.ops.write_out import WriteJob, WriteOptions, Written, identify, num_workers, write_out
from fsdp_ckpt.plan.output import OutputTensor
from fsdp_ckpt.run.progress import Listener
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.store.publish import resolve_destination

__all__ = ["finish"]

_HOW = frozenset({"dry_run", "overwrite", "resume", "jobs", "share"})
"""Options that do not say what is written."""


def finish(plan: ConvertPlan, out: Path, begun: float, listener: Listener | None, *, command: str) -> ConvertReport:
    """Write the files of a plan, unless it is a dry run.

    Args:
        plan: Complete.
        out: The destination, as given.
        begun: When the run began, on the monotonic clock.
        listener: Told about progress.
        command: ``convert`` or ``reshard``.

    Raises:
        As ``convert``.
    """
    options, target = plan.options, str(out)
    destination = resolve_destination(out)
    check_destination(
        destination,
        plan.checkpoint,
        sources=plan.sources,
        out=target,
        overwrite=options.overwrite,
        command=command,
        replaces_checkpoints=True,
    )
    if options.remove_source:
        _check_removable(plan, destination)
    job = WriteJob(
        destination=destination,
        roots=plan.roots,
        specs=plan.laid.specs,
        files=plan.laid.files,
        identity=identify(plan.checkpoint, plan.chosen.parts, _facts(plan, command)),
        options=WriteOptions(
            overwrite=options.overwrite,
            resume=options.resume,
            verify=options.verify,
            fsync=options.fsync,
            jobs=options.jobs,
            share=options.share,
            keep_crcs=options.remove_source,
        ),
    )
    mine = job.mine
    free = check_space(destination, sum(spec.size for spec in mine), len(mine) + len(job.files))
    if options.dry_run:
        return _report(plan, job, Written(results={}), begun, free=free, command=command)
    written = write_out(job, listener)
    if options.remove_source and written.published:
        verify_output(destination, job.specs, written.crcs)
        for part in plan.chosen.parts:
            remove_source(plan.checkpoint, part)
    return _report(plan, job, written, begun, free=free, command=command)


def _facts(plan: ConvertPlan, command: str) -> object:
    options = {one.name: getattr(plan.options, one.name) for one in fields(ConvertOptions) if one.name not in _HOW}
    return [command, options, dict(plan.tied)]


def _check_removable(plan: ConvertPlan, destination: Path) -> None:
    """Refuse to promise a removal that would lose something.

    Raises:
        UsageError: It would.
        Incompatible: A file that two nodes have is not the same in both.
    """
    lost = [*plan.left]
    if plan.excluded:
        lost.append(f"{plan.excluded} excluded tensors")
    if lost:
        raise UsageError(f"--remove-source: this would be lost: {lost[0]}", hint="convert without --remove-source")
    read = {file for part in plan.chosen.parts for file in part.files}
    for other in plan.checkpoint.parts:
        if other not in plan.chosen.parts and other.files.keys() & read:
            raise UsageError(
                f"--remove-source: the files that would go also hold {other.name}",
                hint="convert without --remove-source",
            )
    for part in plan.chosen.parts:
        if any((root / part.folder).resolve() in destination.parents for root in plan.roots):
            raise UsageError("--remove-source: the destination lies in the folder that would be removed")
    store = LocalStore(plan.roots)
    for file in sorted(read):
        demand_equal_copies(store, file)


def _report(
    plan: ConvertPlan, job: WriteJob, written: Written, begun: float, *, free: int | None, command: str
) -> ConvertReport:
    tensors: list[OutputTensor] = [tensor for part in (*plan.models, *plan.optimizers) for tensor in part.tensors]
    dtypes: dict[str, int] = {}
    cast: dict[str, int] = {}
    for tensor in tensors:
        dtypes[tensor.dtype.name] = dtypes.get(tensor.dtype.name, 0) + 1
        if tensor.is_cast:
            step = f"{tensor.source.dtype} -> {tensor.dtype}"
            cast[step] = cast.get(step, 0) + 1
    results, options, sharding = list(written.results.values()), plan.options, plan.sharding
    return ConvertReport(
        source=plan.sources[0],
        other_sources=plan.sources[1:],
        destination=str(job.destination),
        layout=plan.checkpoint.title,
        to=command if command == "reshard" else options.to,
        parts=plan.written,
        files={spec.name: spec.size for spec in job.specs},
        small_files=list(job.files),
        world_size=sharding.mesh.num_ranks if sharding else None,
        mesh=sharding.mesh.shape if sharding else None,
        dtypes=dtypes,
        cast=cast,
        renamed=plan.renamed,
        excluded=plan.excluded,
        left=plan.left,
        tied=plan.tied,
        verified_bytes=sum(result.verified_bytes for result in results),
        unverified=sum(result.unverified for result in results),
        shared_bytes=sum(result.shared_bytes for result in results),
        recovered=[sentence for result in results for sentence in result.recovered],
        notes=plan.notes,
        warnings=[*plan.warnings, *_unused(plan)],
        elapsed_s=time.monotonic() - begun,
        dry_run=options.dry_run,
        pending=written.pending,
        source_removed=options.remove_source and written.published and not options.dry_run,
        free_bytes=free,
        peak_memory_bytes=(50 + 4 * num_workers(job.options)) << 20,
    )


def _unused(plan: ConvertPlan) -> list[str]:
    if plan.sharding is None:
        return []
    return [f"--placement {pattern}: no tensor has such a name" for pattern in plan.sharding.unused]
