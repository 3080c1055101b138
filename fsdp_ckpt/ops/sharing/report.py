"""What push and pull can be asked for, and what they tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_ckpt.ops.validation.report import Finding

__all__ = ["PullOptions", "PullReport", "PushOptions", "PushReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """How to push.

    Attributes:
        parts: Names of parts, or what they are for (``model``, ``optimizer``); nothing for all.
        public: Let everybody see a repository that is made.
        revision: The branch, made where there is none; as in the URL.
        path_in_repo: Folder in the repository; as in the URL.
        create_pr: Open a pull request instead of a commit on the branch.
        message: Of the commit.
        card: Write a README.md where the repository has none.
        validate: Look for faults first, and refuse where there are some.
        replace: Remove, in the same commit, weights of another checkpoint that lie in the same folders.
        dry_run: Say what would be done.
    """

    parts: Sequence[str] = ()
    public: bool = False
    revision: str | None = None
    path_in_repo: str | None = None
    create_pr: bool = False
    message: str | None = None
    card: bool = True
    validate: bool = True
    replace: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What a push did, or would do.

    Attributes:
        path: The checkpoint as given.
        root: The folder that was read, which may lie below.
        url: Where it is: ``hf://…``.
        dry_run: Nothing was changed.
        private: Whether the repository is, or would be, private.
        created: Whether the repository was new.
        commit: Hash of the commit; None where there was nothing to do, and for a dry run.
        commit_url: Its page.
        pull_request: Page of the pull request, where one was opened.
        message: Of the commit.
        files: Bytes by path in the repository, of what was sent.
        num_bytes: All of them.
        skipped: Bytes by path of what was there already.
        removed: Paths of an earlier checkpoint that went in the same commit.
        card: Whether a README.md was written.
        left_out: Files in the checkpoint's folder that do not belong to it, or were not chosen.
        warnings: What validation found that is not wrong, in a sentence.
        notes: What one should know.
        elapsed_s: Seconds.
    """

    path: str
    root: str
    url: str
    dry_run: bool
    private: bool
    created: bool
    commit: str | None
    commit_url: str | None
    pull_request: str | None
    message: str
    files: Mapping[str, int]
    num_bytes: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    removed: Sequence[str] = ()
    card: bool = False
    left_out: Sequence[str] = ()
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """How to pull.

    Attributes:
        parts: Names of parts, or what they are for (``model``, ``optimizer``); nothing for all files.
        include: Only files whose name below the URL fits one of these globs.
        exclude: No files whose name fits one of these.
        revision: Branch, tag, ``refs/pr/N`` or commit; as in the URL.
        overwrite: Replace the destination, in one step at the end.
        deep: Compare the checksums in the checkpoint, too, not only those of the hub.
        dry_run: Say what would be fetched.
    """

    parts: Sequence[str] = ()
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    revision: str | None = None
    overwrite: bool = False
    deep: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """What a pull did, or would do.

    Attributes:
        url: As given, without credentials.
        commit: Hash of the commit that was fetched.
        destination: The folder.
        dry_run: Nothing was fetched.
        files: Bytes by name in the destination.
        num_bytes: All of them.
        kept: Bytes by name of what an earlier run had fetched.
        left_out: Files on the hub that were not wanted.
        checked: How far the result was validated: ``headers``, ``deep``; None where that makes no sense.
        findings: What validation found that is wrong; the files are as they are on the hub.
        notes: What one should know.
        elapsed_s: Seconds.
    """

    url: str
    commit: str
    destination: str
    dry_run: bool
    files: Mapping[str, int]
    num_bytes: int
    kept: Mapping[str, int] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    checked: str | None = None
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    elapsed_s: float = 0.0
