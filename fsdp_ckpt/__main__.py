"""Where the command starts: ``fsdp-ckpt`` and ``python -m fsdp_ckpt``.

Imports nothing before it can answer Ctrl-C with an exit code instead of a traceback.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    try:
        _open_standard_streams()
        from fsdp_ckpt.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


def _open_standard_streams() -> None:
    """Fill descriptors 0 to 2 where the caller closed them, so that no checkpoint gets their numbers."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open as long as the process


if __name__ == "__main__":
    main()
