"""Carry out a planned conversion, and say what it did."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.nodes import demand_equal_copies
from fsdp_ckpt.ops.conversion.options import ConvertOptions, as_typed
from fsdp_ckpt.ops.conversion.plan import ConvertPlan
from fsdp_ckpt.ops.conversion.report import ConvertReport
from fsdp_ckpt.ops.destination import destination_of, local_bytes, refuse_for_urls, shown_destination, upload_bytes
from fsdp_ckpt.ops.preflight import check_destination, check_space
from fsdp_ckpt.ops.remove_source import refuse_remote, refuse_unnamed, remove_source, verify_output
from fsdp_ckpt.ops.write_out import WriteJob, WriteOptions, Written, identify, num_workers, write_out
from fsdp_ckpt.plan.output import OutputTensor
from fsdp_ckpt.run.fold import factors_bytes
from fsdp_ckpt.run.progress import Listener
from fsdp_ckpt.store.local import LocalStore

__all__ = ["finish"]

_HOW = frozenset({"dry_run", "overwrite", "resume", "jobs", "share"})
"""Options that do not say what is written."""


def finish(plan: ConvertPlan, out: str, begun: float, listener: Listener | None, *, command: str) -> ConvertReport:
    """Write the files of a plan, unless it is a dry run.

    Args:
        plan: Complete.
        out: The destination, as given: a folder, or a URL.
        begun: When the run began, on the monotonic clock.
        listener: Told about progress.
        command: ``convert`` or ``reshard``.

    Raises:
        As ``convert``.
    """
    options, target = plan.options, shown_destination(out)
    if plan.sharding is not None and plan.sharding.unused:
        raise UsageError(
            f"--placement {plan.sharding.unused[0]}: no tensor has such a name, or an earlier placement has them all",
            hint=f"fsdp-ckpt inspect {shlex.join(plan.sources)} --tensors    (lists the names)",
        )
    refuse_for_urls(
        target,
        remove_source=options.remove_source,
        resume=options.resume,
        shared=options.share is not None and options.share.count > 1,
    )
    destination = destination_of(out)
    check_destination(
        destination,
        plan.checkpoint,
        sources=plan.sources,
        out=target,
        overwrite=options.overwrite,
        resume=options.resume,
        command=as_typed(options, command),
        replaces_checkpoints=True,
        writes=[*(spec.name for spec in plan.laid.specs), *plan.laid.files],
    )
    if options.remove_source:
        _check_removable(plan, destination, target, as_typed(options, command))
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
    needed_bytes = local_bytes(job, workers=num_workers(job.options))
    free = check_space(destination, needed_bytes, len(mine) + len(job.files), casts=command == "convert")
    if options.dry_run:
        return _report(plan, job, Written(results={}), begun, free=free, command=command)
    written = write_out(job, listener)
    if options.remove_source and written.published:
        verify_output(destination, job.specs, written.crcs)
        remove_source(plan.checkpoint, plan.chosen.parts, destination=destination)
    return _report(plan, job, written, begun, free=free, command=command)


def _facts(plan: ConvertPlan, command: str) -> object:
    """Return what tells whether another run would write the same: the options, and what was made of them.

    Files that options name (names, shapes, an adapter's configuration) may have changed since; what was read of them
    shows in the plan.
    """
    options = {one.name: getattr(plan.options, one.name) for one in fields(ConvertOptions) if one.name not in _HOW}
    digest = hashlib.sha256()
    for spec in plan.laid.specs:
        digest.update(f"{spec.name} {spec.size} {[*spec.ranges.items()]}".encode(errors="surrogatepass"))
        digest.update(spec.head)
    for part in (*plan.models, *plan.optimizers):
        for tensor in part.tensors:
            digest.update(_described(tensor).encode(errors="surrogatepass"))
        for value in part.objects:
            listed = value.value if _is_list_of_params(value.value) else None  # anything else is from the source
            digest.update(repr((value.path, listed)).encode(errors="surrogatepass"))
    return [command, options, dict(plan.tied), digest.hexdigest()]


def _is_list_of_params(value: object) -> bool:
    return isinstance(value, list) and all(type(item) in (str, int) for item in value)


def _described(tensor: OutputTensor) -> str:
    """Return everything that decides about a tensor's bytes and place, in one line."""
    sum_ = tensor.addition
    added = None if sum_ is None else (sum_.up.key, sum_.down.key, sum_.scale, sum_.transposed)
    return repr((tensor.name, tensor.path, tensor.dtype.name, tensor.source.key, tensor.window, added))


def _check_removable(plan: ConvertPlan, destination: Path, target: str, command: str) -> None:
    """Refuse to promise a removal that would lose something, or of a checkpoint that the user did not name.

    Raises:
        UsageError: It would.
        Incompatible: A file that two nodes have is not the same in both.
    """
    refuse_remote(plan.checkpoint)
    refuse_unnamed(plan.checkpoint, hint=f"fsdp-ckpt {command}", out=target)
    lost = [*plan.left]
    if plan.excluded:
        lost.append(f"{plan.excluded} excluded tensors")
    lost += [f"`{key}`" for key in plan.lost()]
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
    workers = num_workers(job.options)
    return ConvertReport(
        source=plan.sources[0],
        root=str(plan.checkpoint.root),
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
        resumed=written.resumed,
        notes=plan.notes,
        warnings=plan.warnings,
        elapsed_s=time.monotonic() - begun,
        dry_run=options.dry_run,
        pending=written.pending,
        source_removed=options.remove_source and written.published and not options.dry_run,
        free_bytes=free,
        peak_memory_bytes=_peak_bytes(tensors, workers) + upload_bytes(job.destination, workers=workers),
    )


def _peak_bytes(tensors: Sequence[OutputTensor], workers: int) -> int:
    """Return the memory that is needed: ourselves, buffers, and adapters' matrices, as many as there are workers."""
    folded = sorted((factors_bytes(one.addition) for one in tensors if one.addition is not None), reverse=True)
    return ((50 + 4 * workers) << 20) + sum(folded[:workers])
