"""``fsdp-ckpt config``: make, show, check and convert configurations."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard
from fsdp_ckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsdp_ckpt.config.launch import LaunchConfig

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make, show, check and convert FSDP configurations: the YAML of Accelerate, read strictly.",
    epilog="""\b
Examples:
  fsdp-ckpt config init                           ask, and write fsdp.yaml
  fsdp-ckpt config show fsdp.yaml                 every value, and where it comes from
  fsdp-ckpt config check fsdp.yaml
  fsdp-ckpt config to-fsdp2 old.yaml new.yaml
  fsdp-ckpt config to-deepspeed fsdp.yaml ds.json
  fsdp-ckpt config from-deepspeed ds.json fsdp.yaml
""",
)

_Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file that is there.")]
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="FSDP option; goes before the file. Repeatable.")
]
_Source = Annotated[str, typer.Argument(metavar="FILE", help="Configuration to read.")]
_Target = Annotated[str | None, typer.Argument(metavar="[OUT]", help="File to write; stdout when left out.")]
_Found = Annotated[
    str | None, typer.Argument(metavar="[FILE]", help="Configuration; fsdp.yaml here or Accelerate's when left out.")
]


@app.command(
    epilog="""\b
Examples:
  fsdp-ckpt config init
  fsdp-ckpt config init fsdp.yaml --yes -n 8 --set mixed_precision=bf16
"""
)
@guard
def init(
    target: Annotated[str, typer.Argument(metavar="OUT", help="File to write.")] = "fsdp.yaml",
    num_processes: Annotated[int | None, typer.Option("-n", "--num-processes", min=1, help="Ranks.")] = None,
    set_: _Set = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Ask nothing: --set, and defaults.")] = False,
    overwrite: _Overwrite = False,
) -> None:
    """Ask how a job is to be sharded, and write the answers to a file that Accelerate reads, too."""
    from fsdp_ckpt.cli.config_view import config_lines, settings_of
    from fsdp_ckpt.cli.wizard import ask_all
    from fsdp_ckpt.config.accelerate_yaml import to_yaml
    from fsdp_ckpt.config.launch import LaunchConfig
    from fsdp_ckpt.config.override import override, read_settings
    from fsdp_ckpt.config.questions import config_of_answers
    from fsdp_ckpt.errors import DestinationExists
    from fsdp_ckpt.ops.launch import check_startable
    from fsdp_ckpt.ops.write_config import write_text

    settings = read_settings(set_ or ())
    if os.path.isdir(target):
        raise DestinationExists(f"{target}: this is a folder", hint=f"give a file: {os.path.join(target, 'fsdp.yaml')}")
    if os.path.exists(target) and not overwrite:
        raise DestinationExists(f"{target}: there is a file already", hint="add --overwrite to replace it")
    config = override(LaunchConfig(), settings, {"num_processes": num_processes})
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(
                "there is no terminal to ask on",
                hint=f"fsdp-ckpt config init {target} --yes -n {config.num_processes} {settings_of(config)}",
            )
        given = {**settings, **({"num_processes": num_processes} if num_processes else {})}
        try:
            config = config_of_answers(ask_all(given, _read_line, _say))
            _say("")
            for line in config_lines(config):
                _say(line.removesuffix("default").rstrip())
            if _read_line(f"\nWrite {target}? [yes] ").strip().lower() not in ("", "y", "yes"):
                raise KeyboardInterrupt
        except EOFError:
            raise KeyboardInterrupt from None
    check_startable(config)
    write_text(target, to_yaml(config), overwrite=overwrite)
    print(target)
    _notes(config)
    out.note(f"next: fsdp-ckpt launch --config {target} train.py")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _read_line(prompt: str) -> str:
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return input()


def _notes(config: LaunchConfig) -> None:
    for text in config.notes:
        out.note(text)


@app.command(epilog="\b\nExamples:\n  fsdp-ckpt config show fsdp.yaml\n  fsdp-ckpt config show --json")
@guard
def show(file: _Found = None, set_: _Set = None, as_json: _Json = False) -> None:
    """Show every value of a configuration, and where it comes from."""
    from fsdp_ckpt.cli.config_view import as_report, config_lines

    config = _found(file, set_)
    if as_json:
        out.json_report("config-show", as_report(config))
        return
    for line in config_lines(config):
        print(line)
    _notes(config)


@app.command(epilog="\b\nExamples:\n  fsdp-ckpt config check fsdp.yaml && sbatch train.sh")
@guard
def check(file: _Found = None, set_: _Set = None, as_json: _Json = False) -> None:
    """Check a configuration: keys, values, contradictions, sizes. Ends with 0 when a job can be started with it."""
    from fsdp_ckpt.cli.config_view import as_report
    from fsdp_ckpt.ops.launch import check_startable

    config = _found(file, set_)
    check_startable(config)
    if as_json:
        out.json_report("config-check", as_report(config))
        return
    _notes(config)
    print("ok")


def _found(file: str | None, settings: Sequence[str] | None) -> LaunchConfig:
    from fsdp_ckpt.config.find import find_config
    from fsdp_ckpt.config.override import override, read_settings

    config, name = find_config(file, os.environ)
    if file is None:
        out.note(f"configuration: {name}")
    return override(config, read_settings(settings), {}) if settings else config


@app.command("to-fsdp2", epilog="\b\nExamples:\n  fsdp-ckpt config to-fsdp2 old.yaml new.yaml")
@guard
def to_fsdp2(file: _Source, target: _Target = None, overwrite: _Overwrite = False, as_json: _Json = False) -> None:
    """Rewrite an FSDP1 configuration for FSDP2, and list what changes."""
    from fsdp_ckpt.cli.config_view import as_report
    from fsdp_ckpt.config.accelerate_yaml import read_config, to_yaml
    from fsdp_ckpt.config.fsdp2 import to_fsdp2 as convert

    done = convert(read_config(file))
    report = as_report(done.config, changed=done.changed, dropped=done.dropped)
    _finish("config-to-fsdp2", report, to_yaml(done.config), target, overwrite=overwrite, as_json=as_json)


@app.command("to-deepspeed", epilog="\b\nExamples:\n  fsdp-ckpt config to-deepspeed fsdp.yaml ds.json")
@guard
def to_deepspeed(file: _Source, target: _Target = None, overwrite: _Overwrite = False, as_json: _Json = False) -> None:
    """Write the DeepSpeed JSON that shards in the same way, and list what has no counterpart."""
    from fsdp_ckpt.config.accelerate_yaml import read_config
    from fsdp_ckpt.config.deepspeed import to_deepspeed as convert
    from fsdp_ckpt.config.deepspeed import to_json

    done = convert(read_config(file))
    report = {"config": done.document, "changed": done.changed, "dropped": done.dropped}
    _finish("config-to-deepspeed", report, to_json(done), target, overwrite=overwrite, as_json=as_json)


@app.command("from-deepspeed", epilog="\b\nExamples:\n  fsdp-ckpt config from-deepspeed ds.json fsdp.yaml -n 8")
@guard
def from_deepspeed(
    file: Annotated[str, typer.Argument(metavar="FILE", help="DeepSpeed's JSON, or Accelerate's YAML for DeepSpeed.")],
    target: _Target = None,
    num_processes: Annotated[int | None, typer.Option("-n", "--num-processes", min=1, help="Ranks.")] = None,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """Write the FSDP configuration that shards as a DeepSpeed one does, and list what has no counterpart."""
    from fsdp_ckpt.cli.config_view import as_report
    from fsdp_ckpt.config.accelerate_yaml import to_yaml
    from fsdp_ckpt.config.deepspeed import from_deepspeed as convert

    done = convert(file, num_processes=num_processes)
    report = as_report(done.config, changed=done.changed, dropped=done.dropped)
    if done.config.num_processes is None and not as_json:
        out.note("the number of ranks is not known: add -n N, or give --num-processes to launch")
    _finish("config-from-deepspeed", report, to_yaml(done.config), target, overwrite=overwrite, as_json=as_json)


def _finish(
    name: str, report: dict[str, Any], text: str, target: str | None, *, overwrite: bool, as_json: bool
) -> None:
    """Write or print the result; say what changed on stderr."""
    from fsdp_ckpt.ops.write_config import write_text

    if target is not None:
        write_text(target, text, overwrite=overwrite)
    if as_json:
        out.json_report(name, report | {"file": target})
        return
    for sentence in report["changed"]:
        out.note(sentence)
    for sentence in report["dropped"]:
        out.warning(f"no counterpart: {sentence}")
    print(target if target is not None else text, end="\n" if target is not None else "")
