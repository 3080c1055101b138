"""``fsdp-ckpt diff``."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard

EXAMPLES = """\b
Examples:
  fsdp-ckpt diff run/step-1000 run/step-2000 --stat
  fsdp-ckpt diff run/checkpoint-2000 merged/     did the merge keep the model?
  fsdp-ckpt diff two-ranks/ four-ranks/ --part model --part optimizer
  fsdp-ckpt diff fp32/ bf16/ --rtol 0.01
  fsdp-ckpt diff a.pt b.safetensors --rename model.= --exclude '*.bias'
\b
Exit codes: 0 equal, or within the tolerance; 1 different; others as always.
"""

Many = list[str]


@guard
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="The older checkpoint: a file, a part, a folder of parts.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The newer one, in any layout, of any number of ranks.")],
    part: Annotated[
        Many | None, typer.Option(metavar="NAME", help="Only this part, or role: model, optimizer; repeatable.")
    ] = None,
    include: Annotated[Many | None, typer.Option(metavar="GLOB", help="Only names that fit; repeatable.")] = None,
    exclude: Annotated[Many | None, typer.Option(metavar="GLOB", help="No names that fit; repeatable.")] = None,
    rename: Annotated[
        Many | None, typer.Option(metavar="OLD=NEW", help="Names of A: prefix, or s/REGEX/NEW/; repeatable.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(metavar="X", help="Largest absolute difference that counts as equal.")
    ] = None,
    rtol: Annotated[float, typer.Option(metavar="Y", help="Adds Y times |a| to the tolerance.")] = 0.0,
    full: Annotated[
        bool, typer.Option("--full", help="Read all tensors: without it, those with equal recorded checksums are not.")
    ] = False,
    stat: Annotated[bool, typer.Option("--stat", help="A bar for every tensor: its relative difference.")] = False,
    name_only: Annotated[
        bool, typer.Option("--name-only", help="Print part and name of what differs, with a tab between.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Threads.", show_default="cores, at most 4")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quiet: Annotated[
        bool,
        typer.Option("-q", "--quiet", help="One line if they differ, nothing if not. -q with --full reads bytes, too."),
    ] = False,
) -> None:
    """Compare two checkpoints: what differs, where, and by how much.

    Layouts and numbers of ranks may differ. Model is compared with model, optimizer with optimizer, and so on. A part
    that only one side has is a difference. But where one side holds models only, as a merged folder does, only models
    are compared, and the rest is named; --part compares what you name.

    Where recorded checksums are equal, bytes are not read: damage since the save does not show. --full reads them; a
    damaged side then ends with exit code 4. Memory does not depend on sizes. torch is not imported, no pickle is run.
    """
    from fsdp_ckpt.cli.diff_view import show_diff
    from fsdp_ckpt.ops.diff import diff as run

    with out.progress("diff", quiet=quiet) as listener:
        report = run(
            a,
            b,
            part=part or (),
            include=include or (),
            exclude=exclude or (),
            rename=rename or (),
            tolerance=tolerance,
            rtol=rtol,
            trust_crc=not full,
            statistics=as_json or not (quiet or name_only),
            jobs=jobs,
            listener=listener,
        )
    if as_json:
        out.json_report("diff", report)
    else:
        show_diff(report, stat=stat, name_only=name_only, quiet=quiet)
    if not report.is_equal:
        raise typer.Exit(1)
