"""What `validate` reports."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from fsdp_ckpt.catalog import Problem, Severity
from fsdp_ckpt.findings import KINDS
from fsdp_ckpt.store.remote.urls import is_url

if TYPE_CHECKING:
    from fsdp_ckpt.ops.validation.resume import ResumeAnswer
    from fsdp_ckpt.ops.validation.values import TensorValues

__all__ = ["Checked", "Finding", "Level", "ValidateReport", "ValidateRun", "as_findings"]

_ORDER = list(Severity)
_CAUSES = frozenset(
    {
        "missing-file", "missing-metadata", "missing-rank", "misplaced-file", "mixed-saves", "no-permission",
        "path-outside", "short-file", "unreadable", "unsafe-pickle", "wrong-size",
    }
)  # fmt: skip
"""What other findings follow from."""
_OF_FILES = frozenset({"missing-file", "short-file", "wrong-size"})
"""What the manifest and the metadata both may say of one file."""


class Level(StrEnum):
    """How far to look; each level includes the ones before."""

    GEOMETRY = "geometry"
    """Metadata and sizes of files: whether all is there, and shards make up tensors. Costs the reading of metadata."""
    HEADERS = "headers"
    """The head of every item as well: whether it is what the metadata say. Some 4 KiB for each."""
    DEEP = "deep"
    """Every byte, against the checksums that were recorded when it was written. As long as reading takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that was found.

    Attributes:
        severity: ``error``, ``warning`` or ``note``.
        code: Stable: ``E101``; docs/findings has a page for each.
        name: The same in words: ``missing-shard``.
        where: Tensor or file, relative to the checkpoint.
        message: What was found, with numbers.
        meaning: What it means for loading.
        next: The next command to type; empty where there is none.
    """

    severity: str
    code: str
    name: str
    where: str
    message: str
    meaning: str
    next: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was looked at.

    Attributes:
        level: How far.
        num_files: Files of all parts.
        num_tensors: Tensors of all parts.
        num_items: Items whose head was read.
        num_bytes: Bytes of all tensors.
        verified_bytes: Bytes whose checksum was compared.
        unverified_bytes: Bytes, of those that were to be compared, for which none was recorded.
        fetched_bytes: Bytes that were fetched of a remote checkpoint; None for a local one.
        requests: In how many requests.
    """

    level: str
    num_files: int = 0
    num_tensors: int = 0
    num_items: int = 0
    num_bytes: int = 0
    verified_bytes: int = 0
    unverified_bytes: int = 0
    fetched_bytes: int | None = None
    requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateReport:
    """What is wrong with a checkpoint.

    Attributes:
        path: As given.
        root: The folder that was read, which may lie below.
        ok: Whether there are no errors, and no warnings where these count.
        errors: How many findings are errors.
        warnings: How many are warnings.
        layout: Layout in a word; None when nothing could be told.
        title: Layout for people.
        step: Training step, where recorded.
        world_size: Ranks, where that shows.
        checked: What was looked at.
        findings: Errors first.
        resume: Whether training can go on from it; None when nobody asked.
        fits: What was asked for and is right, in sentences: ``torch 2.9 can read it``.
        values: Of each tensor, when asked for.
        other_paths: Further folders as given, of other nodes.
    """

    path: str
    root: str
    ok: bool
    errors: int
    warnings: int
    layout: str | None
    title: str
    step: int | None
    world_size: int | None
    checked: Checked
    findings: Sequence[Finding]
    resume: ResumeAnswer | None = None
    fits: Sequence[str] = ()
    values: Sequence[TensorValues] = ()
    other_paths: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateRun:
    """What is wrong with several checkpoints.

    Attributes:
        ok: Whether all are.
        errors: How many findings of all are errors.
        warnings: How many are warnings.
        checkpoints: One report for each, in the order given; those of a run newest first.
    """

    ok: bool
    errors: int
    warnings: int
    checkpoints: Sequence[ValidateReport]


def as_findings(problems: Iterable[Problem], path: str) -> list[Finding]:
    """Return problems as findings: errors first, causes before what follows from them, and each only once.

    Args:
        problems: What readers and checks noticed.
        path: The checkpoint, for the next command.
    """
    found: dict[tuple[str, str], Finding] = {}
    shown = shlex.quote(path if not path.startswith("-") else f"./{path}")
    above = path.rstrip("/").rpartition("/")[0] if is_url(path) else os.path.dirname(os.path.abspath(path))
    parent = shlex.quote(above)
    for problem in sorted(dict.fromkeys(problems), key=lambda problem: _ORDER.index(problem.severity)):
        kind = KINDS[problem.code]
        where = problem.where or "."
        place = where if problem.code in _OF_FILES else f"{where}: {problem.message}"
        found.setdefault(
            (kind.code, place),
            Finding(
                severity=problem.severity.value,
                code=kind.code,
                name=kind.name,
                where=where,
                message=problem.message,
                meaning=kind.meaning,
                next=kind.command.format(path=shown, parent=parent),
            ),
        )
    return sorted(found.values(), key=_rank)


def _rank(finding: Finding) -> tuple[int, bool, str]:
    """Order by severity; what is the cause of others comes first."""
    return _ORDER.index(Severity(finding.severity)), finding.name not in _CAUSES, finding.code
