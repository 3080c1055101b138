"""``fsdp-ckpt validate``."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard
from fsdp_ckpt.errors import UsageError

EXAMPLES = """\b
Examples:
  fsdp-ckpt validate run/step-1000
  fsdp-ckpt validate run --deep             every checkpoint, every byte
  fsdp-ckpt validate run/step-1000 --world-size 24 --against config.json
  fsdp-ckpt validate model/ --values --strict
  fsdp-ckpt validate --as-one node1/step-10 node2/step-10
\b
Exit codes: 0 nothing is wrong, 1 something is. What each code means, how it
comes about and what to do: docs/findings.
"""


@guard
def validate(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH", help="Files, parts or checkpoints; a run folder stands for all checkpoints in it."
        ),
    ],
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte and compare the CRC-32 that its writer recorded.")
    ] = False,
    values: Annotated[bool, typer.Option("--values", help="Look for NaN, Inf and zeros among the values.")] = False,
    level: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL",
            help="How far to look: geometry (metadata and sizes), headers (the head of every item), deep.",
            show_default="headers",
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Let warnings count as faults.")] = False,
    world_size: Annotated[
        int | None, typer.Option(metavar="N", help="Can I resume it on N ranks?", show_default=False)
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Does it fit? A config.json, weights, another checkpoint, or the YAML of a job.",
            show_default=False,
        ),
    ] = None,
    torch: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Can this version of torch read it?", show_default=False)
    ] = None,
    as_one: Annotated[
        bool, typer.Option("--as-one", help="The folders are of nodes that saved one checkpoint to disks of their own.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Threads.", show_default="cores, at most 4")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="One line for each checkpoint.")] = False,
) -> None:
    """Find every fault of a checkpoint, say what it means for loading, and what to do.

    Any checkpoint, whoever wrote it. torch is not imported and no pickle is run, so it is safe on files of strangers.
    """
    from fsdp_ckpt.cli.validate_view import show_validate
    from fsdp_ckpt.ops.validate import validate_each

    if deep and level not in (None, "deep"):
        raise UsageError(f"--deep and --level {level} contradict each other", hint="leave one of them out")
    with out.progress("validate", quiet=quiet or not (deep or values or level == "deep")) as listener:
        report = validate_each(
            [paths] if as_one else paths,
            level="deep" if deep else level,
            values=values,
            strict=strict,
            world_size=world_size,
            against=against,
            torch=torch,
            jobs=jobs,
            listener=listener,
        )
    chosen = {"--world-size": world_size, "--against": against, "--torch": torch, "--level": level}
    flags = {"--deep": deep, "--values": values, "--strict": strict}
    options = [name for name, is_on in flags.items() if is_on]
    options += [text for name, value in chosen.items() if value is not None for text in (name, str(value))]
    show_validate(report, as_json=as_json, quiet=quiet, options=options)
    if not report.ok:
        raise typer.Exit(1)
