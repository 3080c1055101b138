"""Fetch a checkpoint from the hub: only what is wanted, verified, and into a folder that appears complete."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_ckpt.errors import DestinationExists, UsageError
from fsdp_ckpt.layouts.registry import PathLike
from fsdp_ckpt.ops.sharing.belonging import foreign_names
from fsdp_ckpt.ops.sharing.hub_address import HubAddress, parse_hub_address
from fsdp_ckpt.ops.sharing.report import PullOptions, PullReport
from fsdp_ckpt.ops.validation.wording import few
from fsdp_ckpt.run.progress import Listener
from fsdp_ckpt.store.leftovers import is_staging
from fsdp_ckpt.store.publish import resolve_destination
from fsdp_ckpt.store.remote.places import speaks_urls
from fsdp_ckpt.store.remote.urls import is_url, local_path, redact

__all__ = ["PullOptions", "PullReport", "pull"]


@speaks_urls
def pull(
    url: str, dst: PathLike, *, options: PullOptions | None = None, listener: Listener | None = None, **changes: Any
) -> PullReport:
    """Fetch a checkpoint, or parts of one, from the Hugging Face hub.

    Each file is compared with the size and hash that the hub has for it. The folder appears complete or not at all;
    after an interruption, the same call goes on with what was fetched and verified.

    Args:
        url: ``hf://[datasets/]owner/repo[@revision][/path]``.
        dst: The folder to make; parents are made as well.
        options: All options at once; or give them as keywords:
        listener: Called with ``Progress`` while bytes come.
        **changes: Fields of ``PullOptions``: ``parts``, ``include``, ``revision``, …

    Raises:
        Unreachable: There is no such thing, or the hub does not answer, or does not let this user.
        DestinationExists: ``dst`` has content and ``overwrite`` is off.
        NotEnoughSpace: The disk is too small.
        ChecksumMismatch: What came is not what the hub has.
        PathOutside: A name on the hub leads out of ``dst``.
        UsageError: The URL is no address on the hub, or there is no such part.

    Example:
        >>> pull("hf://owner/model/step-1000", "step-1000", parts=["model"]).num_bytes  # doctest: +SKIP
        2310000000
    """
    options = replace(options or PullOptions(), **changes)
    address = parse_hub_address(url, revision=options.revision)
    given = os.fspath(dst)
    if is_url(given):
        raise UsageError(f"`{redact(given)}` is not a local folder", hint=f"fsdp-ckpt pull {address} FOLDER")
    destination = resolve_destination(Path(local_path(given)))
    if not options.dry_run:
        _check_destination(destination, given, address, overwrite=options.overwrite)
    from fsdp_ckpt.ops.sharing.pulling import run_pull  # huggingface_hub takes a while to import

    return run_pull(address, given, destination, options, listener=listener)


def _check_destination(destination: Path, given: str, address: HubAddress, *, overwrite: bool) -> None:
    if not destination.exists():
        return
    again = f"fsdp-ckpt pull {shlex.quote(str(address))}"
    if not destination.is_dir():
        raise DestinationExists(f"`{given}` exists and is not a folder", hint=f"{again} {shlex.quote(given)}.pulled")
    names = sorted(entry.name for entry in destination.iterdir() if not is_staging(entry.name))
    foreign = foreign_names(names)
    if foreign and overwrite:
        raise DestinationExists(
            f"`{given}` holds `{foreign[0]}`, which is no part of a checkpoint; --overwrite replaces the whole folder",
            hint=f"{again} {shlex.quote(given.rstrip('/') + '-pulled')}",
        )
    if names and not overwrite:
        raise DestinationExists(
            f"`{given}` is not empty: it holds {few(names)}",
            hint=f"{again} {shlex.quote(given)} --overwrite    (replaces it in one step), or another folder",
        )
