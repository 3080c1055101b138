"""``fsdp-ckpt repair``."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard

EXAMPLES = """\b
Examples:
  fsdp-ckpt repair run/step-1000
  fsdp-ckpt repair run/step-1000 --apply
  fsdp-ckpt repair run/step-1000 --for-torch 2.9 --apply
  fsdp-ckpt repair run/step-1000 --like run/step-900
  fsdp-ckpt repair run/step-1000 --replica /backup/step-1000
\b
--only takes:
  metadata-for-torch   .metadata for an older torch, any Python
  rebuild-metadata     a .metadata that is lost or broken
  drop-stale           files of earlier or unfinished saves
  finish-swap          a checkpoint that a dead save moved away
  rebuild-index        model.safetensors.index.json
  restore-box          damaged bytes, from another copy
\b
Exit codes: 0 nothing is wrong, or all was mended; 1 without --apply: it
  can be mended; 4 something cannot be mended.
"""


@guard
def repair(
    path: Annotated[str, typer.Argument(metavar="PATH", help="One checkpoint, such as run/step-1000.")],
    apply: Annotated[bool, typer.Option("--apply", help="Do it. Without: say what would be done.")] = False,
    for_torch: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Make .metadata fit for this torch, 2.3 or newer.")
    ] = None,
    like: Annotated[
        str | None, typer.Option(metavar="DIR", help="Same model, other step: names for a lost .metadata.")
    ] = None,
    replica: Annotated[
        str | None, typer.Option(metavar="DIR", help="Another copy of this checkpoint to take files from.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="KIND", help="Only this kind; repeatable.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare checksums of all tensors (reads them).")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the files that are changed only.")] = False,
) -> None:
    """Mend what can be mended for certain. Nothing is changed without --apply, and nothing is ever lost.

    What is replaced goes into PATH/.before-repair-N; the report says how to bring it back.
    """
    from fsdp_ckpt.cli.repair_view import show_repair
    from fsdp_ckpt.ops.repair import repair as run

    with out.progress("repair", quiet=quiet or not verify) as listener:
        report = run(
            path, apply=apply, for_torch=for_torch, like=like, replica=replica, only=only or (), verify=verify,
            listener=listener,
        )  # fmt: skip
    show_repair(report, as_json=as_json, quiet=quiet)
    if report.faults:
        raise typer.Exit(4)
    if not report.whole:
        raise typer.Exit(1)
