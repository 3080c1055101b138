"""``fsdp-ckpt prune``."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard

EXAMPLES = """\b
Examples:
  fsdp-ckpt prune run --keep 3 --dry-run
  fsdp-ckpt prune run --keep 3 --keep-every 10000
  fsdp-ckpt prune run --keep 1 --keep-best eval_loss:min=2
  fsdp-ckpt prune run --keep 3 --incomplete
"""


@guard
def prune(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A run folder: step-N, checkpoint-N … lie in it.")],
    keep: Annotated[int, typer.Option(metavar="K", help="Keep the last K, by step.")],
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", help="Also keep every step that is a multiple of N.")
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC[:min|max][=M]", help="Also keep the M best by a value saved with them; repeatable."
        ),
    ] = None,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Also remove older incomplete ones, and what dead saves left.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="First compare recorded checksums; damaged ones do not count.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the removed folders only.")] = False,
) -> None:
    """Remove checkpoints of a run that are not to be kept. Nothing is asked: look with --dry-run first.

    The newest complete one always stays, as do links, and folders that hold anything but a checkpoint. min or max may
    be left out for names that end with loss, perplexity or accuracy. Exit code 1 when something could not be removed.
    """
    from fsdp_ckpt.cli.prune_view import show_prune
    from fsdp_ckpt.ops.prune_run import prune_run

    with out.progress("prune", quiet=quiet or not deep) as listener:
        report = prune_run(
            folder, keep=keep, keep_every=keep_every, keep_best=keep_best, incomplete=incomplete, deep=deep,
            dry_run=dry_run, listener=listener,
        )  # fmt: skip
    show_prune(report, as_json=as_json, quiet=quiet)
    if report.failed:
        raise typer.Exit(1)
