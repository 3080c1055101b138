"""Find every fault of a checkpoint that there is, and say what it means."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fsdp_ckpt.catalog import Checkpoint, Problem, Severity
from fsdp_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, NotPermitted, UsageError
from fsdp_ckpt.layouts.manifest import Manifest, check_stamps, manifest_of
from fsdp_ckpt.layouts.manifest import check_files as check_sizes
from fsdp_ckpt.layouts.registry import PathLike, given_paths, members_of_run, read_checkpoint
from fsdp_ckpt.ops.validation.files import check_extents, check_files, check_leftovers, check_permissions
from fsdp_ckpt.ops.validation.headers import HeaderCount, check_headers, count_items
from fsdp_ckpt.ops.validation.names import check_names
from fsdp_ckpt.ops.validation.records import DeepResult, check_records, deep_bytes
from fsdp_ckpt.ops.validation.report import Checked, Finding, Level, ValidateReport, ValidateRun, as_findings
from fsdp_ckpt.ops.validation.resume import answer_resume, check_resume
from fsdp_ckpt.ops.validation.training_state import check_training_state
from fsdp_ckpt.ops.validation.values import TensorValues, check_values
from fsdp_ckpt.ops.validation.versions import check_torch, check_versions, torch_sentence
from fsdp_ckpt.ops.validation.wording import counted, few, finding
from fsdp_ckpt.run.progress import Listener, Meter
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.remote.mirrors import traffic_of
from fsdp_ckpt.store.remote.places import speaks_urls
from fsdp_ckpt.units import format_size

__all__ = ["Checked", "Finding", "Level", "ValidateReport", "ValidateRun", "validate", "validate_each"]

_STOPS_LOADERS = frozenset({"bad-index", "duplicate-tensor", "missing-index", "not-in-index"})
"""What readers here cope with, and others do not."""
_MANY_ITEMS = 200_000
"""Heads to read take about a minute; from here on only when asked for."""


@speaks_urls
def validate_each(
    paths: Sequence[PathLike | Sequence[PathLike]],
    *,
    strict: bool = False,
    **options: Any,
) -> ValidateRun:
    """Validate several checkpoints, or all of a run.

    Args:
        paths: Each as for ``validate``, but a run folder stands for all checkpoints in it.
        strict: As for ``validate``.
        **options: The other options of ``validate``.

    Raises:
        As ``validate``; where there are several, one that is no checkpoint is a finding.
    """
    targets: list[PathLike | Sequence[PathLike]] = []
    for path in paths:
        try:
            members = members_of_run(path) if isinstance(path, str | os.PathLike) else []
        except CheckpointNotFound:
            members = []  # said below, where others are not forgotten
        targets += members or [path]
    reports = []
    for target in targets:
        try:
            reports.append(validate(target, strict=strict, **options))
        except CheckpointNotFound as error:
            if len(targets) == 1:
                raise
            reports.append(_nothing(target, error))
    return ValidateRun(
        ok=all(report.ok for report in reports),
        errors=sum(report.errors for report in reports),
        warnings=sum(report.warnings for report in reports),
        checkpoints=reports,
    )


def _nothing(target: PathLike | Sequence[PathLike], error: CheckpointNotFound) -> ValidateReport:
    first, *others = given_paths(target)
    return ValidateReport(
        path=first,
        other_paths=others,
        root=first,
        ok=False,
        errors=1,
        warnings=0,
        layout=None,
        title="no checkpoint",
        step=None,
        world_size=None,
        checked=Checked(level=Level.GEOMETRY.value),
        findings=as_findings([finding("no-tensors", ".", error.message)], first),
    )


@speaks_urls
def validate(
    path: PathLike | Sequence[PathLike],
    *,
    level: Level | str | None = None,
    values: bool = False,
    strict: bool = False,
    world_size: int | None = None,
    against: str | os.PathLike[str] | None = None,
    torch: str | None = None,
    jobs: int | None = None,
    listener: Listener | None = None,
) -> ValidateReport:
    """Look for every fault of a checkpoint, whoever wrote it. torch is not imported, and no pickle is run.

    Args:
        path: A file, a part, a checkpoint, or a run folder (then the newest complete one in it). Where nodes saved to
            disks of their own: the folders of all nodes.
        level: How far to look: ``"geometry"`` at metadata and sizes, ``"headers"`` also at the head of every item,
            ``"deep"`` at every byte that has a recorded checksum. None for ``"headers"``, or ``"geometry"`` where
            there are more than 200,000 items.
        values: Look for NaN, infinities, zeros and other oddities among the values, too. Reads all tensors.
        strict: Let warnings count as faults.
        world_size: Say whether training can be resumed on so many ranks.
        against: Compare with what it is to be loaded into: a model's ``config.json``, weights, another checkpoint, or
            a configuration of a job (YAML).
        torch: Say whether this version of torch can read it, as in ``"2.9"``.
        jobs: Threads; None for as many as there are cores, at most four.
        listener: Told how far reading is.

    Returns:
        What was found. ``ok`` is False when something is wrong; what cannot be read is in it as well.

    Raises:
        CheckpointNotFound: Nothing is there that is a checkpoint.
        UsageError: A level or version that there is not.
        Incompatible: Several folders that are not of one save.

    Example:
        >>> validate("run/step-1000", level="deep").ok  # doctest: +SKIP
        True
    """
    first, *others = given_paths(path)
    chosen = _level(level)
    if jobs is not None and jobs < 1:
        raise UsageError(f"{jobs} threads", hint="at least one")
    if world_size is not None and world_size < 1:
        raise UsageError(f"a world size of {world_size}", hint="a job has at least one rank")
    checkpoint = read_checkpoint([first, *others], tolerant=True)
    run = _Validation(checkpoint, chosen, jobs or min(4, os.cpu_count() or 1), listener)
    problems = list(run.find())
    found_values: list[TensorValues] = []
    if values:
        problems += run.look_at_values(found_values)
    fits = []
    if against is not None:
        from fsdp_ckpt.ops.validation.against import check_against, fit_sentence  # they read configurations, too

        found = list(check_against(checkpoint, os.fspath(against)))
        problems += found
        fits.append(fit_sentence(checkpoint, os.fspath(against), found))
    if torch is not None:
        found = list(check_torch(checkpoint, torch))
        problems += found
        fits.append(torch_sentence(torch, found))
    resume = None
    if world_size is not None:
        problems += check_resume(checkpoint, world_size)
    if world_size is not None or (against is not None and os.fspath(against).endswith((".yaml", ".yml"))):
        resume = answer_resume(problems)
    findings = as_findings(problems, first)
    errors, warnings = (sum(one.severity == kind for one in findings) for kind in ("error", "warning"))
    return ValidateReport(
        path=first,
        other_paths=others,
        root=str(checkpoint.root),
        ok=not errors and not (strict and warnings),
        errors=errors,
        warnings=warnings,
        layout=checkpoint.layout,
        title=checkpoint.title,
        step=checkpoint.step,
        world_size=checkpoint.world_size,
        checked=run.checked(),
        findings=findings,
        resume=resume,
        fits=[sentence for sentence in fits if sentence],
        values=found_values,
    )


def _level(level: Level | str | None) -> Level | None:
    try:
        return None if level is None else Level(level)
    except ValueError:
        raise UsageError(f"there is no level {level!r:.40}", hint=f"choose {', '.join(Level)}") from None


class _Validation:
    """One checkpoint, and how far it was looked at."""

    def __init__(self, checkpoint: Checkpoint, level: Level | None, jobs: int, listener: Listener | None) -> None:
        self.checkpoint = checkpoint
        self.num_items = count_items(checkpoint)
        self.is_cut = level is None and self.num_items > _MANY_ITEMS
        self.level = level or (Level.GEOMETRY if self.is_cut else Level.HEADERS)
        self.jobs = jobs
        self.listener = listener
        self.headers = HeaderCount()
        self.deep = DeepResult()

    def find(self) -> Iterator[Problem]:
        """Yield what is wrong with it by itself."""
        checkpoint = self.checkpoint
        yield from checkpoint.problems
        for part in checkpoint.parts:
            for one in part.problems:
                yield replace(one, severity=Severity.ERROR) if one.code in _STOPS_LOADERS else one
        manifest = self._manifest()
        yield from check_files(checkpoint, manifest, look=self.level is not Level.GEOMETRY)
        yield from check_permissions(checkpoint, manifest)
        folder = Folder(LocalStore(checkpoint.roots))
        if manifest is not None:
            yield from check_sizes(folder, manifest)
        with suppress(NotPermitted):  # just said
            yield from check_stamps(folder, manifest, [file for part in checkpoint.parts for file in part.files])
        yield from check_leftovers(checkpoint)
        yield from check_extents(checkpoint, look=self.level is not Level.GEOMETRY)
        yield from check_names(checkpoint)
        yield from check_training_state(checkpoint)
        yield from check_versions(checkpoint)
        if self.is_cut:
            yield finding("headers-not-read", ".", f"{self.num_items:,} items: their heads were not looked at")
        if self.level is Level.GEOMETRY:
            return
        with Sources(checkpoint.roots) as sources:
            yield from check_headers(checkpoint, sources, self.headers)
            if self.level is Level.DEEP:
                meter = Meter(deep_bytes(checkpoint), self.listener)
                self.deep = check_records(checkpoint, sources, manifest, jobs=self.jobs, meter=meter)
                yield from self.deep.problems
                yield from self._unverified()

    def _manifest(self) -> Manifest | None:
        try:
            return manifest_of(LocalStore(self.checkpoint.roots))
        except CorruptCheckpoint:  # reported when the checkpoint was read
            return None

    def _unverified(self) -> Iterator[Problem]:
        """Say it once, of all files."""
        found = self.deep.unverified
        if found:
            files = counted(len(found), "file")
            message = f"{format_size(sum(found.values()))} in {files} have no checksum: {few(sorted(found))}"
            yield finding("no-checksums", ".", message)

    def look_at_values(self, values: list[TensorValues]) -> Iterator[Problem]:
        """Yield what is odd about the values, and collect what they are."""
        meter = Meter(sum(part.num_bytes for part in self.checkpoint.parts), self.listener)
        verify = self.level is not Level.DEEP  # all is read anyway
        with Sources(self.checkpoint.roots) as sources:
            yield from check_values(
                self.checkpoint, sources, jobs=self.jobs, meter=meter, verify=verify, listener=values.append
            )
        self.deep.verified_bytes += sum(one.verified_bytes for one in values)

    def checked(self) -> Checked:
        """Return what was looked at."""
        parts = self.checkpoint.parts
        traffic = traffic_of(self.checkpoint.roots)
        return Checked(
            level=self.level.value,
            num_files=len({file for part in parts for file in part.files}),
            num_tensors=sum(len(part.tensors) for part in parts),
            num_items=self.headers.items,
            num_bytes=sum(part.num_bytes for part in parts),
            verified_bytes=self.deep.verified_bytes,
            unverified_bytes=sum(self.deep.unverified.values()),
            fetched_bytes=None if traffic is None else traffic.num_bytes,
            requests=None if traffic is None else traffic.requests,
        )
