"""Write a checkpoint for another number of ranks, or another mesh."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.registry import PathLike, given_paths
from fsdp_ckpt.ops.choose import read_source
from fsdp_ckpt.ops.conversion.finish import finish
from fsdp_ckpt.ops.conversion.options import ConvertOptions, as_typed, check_options
from fsdp_ckpt.ops.conversion.plan import begin_plan
from fsdp_ckpt.ops.conversion.report import ConvertReport
from fsdp_ckpt.ops.conversion.resharding import plan_resharding
from fsdp_ckpt.ops.conversion.targets import lay_out
from fsdp_ckpt.ops.destination import shown_destination
from fsdp_ckpt.ops.next_step import names_next_step
from fsdp_ckpt.run.progress import Listener
from fsdp_ckpt.store.remote.places import speaks_urls

__all__ = ["reshard"]

_FIELDS = frozenset({
    "part", "mesh", "placements", "param_names", "shapes_from", "dry_run", "overwrite", "resume", "verify", "fsync",
    "jobs", "share", "remove_source",
})  # fmt: skip


@speaks_urls
@names_next_step
def reshard(
    src: PathLike | Sequence[PathLike],
    dst: PathLike,
    world_size: int | None = None,
    *,
    listener: Listener | None = None,
    **changes: Any,
) -> ConvertReport:
    """Write a checkpoint with one data file per rank of another world size.

    A distributed checkpoint keeps its layout, keys, dtypes and values, and the files beside it; any other becomes an
    Accelerate folder (``pytorch_model_fsdp_0/``, ``optimizer_0/``). ``torch.distributed.checkpoint.load``, Accelerate
    and ``load_state`` read the result on any number of ranks; on that number, each rank reads its own file only.

    Args:
        src: A checkpoint in any layout, or the folders of all nodes.
        dst: The folder to make.
        world_size: Ranks; or give ``mesh``.
        listener: Called with ``Progress`` while bytes are moved.
        **changes: ``mesh`` (``"2x4"``: the last dimension shards, those before replicate, unless ``placements`` say
            otherwise), ``placements`` (``"GLOB=0,1"``: per mesh dimension the tensor dimension that it shards, ``r`` to
            replicate), ``part``, ``param_names``, ``shapes_from``, ``dry_run``, ``overwrite``, ``resume``, ``verify``,
            ``fsync``, ``jobs``, ``share``, ``remove_source``; as for ``convert``.

    Returns:
        What was done.

    Raises:
        As ``convert``.

    Example:
        >>> reshard("run/step-1000", "run/step-1000-on-6", 6).world_size  # doctest: +SKIP
        6
    """
    begun = time.monotonic()
    unknown = changes.keys() - _FIELDS
    if unknown:
        raise UsageError(f"unknown option: {min(unknown)}")
    if world_size is None and changes.get("mesh") is None:
        raise UsageError("reshard needs the number of ranks", hint="--world-size 8, or --mesh 2x4")
    options = replace(ConvertOptions(to="accelerate", world_size=world_size), **changes)
    check_options(options)
    target, paths = shown_destination(os.fspath(dst)), given_paths(src)
    checkpoint = read_source(paths, out=target, command=as_typed(options, "reshard"))
    plan = None
    if options.shapes_from is None:
        plan = plan_resharding(checkpoint, options, paths=paths, out=target)
    if plan is None:
        plan = begin_plan(paths, options, out=target, command="reshard")
        lay_out(plan)
        plan.notes.append("the source is no distributed checkpoint: the result is an Accelerate folder")
    return finish(plan, os.fspath(dst), begun, listener, command="reshard")
