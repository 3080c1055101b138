"""``fsdp-ckpt inspect``."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard
from fsdp_ckpt.errors import IncompleteCheckpoint

EXAMPLES = """\b
Examples:
  fsdp-ckpt inspect run/checkpoint-2000
  fsdp-ckpt inspect run/step-1000 --shards
  fsdp-ckpt inspect run/step-1000 --tensors '*.q_proj.weight'
  fsdp-ckpt inspect optimizer_0 --objects --json
  fsdp-ckpt inspect node1/step-10 node2/step-10   saved on two disks
"""


@guard
def inspect(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="A file, a part, a checkpoint, or a run folder; or that folder of every node, where nodes saved to "
            "disks of their own.",
        ),
    ],
    tree: Annotated[bool, typer.Option("--tree", help="Show tensors as a tree of modules.")] = False,
    tensors: Annotated[
        str | None, typer.Option(metavar="[GLOB]", help="List every tensor, or those that match.", show_default=False)
    ] = None,
    shards: Annotated[bool, typer.Option("--shards", help="Show how bytes are spread over files and ranks.")] = False,
    objects: Annotated[bool, typer.Option("--objects", help="Show param groups, schedulers and other values.")] = False,
    part: Annotated[str | None, typer.Option(help="Only this part.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="One line: layout, completeness, size.")] = False,
) -> None:
    """Show what a checkpoint holds: layout, parts, tensors, shards, and what is missing.

    Reads metadata and headers only. torch is not imported and no pickle is run, so it is safe on files of strangers.
    Exit code 4 when something is missing; what else may be wrong is for validate to find.
    """
    from fsdp_ckpt.ops.inspect import inspect as run

    report = run(paths, tensors=tensors, shards=shards or as_json, objects=objects, part=part)
    if as_json:
        out.json_report("inspect", report)
    else:
        from fsdp_ckpt.cli.inspect_view import show_inspect

        show_inspect(report, tree=tree, tensors=tensors is not None, shards=shards, objects=objects, quiet=quiet)
    if not (report.complete if part is None else all(found.complete for found in report.parts)):
        raise typer.Exit(IncompleteCheckpoint.exit_code)
