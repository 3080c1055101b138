"""Convert a checkpoint: from any layout that is read to any that is written, in bounded memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.registry import PathLike, given_paths
from fsdp_ckpt.ops.conversion.finish import finish
from fsdp_ckpt.ops.conversion.options import ConvertOptions
from fsdp_ckpt.ops.conversion.plan import begin_plan
from fsdp_ckpt.ops.conversion.report import ConvertReport
from fsdp_ckpt.ops.conversion.targets import lay_out
from fsdp_ckpt.ops.destination import shown_destination
from fsdp_ckpt.ops.next_step import names_next_step
from fsdp_ckpt.run.progress import Listener
from fsdp_ckpt.store.remote.places import speaks_urls

__all__ = ["ConvertOptions", "ConvertReport", "convert"]


@speaks_urls
@names_next_step
def convert(
    src: PathLike | Sequence[PathLike],
    dst: PathLike,
    *,
    options: ConvertOptions | None = None,
    listener: Listener | None = None,
    **changes: Any,
) -> ConvertReport:
    """Convert a checkpoint, optimizer included, into another layout.

    The folder appears complete or not at all. Memory does not depend on the model's size. Tensors keep their dtype
    and bits unless ``dtype`` is given; names lose what wrappers put in front of them.

    Args:
        src: A checkpoint in any layout that ``inspect`` knows, or a folder above it. Where nodes saved to disks of
            their own: the folders of all nodes.
        dst: The folder to make; parents are made as well.
        options: All options at once; or give them as keywords:
        listener: Called with ``Progress`` while bytes are moved.
        **changes: Fields of ``ConvertOptions``: ``to``, ``part``, ``world_size``, …

    Returns:
        What was done.

    Raises:
        CheckpointNotFound: No checkpoint, or not what was asked for.
        CorruptCheckpoint: Damaged or incomplete; nothing is left at ``dst``.
        DestinationExists: ``dst`` has content and ``overwrite`` is off.
        NotEnoughSpace: The disk is too small; found before writing where possible.
        Incompatible: Flat parameters without shapes, colliding names, dtypes that the format lacks, an optimizer whose
            names cannot be told for certain, a model that does not fit its config.json.
        UsageError: Options that contradict each other.

    Example:
        >>> report = convert("run/step-1000", "out", to="accelerate", world_size=8)  # doctest: +SKIP
        >>> [part.written_as for part in report.parts]  # doctest: +SKIP
        ['pytorch_model_fsdp_0', 'optimizer_0']
    """
    begun = time.monotonic()
    unknown = set(changes) - {one.name for one in fields(ConvertOptions)}
    if unknown:
        raise UsageError(f"unknown option: {min(unknown)}")
    chosen = replace(options or ConvertOptions(), **changes)
    target = shown_destination(os.fspath(dst))
    plan = begin_plan(given_paths(src), chosen, out=target)
    lay_out(plan)
    return finish(plan, os.fspath(dst), begun, listener, command="convert")
