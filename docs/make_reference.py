"""Write docs/reference.md: the help screens, exit codes and JSON rules, from the code itself."""

import os
import sys
from pathlib import Path

from typer.testing import CliRunner

from fsdp_ckpt import errors
from fsdp_ckpt.cli.app import app

TARGET = Path(__file__).parent / "reference.md"
COMMANDS = (
    "inspect", "validate", "diff", "list", "merge", "convert", "reshard", "prune", "repair", "push", "pull", "train",
    "generate", "launch", "config", "config init", "config show", "config check", "config to-fsdp2",
    "config to-deepspeed", "config from-deepspeed",
)  # fmt: skip
_OTHER_CODES = {
    0: "done",
    1: "findings: faults (validate), differences (diff), something to mend (repair), something not removed (prune)",
    70: "internal error: a bug in fsdp-ckpt",
    130: "interrupted by Ctrl-C",
    143: "stopped by SIGTERM",
}


def render() -> str:
    """Return the page."""
    os.environ["COLUMNS"] = "100"
    runner = CliRunner()
    pages = ["# Reference\n\nWritten by `docs/make_reference.py` from the code.\n"]
    for arguments in ([], *(command.split() for command in COMMANDS)):
        title = " ".join(["fsdp-ckpt", *arguments])
        text = runner.invoke(app, [*arguments, "--help"], prog_name="fsdp-ckpt", terminal_width=100).output
        body = "\n".join(line.rstrip() for line in text.strip().splitlines())
        pages.append(f"## {title}\n\n```text\n{body}\n```\n")
    pages.append("## Exit codes\n\nAn unknown code is a failure.\n\n| code | meaning |\n|---|---|")
    codes = dict(_OTHER_CODES)
    for name in errors.__all__:
        kind = getattr(errors, name)
        if kind.__bases__[0] is errors.FsdpCkptError:
            codes.setdefault(kind.exit_code, (kind.__doc__ or "").strip().splitlines()[0].rstrip("."))
    pages += [f"| {code} | {meaning} |" for code, meaning in sorted(codes.items())]
    pages.append(
        "\n## JSON\n\n`--json` prints one object to stdout. Its `schema` is `fsdp-ckpt/<command>/1`; sizes are exact"
        "\nbytes. The other fields are those of `fsdp_ckpt.InspectReport`, `MergeReport`, `ConvertReport` (also of"
        "\n`reshard`), `DiffReport`, `RepairReport`, `PushReport` and `PullReport`, whose docstrings describe them; of"
        "\n`validate`, `list` and `prune` those of `ValidateRun` in"
        "\n`fsdp_ckpt.ops.validate`, `ListReport` in `fsdp_ckpt.ops.list_run` and `PruneReport` in"
        "\n`fsdp_ckpt.ops.prune_run`. `config` commands print `config` (Accelerate's keys), `origins` and `notes`;"
        "\nconversions `changed` and `dropped`; `launch --dry-run` `command` and `environment`."
        "\n\n## Environment\n\n| variable | effect |\n|---|---|"
        "\n| `FSDP_CKPT_DEBUG=1` | tracebacks, as with `--debug` |"
        "\n| `FSDP_CKPT_PROGRESS=none` | no progress |"
        "\n| `NO_COLOR` | no colour; there is none in a pipe anyway |\n"
    )
    return "\n".join(pages)


if __name__ == "__main__":
    TARGET.write_text(render())
    sys.stdout.write(f"wrote {TARGET.name}\n")
