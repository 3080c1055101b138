"""Render docs/images/inspect.svg: the real output of `fsdp-ckpt inspect` on a shipped checkpoint."""

import io
import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

from rich.console import Console

from fsdp_ckpt.cli.inspect_view import show_inspect
from fsdp_ckpt.ops.inspect import inspect

HERE = Path(__file__).parent
SOURCE = HERE.parent / "fixtures" / "torch-2.13.0" / "fsdp2_sharded_w2"
TARGET = HERE / "images" / "inspect.svg"


def render() -> str:
    """Return the picture."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, markup=False, highlight=False)
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            shutil.copytree(SOURCE / part, Path("checkpoint-2000") / part)
        show_inspect(inspect("checkpoint-2000"), console=console)
    return console.export_svg(title="fsdp-ckpt inspect checkpoint-2000", unique_id="inspect")


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render())
    sys.stdout.write(f"wrote {TARGET.name}\n")
