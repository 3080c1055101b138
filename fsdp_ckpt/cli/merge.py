"""``fsdp-ckpt merge``."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard

EXAMPLES = """\b
Examples:
  fsdp-ckpt merge run/checkpoint-2000/pytorch_model_fsdp_0 out/
  fsdp-ckpt merge checkpoint-2000 out/ --dtype bfloat16 --max-shard-size 5GB
  fsdp-ckpt merge run/step-1000 out/ --dry-run
  torchrun --nproc-per-node 8 --no-python fsdp-ckpt merge step-1000 out/
  fsdp-ckpt merge node1/step-10 node2/step-10 out/   saved on two disks
"""

Many = list[str]
Sources = Annotated[
    Many,
    typer.Argument(
        metavar="SRC",
        help="Checkpoint: a part, a folder with parts, or a run folder; or that folder of every node, where nodes "
        "saved to disks of their own.",
    ),
]
Output = Annotated[str, typer.Argument(metavar="OUT", help="Folder to make, or a URL.")]


@guard
def merge(
    src: Sources,
    output: Output,
    max_shard_size: Annotated[str, typer.Option(help="Largest file: 5GB is 10^9 bytes, 4GiB is 2^30.")] = "50GB",
    format: Annotated[str, typer.Option(help="safetensors, or bin for torch.save files.")] = "safetensors",
    dtype: Annotated[str | None, typer.Option(help="Convert float tensors: bfloat16, float16, float32.")] = None,
    include: Annotated[Many | None, typer.Option(metavar="GLOB", help="Only tensors of this name; repeatable.")] = None,
    exclude: Annotated[Many | None, typer.Option(metavar="GLOB", help="No tensors of this name; repeatable.")] = None,
    rename: Annotated[Many | None, typer.Option(metavar="OLD=NEW", help="Prefix, or s/REGEX/NEW/; repeatable.")] = None,
    tie: Annotated[
        bool | None,
        typer.Option(
            "--tie/--no-tie", help="Drop an output head equal to the embedding. [default: as config.json says]"
        ),
    ] = None,
    part: Annotated[str | None, typer.Option(help="Part to merge; or I/N: this process's share of the files.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT, in one step at the end.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep files that an interrupted run finished.")] = False,
    remove_source: Annotated[
        bool,
        typer.Option("--remove-source", help="Delete SRC (all of them) after the result was read back and compared."),
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not compare recorded checksums.")] = False,
    no_fsync: Annotated[
        bool, typer.Option("--no-fsync", help="Leave it to the system when data reach the disk.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Threads.", show_default="cores, at most 4")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the output folder only.")] = False,
) -> None:
    """Merge a sharded checkpoint into safetensors files.

    Finds the model in SRC, checks the CRC-32 of every shard while it is copied, and makes OUT appear complete or not
    at all. Memory does not depend on the size of the model.
    """
    from fsdp_ckpt.cli.merge_view import show_merge
    from fsdp_ckpt.ops.merge import merge as run
    from fsdp_ckpt.ops.merge_plan import MergeOptions
    from fsdp_ckpt.ops.share import Share, share_from_environment

    is_share = part is not None and re.fullmatch(r"\d+/\d+", part) is not None
    options = MergeOptions(
        max_shard_size=max_shard_size,
        format=format,  # type: ignore[arg-type]  # checked by plan_merge
        dtype=dtype,
        include=include or (),
        exclude=exclude or (),
        rename=rename or (),
        tie=tie,
        part=None if is_share else part,
        dry_run=dry_run,
        overwrite=overwrite,
        resume=resume,
        remove_source=remove_source,
        verify=not no_verify,
        fsync=not no_fsync,
        jobs=jobs,
        share=Share.parse(part) if is_share and part is not None else share_from_environment(os.environ),
    )
    with out.progress("merge", quiet=quiet or dry_run) as listener:
        report = run(src, output, options=options, listener=listener)
    show_merge(report, as_json=as_json, quiet=quiet)
