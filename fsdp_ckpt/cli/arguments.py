"""Commands that take several sources and one destination."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import typer
from typer.core import TyperCommand

from fsdp_ckpt.cli.out import error_lines

__all__ = ["SourcesAndDestination"]

_DESTINATIONS = {"dst": "DST", "output": "OUT"}


class SourcesAndDestination(TyperCommand):
    """A command whose arguments are ``src``, any number of paths, and one more: ``dst`` or ``output``.

    A single path goes to the last argument, and the parser would say that the first one is missing; what was forgotten
    is the destination.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; where there is one path alone, say that it is taken for the source."""
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        only = next((name for name in _DESTINATIONS if given.get(name)), None)
        if only is not None and not given.get("src") and not given.get("help"):
            label, path = _DESTINATIONS[only], str(given[only])
            options = [word for word in args if word != path]
            hint = shlex.join(["fsdp-ckpt", str(ctx.info_name), path, label, *options])
            for line in error_lines(f"{label} is missing, the folder to make of `{path}`", hint):
                print(line, file=sys.stderr)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)
