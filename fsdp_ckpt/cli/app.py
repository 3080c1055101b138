"""The ``fsdp-ckpt`` command."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

import fsdp_ckpt
from fsdp_ckpt.cli import config as config_command
from fsdp_ckpt.cli import convert as convert_command
from fsdp_ckpt.cli import diff as diff_command
from fsdp_ckpt.cli import inspect as inspect_command
from fsdp_ckpt.cli import launch as launch_command
from fsdp_ckpt.cli import list as list_command
from fsdp_ckpt.cli import merge as merge_command
from fsdp_ckpt.cli import prune as prune_command
from fsdp_ckpt.cli import pull as pull_command
from fsdp_ckpt.cli import push as push_command
from fsdp_ckpt.cli import repair as repair_command
from fsdp_ckpt.cli import reshard as reshard_command
from fsdp_ckpt.cli import train as train_command
from fsdp_ckpt.cli import validate as validate_command
from fsdp_ckpt.cli.arguments import SourcesAndDestination

__all__ = ["app", "run"]

app = typer.Typer(
    name="fsdp-ckpt",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help starts three times sooner
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Start here:
  fsdp-ckpt inspect CHECKPOINT          what is in it, and is it whole?
  fsdp-ckpt validate CHECKPOINT --deep  every byte: is anything damaged?
  fsdp-ckpt list RUN                    its checkpoints; which one is next?
  fsdp-ckpt merge CHECKPOINT OUT        make model.safetensors of it
  fsdp-ckpt convert CHECKPOINT OUT --to hf   any layout to any, optimizer too
  fsdp-ckpt push CHECKPOINT hf://ME/REPO     share it; pull fetches it
  fsdp-ckpt train run --kill-at 200     see saving, dying and resuming work
  fsdp-ckpt config init                 describe an FSDP setup; then launch
\b
Exit codes: 0 ok, 1 findings or differences, 2 usage, 3 no checkpoint,
  4 corrupt or incomplete, 5 destination exists, 6 not enough disk or memory,
  7 network or hub, 8 incompatible, 70 internal error, 128 + N ended by signal
  N. launch: those of the script.
""",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fsdp-ckpt {fsdp_ckpt.__version__}")
        raise typer.Exit


def _debug(wanted: bool) -> None:
    if wanted:
        os.environ["FSDP_CKPT_DEBUG"] = "1"


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", callback=_debug, is_eager=True, help="Show tracebacks. Also FSDP_CKPT_DEBUG=1.")
    ] = False,
) -> None:
    """Checkpoints of PyTorch FSDP: look, check, merge and convert without torch; start and resume jobs."""


app.command("inspect", epilog=inspect_command.EXAMPLES)(inspect_command.inspect)
app.command("diff", epilog=diff_command.EXAMPLES)(diff_command.diff)
app.command("validate", epilog=validate_command.EXAMPLES)(validate_command.validate)
app.command("list", epilog=list_command.EXAMPLES)(list_command.list_checkpoints)
app.command("merge", cls=SourcesAndDestination, epilog=merge_command.EXAMPLES)(merge_command.merge)
app.command("convert", cls=SourcesAndDestination, epilog=convert_command.EXAMPLES)(convert_command.convert)
app.command("reshard", cls=SourcesAndDestination, epilog=reshard_command.EXAMPLES)(reshard_command.reshard)
app.command("prune", epilog=prune_command.EXAMPLES)(prune_command.prune)
app.command("repair", epilog=repair_command.EXAMPLES)(repair_command.repair)
app.command("push", epilog=push_command.EXAMPLES)(push_command.push)
app.command("pull", epilog=pull_command.EXAMPLES)(pull_command.pull)
app.command("train", epilog=train_command.TRAIN_EXAMPLES)(train_command.train)
app.command("generate", epilog=train_command.GENERATE_EXAMPLES)(train_command.generate)
app.add_typer(config_command.app, name="config")
app.command(
    "launch",
    epilog=launch_command.EXAMPLES,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)(launch_command.launch)
app.command("ls", hidden=True, epilog=list_command.EXAMPLES)(list_command.list_checkpoints)
for _alias in ("merge-weights", "consolidate"):
    app.command(_alias, cls=SourcesAndDestination, hidden=True, epilog=merge_command.EXAMPLES)(merge_command.merge)


def complete_arguments(arguments: list[str]) -> list[str]:
    """Give ``--tensors`` its default GLOB where none follows: at the end, before an option, before an existing path."""
    result = list(arguments)
    for position, argument in enumerate(arguments):
        if argument == "--tensors":
            following = arguments[position + 1 : position + 2]
            if not following or following[0].startswith("-") or os.path.exists(following[0]):
                result[position] = "--tensors=*"
    return result


def run() -> None:
    """Run the command line with the arguments of the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks
    sys.argv[1:] = complete_arguments(sys.argv[1:])
    app(prog_name="fsdp-ckpt")
