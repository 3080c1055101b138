"""Share a checkpoint on the hub: checked, only the files that belong, and in one commit."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from typing import Any

from fsdp_ckpt.errors import CorruptCheckpoint, UsageError
from fsdp_ckpt.layouts.registry import PathLike, read_checkpoint
from fsdp_ckpt.ops.sharing.hub_address import HubAddress, parse_hub_address
from fsdp_ckpt.ops.sharing.report import PushOptions, PushReport
from fsdp_ckpt.ops.validate import validate
from fsdp_ckpt.ops.validation.wording import counted
from fsdp_ckpt.run.progress import Listener
from fsdp_ckpt.store.remote.urls import is_url, local_path, redact

__all__ = ["PushOptions", "PushReport", "push"]


def push(
    src: PathLike, url: str, *, options: PushOptions | None = None, listener: Listener | None = None, **changes: Any
) -> PushReport:
    """Bring a checkpoint to the Hugging Face hub.

    Only the files that make it up go there, in one commit: a reader sees all of it or nothing.

    Args:
        src: The checkpoint, on a local disk.
        url: ``hf://[datasets/]owner/repo[@revision][/path]``. The repository is made where there is none: private.
        options: All options at once; or give them as keywords:
        listener: Called with ``Progress`` while bytes are sent.
        **changes: Fields of ``PushOptions``: ``parts``, ``public``, ``create_pr``, …

    Raises:
        CheckpointNotFound: No checkpoint.
        CorruptCheckpoint: Validation found faults.
        DestinationExists: Weights of another checkpoint would stay beside this one's.
        UsageError: The URL is no address on the hub, or there is no such part.
        Unreachable: The hub does not answer, or does not let this user.

    Example:
        >>> push("run/checkpoint-2000", "hf://owner/model", parts=["model"]).commit_url  # doctest: +SKIP
        'https://huggingface.co/owner/model/commit/…'
    """
    options = replace(options or PushOptions(), **changes)
    given = os.fspath(src)
    address = _address(url, options)
    if is_url(given):
        raise UsageError(
            f"`{redact(given)}` is not on a local disk",
            hint=f"fsdp-ckpt pull {shlex.quote(redact(given))} FOLDER    (brings it there)",
        )
    place = local_path(given)
    warnings = _check(place) if options.validate else []
    checkpoint = read_checkpoint(place, tolerant=not options.validate)
    from fsdp_ckpt.ops.sharing.pushing import run_push  # huggingface_hub takes a while to import

    return run_push(given, checkpoint, address, options, warnings=warnings, listener=listener)


def _address(url: str, options: PushOptions) -> HubAddress:
    address = parse_hub_address(url, revision=options.revision, path=options.path_in_repo)
    if address.is_pinned:
        raise UsageError(f"`{address}` is a commit, to which nothing can be added", hint="name a branch")
    if options.create_pr and address.revision not in (None, "main"):
        raise UsageError(
            f"a pull request is against the default branch, not `{address.revision}`", hint="leave one of them out"
        )
    return address


def _check(place: str) -> list[str]:
    """Validate, refuse what has faults, and return a sentence about what else was found."""
    report = validate(place)
    first = next((found for found in report.findings if found.severity == "error"), None)
    shown = shlex.quote(place)
    if first is not None:
        more = f", and {counted(report.errors - 1, 'more fault')}" if report.errors > 1 else ""
        raise CorruptCheckpoint(
            f"`{place}` is not whole, and was not pushed: {first.where}: {first.message}{more}",
            hint=f"fsdp-ckpt validate {shown}    (says all); to push it as it is: --no-validate",
        )
    if report.warnings:
        return [f"{counted(report.warnings, 'warning')} of validation, no fault: fsdp-ckpt validate {shown}"]
    return []
