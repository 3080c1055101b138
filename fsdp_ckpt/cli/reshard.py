"""``fsdp-ckpt reshard``."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.convert import (
    AsJson,
    DryRun,
    Jobs,
    Mesh,
    NoFsync,
    NoVerify,
    Output,
    Overwrite,
    ParamNames,
    Placements,
    Quiet,
    RemoveSource,
    Resume,
    ShapesFrom,
    Sources,
)
from fsdp_ckpt.cli.guard import guard

EXAMPLES = """\b
Examples:
  fsdp-ckpt reshard run/step-1000 run/step-1000-on-6 --world-size 6
  fsdp-ckpt reshard step-1000 out/ --mesh 2x4          HSDP: 2 replicas of 4
  fsdp-ckpt reshard step-1000 out/ --mesh 2x4 --placement '*.up.weight=0,1'
  fsdp-ckpt reshard run/step-1000 out/ --world-size 64 --dry-run
"""


@guard
def reshard(
    src: Sources,
    dst: Output,
    world_size: Annotated[int | None, typer.Option(help="Ranks to shard for.")] = None,
    mesh: Mesh = None,
    placement: Placements = None,
    part: Annotated[str | None, typer.Option(help="model, optimizer, all, or a part's name. [default: all]")] = None,
    param_names: ParamNames = None,
    shapes_from: ShapesFrom = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    remove_source: RemoveSource = False,
    no_verify: NoVerify = False,
    no_fsync: NoFsync = False,
    jobs: Jobs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint for another number of ranks, a data file for each.

    A distributed checkpoint keeps its layout, names and values, and the files beside it; any other becomes an
    Accelerate folder. Both load on any number of ranks; on that number each rank reads one file only.
    """
    from fsdp_ckpt.cli.convert_view import show_conversion
    from fsdp_ckpt.ops.reshard import reshard as run
    from fsdp_ckpt.ops.share import process_share

    share = process_share()
    with out.progress("reshard", quiet=quiet or dry_run) as listener:
        report = run(
            src,
            dst,
            world_size,
            mesh=mesh,
            placements=placement or (),
            part=part,
            param_names=param_names,
            shapes_from=shapes_from,
            dry_run=dry_run,
            overwrite=overwrite,
            resume=resume,
            remove_source=remove_source,
            verify=not no_verify,
            fsync=not no_fsync,
            jobs=jobs,
            share=share,
            listener=listener,
        )
    show_conversion(report, "reshard", as_json=as_json, quiet=quiet, share=share)
