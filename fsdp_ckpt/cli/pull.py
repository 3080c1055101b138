"""``fsdp-ckpt pull``."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard

EXAMPLES = """\b
Examples:
  fsdp-ckpt pull hf://me/my-model model/
  fsdp-ckpt pull hf://me/my-run@v2/step-2000 step-2000 --part model
  fsdp-ckpt pull hf://me/my-model model/ --exclude '*.bin' --dry-run
\b
An interrupted pull goes on where it stopped when it is started again.
Exit codes: 0 all is well; 4 the files are as on the hub, but validation
  found faults; 7 no such repository, no access, or no network.
"""

Globs = list[str]


@guard
def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="hf://[datasets/]OWNER/REPO[@REVISION][/PATH]")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="Folder to make.")],
    part: Annotated[
        list[str] | None, typer.Option(help="Only this part: model, optimizer, or a name; repeatable.")
    ] = None,
    include: Annotated[Globs | None, typer.Option(metavar="GLOB", help="Only files of this name; repeatable.")] = None,
    exclude: Annotated[Globs | None, typer.Option(metavar="GLOB", help="No files of this name; repeatable.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag, refs/pr/N or commit.")] = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Compare the checksums in the checkpoint, too; the hub's are always compared."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST, in one step at the end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be fetched, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the folder only.")] = False,
) -> None:
    """Fetch a checkpoint, or parts of one, from the Hugging Face hub.

    Compares size and hash of every file, validates the result, and makes DST appear complete or not at all.
    """
    from fsdp_ckpt.cli.push_view import show_pull
    from fsdp_ckpt.ops.pull import PullOptions
    from fsdp_ckpt.ops.pull import pull as run

    options = PullOptions(
        parts=part or (),
        include=include or (),
        exclude=exclude or (),
        revision=revision,
        overwrite=overwrite,
        deep=deep,
        dry_run=dry_run,
    )
    with out.progress("pull", quiet=quiet or dry_run) as listener:
        report = run(url, dst, options=options, listener=listener)
    show_pull(report, as_json=as_json, quiet=quiet)
    if report.findings:
        raise typer.Exit(4)
