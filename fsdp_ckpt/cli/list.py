"""``fsdp-ckpt list``."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard

EXAMPLES = """\b
Examples:
  fsdp-ckpt list run
  fsdp-ckpt list run --deep
  fsdp-ckpt list run -q
"""


@guard
def list_checkpoints(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A run folder: step-N, checkpoint-N … lie in it.")],
    deep: Annotated[bool, typer.Option("--deep", help="Read every file, and compare its recorded CRC-32.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the newest complete one.")] = False,
) -> None:
    """List the checkpoints of a run, newest first: step, age, size, whether each is whole.

    Sizes, manifests and metadata are looked at, no numbers. A save that was cut off is incomplete, and resuming passes
    over it. Only checkpoints of fsdp-ckpt record checksums of files, for --deep. Exit code 3 when there is no
    checkpoint; with -q, 4 when none is complete.
    """
    if quiet and not as_json:
        from fsdp_ckpt.ops.list_run import find_latest

        print(find_latest(folder, deep=deep))
        return
    from fsdp_ckpt.ops.list_run import list_run

    with out.progress("list", quiet=quiet or not deep) as listener:
        report = list_run(folder, deep=deep, listener=listener)
    if as_json:
        out.json_report("list", report)
        return
    from fsdp_ckpt.cli.list_view import show_list

    show_list(report)
